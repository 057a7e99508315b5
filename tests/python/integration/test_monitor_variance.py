"""How far members' models are from their mean, as averagers tell their monitors: what, when, and to whom."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import offbeat
from support.averaging import LOSS, METHODS, arrays, batch, model, step
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

EVERY = 4
NUM_STEPS = 22
NUM_ROUNDS = NUM_STEPS // EVERY


def flat(trained):
    return np.concatenate([array.ravel() for array in arrays(trained)]).astype(float)


def values_of(monitor):
    return list(monitor.report().series["parameter_variance"].values)


def averager_of(trained, settings, rank=None):
    if "server_address" in settings:
        settings = settings | {"communication_backend": "tcp", "rank": rank}
    return offbeat.AsyncModelAverager(trained, averaging_frequency=EVERY, **settings)


def member(rank, settings, metrics=("parameter_variance",)):
    """Train one of several.

    Returns:
        As each round began, the samples since the one before and the parameters; what the monitor heard; how
        often the distance was measured; the parameters in the end.
    """
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    monitor = offbeat.AsyncTrainingMonitor(trained, list(metrics)) if metrics else None
    taken, samples, measured = [], 0, []
    with averager_of(trained, settings, rank) as ours:
        measure = ours._turns.rounds._drift

        def counted(*arguments):
            measured.append(ours.iterations)
            return measure(*arguments)

        ours._turns.rounds._drift = counted
        for number in range(NUM_STEPS):
            samples += (num := step(trained, live, rank, number))
            if number % EVERY == EVERY - 1:
                taken.append((samples, flat(trained)))
                samples = 0
            ours.step(num, loss=1.0, optimizer=live)
        ours.flush()
    heard = values_of(monitor) if "parameter_variance" in metrics else None
    return taken, heard, len(measured), flat(trained)


def distances(found, *, are_equals=False):
    """Give each member's square distance from the mean in each round, in double precision."""
    rounds = []
    for taken in zip(*(taken for taken, *_ in found), strict=True):
        weights = [1 if are_equals else samples for samples, _ in taken]
        mean = sum(w * own for w, (_, own) in zip(weights, taken, strict=True)) / sum(weights)
        rounds.append([float(((own - mean) ** 2).sum()) for _, own in taken])
    return np.array(rounds)


@pytest.mark.parametrize("overlap", [False, 2])
@pytest.mark.parametrize("method", METHODS)
def test_members_of_a_group_hear_in_each_round_the_variance_of_the_one_before(method, overlap):
    found = together(member, 3, {"method": method, "overlap": overlap})
    variances = distances(found).mean(axis=1)
    for _, heard, *_ in found:
        assert heard[:NUM_ROUNDS] == pytest.approx(list(variances), rel=1e-3)
        assert heard == found[0][1], "they judge the same number, and so want the same"


@pytest.mark.parametrize("overlap", [False, 2])
def test_two_that_meet_as_a_pair_hear_how_far_they_were_from_what_both_went_to(overlap):
    found = together(member, 2, {"method": "gossip", "overlap": overlap})
    variances = distances(found, are_equals=True).mean(axis=1)
    for _, heard, *_ in found:
        assert heard[: NUM_ROUNDS - 1] == pytest.approx(list(variances[:-1]), rel=1e-3)


@pytest.mark.parametrize("overlap", [False, 2])
@pytest.mark.parametrize("method", ["average", "diloco"])
def test_at_a_server_each_member_hears_how_far_it_was_itself(method, overlap):
    with offbeat.ParameterServer(transaction="model") as server:
        settings = {"server_address": server.address, "world_size": 2}
        found = together(member, 2, settings | {"method": method, "overlap": overlap})
    for own, (_, heard, *_) in zip(distances(found).T, found, strict=True):
        assert heard[:NUM_ROUNDS] == pytest.approx(list(own), rel=1e-3)


def test_where_a_server_steps_for_each_that_arrives_there_is_no_mean_to_be_away_from():
    with offbeat.ParameterServer(transaction="model") as server:
        settings = {"server_address": server.address, "world_size": 2, "asynchronous": True}
        found = together(member, 2, settings | {"method": "diloco"})
    assert [heard for _, heard, *_ in found] == [[], []]


def test_who_is_alone_at_a_server_is_not_told_of_a_distance_from_itself():
    """Whoever joins would be an alert, after so many zeros."""
    with offbeat.ParameterServer(transaction="model") as server:
        _, heard, *_ = member(0, {"server_address": server.address, "world_size": 1})
    assert heard == []


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": False},
        {"overlap": 1},
        {"overlap": False, "method": "diloco"},
        {"overlap": 1, "method": "gossip"},
    ],
    ids=str,
)
def test_it_is_measured_only_for_a_monitor_that_judges_it_and_changes_no_bit(settings):
    watched = together(member, 2, settings)
    for metrics in (["loss"], []):
        others = together(member, 2, settings, metrics)
        for (*_, num, values), (*_, other_values) in zip(others, watched, strict=True):
            assert num == 0
            assert np.array_equal(values, other_values)
    if settings.get("method") != "gossip":  # whose pairs know it anyway
        assert all(num >= NUM_ROUNDS for *_, num, _ in watched)


