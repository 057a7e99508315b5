"""Members that gossip keep their mean, come to it, and wait for nobody but whom they meet."""

import os
import signal
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import averaging, optim
from offbeat.averaging.pairs import partner
from offbeat.errors import ConfigError, ConnectionLostError, NonFiniteError
from support.averaging import LOSS, SPEC, arrays, batch, close, model, step, warned
from support.group import together
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def gossiping(trained, **settings):
    return offbeat.AsyncModelAverager(trained, **{"method": "gossip", "averaging_frequency": 4} | settings)


def learning(rank, iterations):
    """Learn nothing but a random walk of this member's own, while rounds are under way behind it."""
    trained = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    start = trained.weight.detach().clone()
    walk = torch.zeros_like(start)
    random = torch.Generator().manual_seed(rank)
    ours = gossiping(trained, overlap=True)
    for _ in range(iterations[rank]):
        way = torch.randn(2, 3, dtype=torch.float64, generator=random)
        walk += way
        with torch.no_grad():
            trained.weight.add_(way)
        ours.step(1 + rank)
    ours.state_dict()  # ends the round under way
    before, rounds = trained.weight.tolist(), ours.averaging_round
    ours.flush()
    assert ours.averaging_round > rounds, "the mean of all, to which it has gone, is one"
    assert ours.last_averaging_iteration == 0
    return [np.array(values) for values in (start.tolist(), walk.tolist(), before, trained.weight.tolist())]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_the_sum_over_members_changes_by_what_they_learn_alone_and_flush_brings_all_to_the_mean(num):
    found = together(learning, num, (43,) * num)
    expected = num * found[0][0] + sum(walk for _, walk, _, _ in found)
    assert np.abs(sum(before for _, _, before, _ in found) - expected).max() < 1e-12
    assert not np.allclose(found[0][2], found[1][2], atol=1e-3), "each has a model of its own until then"
    for *_, last in found:
        assert np.array_equal(last, found[0][3])
    assert np.abs(found[0][3] - expected / num).max() < 1e-13


@pytest.mark.parametrize("iterations", [(43, 6, 21), (9, 0, 30)])
def test_members_that_end_early_hold_up_nobody_and_their_learning_is_in_the_mean(iterations):
    found = together(learning_until_flush, 3, iterations)
    expected = found[0][0] + sum(walk for _, walk, _ in found) / 3
    for _, _, last in found:
        assert np.array_equal(last, found[0][2])
    assert np.abs(found[0][2] - expected).max() < 1e-12


def learning_until_flush(rank, iterations):
    trained = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    start = trained.weight.detach().clone()
    walk = torch.zeros_like(start)
    random = torch.Generator().manual_seed(rank)
    ours = gossiping(trained, overlap=2)
    for part in (iterations[rank], 5 * rank):  # what is known later of the first end is not of the second
        for _ in range(part):
            way = torch.randn(2, 3, dtype=torch.float64, generator=random)
            walk += way
            with torch.no_grad():
                trained.weight.add_(way)
            ours.step(1)
        ours.flush()
    return [np.array(values) for values in (start.tolist(), walk.tolist(), trained.weight.tolist())]


def consenting(rank, rounds):
    """Learn nothing: begin with numbers of one's own, and only meet."""
    trained = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    ours = gossiping(trained, averaging_frequency=1, overlap=False)
    with torch.no_grad():
        trained.weight.copy_(torch.randn(1, 4, generator=torch.Generator().manual_seed(rank)))
    seen = [trained.weight.tolist()[0]]
    for _ in range(rounds):
        ours.step(1)
        seen.append(trained.weight.tolist()[0])
    sent = ours.bytes_sent
    ours.flush()
    return np.array(seen), sent, ours.averaging_round


@pytest.mark.parametrize("num", [4, 5])
def test_each_round_takes_pairs_to_their_mean_and_all_come_to_one(num):
    rounds = 12
    found = together(consenting, num, rounds)
    values = np.stack([seen for seen, _, _ in found], axis=1)  # rounds, members, numbers
    expected = values[0]
    for number in range(rounds):
        others = [partner(number, member, num) for member in range(num)]
        expected = (expected + expected[[m if o is None else o for m, o in enumerate(others)]]) / 2
        assert np.abs(values[number + 1] - expected).max() < 1e-14
    distance = ((values - values[0].mean(0)) ** 2).sum((1, 2))
    rate = 0.5 if num % 2 else (num - 2) / (2 * (num - 1))
    assert distance[-1] < distance[0] * rate**rounds * 100, "as fast as the closed form says, within a bound"
    for member, (_, sent, counted) in enumerate(found):
        met = [partner(number, member, num) is not None for number in range(rounds + 1)]
        assert sent == sum(met[:rounds]) * (4 * 8 + 8), (
            "its model, once in each round in which it met somebody"
        )
        assert counted == sum(met) + 1, "and at flush one round more, and the mean of all"


