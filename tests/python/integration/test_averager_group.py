"""Members of a process group that average are what the methods say, computed in one process."""

import copy
import functools
import gc
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed, nn

import offbeat
from offbeat import averaging, optim
from offbeat.averaging import members
from offbeat.errors import (
    ClosedError,
    ConfigError,
    ConnectionLostError,
    ModelMismatchError,
    NonFiniteError,
    StateError,
)
from support.averaging import (
    LOSS,
    METHODS,
    SPEC,
    Alone,
    Counter,
    arrays,
    batch,
    close,
    model,
    sick_beside_one_that_has_ended,
    step,
    warned,
)
from support.group import together
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def member(rank, iterations, frequency, method, overlap):
    trained = model(seed=rank)  # all start from the first one's
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=frequency, method=method, overlap=overlap)
    for number in range(iterations[rank]):
        inputs, targets = batch(rank, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    before = [value.copy() for value in arrays(trained)]
    ours.flush()
    return before, arrays(trained), ours.averaging_round, ours.bytes_sent


def alone(num, method, iterations, frequency, overlap):
    """Give each member's model before the end, and all members' model after it."""
    us = Alone(num, method)
    assert us.train(iterations, frequency, overlap) is None
    before = [[value.copy() for value in arrays(m)] for m in us.models]
    us.lead(*us.take(), moved=False)
    if method == "easgd":
        us.lead(*us.take(), moved=False)  # in the round in which nobody had anything to do any more
        return before, [centre.float().numpy() for centre in us.reference]
    return before, arrays(us.models[0])


@pytest.mark.parametrize("overlap", [False, 2])
@pytest.mark.parametrize("method", METHODS)
def test_members_do_what_the_methods_say(method, overlap):
    num = 3 if method == "easgd" else 2
    found = together(member, num, (10,) * num, 4, method, overlap)
    before, last = alone(num, method, 10, 4, int(overlap))
    for rank in range(num):
        assert close(found[rank][0], before[rank]), "what it had before the end"
        assert all(map(np.array_equal, found[rank][1], found[0][1])), "the same for all at the end"
    assert close(found[0][1], last)
    assert found[0][2] == 3, "after 4 and 8 iterations, and at the end"
    num_numbers = sum(p.size for p in last)
    assert found[0][3] == 4 * (4 * num_numbers + 8), "four rounds, one of them of nothing"


def every_iteration(rank, iterations):
    trained = model(seed=rank)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=1, overlap=False)
    for number in range(iterations):
        inputs, targets = batch(rank, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
    return arrays(trained)


def test_averaging_every_iteration_is_training_on_the_large_batch():
    first, second = together(every_iteration, 2, 8)
    assert all(map(np.array_equal, first, second))
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    for number in range(8):
        batches = [batch(rank, number) for rank in range(2)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        live.zero_grad()
        LOSS(trained(inputs), targets).backward()
        live.step()
    for a, b in zip(first, arrays(trained), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("iterations", [(13, 5), (9, 0)])
def test_members_that_end_at_different_times_end_alike(method, iterations):
    found = together(member, 2, iterations, 4, method, True)
    assert all(map(np.array_equal, found[0][1], found[1][1]))
    assert found[0][2] == found[1][2], "they have been in the same rounds"
    assert not all(map(np.array_equal, found[0][1], arrays(model())))


def background(rank, iterations):
    """Freeze all learning but by this member's own steps, which add a number of their own."""
    trained = nn.Linear(3, 2, bias=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=5, overlap=True)
    start = trained.weight.detach().clone()
    for _ in range(iterations):
        with torch.no_grad():
            trained.weight.add_(2.0 ** -(rank + 1))
        ours.step(4)
    ours.state_dict()  # ends the round under way
    return start.tolist(), trained.weight.detach().tolist()


def test_in_the_background_no_progress_is_lost():
    """The sum over members is the start's and all their steps, at whichever iteration each round ended."""
    found = together(background, 2, 43)
    start = np.array(found[0][0])
    total = sum(np.array(weights) for _, weights in found)
    assert np.allclose(total, 2 * start + 43 * (0.5 + 0.25), atol=1e-5)


def rounds_in_their_memory(rank, method):
    """See after each round that the next has its memory; give where the values were, and what was sent."""
    trained = model(rank)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=2, method=method, overlap=1)
    room, parameters = ours._turns.rounds._room, list(trained.parameters())
    addresses = set()

    def is_free():
        flats = [room.empty(parameters), room.empty(parameters)]
        return {flat[torch.float32].data_ptr() for flat in flats} == addresses

    for _ in range(10):
        ours.step(1)
        if ours.is_under_way:
            said = ours._turns.members._said
            flats = said.values[torch.float32], said.room[torch.float32]
            addresses |= {flat.data_ptr() for flat in flats}
            del said, flats
        elif addresses:
            wait_for(is_free, timeout_s=10)  # gloo's own thread lets go a moment later
    ours.flush()
    return len(addresses)


@pytest.mark.parametrize("method", ["average", "diloco"])
def test_each_round_is_in_the_memory_of_the_one_before(method):
    assert together(rounds_in_their_memory, 2, method) == [2, 2]


def fragments(rank):
    trained = model(seed=rank)
    ours = offbeat.AsyncModelAverager(
        trained,
        averaging_frequency=6,
        method=averaging.DiLoCo(lr=1.0, momentum=0.0, fragments=3),
        overlap=False,
    )
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    alike = []
    for number in range(6):
        samples = step(trained, live, rank, number)
        ours.step(samples)
        alike.append([value.tolist() for value in arrays(trained)])
    ours.flush()
    return alike, arrays(trained), ours.bytes_sent


def test_fragments_are_averaged_in_turn():
    (first, last, sent), (second, also_last, _) = together(fragments, 2)
    same = [[a == b for a, b in zip(one, two, strict=True)] for one, two in zip(first, second, strict=True)]
    assert same == [
        [False, False, False, False],
        [True, False, False, False],
        [False, False, False, False],
        [False, True, True, False],
        [False, False, False, False],
        [False, False, False, True],
    ]
    assert all(map(np.array_equal, last, also_last))
    num_numbers = sum(value.size for value in last)
    assert sent <= 4 * num_numbers * 3 + 7 * 8, "three rounds, three at flush, one of nothing"


def with_statistics(rank, overlap):
    trained = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 5))
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=3, overlap=overlap)
    seen = []
    for number in range(3 + int(overlap)):
        ours.train_step(
            inputs=torch.full((2 + 2 * rank, 2), 1.0 + 10 * rank + number),
            targets=torch.zeros(2 + 2 * rank, dtype=torch.long),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=LOSS,
        )
        seen.append(trained[0].running_mean[0].item())
    return seen