def watched_by_one(rank):
    return member(rank, {"overlap": False}, ("parameter_variance",) if rank == 0 else ())


def test_a_monitor_of_one_member_alone_hears_of_that_one():
    found = together(watched_by_one, 2)
    own = distances(found)[:, 0]
    assert found[0][1][:NUM_ROUNDS] == pytest.approx(list(own), rel=1e-3)
    assert found[1][2] == 0


def interrupted(rank, settings):
    """Give what a monitor heard before and after a restart, and what it hears without one."""

    def made():
        trained = model()
        live = torch.optim.SGD(trained.parameters(), lr=0.1)
        monitor = offbeat.AsyncTrainingMonitor(trained, ["parameter_variance"])
        return trained, live, monitor, averager_of(trained, settings)

    def train(parts, numbers):
        trained, live, _, ours = parts
        for number in numbers:
            ours.step(step(trained, live, rank, number), optimizer=live)

    first = made()
    train(first, range(2 * EVERY + 2))
    trained, _, monitor, ours = first
    before = values_of(monitor)
    states = ours.state_dict(), monitor.state_dict()
    values = {name: value.clone() for name, value in trained.state_dict().items()}
    train(first, range(2 * EVERY + 2, NUM_STEPS))
    whole = values_of(monitor)
    ours.close()
    trained, live, monitor, ours = second = made()
    trained.load_state_dict(values)
    ours.load_state_dict(states[0], optimizer=live)
    monitor.load_state_dict(states[1])
    train(second, range(2 * EVERY + 2, NUM_STEPS))
    ours.close()
    return before + values_of(monitor), whole


@pytest.mark.parametrize("method", ["average", "diloco", "gossip"])
def test_after_a_restart_a_monitor_hears_what_it_would_have_heard(method):
    for resumed, whole in together(interrupted, 2, {"method": method, "overlap": False}):
        assert len(whole) >= 2
        assert resumed == whole


def torn(rank, remedy):
    """Be one of three, the last of which is torn away from iteration 40 on."""
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.01)
    frequencies = []
    with (
        averager_of(trained, {"overlap": False}) as ours,
        offbeat.AsyncTrainingMonitor(
            trained, ["parameter_variance"], remediation_strategy=remedy, warm_up=8
        ) as monitor,
    ):
        for number in range(60):
            num = step(trained, live, rank, number)
            if rank == 2 and number >= 40:
                with torch.no_grad():
                    trained[0].weight += 1.0
            ours.step(num, optimizer=live)
            frequencies.append(ours.averaging_frequency)
        report = monitor.report()
    return [alert.step for alert in report.alerts], report.num_dropped, frequencies


def test_where_one_member_is_torn_away_all_average_more_often_from_the_same_round_on():
    found = together(torn, 3, "increase_sync_frequency")
    assert found[0] == found[1] == found[2]
    steps, _, frequencies = found[0]
    assert steps[0] == 48, "the round that ends in 44 has shown it, and the next one tells all"
    assert (frequencies[0], frequencies[-1]) == (EVERY, EVERY // 2)


def test_what_a_round_shows_drops_no_gradient_of_the_step_after_it():
    for steps, num_dropped, _ in together(torn, 3, "reject"):
        assert steps
        assert num_dropped == 0


def by_trainer(rank, strategy):
    trained = model()
    inputs, targets = zip(*(batch(rank, number) for number in range(24)), strict=True)
    data = TensorDataset(torch.cat(inputs)[:48], torch.cat(targets)[:48])  # as much in each member
    trainer = offbeat.AsyncTrainer(
        trained, strategy=strategy, regular_sync_frequency=3, overlap=False, local_batch_size=4
    )
    with offbeat.AsyncTrainingMonitor(trained, ["parameter_variance"]) as monitor:
        trainer.train(dataset=data, epochs=2, optimizer=offbeat.optim.SGD(lr=0.1), loss_fn=LOSS)
        return values_of(monitor)


@pytest.mark.parametrize(
    "strategy", ["average", {0: "average", 1: "diloco"}, {0: "local", 1: "easgd"}], ids=str
)
def test_a_trainer_that_averages_tells_it_also_where_the_strategy_changes(strategy):
    first, second = together(by_trainer, 2, strategy)
    assert first == second
    assert len(first) >= (3 if strategy == {0: "local", 1: "easgd"} else 6)
    assert min(first) > 0.0