def without_threads(rank, who):
    """Train where some members can have no thread for what they exchange."""
    start = threading.Thread.start

    def refused(thread):
        if rank in who and thread.name == "offbeat-gossip":
            raise RuntimeError("can't start new thread")
        start(thread)

    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    ours = gossiping(trained, overlap=2)
    with mock.patch.object(threading.Thread, "start", refused):
        for number in range(24):
            ours.step(step(trained, live, rank, number))
    before = [value.copy() for value in arrays(trained)]
    ours.flush()
    return [*before, *arrays(trained)]


def test_where_no_thread_can_be_had_members_meet_as_well():
    expected = together(without_threads, 3, ())
    for found, those in zip(together(without_threads, 3, (0, 2)), expected, strict=True):
        assert all(map(np.array_equal, found, those))


def two_methods(rank):
    found = []
    for method in ("average", "gossip"):
        trained = model(seed=rank)
        ours = gossiping(trained, method=method, overlap=2)
        for number in range(18):
            inputs, targets = batch(0, number)
            targets = (targets + rank) % 5
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        ours.flush()
        found.append([value.copy() for value in arrays(trained)])
        ours.close()
    return found


def test_of_two_members_with_as_many_samples_it_is_their_average():
    for average, gossip in together(two_methods, 2):
        assert close(gossip, average)


def slow(rank, here):
    """Two pairs, of which one begins its round when the other one's has ended."""
    trained = model()
    ours = gossiping(trained, averaging_frequency=1, overlap=False)
    first = {0, partner(0, 0, 4)}
    if rank not in first:
        for member in first:
            wait_for((here / str(member)).exists, timeout_s=60)
    ours.step(1)
    (here / str(rank)).touch()
    ours.flush()
    return ours.averaging_round


def test_no_pair_waits_for_another(tmp_path):
    assert together(slow, 4, tmp_path) == [3] * 4, "its own, one at flush, and the mean of all"


def with_statistics(rank):
    trained = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 5))
    ours = gossiping(trained, averaging_frequency=3, overlap=2)
    for number in range(5):
        samples = 2 + 2 * rank
        ours.train_step(
            inputs=torch.full((samples, 2), 1.0 + 10 * rank + number),
            targets=torch.zeros(samples, dtype=torch.long),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=LOSS,
        )
    return trained[0].running_mean[0].item()


def test_running_statistics_are_those_of_equals_and_keep_what_came_since():
    found = together(with_statistics, 2)
    means = [0.0, 0.0]
    for number in range(5):
        means = [0.9 * mean + 0.1 * (1.0 + 10 * rank + number) for rank, mean in enumerate(means)]
        if number == 2:
            agreed, taken = sum(means) / 2, list(means)
    expected = [mean + 0.9**2 * (agreed - own) for mean, own in zip(means, taken, strict=True)]
    assert found == pytest.approx(expected, rel=1e-5)


def resumed(rank, where, part):
    trained = model(seed=rank)
    ours = gossiping(
        trained, overlap=2, averaging_policy="adaptive", min_averaging_frequency=3, max_averaging_frequency=9
    )
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    kept = where / f"{rank}.pt"
    if part == "second":
        state = torch.load(kept)
        trained.load_state_dict(state["model"])
        ours.load_state_dict(state["averager"], optimizer=live)
    frequencies = []
    for number in {"whole": range(60), "first": range(33), "second": range(33, 60)}[part]:
        inputs, targets = batch(rank, number % 7)
        ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
        frequencies.append(ours.averaging_frequency)
        if part == "whole" and number == 32:
            ours.state_dict()  # ends the round under way, as saving does
    if part == "first":
        torch.save({"averager": ours.state_dict(), "model": trained.state_dict()}, kept)
    return frequencies, arrays(trained)


def test_a_state_with_rounds_that_are_known_later_goes_on_bit_for_bit(tmp_path):
    whole = together(resumed, 3, tmp_path, "whole")
    first = together(resumed, 3, tmp_path, "first")
    second = together(resumed, 3, tmp_path, "second")
    for (frequencies, last), (earlier, _), (later, also_last) in zip(whole, first, second, strict=True):
        assert frequencies == earlier + later == whole[0][0], "adaptive, and the same in all members"
        assert len(set(frequencies)) > 1
        assert all(map(np.array_equal, last, also_last))