@pytest.mark.parametrize("overlap", [False, 2])
def test_running_statistics_are_averaged_by_samples_and_keep_what_came_since(overlap):
    found = together(with_statistics, 2, overlap)
    means = []
    for rank in range(2):
        mean = 0.0
        for number in range(3):
            mean = 0.9 * mean + 0.1 * (1.0 + 10 * rank + number)
        means.append(mean)
    agreed = (2 * means[0] + 4 * means[1]) / 6
    for rank in range(2):
        expected = agreed
        for number in range(3, 3 + int(overlap)):
            expected = 0.9 * expected + 0.1 * (1.0 + 10 * rank + number)
        assert found[rank][-1] == pytest.approx(expected, rel=1e-5)


class Keeps(torch.optim.Optimizer):
    """One that moves nothing, and keeps what is no dict."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = (parameter.detach().clone(),)


def sick(rank, is_given):
    trained = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=2)
    live, beside = torch.optim.Adam(trained.parameters(), lr=0.01), Keeps(trained.parameters(), {})
    with warned() as told:
        for number in range(24):
            random = torch.Generator().manual_seed(100 * rank + number)
            inputs, targets = torch.randn(8, 6, generator=random), torch.randint(5, (8,), generator=random)
            if rank == 1 and number == 5:
                inputs[0, 0] = float("nan")
            live.zero_grad()
            LOSS(trained(inputs), targets).backward()
            live.step()
            beside.step()
            ours.step(len(inputs), optimizer=live if is_given else None)
    moments = [bool(value["exp_avg"].isfinite().all()) for value in live.state.values()]
    ours.flush()
    return (
        len([text for text in told if "were not finite" in text]),
        all(moments),
        [value.numpy() for value in trained.state_dict().values()],
    )


def ill_in_a_group(rank, ill_at, method):
    return sick_beside_one_that_has_ended(rank, ill_at, method=method)


@pytest.mark.parametrize("ill_at", [9, 25])
@pytest.mark.parametrize("method", METHODS)
def test_a_member_that_is_not_finite_goes_on_from_those_who_have_ended(method, ill_at):
    (well, first, stayed), (ill, second, _) = together(ill_in_a_group, 2, ill_at, method)
    assert (well, ill) == (0, 1)
    assert stayed == [True], "of one that is not finite no step is made"
    assert all(np.isfinite(value).all() for value in first)
    assert all(map(np.array_equal, first, second))


def ending_one_after_another(rank, method, more):
    trained = model()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=1, overlap=False, method=method)
    with warned() as told:
        for _ in range(2 + rank * more):
            ours.step(1)
        ours.flush()
    ours.close()
    return [text for text in told if "members have ended, and the others have trained on" in text]


@pytest.mark.parametrize(
    ("method", "more", "is_told"),
    [
        ("diloco", 4, True),
        ("slowmo", 4, True),
        ("bmuf", 4, True),
        ("average", 4, False),
        ("diloco", 1, False),
    ],
)
def test_members_that_train_on_by_an_outer_momentum_after_others_have_ended_are_warned(method, more, is_told):
    for told in together(ending_one_after_another, 2, method, more):
        assert len(told) == is_told
        assert all("1 of 2 members have ended" in text and "overlap=False" in text for text in told)


def none_is_finite(rank):
    trained = model()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=False)
    with torch.no_grad():
        trained[0].weight[0, 0] = float("nan")
    try:
        for _ in range(8):
            ours.step(1)
    except NonFiniteError as error:
        return str(error), ours.iterations
    return None


def test_where_no_member_is_finite_it_is_an_error_in_all_at_once():
    for told, iterations in together(none_is_finite, 2):
        assert "nor any member's" in told
        assert iterations == 4


@pytest.mark.parametrize("is_given", [True, False])
def test_a_member_that_is_not_finite_goes_on_from_the_others_mean_with_all_that_it_keeps(is_given):
    (well, _, first), (ill, are_finite, second) = together(sick, 2, is_given)
    assert (well, ill) == (0, 1), "warned once, and then it was well again"
    assert are_finite
    assert all(np.isfinite(value).all() for value in first)
    assert all(map(np.array_equal, first[:-1], second[:-1]))


def springs(rank, samples, is_ill):
    """Let the first member alone go away from the centre, which is at 0; the other adds nothing."""
    one = Counter(by=1.0 if rank == 0 else float("nan"), samples=samples)
    ours = offbeat.AsyncModelAverager(one.model, averaging_frequency=1, overlap=False, method="easgd")
    if rank == 0 or is_ill:
        one.train(ours)
    ours.flush()
    return one.value


@pytest.mark.parametrize("is_ill", [False, True])
@pytest.mark.parametrize("samples", [1, 8])
def test_a_member_that_has_ended_or_is_not_finite_moves_easgds_centre_nowhere(samples, is_ill):
    """The centre goes 2 x 0.9 / 2 of the way to whom it is drawn to, however many samples that has had."""
    assert together(springs, 2, samples, is_ill) == [pytest.approx(0.9)] * 2


def unlike(rank, what):
    trained = model()
    settings = {"averaging_frequency": 4}
    if what == "frequency":
        settings["averaging_frequency"] = 4 + rank
    if what == "method":
        settings["method"] = ("average", "easgd")[rank]
    if what == "springs":
        settings["method"] = averaging.EASGD(alpha=(0.5, 1.5)[rank])
    if what == "springs of all":
        settings["method"] = averaging.EASGD(alpha=1.5)
    if what == "frozen" and rank:
        trained[0].weight.requires_grad_(requires_grad=False)
    if what == "model" and rank:
        trained = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    if what == "overlap":
        settings["overlap"] = 1 + rank
    try:
        offbeat.AsyncModelAverager(trained, **settings)
    except (ConfigError, ConnectionLostError, StateError, ModelMismatchError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("frequency", "averaging_frequency is 4 in member 0 and 5 in member 1"),
        ("method", "method is Average() in member 0 and EASGD(alpha=None) in member 1"),
        ("frozen", "requires_grad of '0.weight' is True in member 0 and False in member 1"),
        ("overlap", "overlap is 1 in member 0 and 2 in member 1"),
        ("springs", "method is EASGD(alpha=0.5) in member 0 and EASGD(alpha=1.5) in member 1"),
    ],
)
def test_members_that_are_set_differently_are_all_told_in_what(what, told):
    for kind, text in together(unlike, 2, what):
        assert kind == "StateError"
        assert text == f"members average differently: {told}: give the same to all of them"


def test_what_so_many_members_cannot_use_is_refused_in_all_of_them():
    for kind, text in together(unlike, 2, "springs of all"):
        assert (kind, text[:41]) == ("ConfigError", "alpha is 1.5 and there are 2 members: the")


def test_members_with_different_models_are_told_where_they_differ():
    for kind, text in together(unlike, 2, "model"):
        assert kind == "ModelMismatchError"
        assert "members hold different models: here comes '0.weight'" in text


def changing(rank, what, who):
    """Wish for something else in some members, from the first round on; say what comes of it."""
    trained = model(seed=rank)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=1)
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    if rank in who and what == "method":
        ours.method = averaging.DiLoCo(fragments=2)
    if rank in who and what == "frozen":
        trained[0].weight.requires_grad_(requires_grad=False)
    with warned() as told:
        for number in range(20):
            ours.step(step(trained, live, rank, number))
        ours.flush()
    told = [text for text in told if "want different things" in text]
    return ours.method.name, told, arrays(trained)


@pytest.mark.parametrize("what", ["method", "frozen"])
@pytest.mark.parametrize("who", [(0, 1), (0,)])
def test_members_change_together_or_not_at_all_and_end_alike(what, who):
    (first, told, last), (second, also_told, also_last) = together(changing, 2, what, who)
    assert first == second == ("diloco" if what == "method" and len(who) == 2 else "average")
    assert len(told) == len(also_told) == (len(who) == 1)
    if told:
        wish = {
            "method": f"method={averaging.DiLoCo(fragments=2)!r} (in force: Average())",
            "frozen": "other parameters to be trained (requires_grad)",
        }[what]
        assert f"this member (rank 0) wishes for {wish}, and not all others do" in told[0]
        assert "this member (rank 1) wishes for what is in force, and others for" in also_told[0]
    assert all(map(np.array_equal, last, also_last))


def ending(rank, case):
    """Do something shortly before the end that leaves members different."""
    trained = model(seed=rank)
    before = {
        "fragments": averaging.DiLoCo(fragments=2),
        "springs": averaging.EASGD(),
        "share": averaging.DiLoCo(merge_alpha=0.5),
    }
    ours = offbeat.AsyncModelAverager(
        trained, averaging_frequency=4, overlap=1, method=before.get(case, "average")
    )
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    if case == "unfrozen":
        trained[0].weight.requires_grad_(requires_grad=False)
        ours.step(step(trained, live, rank, 99))
    for number in range(10):
        if number == 8:
            if case == "fragments":
                ours.method = "average"
            if case == "into fragments":
                ours.method = averaging.DiLoCo(fragments=2)
            if case in ("springs", "share"):
                trained[0].weight.requires_grad_(requires_grad=False)
            if case == "unfrozen":
                trained[0].weight.requires_grad_(requires_grad=True)
        ours.step(step(trained, live, rank, number))
    ours.flush()
    return arrays(trained)


@pytest.mark.parametrize("case", ["fragments", "into fragments", "springs", "share", "unfrozen"])
def test_whatever_changed_before_the_end_members_end_alike(case):
    first, second = together(ending, 2, case)
    assert all(map(np.array_equal, first, second))


def leaving_a_centre(rank, after):
    """Change the method just before the end; give where this member was before, and the centre."""
    trained = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    random = torch.Generator().manual_seed(rank)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=1, method="easgd")
    for _ in range(10):
        with torch.no_grad():
            trained.weight.add_(torch.randn(2, 3, dtype=torch.float64, generator=random))
        ours.step(1 + rank)
    before = trained.weight.detach().numpy().copy()
    centre = ours.state_dict()["rounds"]["memories"][0]["reference"][0].numpy()
    ours.method = after
    ours.flush()
    return before, centre, arrays(trained)[0], ours.method.name


@pytest.mark.parametrize("after", ["average", averaging.EASGD(alpha=0.1), "gossip"], ids=str)
def test_from_easgd_to_another_method_just_before_the_end_is_to_the_mean_of_all_and_not_to_one(after):
    found = together(leaving_a_centre, 3, after)
    own = sum(before for before, *_ in found) / 3
    centre = found[0][1]
    expected = own - 0.3 * (own - centre)  # drawn to the centre once more, by .9 / 3, and then to their mean
    assert not np.allclose(found[0][0], own, atol=1e-2), "each is elsewhere"
    for _, _, last, name in found:
        assert name == (after if isinstance(after, str) else after.name)
        assert np.abs(last - expected).max() < 1e-12


def with_a_barrier(rank):
    """Use the group between rounds that only one member has begun."""
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=4, overlap=True)
    for number in range(8 if rank == 0 else 12):
        ours.step(batch(rank, number)[0].shape[0])
    torch.distributed.barrier()
    total = torch.tensor([float(rank)])
    torch.distributed.all_reduce(total)
    ours.flush()
    return total.item(), ours.averaging_round


def test_the_users_own_messages_do_not_meet_rounds():
    assert [total for total, _ in together(with_a_barrier, 2)] == [1.0, 1.0]


def resumed(rank, where, part):
    trained = model(seed=rank)
    ours = offbeat.AsyncModelAverager(
        trained, averaging_frequency=6, overlap=2, method=averaging.DiLoCo(fragments=2)
    )
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    kept = where / f"{rank}.pt"
    if part == "second":
        state = torch.load(kept)
        trained.load_state_dict(state["model"])
        ours.load_state_dict(state["averager"], optimizer=live)
    for number in {"whole": range(17), "first": range(10), "second": range(10, 17)}[part]:
        ours.step(step(trained, live, rank, number), optimizer=live)
        if part == "whole" and number == 9:
            ours.state_dict()  # ends the round under way, as saving does
    if part == "first":
        state = ours.state_dict()
        torch.save({"averager": state, "model": trained.state_dict()}, kept)
    return arrays(trained)


def test_a_state_with_a_round_under_way_goes_on_bit_for_bit(tmp_path):
    whole = together(resumed, 2, tmp_path, "whole")
    together(resumed, 2, tmp_path, "first")
    second = together(resumed, 2, tmp_path, "second")
    assert all(
        np.array_equal(a, b)
        for one, two in zip(whole, second, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def resumed_at_another_pace(rank, is_early):
    """Save, some after the frequency has changed; go on, and say when rounds begin."""
    first = Counter()
    ours = offbeat.AsyncModelAverager(first.model, averaging_frequency=3, overlap=False)
    state, value = ours.state_dict(), first.value
    ours.averaging_frequency = 5
    first.train(ours, 9)
    if not is_early or rank == 1:
        state, value = ours.state_dict(), first.value
    ours.flush()
    one = Counter()
    with offbeat.AsyncModelAverager(one.model, averaging_frequency=3, overlap=False) as again:
        nn.init.constant_(one.model.weight, value)
        again.load_state_dict(state, strict=False)
        begins = []
        for number in range(12):
            begun = again._turns.rounds.number
            one.train(again)
            if again._turns.rounds.number > begun:
                begins.append(number)
        again.flush()
    return begins


@pytest.mark.parametrize("is_early", [False, True])
def test_members_take_up_a_changed_frequency_where_all_were_saved_with_it(is_early):
    first, second = together(resumed_at_another_pace, 2, is_early)
    if is_early:
        assert (first, second) == ([2, 5, 8, 11], [1, 4, 7, 10])
    else:
        assert first == second == [3, 8]


def loading_alone(rank):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=4, method=averaging.DiLoCo(fragments=2))
    state = ours.state_dict()
    if rank == 0:
        state["rounds"]["number"] = 3
    try:
        ours.load_state_dict(state)
    except StateError as error:
        return str(error)
    return None


def test_states_of_different_rounds_are_refused_in_all_members():
    for told in together(loading_alone, 2):
        assert "members load states of different rounds" in told
        assert "strict=False" in told


class Interrupting:
    """A sum under way whose first wait is broken off."""

    def __init__(self, work):
        self.work = work
        self.is_broken = False

    def wait(self):
        if not self.is_broken:
            self.is_broken = True
            raise KeyboardInterrupt
        self.work.wait()

    def is_completed(self):
        return self.work.is_completed()


def break_off_the_next_wait(sums):
    finish = sums.finish

    def broken_off():
        sums._works[0] = Interrupting(sums._works[0])
        sums.finish = finish
        finish()

    sums.finish = broken_off


def interrupted(rank):
    trained = model()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=2, method="diloco", overlap=False)
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    num_broken = 0
    for number in range(6):
        samples = step(trained, live, rank, number)
        if rank == 0 and number == 1:
            break_off_the_next_wait(ours._turns.members._sums)
        try:
            ours.step(samples)
        except KeyboardInterrupt:
            num_broken += 1
    ours.flush()
    return arrays(trained), num_broken


def test_ctrl_c_while_a_round_is_waited_for_leaves_it_to_be_ended_later():
    (first, was_broken), (second, _) = together(interrupted, 2)
    assert was_broken == 1
    assert all(map(np.array_equal, first, second))


def closing(rank):
    def num_open():
        return [len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")]

    offbeat.AsyncModelAverager(model()).close()
    before = num_open()
    for _ in range(3):
        with offbeat.AsyncModelAverager(model(), averaging_frequency=1) as ours:
            ours.step(1)
            ours.flush()
    made = offbeat.AsyncModelAverager(model())
    del made, ours
    gc.collect()
    torch.distributed.barrier()
    return before, num_open()


def test_an_averager_that_is_closed_or_gone_leaves_nothing_open():
    for before, after in together(closing, 2):
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def closing_in_mid_round(rank, method, here):
    one = Counter(by=1.0 + 4.0 * rank)
    ours = offbeat.AsyncModelAverager(one.model, averaging_frequency=1, method=method)
    if rank == 1:
        wait_for((here / "closed").exists, timeout_s=60)
        one.train(ours)
        ours.state_dict()  # ends the round
        value = one.value
        with pytest.raises(ConnectionLostError, match="for one is gone"):
            one.train(ours, 3)
        return value, ours.averaging_round
    one.train(ours)
    assert ours.is_under_way
    began_s = time.monotonic()
    ours.close()
    took_s = time.monotonic() - began_s
    assert not ours.is_under_way
    for do in (ours.flush, lambda: one.train(ours)):
        with pytest.raises(ClosedError, match="takes part no more"):
            do()
    (here / "closed").touch()
    return one.value, took_s


@pytest.mark.parametrize("method", ["average", "gossip"])
def test_one_that_closes_in_mid_round_waits_for_nobody_and_the_others_have_what_it_said(method, tmp_path):
    (closed, took_s), (stays, rounds) = together(closing_in_mid_round, 2, method, tmp_path)
    assert took_s < 30.0, "half the time that the group has for a round"
    assert closed == 2.0, "what it has learnt itself, once more after it was closed"
    assert (stays, rounds) == ((1.0 + 5.0) / 2, 1)


LEFT_IN_MID_ROUND = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
from torch import distributed, nn
import offbeat

rank, here = int(sys.argv[1]), Path(sys.argv[2])
store = distributed.FileStore(str(here / "store"), 2)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
ours = offbeat.AsyncModelAverager(nn.Linear(1, 1), averaging_frequency=1, method=sys.argv[3])
if rank == 0:
    ours.step(1)
    assert ours.is_under_way
    raise ValueError("of the user's")
sys.stdin.readline()
"""


