"""What members of a process group decide together: micro-batches per update, gains, and updates skipped."""

import time

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat.accumulator import accumulator, meter
from offbeat.errors import StateError
from support.averaging import warned
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
WEIGHTS = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def micro_batch(rank, number):
    random = torch.Generator().manual_seed(1000 * rank + number)
    size = 4 + (3 * rank + number) % 3
    inputs = torch.randn(size, 6, generator=random)
    return inputs, (inputs @ WEIGHTS + torch.randn(size, 5, generator=random)).argmax(1)


class Clock:
    """By which a micro-batch takes a second, and a message nothing."""

    now_s = 0.0

    @classmethod
    def perf_counter(cls):
        return cls.now_s

    @classmethod
    def loss(cls, outputs, targets):
        cls.now_s += 1.0
        return LOSS(outputs, targets)


def adapting(rank, overlap, num_batches, has_fast_network):
    meter.time = accumulator.time = Clock if has_fast_network else time
    ours = offbeat.AsyncGradientAccumulator(
        model(), accumulation_steps=6, adaptive_accumulation=True, overlap=overlap
    )
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    windows, gains, gathered = [], [], []
    for number in range(num_batches[rank]):
        inputs, targets = micro_batch(rank, number)
        gathered.append(number)
        is_end = len(gathered) == ours.accumulation_steps
        ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=Clock.loss)
        if ours.is_update_step():
            gains.append(ours.gain)
        if is_end:
            windows.append(gathered)
            gathered = []
    ours.flush()
    last = [gathered] if gathered else []
    return (
        windows + last,
        gains,
        ours.gain,
        ours.noise_scale,
        [p.detach().numpy() for p in ours.model.parameters()],
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_batches", [(150, 150), (150, 70)])
def test_members_take_as_many_micro_batches_and_the_same_gain(overlap, num_batches):
    first, second = together(adapting, 2, overlap, num_batches, True)
    num = min(len(first[0]), len(second[0])) - 1
    sizes = [[len(window) for window in windows[:num]] for windows in (first[0], second[0])]
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0])) > 1, "there is something to decide"
    assert all(1 <= size <= 6 for size in sizes[0])
    both = list(zip(first[1], second[1], strict=False))
    assert len(both) >= num - 1
    assert all(one == other for one, other in both)
    assert max(first[1]) > 1.0
    assert first[2:4] == second[2:4]
    assert all(map(np.array_equal, first[4], second[4]))
    if not overlap and num_batches[0] == num_batches[1]:
        parameters = large_batches(first[0], [*first[1], first[2]])
        for a, b in zip(first[4], parameters, strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_where_members_wait_longer_than_they_compute_updates_stay_as_large_as_they_may_be():
    for windows, _, _, noise, _ in together(adapting, 2, False, (150, 150), False):
        assert noise < 8 * 6, "by the noise they would be smaller"
        assert {len(window) for window in windows} == {6}


def large_batches(windows, gains):
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    for window, gain in zip(windows, gains, strict=False):
        batches = [micro_batch(rank, number) for rank in range(2) for number in window]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        live.zero_grad()
        LOSS(trained(inputs), targets).backward()
        live.param_groups[0]["lr"] = 0.1 * gain
        live.step()
    return [p.detach().numpy() for p in trained.parameters()]


def scaled(rank, overlap, windows, infinite):
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2)
    ours = offbeat.AsyncGradientAccumulator(model(), 2, overlap=overlap, grad_scaler=scaler)
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1, momentum=0.9)
    for number in range(2 * windows[rank]):
        inputs, targets = micro_batch(rank, number)
        if (rank, number // 2) in infinite:
            inputs[0, 0] = float("inf")
        ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
    ours.flush(optimizer=live)
    parameters = [p.detach().numpy() for p in ours.model.parameters()]
    return parameters, ours.updates, ours.skipped_updates, scaler.get_scale()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(8, 8), (8, 3), (5, 0)])