def changing(rank, before, after, who):
    trained = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    start = trained.weight.detach().clone()
    walk = torch.zeros_like(start)
    random = torch.Generator().manual_seed(rank)
    ours = gossiping(trained, averaging_frequency=3, method=before, overlap=1)
    begins = []
    with warned() as told:
        for number in range(36):
            if number == 10 and rank in who:
                ours.method = after
                ours.averaging_frequency = 5
            way = torch.randn(2, 3, dtype=torch.float64, generator=random)
            walk += way
            with torch.no_grad():
                trained.weight.add_(way)
            begun = ours._turns.rounds.number
            ours.step(2)
            if ours._turns.rounds.number > begun:
                begins.append(ours.iterations)
        ours.flush()
    told = [text for text in told if "want different things" in text]
    return (
        (ours.method.name, ours.averaging_frequency, len(told)),
        begins,
        [np.array(values) for values in (start.tolist(), walk.tolist(), trained.weight.tolist())],
    )


@pytest.mark.parametrize(
    ("before", "after"), [("gossip", "average"), ("average", "gossip"), ("diloco", "gossip")]
)
@pytest.mark.parametrize("who", [(0, 1, 2), (1,)])
def test_the_method_changes_in_all_members_at_once_or_in_none_and_nothing_is_lost(before, after, who):
    found = together(changing, 3, before, after, who)
    for how, begins, (*_, last) in found:
        assert how == ((after, 5, 0) if len(who) == 3 else (before, 3, 1))
        assert begins == found[0][1]
        assert np.array_equal(last, found[0][2][2])
    if before != "diloco":
        expected = found[0][2][0] + sum(walk for _, _, (_, walk, _) in found) / 3
        assert np.abs(found[0][2][2] - expected).max() < 1e-12


def changing_at_the_end(rank, after):
    trained = nn.Linear(3, 2, dtype=torch.float64)
    random = torch.Generator().manual_seed(rank)
    ours = gossiping(trained, averaging_frequency=4, overlap=1)
    start = [p.detach().numpy().copy() for p in trained.parameters()]
    walks = [np.zeros(value.shape) for value in start]
    for _ in range(10 + rank):
        for parameter, walk in zip(trained.parameters(), walks, strict=True):
            way = torch.randn(parameter.shape, dtype=torch.float64, generator=random)
            np.add(walk, way.numpy(), out=walk)
            with torch.no_grad():
                parameter.add_(way)
        ours.step(1 + rank)
    ours.method = after
    ours.flush()
    return start, walks, arrays(trained), ours.method.name


@pytest.mark.parametrize(
    "after",
    ["average", "easgd", averaging.DiLoCo(lr=1.0, momentum=0.0, fragments=2)],
    ids=["average", "easgd", "diloco"],
)
def test_a_change_just_before_the_end_loses_nothing_of_what_members_that_count_less_have_learnt(after):
    found = together(changing_at_the_end, 3, after)
    for number, start in enumerate(found[0][0]):
        expected = start + sum(walks[number] for _, walks, *_ in found) / 3
        for _, _, last, name in found:
            assert name != "gossip"
            assert np.array_equal(last[number], found[0][2][number])
            assert np.abs(last[number] - expected).max() < 1e-12


def freezing(rank):
    trained = model(seed=rank)
    ours = gossiping(trained, overlap=1)
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    for number in range(24):
        if number in (6, 15):
            trained[0].weight.requires_grad_(requires_grad=number == 15)
        ours.step(step(trained, live, rank, number))
    ours.flush()
    return arrays(trained)


def test_members_may_freeze_together():
    found = together(freezing, 3)
    for last in found:
        assert all(map(np.array_equal, last, found[0]))


def sick(rank, who):
    trained = model()
    ours = gossiping(trained, overlap=2)
    live = torch.optim.Adam(trained.parameters(), lr=0.01)
    error = None, 0
    with warned() as told:
        try:
            for number in range(24):
                inputs, targets = batch(rank, number)
                if rank in who and number == 5:
                    inputs[0, 0] = float("nan")
                live.zero_grad()
                LOSS(trained(inputs), targets).backward()
                live.step()
                ours.step(len(inputs), optimizer=live)
            ours.flush()
        except NonFiniteError as raised:
            error = str(raised), ours.iterations
    moments = [bool(value["exp_avg"].isfinite().all()) for value in live.state.values()]
    return len([text for text in told if "were not finite" in text]), all(moments), arrays(trained), error