@pytest.mark.parametrize("method", ["average", "gossip"])
def test_a_process_that_ends_in_mid_round_waits_for_nobody(method, tmp_path):
    def start(rank):
        return subprocess.Popen(
            [sys.executable, "-c", LEFT_IN_MID_ROUND, str(rank), tmp_path, method],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    with start(0) as ends, start(1) as stays:
        try:
            _, told = ends.communicate(timeout=90)  # a wait for the other would be for as long as the group's
            assert ends.returncode == 1
            assert told.endswith("ValueError: of the user's\n")
            assert stays.poll() is None
        finally:
            stays.communicate("\n", timeout=90)
            ends.kill()
            stays.kill()


def with_a_short_patience(rank):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=1, overlap=False)
    found = ours._turns.members._sums.group._get_backend(torch.device("cpu")).options._timeout
    return found.total_seconds()


def test_rounds_wait_as_long_as_the_users_group_does():
    assert together(with_a_short_patience, 2) == [60.0, 60.0], "what `together` gives to init_distributed"


def dying(rank, gone, said):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=2, overlap=True)
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
            told.append((str(error), "".join(traceback.format_exception(error)).count("Traceback")))
    said.write_text(json.dumps(told))


def test_a_member_that_dies_is_an_error_that_says_so_each_time(tmp_path):
    with pytest.raises(EOFError):  # of the one that is killed
        together(dying, 2, tmp_path / "gone", tmp_path / "said")
    (first, num), second = json.loads((tmp_path / "said").read_text())
    assert re.match(r"averaging cannot go on in round [12]: the models of all members could not be", first)
    assert "for one is gone or was waited for too long" in first
    assert "start all of them again" in first
    assert num == 1, "gloo's own words are in it, and not its traceback beside it"
    assert second == [first, num]