def test_what_is_infinite_in_one_member_is_skipped_in_all_and_scales_stay_equal(overlap, windows):
    infinite = {(0, 3), (1, 6), (1, 2)}
    first, second = together(scaled, 2, overlap, windows, infinite)
    assert all(map(np.array_equal, first[0], second[0]))
    assert first[1:] == second[1:]
    skipped = {window for rank, window in infinite if window < windows[rank]}
    assert first[1:3] == (max(windows) - len(skipped), len(skipped))
    expected = without_a_scaler(windows, skipped, lateness=int(overlap))
    for a, b in zip(first[0], expected, strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


def without_a_scaler(windows, skipped, lateness):
    """Scales are powers of two: they change nothing but which updates are made."""
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    waiting = []
    for window in range(max(windows) + lateness):
        if window < max(windows):
            batches = [
                micro_batch(rank, number)
                for rank, num in enumerate(windows)
                if window < num
                for number in (2 * window, 2 * window + 1)
            ]
            inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            gradients = torch.autograd.grad(LOSS(trained(inputs), targets), list(trained.parameters()))
            waiting.append(None if window in skipped else gradients)
        if len(waiting) > lateness or window >= max(windows):
            gradients = waiting.pop(0)
            if gradients is not None:
                for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                live.step()
    return [p.detach().numpy() for p in trained.parameters()]


def one_of_each(inputs, targets):
    return 1.0


def made_unlike(rank, keywords):
    given = {"accumulation_steps": 4} | keywords[rank]
    if "grad_scaler" in given:
        given["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=given["grad_scaler"])
    trained = model()
    if given.pop("frozen", False):
        trained[0].weight.requires_grad_(requires_grad=False)
    try:
        if given.pop("averages", False):
            offbeat.AsyncModelAverager(trained)
        else:
            offbeat.AsyncGradientAccumulator(trained, **given)
    except StateError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"adaptive_accumulation": True}, "adaptive_accumulation is False in member 0 and True"),
        (
            {"adaptive_accumulation": True},
            {"adaptive_accumulation": True, "accumulation_steps": 2},
            "accumulation_steps is 4 in member 0 and 2",
        ),
        (
            {"accumulation_steps": None, "base_batch_size": 4, "target_batch_size": 16},
            {"accumulation_steps": None, "base_batch_size": 4, "target_batch_size": 32},
            "target_batch_size is 16 in member 0 and 32",
        ),
        ({}, {"overlap": False}, "overlap is True in member 0 and False"),
        ({}, {"loss_reduction": "sum"}, "loss_reduction is 'mean' in member 0 and 'sum'"),
        ({}, {"normalizer": one_of_each}, "normalizer is None in member 0 and 'a function'"),
        ({}, {"grad_scaler": 1024.0}, "grad_scaler is None in member 0 and 'a GradScaler'"),
        ({}, {"frozen": True}, "requires_grad of '0.weight' is True in member 0 and False"),
        ({}, {"averages": True}, None),
    ],
    ids=lambda given: next(iter(given), None) if isinstance(given, dict) else "",
)
def test_members_that_are_made_otherwise_are_told_at_once_in_what(first, second, said):
    for told in together(made_unlike, 2, (first, second)):
        if said is None:
            assert told == (
                "member 0 makes an AsyncGradientAccumulator and member 1 an AsyncModelAverager, in one "
                "process group: make the same in all of them"
            )
        else:
            assert told == f"members accumulate differently: {said} in member 1: give the same to all of them"


def scaled_unlike(rank):
    """Begin with another scale in each member."""
    scaler = torch.amp.GradScaler("cpu", init_scale=(1024.0, 512.0)[rank])
    ours = offbeat.AsyncGradientAccumulator(model(), 1, overlap=False, grad_scaler=scaler)
    with pytest.raises(StateError) as raised:
        ours.train_step(
            inputs=torch.ones(2, 6),
            targets=torch.zeros(2, dtype=torch.long),
            optimizer=offbeat.optim.SGD(lr=0.1),
            loss_fn=nn.CrossEntropyLoss(),
        )
    return str(raised.value)


def test_members_whose_scales_differ_are_told_both():
    for told in together(scaled_unlike, 2):
        assert told == (
            "members are set differently: scale of grad_scaler is 1024.0 in member 0 and 512.0 in member 1: "
            "make all scalers with the same init_scale, or load the same state"
        )


def test_members_may_have_another_number_of_micro_batches():
    assert together(made_unlike, 2, ({}, {"accumulation_steps": 2})) == [None, None]


def told_of_lateness(rank, overlap, momentum):
    """Make three updates, and give what is warned of."""
    with warned() as told:
        ours = offbeat.AsyncGradientAccumulator(model(), 1, overlap=overlap)
        for number in range(3):
            inputs, targets = micro_batch(rank, number)
            given = offbeat.optim.SGD(lr=0.01, momentum=momentum)
            ours.train_step(inputs=inputs, targets=targets, optimizer=given, loss_fn=LOSS)
        ours.flush()
    return told


@pytest.mark.parametrize(("overlap", "momentum"), [(True, 0.9), (True, 0.0), (False, 0.9)])
def test_that_late_updates_are_dear_with_momentum_is_told_once_by_the_first_member(overlap, momentum):
    first, second = together(told_of_lateness, 2, overlap, momentum)
    assert second == []
    if overlap and momentum:
        (text,) = first
        assert "the SGD's momentum is 0.9: the largest learning rate that is stable is up to 38 times" in text
    else:
        assert first == []