@pytest.mark.parametrize("meets_nobody", [False, True])
def test_a_member_that_is_not_finite_goes_on_from_whom_it_meets(meets_nobody):
    ill = next(member for member in range(3) if (partner(1, member, 3) is None) == meets_nobody)
    found = together(sick, 3, (ill,))
    assert [told for told, *_ in found] == [int(member == ill) for member in range(3)]
    for _, are_finite, last, (error, _) in found:
        assert are_finite
        assert error is None
        assert all(np.isfinite(value).all() for value in last)
        assert all(map(np.array_equal, last, found[0][2]))


def test_where_no_member_is_finite_it_is_an_error_in_all():
    for *_, (error, iterations) in together(sick, 3, (0, 1, 2)):
        assert "nor any member's" in error
        assert iterations == 18, "two rounds after the first of which none was finite"


def beside_another_group(rank):
    def num_open():
        return [len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")]

    def run():
        trained = model()
        with gossiping(trained, averaging_frequency=1) as ours:
            live = torch.optim.SGD(trained.parameters(), lr=0.1)
            for number in range(3):
                ours.step(step(trained, live, rank, number))
            ours.flush()
            is_beside = ours._turns.members._twos.sums is not ours._turns.members._sums
        return is_beside, arrays(trained)

    plain = run()
    before = num_open()
    with pytest.MonkeyPatch.context() as patched:  # there is no group of NCCL's here
        patched.setattr("offbeat.averaging.members.carries", lambda group, device: False)
        beside = run()
    torch.distributed.barrier()
    # What a group held is let go of on a thread, which on a busy machine takes a while.
    wait_for(lambda: all(now <= then for now, then in zip(num_open(), before, strict=True)))
    return plain, beside


def test_where_the_group_carries_nothing_of_the_cpus_pairs_have_one_beside_it_and_leave_nothing_open():
    for (is_beside, plain), (is_other_beside, beside) in together(beside_another_group, 2):
        assert (is_beside, is_other_beside) == (False, True)
        assert all(map(np.array_equal, plain, beside))


def interrupted(rank):
    """Break off the first wait for a partner, as Ctrl-C does."""
    trained = model()
    ours = gossiping(trained, averaging_frequency=2, overlap=False)
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    num_broken = 0
    for number in range(6):
        samples = step(trained, live, rank, number)
        if rank == 0 and number == 3:
            pairs = ours._turns.members._twos.pairs
            begin = pairs.begin

            def begin_and_break_off(*arguments, pairs=pairs, begin=begin, **more):
                begin(*arguments, **more)
                pairs.begin = begin
                result = pairs._behind.under_way.result

                def broken_off():
                    pairs._behind.under_way.result = result
                    raise KeyboardInterrupt

                pairs._behind.under_way.result = broken_off

            pairs.begin = begin_and_break_off
        try:
            ours.step(samples)
        except KeyboardInterrupt:
            num_broken += 1
    ours.flush()
    return arrays(trained), num_broken


def test_ctrl_c_while_a_partner_is_waited_for_leaves_the_round_to_be_ended_later():
    (first, was_broken), (second, _) = together(interrupted, 2)
    assert was_broken == 1
    assert all(map(np.array_equal, first, second))


def dying(rank, gone, said):
    ours = gossiping(model(), averaging_frequency=2)
    for _ in range(2):
        ours.step(1)
    if rank == 1:
        gone.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(gone.exists, timeout_s=60)
    told = []
    for _ in range(2):
        try:
            for _ in range(6):
                ours.step(1)
        except ConnectionLostError as error:
            told.append(str(error))
    said.write_text("\n".join(told))


def test_a_member_that_dies_is_an_error_that_says_so_each_time(tmp_path):
    with pytest.raises(EOFError):  # of the one that is killed
        together(dying, 2, tmp_path / "gone", tmp_path / "said")
    first, second = (tmp_path / "said").read_text().splitlines()
    assert "for one is gone or was waited for too long" in first
    assert first == second


def test_at_a_server_it_is_refused_with_the_remedy():
    with offbeat.ParameterServer(transaction="model") as server:
        settings = {"communication_backend": "tcp", "server_address": server.address}
        told = "method is 'gossip', whose members meet in twos, .* or communication_backend='gloo'"
        with pytest.raises(ConfigError, match=told):
            offbeat.AsyncModelAverager(model(), 1, 0, method="gossip", **settings)
        with offbeat.AsyncModelAverager(model(), 1, 0, **settings) as ours:
            with pytest.raises(ConfigError, match=told):
                ours.method = averaging.Gossip()
            with pytest.raises(ConfigError, match="a model is averaged whole"):
                ours.method = averaging.DiLoCo(fragments=2)
            assert ours.method == averaging.Average()