def dying_outside_rounds(rank, gone, said):
    ours = offbeat.AsyncModelAverager(model(), averaging_frequency=2, overlap=False)
    if rank == 1:
        gone.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(gone.exists, timeout_s=60)
    try:
        ours.agree(0)
    except ConnectionLostError as error:
        said.write_text(str(error))


def test_a_member_that_dies_outside_rounds_is_the_same_error_and_not_torchs(tmp_path):
    with pytest.raises(EOFError):
        together(dying_outside_rounds, 2, tmp_path / "gone", tmp_path / "said")
    assert "for one is gone or was waited for too long" in (tmp_path / "said").read_text()


def dying_before_it_is_made(rank, said):
    group = distributed.new_group(timeout=timedelta(seconds=5))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        offbeat.AsyncModelAverager(model(), process_group=group)
    except ConnectionLostError as error:
        said.write_text(str(error))


def test_a_member_that_dies_before_they_meet_is_the_same_error_and_not_torchs(tmp_path):
    with pytest.raises(EOFError):
        together(dying_before_it_is_made, 2, tmp_path / "said")
    assert "for one is gone or was waited for too long" in (tmp_path / "said").read_text()


def adaptive(rank, metric):
    trained = model()
    ours = offbeat.AsyncModelAverager(
        trained,
        averaging_frequency=4,
        averaging_policy="adaptive",
        min_averaging_frequency=3,
        max_averaging_frequency=12,
        adaptation_metric=metric,
        overlap=2,
    )
    frequencies = []
    for number in range(80):
        inputs, targets = batch(rank, number % 7)
        ours.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.05), loss_fn=LOSS)
        frequencies.append(ours.averaging_frequency)
    ours.flush()
    return frequencies, arrays(trained)


@pytest.mark.parametrize("metric", ["loss_variance", "parameter_variance", "gradient_norm"])
def test_members_agree_on_an_adaptive_frequency(metric):
    (first, last), (second, also_last) = together(adaptive, 2, metric)
    assert first == second
    assert len(set(first)) > 1
    assert all(map(np.array_equal, last, also_last))


def with_what_is_not_finite(rank, metric):
    """Measure nothing of use in one member."""
    trained = model()
    ours = offbeat.AsyncModelAverager(
        trained,
        averaging_frequency=4,
        averaging_policy="adaptive",
        max_averaging_frequency=12,
        adaptation_metric=metric,
        overlap=False,
    )
    live = torch.optim.SGD(trained.parameters(), lr=0.05)
    frequencies = []
    for number in range(60):
        loss = float(number % 4) / (1 + number)
        if rank == 1:
            loss = float("nan")
            live.zero_grad()
            trained[0].weight.grad = torch.full_like(trained[0].weight, float("inf"))
        else:
            step(trained, live, rank, number)
            trained[0].weight.grad.mul_(1.0 / (1 + number))
        ours.step(4, loss=loss)
        frequencies.append(ours.averaging_frequency)
    return frequencies


@pytest.mark.parametrize("metric", ["loss_variance", "gradient_norm"])
def test_a_member_whose_metric_is_not_finite_leaves_it_to_the_others(metric):
    one, other = together(with_what_is_not_finite, 2, metric)
    assert one == other
    assert len(set(one)) > 1


def other_frequency(rank, who, overlap):
    trained = model()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=3, overlap=False, method="diloco")
    begins = []
    try:
        for number in range(22):
            if number == 7 and rank in who:
                ours.averaging_frequency, ours.overlap = 5, overlap
            before = ours.bytes_sent
            inputs, targets = batch(rank, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
            if ours.bytes_sent > before:
                begins.append(ours.iterations)
        ours.flush()
    except StateError as error:
        return str(error), begins
    return arrays(trained), begins


@pytest.mark.parametrize("overlap", [False, 2])
def test_members_agree_on_another_frequency_and_keep_to_it_from_the_same_round_on(overlap):
    (one, begins), (other, others) = together(other_frequency, 2, (0, 1), overlap)
    assert begins == others == [3, 6, 9, 14, 19]
    assert all(map(np.array_equal, one, other))


def with_ends_early_or_late(rank):
    """End each round one iteration after it began, or only when the next one is due."""
    one = Counter()
    ours = offbeat.AsyncModelAverager(one.model, averaging_frequency=4, overlap=True)
    ours.averaging_frequency = 6
    if rank == 1:
        ours._turns.rounds.is_there = lambda: False  # as where the others' models are long on their way
    begins = []
    for _ in range(22):
        begun = ours._turns.rounds.number
        one.train(ours)
        if ours._turns.rounds.number > begun:
            begins.append(ours.iterations)
            if rank == 0:
                wait_for(ours._turns.rounds.is_there, timeout_s=60)
    return begins, ours.state_dict()["rounds"]["number"]


def test_where_a_round_changes_the_frequency_the_next_begins_at_the_same_iteration_however_late_it_ended():
    assert together(with_ends_early_or_late, 2) == [([4, 10, 16, 22], 4)] * 2


def test_a_frequency_that_one_member_alone_has_set_is_not_followed():
    (one, begins), (other, others) = together(other_frequency, 2, (1,), False)
    assert begins == others == [3, 6, 9, 12, 15, 18, 21]
    assert all(map(np.array_equal, one, other))


def loading_in_an_order(rank, is_model_first, strict):
    """Go on from a state, in a model of another life; give what is said, and whether that was the model."""
    trained = model()
    with offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=False) as ours:
        for number in range(6):
            live = torch.optim.SGD(trained.parameters(), lr=0.1)
            ours.step(step(trained, live, rank, number))
        kept = copy.deepcopy((ours.state_dict(), trained.state_dict()))
    again = model(seed=7 + rank)
    if is_model_first:
        again.load_state_dict(kept[1])
    with offbeat.AsyncModelAverager(again, averaging_frequency=4, overlap=False) as ours:
        if not is_model_first:
            again.load_state_dict(kept[1])
        try:
            ours.load_state_dict(kept[0], strict=strict)
        except StateError as error:
            return str(error), ours.iterations
        return all(map(np.array_equal, arrays(again), arrays(trained))), ours.iterations


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_is_refused_in_all_members_where_making_the_averager_has_overwritten_a_model(strict):
    first, second = together(loading_in_an_order, 2, True, strict)
    assert first[0].startswith("the model of another member is not the one of its state: ")
    assert second[0].startswith(
        "the model is not the one of the state: parameter '0.weight' has other values"
    )
    assert "gives the first member's model to all: load both after that" in second[0]
    assert (first[1], second[1]) == (0, 0), "nothing is changed"
    assert together(loading_in_an_order, 2, False, strict) == [(True, 6)] * 2


def walk(ours, number, way, *, samples, switches):
    """Move what is trained in each of so many iterations; `switches` says from when on a part is, or not."""
    for iteration in range(number):
        for part, (since, is_trained) in switches.items():
            if iteration == since:
                ours.model.get_parameter(part).requires_grad_(is_trained)
        with torch.no_grad():
            for parameter in ours.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(way)
        ours.step(samples)


def parts():
    made = nn.Module()
    made.register_parameter("head", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    made.register_parameter("body", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    return made


def unfrozen_late(rank, method, overlap, since):
    """Train a part only after the last round before the end; or never."""
    trained = parts()
    trained.body.requires_grad_(requires_grad=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=10, method=method, overlap=overlap)
    walk(ours, 26, 1 + 2 * rank, samples=4 + 8 * rank, switches={"body": (since, True)})
    ours.flush()
    return trained.body.item(), trained.head.item()


@pytest.mark.parametrize("overlap", [False, True, 2])
@pytest.mark.parametrize(
    "method", ["average", "diloco", "slowmo", "bmuf", averaging.DiLoCo(fragments=2)], ids=str
)
def test_what_was_unfrozen_after_the_last_round_is_the_mean_by_samples(method, overlap):
    """And nothing else is moved by it, as by a momentum."""
    ways, samples = (4.0, 12.0), (4, 12)
    expected = sum(way * num for way, num in zip(ways, samples, strict=True)) / sum(samples)
    found = together(unfrozen_late, 2, method, overlap, 22)
    (_, head), _ = together(unfrozen_late, 2, method, overlap, None)
    if overlap is not True:  # in which rounds end when they do
        assert found[0][1] == pytest.approx(head, rel=1e-12)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(expected, rel=1e-12)


def ended_before(rank, since, more):
    """End earlier in one member; a part is trained for the first time just before that."""
    trained = parts()
    trained.body.requires_grad_(requires_grad=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=5, overlap=False)
    walk(ours, 10 + more * rank, 1 + 2 * rank, samples=4, switches={"body": (since, True)})
    ours.flush()
    return trained.body.item(), trained.head.item()


@pytest.mark.parametrize("more", [0, 4, 5, 7])
def test_one_that_has_ended_pulls_nothing_back_and_loses_nothing_where_a_part_is_unfrozen(more):
    """Both have come 2 and 6 by the round in which they agree; the next has it by all samples since."""
    first = min(more, 5)
    samples = 20, 20 + 4 * first
    body = (2 * samples[0] + (6 + 3 * first) * samples[1]) / sum(samples) + 3 * (more - first)
    for found in together(ended_before, 2, 8, more):
        assert found == pytest.approx((body, 20.0 + 3 * more), rel=1e-12)
    assert together(ended_before, 2, None, more) == [(0.0, 20.0 + 3 * more)] * 2


def unfrozen_apart(rank, numbers):
    """Unfreeze a part in one member long before the other, with three times its samples."""
    trained = parts()
    trained.body.requires_grad_(requires_grad=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=5, overlap=False)
    switches = {"body": ((12, 2)[rank], True)}
    walk(ours, numbers[rank], 1 + 2 * rank, samples=4 + 8 * rank, switches=switches)
    ours.flush()
    return trained.body.item()


def wished_for_before(rank, goes_back):
    """Train a part in one member alone, come together, and then in both; perhaps from a state of before."""
    trained = parts()
    trained.body.requires_grad_(requires_grad=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=False)
    walk(ours, 8 + 4 * rank * goes_back, 1.0, samples=1, switches={})
    kept = copy.deepcopy((trained.state_dict(), ours.state_dict()))
    walk(ours, 32 - 4 * rank * goes_back, 1.0, samples=1, switches={} if rank else {"body": (0, True)})
    ours.flush()
    if goes_back:
        trained.load_state_dict(kept[0])
        ours.load_state_dict(kept[1], strict=False)
    begun = trained.body.item()
    walk(ours, 12, 1 + 2 * rank, samples=1, switches={"body": (0, True)})
    ours.flush()
    return begun, trained.body.item() - begun


@pytest.mark.parametrize("goes_back", [False, True])
def test_what_one_has_trained_alone_before_all_were_alike_counts_no_more(goes_back):
    assert together(wished_for_before, 2, goes_back) == [(0.0 if goes_back else 32.0, 24.0)] * 2


@pytest.mark.parametrize("numbers", [(20, 20), (20, 5)])
def test_what_members_unfreeze_at_different_times_counts_by_the_samples_since_each_did(numbers):
    """As all have by iteration 15; who is in between two rounds then counts from the one before."""
    samples = 10 * 4, numbers[1] * 12
    ways = 20 - 12, 3 * (numbers[1] - 2)
    expected = sum(way * num for way, num in zip(ways, samples, strict=True)) / sum(samples)
    assert together(unfrozen_apart, 2, numbers) == pytest.approx([expected] * 2, rel=1e-12)


def beside_sums_of_ones_own(rank, num):
    """Sum something up in each iteration, as a loss for the log, while a part is frozen and unfrozen."""
    trained = parts()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=3, overlap=True)
    for iteration in range(num):
        trained.body.requires_grad_((iteration // 10) % 2 == 1)
        walk(ours, 1, 1.0 + rank, samples=4, switches={})
        distributed.all_reduce(torch.ones(1))
    ours.flush()
    return trained.body.item(), trained.head.item()


def test_no_iteration_waits_for_others_where_a_part_is_unfrozen():
    """Which see the end of a round in other iterations, and are in sums of the user's meanwhile."""
    one, other = together(beside_sums_of_ones_own, 2, 400)
    assert one == other == (300.0, 600.0)


def made_anew(rank, method):
    """Freeze a part by an optimizer without it, so that its gradient stays; one member's is None."""
    trained = parts()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=False, method=method)
    seen = []
    for iteration in range(40):
        if iteration in (0, 8):
            trained.body.requires_grad_(iteration < 8)
            trained.head.requires_grad_(iteration >= 8)
            live = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=1.0 + rank)
        live.zero_grad()
        (-sum(p.sum() for p in trained.parameters() if p.requires_grad)).backward()
        live.step()
        if rank and iteration == 7:
            trained.body.grad = None
        ours.step(4)
        seen.append((trained.body.item(), trained.head.item()))
    return seen[3::4]


@pytest.mark.parametrize("method", ["average", averaging.DiLoCo(lr=0.7, momentum=0.9)], ids=str)
def test_what_is_frozen_with_a_gradient_that_stays_is_out_once_it_is_written_to_no_more(method):
    """So that no momentum moves it on, and members agree which of them have the gradient and which do not."""
    one, other = together(made_anew, 2, method)
    assert one[4:] == other[4:]
    assert len({body for body, _ in one[4:]}) == 1
    heads = [head for _, head in one[4:]]
    assert all(head > before for before, head in itertools.pairwise(heads))


def in_pairs(rank, numbers, samples, since):
    """Unfreeze a part where members meet in twos, and end at different times."""
    trained = parts()
    trained.body.requires_grad_(requires_grad=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=2, method="gossip", overlap=False)
    for iteration in range(numbers[rank]):
        if iteration in since:
            trained.body.requires_grad_(since.index(iteration) % 2 == 0)
        walk(ours, 1, 10.0**rank, samples=samples[rank], switches={})
    ours.flush()
    return trained.body.item(), trained.head.item()


@pytest.mark.parametrize(
    ("numbers", "samples", "since"),
    [
        ((12, 4), (4, 4), (2,)),
        ((10, 10), (10, 90), (2,)),
        ((20, 10, 20, 20), (4, 4, 4, 4), (0, 3, 9)),
        ((20, 9, 20, 10), (4, 9, 4, 1), (0, 3, 7)),
    ],
)
def test_in_pairs_all_count_the_same_where_a_part_is_unfrozen_and_who_has_ended_loses_nothing(
    numbers, samples, since
):
    """The mean of equals is what each has come by, added up, by the number of members."""
    is_trained = [sum(begin <= n for begin in since) % 2 == 1 for n in range(max(numbers))]
    bodies = [10.0**rank * sum(is_trained[:num]) for rank, num in enumerate(numbers)]
    heads = [10.0**rank * num for rank, num in enumerate(numbers)]
    expected = sum(bodies) / len(numbers), sum(heads) / len(numbers)
    for found in together(in_pairs, len(numbers), numbers, samples, since):
        assert found == pytest.approx(expected, rel=1e-12)


def trained_in_turn(rank, overlap, method, times, made=torch.optim.SGD):
    """Train two parts in turn: one is frozen whenever a step is counted, and trained now and then."""
    trained = parts()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=4, overlap=overlap, method=method)
    live = {name: made([p], lr=1.0 + 2 * rank) for name, p in trained.named_parameters()}
    seen = []
    for iteration in range(20):
        for name, other in (("body", "head"), ("head", "body")):
            trained.get_parameter(name).requires_grad_()
            trained.get_parameter(other).requires_grad_(requires_grad=False)
            if name == "body" and iteration % times:
                continue
            live[name].zero_grad()
            (-trained.get_parameter(name)).sum().backward()
            live[name].step()
        ours.step(4 + 8 * rank)
        seen.append(trained.body.item())
    ours.flush()
    return seen, trained.body.item(), trained.head.item()


@pytest.mark.parametrize("times", [1, 4, 5])
@pytest.mark.parametrize("overlap", [False, 1])
@pytest.mark.parametrize("made", [torch.optim.SGD, functools.partial(torch.optim.SGD, fused=True)])
def test_of_two_parts_that_are_trained_in_turn_both_are_averaged_in_each_round(overlap, times, made):
    """Also of one that is trained only while a round is under way, or not once between two of them."""
    (seen, *last), (also_seen, *also_last) = together(trained_in_turn, 2, overlap, "average", times, made)
    mean = (1 * 4 + 3 * 12) / 16
    assert last == also_last == pytest.approx([mean * (20 // times), mean * 20], rel=1e-12)
    if not overlap:
        alike = [n + 1 for n, (one, other) in enumerate(zip(seen, also_seen, strict=True)) if one == other]
        assert set(range(4, 20, 4)) <= set(alike)


@pytest.mark.parametrize("times", [1, 5])
def test_a_part_that_is_trained_now_and_then_keeps_its_momentum_over_rounds(times):
    """As it would if it were never frozen."""
    outer = averaging.DiLoCo(lr=0.7, momentum=0.9)
    (_, body, head), _ = together(trained_in_turn, 2, False, outer, times)
    mean, reference, velocity = (1 * 4 + 3 * 12) / 16, 0.0, 0.0
    trained = 0
    for end in (4, 8, 12, 16, 20):
        num = sum(1 for iteration in range(end) if iteration % times == 0)
        way, trained = mean * (num - trained), num
        velocity = 0.9 * velocity + way
        reference += 0.7 * (way + 0.9 * velocity)
    assert body == pytest.approx(reference, rel=1e-12)
    if times == 1:
        assert head == body


def trained_between(rank):
    """Move a part, which nothing has a gradient of, between two rounds alone."""
    trained = parts()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=10, overlap=False)
    trained.body.requires_grad_(requires_grad=False)
    for iteration in range(26):
        with torch.no_grad():
            trained.head.add_(1.0)
            if 11 <= iteration < 18:
                trained.body.add_(1 + 2 * rank)
        ours.step(4)
    ours.flush()
    return trained.body.item(), trained.head.item()


def test_what_was_in_no_round_ends_as_the_mean():
    assert together(trained_between, 2) == [(14.0, 26.0)] * 2


def frozen_late(rank, method, overlap):
    """Train a part no more from some time on; give where it was then in this member, and is at the end."""
    trained = parts()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=6, method=method, overlap=overlap)
    walk(ours, 40, 1 + 2 * rank, samples=4, switches={"body": (20, False)})
    ours.flush()
    return trained.body.item(), trained.head.item()


MEAN = averaging.DiLoCo(lr=1.0, momentum=0.0, nesterov=False, fragments=2)


@pytest.mark.parametrize("overlap", [False, 2])
@pytest.mark.parametrize(
    ("method", "size"), [("gossip", 3), ("gossip", 2), ("average", 2), (MEAN, 2)], ids=str
)
def test_what_is_frozen_in_mid_run_loses_nothing(method, size, overlap):
    found = together(frozen_late, size, method, overlap)
    mean = sum(1 + 2 * rank for rank in range(size)) / size
    for body, head in found:
        assert (body, head) == pytest.approx((20 * mean, 40 * mean), rel=1e-12)


def frozen_of_a_share(rank, fragments, overlap):
    """Freeze a part while members keep a share of their own of each round; give it before the end, too."""
    trained = parts()
    method = averaging.DiLoCo(lr=1.0, momentum=0.0, nesterov=False, fragments=fragments, merge_alpha=0.5)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=6, method=method, overlap=overlap)
    walk(ours, 60, 1 + 2 * rank, samples=4, switches={"body": (20, False)})
    before = trained.body.item()
    ours.flush()
    return before, trained.body.item(), trained.head.item()


@pytest.mark.parametrize("overlap", [2, True])
@pytest.mark.parametrize("fragments", [1, 2])
def test_what_is_frozen_where_members_keep_a_share_is_alike_from_its_next_round_on(fragments, overlap):
    (one, end, head), (other, also_end, also_head) = together(frozen_of_a_share, 2, fragments, overlap)
    assert one == pytest.approx(other, rel=1e-12)
    assert end == also_end == pytest.approx(one, rel=1e-12)
    assert head == also_head


def frozen_at_a_centre(rank):
    trained = parts()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=5, method="easgd", overlap=False)
    walk(ours, 40, 1 + 2 * rank, samples=4, switches={"body": (20, False)})
    before = trained.body.item()
    centre = ours.state_dict()["rounds"]["memories"][0]["reference"]
    ours.flush()
    return before, [part.item() for part in centre], trained.body.item()


def test_what_is_frozen_around_a_centre_goes_on_to_it_and_ends_there():
    (one, centre, last), (other, also_centre, also_last) = together(frozen_at_a_centre, 2)
    assert centre == also_centre
    assert len(centre) == 2
    assert one < centre[1] < other
    assert last == also_last
    assert abs(last - centre[1]) < abs(one - centre[1])


def frozen_and_saved(rank, kept):
    """Freeze a part while members are apart, and go on from a state in a new averager."""
    trained = parts()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=5, method="gossip", overlap=False)
    walk(ours, 30, 1 + 2 * rank, samples=4, switches={"body": (20, False)})
    if kept:
        state, values = ours.state_dict(), copy.deepcopy(trained.state_dict())
        ours.close()
        trained = parts()
        trained.body.requires_grad_(requires_grad=False)
        ours = offbeat.AsyncModelAverager(trained, averaging_frequency=5, method="gossip", overlap=False)
        trained.load_state_dict(values)
        ours.load_state_dict(state)
    walk(ours, 5, 1 + 2 * rank, samples=4, switches={})
    ours.flush()
    return trained.body.item(), trained.head.item()


def test_a_state_knows_of_what_is_frozen_and_still_to_be_met_with():
    plain, kept = together(frozen_and_saved, 3, False), together(frozen_and_saved, 3, True)
    assert plain == kept
    assert plain[0] == pytest.approx((60.0, 105.0), rel=1e-12)


def closures(rank):
    """Average behind an optimizer that calls for gradients itself, in a loop of one's own."""
    trained = model(seed=rank)
    live = torch.optim.LBFGS(trained.parameters(), max_iter=2)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=2, overlap=False)
    for number in range(5):
        inputs, targets = batch(rank, number)

        def closure(inputs=inputs, targets=targets):
            live.zero_grad()
            loss = LOSS(trained(inputs), targets)
            loss.backward()
            return loss

        live.step(closure)
        ours.step(len(targets), optimizer=live)
    ours.flush()
    state, values = ours.state_dict(), copy.deepcopy(trained.state_dict())
    ours.close()
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=2, overlap=False)
    trained.load_state_dict(values)
    ours.load_state_dict(state, optimizer=live)
    inputs, targets = batch(rank, 9)
    try:
        ours.train_step(inputs=inputs, targets=targets, loss_fn=LOSS)
    except ConfigError as error:
        return arrays(trained), len(state["optimizer"]["state"]), str(error)
    return None


def test_an_optimizer_with_a_closure_is_averaged_behind_and_refused_where_it_would_be_stepped():
    (one, kept, told), (other, _, _) = together(closures, 2)
    assert all(map(np.array_equal, one, other))
    assert kept == 1
    assert told.startswith("LBFGS.step() needs a closure")


def interrupted_in_the_end(rank):
    """Be interrupted where what differs at the end is brought together; say what comes of it."""
    trained = parts()
    trained.body.requires_grad_(requires_grad=False)
    ours = offbeat.AsyncModelAverager(trained, averaging_frequency=5, overlap=False)
    walk(ours, 3, 1.0 + rank, samples=4, switches={"body": (2, True)})
    told = []
    with mock.patch.object(members, "give_mean", side_effect=KeyboardInterrupt):
        for _ in range(2):
            try:
                ours.flush()
            except (KeyboardInterrupt, ConnectionLostError) as error:
                told.append(f"{type(error).__name__}: {error}")
    ours.close()
    return told


def test_who_breaks_off_what_is_brought_together_is_told_so_afterwards():
    for first, then in together(interrupted_in_the_end, 2):
        assert first.startswith("KeyboardInterrupt")
        assert "were broken off here (KeyboardInterrupt), and others may wait in them" in then
