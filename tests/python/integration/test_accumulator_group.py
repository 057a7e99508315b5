"""Several processes that accumulate together are one that has all their samples."""

import copy
import functools
import json
import logging
import logging.handlers
import math
import os
import queue
import signal
import sys
import threading
import traceback
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat import optim
from offbeat.accumulator import parcel
from offbeat.cli.failures import MAX_WORDS
from offbeat.errors import (
    ClosedError,
    ConfigError,
    ConnectionLostError,
    ModelMismatchError,
    NonFiniteError,
    StateError,
)
from offbeat.local.group import own_group
from offbeat.local.sums import Sums
from support.averaging import warned
from support.group import together
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1, momentum=0.9)


ALL_LARGE, AS_IT_IS = 1, parcel.LARGE
"""Bytes from which gradients are reduced where they are."""


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def micro_batch(rank, window, number):
    """Of one member, as large as nobody else's."""
    random = torch.Generator().manual_seed(1000 * rank + 100 * window + number)
    size = 1 + (3 * rank + 2 * window + number) % 5
    return torch.randn(size, 6, generator=random), torch.randint(5, (size,), generator=random)


def member(rank, windows, num_micro, overlap, large):
    with mock.patch.object(parcel, "LARGE", large):
        return trained_by_member(rank, windows, num_micro, overlap)


def trained_by_member(rank, windows, num_micro, overlap):
    trained = model(seed=rank)  # all start from the first one's
    ours = offbeat.AsyncGradientAccumulator(trained, num_micro, overlap=overlap)
    updates, samples = [], []
    for window in range(windows[rank]):
        for number in range(num_micro):
            inputs, targets = micro_batch(rank, window, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
            updates.append(ours.is_update_step())
            samples.append(ours.effective_batch_size)
    ours.flush(optimizer=SPEC)
    return [p.detach().numpy() for p in trained.parameters()], updates, ours.updates, samples


def alone(windows, num_micro, lateness):
    """Make the same updates in one process, by the gradients at what was there `lateness` updates before."""
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    waiting = []
    for window in range(max(windows)):
        batches = [
            micro_batch(rank, window, number)
            for rank, num in enumerate(windows)
            if window < num
            for number in range(num_micro)
        ]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        live.zero_grad()
        LOSS(trained(inputs), targets).backward()
        waiting.append([p.grad for p in trained.parameters()])
        if len(waiting) > lateness:
            apply(live, trained, waiting.pop(0))
    for gradients in waiting:
        apply(live, trained, gradients)
    return [p.detach().numpy() for p in trained.parameters()]


def apply(live, trained, gradients):
    for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
        parameter.grad = gradient
    live.step()
    trained.zero_grad()


@pytest.mark.parametrize("windows", [(4, 4), (5, 2), (3, 0)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("large", [AS_IT_IS, ALL_LARGE])
def test_members_make_the_updates_of_one_process_with_all_samples(windows, overlap, large):
    first, second = together(member, 2, windows, 3, overlap, large)
    assert all(map(np.array_equal, first[0], second[0])), "they stay equal"
    assert first[2] == second[2] == max(windows), "an update for each window that anybody had"
    last_of_a_window = [number == 2 for _ in range(windows[0]) for number in range(3)]
    late = [False] * 3 * int(overlap)
    assert first[1] == late + last_of_a_window[: len(last_of_a_window) - len(late)]
    for a, b in zip(first[0], alone(windows, 3, lateness=int(overlap)), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()
    all_samples = sum(len(micro_batch(r, 0, n)[0]) for r in range(2) for n in range(3) if windows[r])
    assert next(n for n in first[3] if n) == all_samples


def unused(rank):
    both = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])
    nn.init.ones_(both[2].weight)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = both

        def forward(self, inputs):
            return self.both[rank](inputs)

    ours = offbeat.AsyncGradientAccumulator(Own(), 1, overlap=False)
    before = [p.detach().clone() for p in both.parameters()]
    ours.train_step(
        inputs=torch.ones(1, 2),
        targets=torch.zeros(1),
        optimizer=optim.AdamW(lr=0.1, weight_decay=0.5),
        loss_fn=lambda out, _: out.sum(),
    )
    return [not torch.equal(a, b) for a, b in zip(before, both.parameters(), strict=True)]


def test_what_one_member_used_moves_in_all_and_what_nobody_used_in_none():
    assert together(unused, 2) == [[True, True, True, True, False, False]] * 2


class Everything(nn.Module):
    """Tied, frozen, of another memory format, of another dtype."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.inside = nn.Linear(3, 3, bias=False)
        self.outside = nn.Linear(3, 3)
        self.outside.weight = self.inside.weight
        self.last = nn.Linear(3, 5, dtype=torch.bfloat16)

    def forward(self, inputs):
        x = self.conv(inputs[:, :, None, None].expand(-1, 2, 2, 3).contiguous()).mean((2, 3))
        x = self.outside(torch.tanh(self.inside(self.frozen(x))))
        return self.last(x.bfloat16()).float()


def one_of_everything(rank, reduction, counts_ignored, large):
    with mock.patch.object(parcel, "LARGE", large):
        return trained_on_everything(rank, reduction, counts_ignored)


def trained_on_everything(rank, reduction, counts_ignored):
    torch.manual_seed(rank)
    trained = Everything()
    ours = offbeat.AsyncGradientAccumulator(
        trained,
        1,
        overlap=False,
        loss_reduction=reduction,
        normalizer=(lambda _, targets: (targets != IGNORED).sum()) if counts_ignored else None,
    )
    inputs, targets = for_everything(counts_ignored)
    mine = slice(0, 2) if rank == 0 else slice(2, None)
    ours.train_step(
        inputs=inputs[mine],
        targets=targets[mine],
        optimizer=torch.optim.AdamW(trained.parameters(), lr=0.01, weight_decay=0.5, foreach=True),
        loss_fn=nn.CrossEntropyLoss(reduction=reduction, ignore_index=IGNORED),
    )
    return {name: p.detach().float().numpy() for name, p in trained.named_parameters()}


IGNORED = -100


def for_everything(counts_ignored):
    random = torch.Generator().manual_seed(0)
    targets = torch.randint(5, (7,), generator=random)
    if counts_ignored:
        targets[1::3] = IGNORED
    return torch.randn(7, 1, generator=random), targets


@pytest.mark.parametrize(("reduction", "counts_ignored"), [("mean", False), ("mean", True), ("sum", False)])
@pytest.mark.parametrize("large", [AS_IT_IS, ALL_LARGE])
def test_members_train_whatever_a_model_has(reduction, counts_ignored, large):
    first, second = together(one_of_everything, 2, reduction, counts_ignored, large)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    torch.manual_seed(0)
    alone = Everything()
    live = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.5, foreach=True)
    inputs, targets = for_everything(counts_ignored)
    nn.CrossEntropyLoss(reduction=reduction, ignore_index=IGNORED)(alone(inputs), targets).backward()
    live.step()
    for name, parameter in alone.named_parameters():
        theirs = parameter.detach().float().numpy()
        # Sums of bfloat16 are rounded in another order; what Adam makes of it is a step of 0.01 at most.
        within = 2e-2 if parameter.dtype == torch.bfloat16 else 1e-4
        assert np.abs(first[name] - theirs).max() <= within * np.abs(theirs).max(), name


class Odd(nn.Module):
    """What is used from the second micro-batch on, in the first alone, and several times in a backward."""

    def __init__(self, is_narrow):
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Linear(6, 6)
        self.first = nn.Linear(6, 5)
        self.later = nn.Linear(6, 5)
        self.last = nn.Linear(5, 5, dtype=torch.bfloat16 if is_narrow else torch.float64)
        self.conv = nn.Conv2d(2, 2, (2, 1)).to(memory_format=torch.channels_last)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        x = inputs
        for _ in range(2):  # each is a backward within the backward, which adds to the same gradient
            x = checkpoint(self.inside, x, use_reentrant=True)
        x = x + self.conv(x.view(-1, 2, 3, 1)).flatten(1).repeat(1, 2)[:, :6]
        out = (self.first if self.calls % 3 == 1 else self.later)(torch.tanh(x))
        return out + self.last(out.to(self.last.weight.dtype)).float()


def odd_parameters(trained):
    return {name: p.detach().float().numpy() for name, p in trained.named_parameters()}


def odd(rank, reduction, has_normalizer, num_frozen, large):
    with mock.patch.object(parcel, "LARGE", large):
        return odd_member(rank, reduction, has_normalizer, num_frozen)


def odd_member(rank, reduction, has_normalizer, num_frozen):
    trained = Odd(is_narrow=has_normalizer)
    ours = offbeat.AsyncGradientAccumulator(
        trained,
        3,
        overlap=False,
        loss_reduction=reduction,
        normalizer=(lambda _, targets: float((targets != 0).sum())) if has_normalizer else None,
    )
    live = torch.optim.SGD(trained.parameters(), lr=0.02, momentum=0.9)
    of = nn.CrossEntropyLoss(reduction=reduction, ignore_index=0 if has_normalizer else IGNORED)
    for number in range(12):
        inputs, targets = micro_batch(rank, number // 3, number % 3)
        if number == num_frozen:
            trained.inside.weight.requires_grad_(requires_grad=False)
        ours.train_step(inputs=inputs.requires_grad_(), targets=targets, optimizer=live, loss_fn=of)
    return odd_parameters(trained), ours.updates


def odd_alone(reduction, has_normalizer, num_frozen):
    """Add the gradients of all sums up by hand, and divide them once."""
    trained = Odd(is_narrow=has_normalizer)
    live = torch.optim.SGD(trained.parameters(), lr=0.02, momentum=0.9)
    of = nn.CrossEntropyLoss(reduction="sum", ignore_index=0 if has_normalizer else IGNORED)
    for window in range(4):
        counts = 0
        for rank in range(2):
            trained.calls = 3 * window
            for number in range(3):
                inputs, targets = micro_batch(rank, window, number)
                trained.inside.weight.requires_grad_(3 * window + number < num_frozen)
                of(trained(inputs.requires_grad_()), targets).backward()
                counts += int((targets != 0).sum()) if has_normalizer else len(targets)
        for parameter in trained.parameters():
            if parameter.grad is not None and (reduction == "mean" or has_normalizer):
                parameter.grad /= counts
        live.step()
        trained.zero_grad()
    return odd_parameters(trained)


@pytest.mark.parametrize(
    ("reduction", "has_normalizer"), [("mean", False), ("mean", True), ("sum", False), ("sum", True)]
)
@pytest.mark.parametrize("num_frozen", [99, 4])
@pytest.mark.parametrize("large", [AS_IT_IS, ALL_LARGE])
def test_windows_of_whatever_a_model_does_are_one_sum_of_all_members(
    reduction, has_normalizer, num_frozen, large
):
    first, second = together(odd, 2, reduction, has_normalizer, num_frozen, large)
    assert all(np.array_equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1] == 4
    for name, theirs in odd_alone(reduction, has_normalizer, num_frozen).items():
        within = 2e-2 if has_normalizer else 2e-6  # sums of bfloat16 are rounded in another order
        assert np.abs(first[0][name] - theirs).max() <= within * np.abs(theirs).max(), name


class Doubled(nn.Module):
    """Two parameters of one use, which autograd gives one memory for their gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Parameter(torch.randn(4, 4))
        self.other = nn.Parameter(torch.randn(16))

    def forward(self, inputs):
        return ((self.one.unsqueeze(0) + self.other.view(1, 4, 4)) * inputs.view(-1, 4, 4)).sum((1, 2))


def for_doubled(rank, number):
    random = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(2 + 3 * rank + number, 16, generator=random)


def square(outputs, targets):
    del targets
    return outputs.square().mean()


def doubled(rank, num_micro, large, group):
    trained = Doubled()
    (outputs := trained(for_doubled(0, 0)).sum()).backward()
    is_one_memory = trained.one.grad.data_ptr() == trained.other.grad.data_ptr()
    trained.zero_grad()
    del outputs
    with mock.patch.object(parcel, "LARGE", large):
        ours = offbeat.AsyncGradientAccumulator(trained, num_micro, overlap=False, process_group=group)
        for number in range(num_micro):
            inputs = for_doubled(rank, number)
            ours.train_step(inputs=inputs, targets=torch.zeros(len(inputs)), optimizer=SPEC, loss_fn=square)
    return [p.detach().numpy() for p in trained.parameters()], is_one_memory


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("large", [AS_IT_IS, ALL_LARGE])
@pytest.mark.parametrize("size", [1, 2])
def test_parameters_whose_gradients_share_their_memory_are_trained_as_any(num_micro, large, size):
    found = together(doubled, size, num_micro, large, None if size == 2 else False)
    assert all(is_one_memory for _, is_one_memory in found), "else this tests nothing"
    alone = Doubled()
    live = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    batches = torch.cat([for_doubled(rank, number) for rank in range(size) for number in range(num_micro)])
    for parameter, gradient in zip(
        alone.parameters(), torch.autograd.grad(square(alone(batches), None), alone.parameters()), strict=True
    ):
        parameter.grad = gradient.clone()
    live.step()
    for ours, _ in found:
        for own, theirs in zip(ours, alone.parameters(), strict=True):
            assert np.abs(own - theirs.detach().numpy()).max() <= 1e-5 * theirs.abs().max().item()


class Passes(TorchDispatchMode):
    """Counts numbers that are read and written, of tensors that are there and not of views of them."""

    def __init__(self, at_least):
        super().__init__()
        self.num = 0
        self._at_least = at_least

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and func.namespace != "c10d":
            for tensor in tree_leaves((args, result)):  # out= is the result
                if isinstance(tensor, torch.Tensor) and tensor.numel() >= self._at_least:
                    self.num += tensor.numel()
        return result


def passes(rank, adaptive):
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(640, 480), nn.Tanh(), nn.Linear(480, 640))
    ours = offbeat.AsyncGradientAccumulator(trained, 4, adaptive_accumulation=adaptive)
    num = sum(p.numel() for p in trained.parameters())
    found = []
    for _ in range(5):
        with Passes(at_least=100_000) as counted:
            for _ in range(4):
                inputs, targets = torch.randn(2, 640), torch.randint(640, (2,))
                ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        found.append(counted.num / num)
    alone = nn.Sequential(nn.Linear(640, 480), nn.Tanh(), nn.Linear(480, 640))
    live = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with Passes(at_least=100_000) as counted:
            for _ in range(4):
                (LOSS(alone(torch.randn(2, 640)), torch.randint(640, (2,))) / 4).backward()
            live.step()
            live.zero_grad()
    ours.flush()
    return found, counted.num / num


def test_a_window_of_large_parameters_makes_one_pass_over_memory_more_than_a_loop_of_torchs():
    for found, alone in together(passes, 2, False):
        assert alone > 10, "something was counted"
        assert [round(num - alone, 1) for num in found[3:]] == pytest.approx([1.0, 1.0], abs=0.2), (
            found,
            alone,
        )


def with_batch_norm(rank, num_batches):
    trained = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 5))
    ours = offbeat.AsyncGradientAccumulator(trained, 1)
    for _ in range(num_batches[rank]):
        ours.train_step(
            inputs=torch.full((4, 2), 1.0 + rank),
            targets=torch.zeros(4, dtype=torch.long),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=LOSS,
        )
    before = trained[0].running_mean.clone()
    ours.flush()
    return before.tolist(), trained[0].running_mean.tolist(), trained[0].num_batches_tracked.item()


def test_statistics_are_each_members_own_until_flush_gives_all_their_mean_by_samples():
    (first, after, number), (second, also, same) = together(with_batch_norm, 2, (3, 1))
    assert first != second
    assert after == also == pytest.approx([(3 * a + b) / 4 for a, b in zip(first, second, strict=True)])
    assert number == same == 3


def with_tables(rank, num_batches):
    torch.manual_seed(0)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(2, 5)
            self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1))
            self.register_buffer("table", torch.rand(1000, generator=torch.Generator().manual_seed(1)))
            self.register_buffer("own", torch.zeros(1))

        def forward(self, inputs):
            self.own += 1
            return self.inside(inputs) + self.mask[-1]

    trained = Masked()
    before = {name: buffer.clone() for name, buffer in trained.named_buffers()}
    ours = offbeat.AsyncGradientAccumulator(trained, 1)
    if rank == 1 and not num_batches[1]:
        trained.own.fill_(math.inf)
    for _ in range(num_batches[rank]):
        ours.train_step(
            inputs=torch.ones(3 + rank, 2),
            targets=torch.zeros(3 + rank, dtype=torch.long),
            optimizer=optim.SGD(lr=0.1),
            loss_fn=LOSS,
        )
    ours.flush(optimizer=optim.SGD(lr=0.1))
    same = {name: torch.equal(before[name], buffer) for name, buffer in trained.named_buffers()}
    return same, trained.own.item()


@pytest.mark.parametrize(("num_batches", "own"), [((3, 2), (3 * 9 + 2 * 8) / 17), ((2, 0), 2.0)])
def test_buffers_that_are_alike_keep_their_bits_and_a_member_without_data_breaks_none(num_batches, own):
    for same, mean in together(with_tables, 2, num_batches):
        assert same == {"mask": True, "table": True, "own": False}
        assert mean == pytest.approx(own)


def with_scheduler(rank, by_hook):
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(live, 0.5)
    ours = offbeat.AsyncGradientAccumulator(trained, 1)
    if by_hook:
        live.register_step_post_hook(lambda *_: scheduler.step())
    try:
        for window in range((5, 2)[rank]):
            inputs, targets = micro_batch(rank, window, 0)
            ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
            if not by_hook and ours.is_update_step():
                scheduler.step()
        ours.flush()
    except StateError as error:
        return str(error)
    return [p.detach().tolist() for p in trained.parameters()]


def test_learning_rates_that_part_are_an_error_in_all_members_and_a_hook_keeps_them_together():
    first, second = together(with_scheduler, 2, True)
    assert first == second
    for told in together(with_scheduler, 2, False):
        assert "set differently" in told
        assert "register_step_post_hook" in told


def watched(rank, settings):
    """Train with a monitor, if settings of one are this member's; one loss of the first member's is large."""
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    monitor = offbeat.AsyncTrainingMonitor(ours.model, **settings[rank]) if settings[rank] else None
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    try:
        for window in range(10):
            inputs, targets = micro_batch(rank, window, 0)
            factor = 1e3 if (rank, window) == (0, 7) else 1.0
            ours.train_step(
                inputs=inputs,
                targets=targets,
                optimizer=live,
                loss_fn=lambda outputs, targets, factor=factor: LOSS(outputs, targets) * factor,
            )
        ours.flush()
    except StateError as error:
        return str(error)
    report = None if monitor is None else monitor.report()
    return [p.detach().numpy() for p in ours.model.parameters()], report and (
        report.num_clipped,
        report.num_dropped,
        report.num_alerts,
    )


NORM = {"divergence_metrics": ["gradient_norm"], "warm_up": 2}


@pytest.mark.parametrize("remedy", ["clip", "reject", "reduce_lr", "pause"])
def test_a_monitor_that_changes_one_members_gradients_alone_is_an_error_in_all(remedy):
    one = NORM | {"remediation_strategy": ["alert", remedy]}
    for other in (None, one | {"warm_up": 3}):
        for told in together(watched, 2, (one, other)):
            assert "members are set differently: what monitors do is [" in told
        assert "has to be in every member, set alike" in told


def watched_before(rank, remedy):
    """Make a monitor that goes by its member's own loss, then what shares updates."""
    trained, told = model(), []
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    acts_on = live if remedy == "reduce_lr" else None
    with offbeat.AsyncTrainingMonitor(trained, remediation_strategy=["alert", remedy], acts_on=acts_on):
        for strategy in ("accumulate", {0: "average", 1: "accumulate"}):
            trainer = offbeat.AsyncTrainer(trained, strategy=strategy)
            with pytest.raises(ConfigError) as error:
                trainer.train(
                    dataloader=[micro_batch(rank, 0, 0)] * 4, epochs=2, optimizer=live, loss_fn=LOSS
                )
            told.append((str(error.value), trainer.history.steps))
        trainer = offbeat.AsyncTrainer(trained, strategy="average")
        for strategy in ("accumulate", {0: "average", 9: "accumulate"}):
            with pytest.raises(ConfigError) as error:
                trainer.strategy = strategy
            assert repr(trainer.strategy) == "Average()"
            told.append((str(error.value), 0))
        with pytest.raises(ConfigError) as error:
            offbeat.AsyncGradientAccumulator(trained, 1)
        told.append((str(error.value), 0))
        offbeat.AsyncGradientAccumulator(trained, 1, process_group=False)
    offbeat.AsyncGradientAccumulator(trained, 1)
    return told


@pytest.mark.parametrize("remedy", ["clip", "reject", "reduce_lr"])
def test_a_monitor_that_goes_by_what_is_each_members_own_is_refused_before_anything_is_trained(remedy):
    for told in together(watched_before, 2, remedy):
        for error, num_steps in told:
            assert "divergence_metrics has loss, which each member of the accumulator's group has" in error
            assert f"and {remedy} would change one member's update alone" in error
            assert num_steps == 0


def test_monitors_that_are_set_alike_clip_in_all_members_and_one_that_tells_may_be_in_one():
    clips = NORM | {"remediation_strategy": "clip", "alert_threshold": 0.0}
    first, second = together(watched, 2, (clips, clips))
    assert first[1] == second[1]
    assert first[1][0] > 0, "there was something to clip"
    assert all(map(np.array_equal, first[0], second[0]))
    plain, same = together(watched, 2, (NORM, None))
    assert all(map(np.array_equal, plain[0], same[0]))


def test_a_member_that_pauses_by_its_own_loss_drops_nothing_of_all_members():
    pauses = {"remediation_strategy": "pause", "pause_timeout_s": 0.0, "warm_up": 5}
    first, second = together(watched, 2, (pauses, None))
    num_clipped, num_dropped, num_alerts = first[1]
    assert num_alerts["loss"] > 0, "it has paused"
    assert num_clipped == num_dropped == 0
    assert all(map(np.array_equal, first[0], second[0]))


def without_data(rank, num_windows, optimizer):
    """Flush where there was no data, and forget the optimizer the first time."""
    ours = offbeat.AsyncGradientAccumulator(model(), 1, overlap=False)
    steps_of(rank, ours, range(num_windows[rank]))
    said = None
    try:
        ours.flush()
    except ConfigError as error:
        said = str(error)
        ours.flush(optimizer=optimizer)
    return said, ours.updates, [p.detach().numpy() for p in ours.model.parameters()]


def test_a_member_without_data_or_optimizer_says_what_it_lacks_and_goes_on_with_it():
    first, second = together(without_data, 2, (3, 0), SPEC)
    assert first[0] is None
    assert "there is no optimizer here, where no data was: call flush(optimizer=...)" in second[0]
    assert first[1] == second[1] == 3
    assert all(map(np.array_equal, first[2], second[2]))
    assert [said for said, _, _ in together(without_data, 2, (0, 0), None)] == [None, None], "none is needed"


def flushing_with_another_rate(rank):
    ours = offbeat.AsyncGradientAccumulator(model(), 1, overlap=False)
    try:
        steps_of(rank, ours, range((3, 0)[rank]))
        ours.flush(optimizer=SPEC if rank == 0 else optim.SGD(lr=0.2, momentum=0.9))
    except StateError as error:
        return str(error)
    return None


def test_an_optimizer_that_is_given_to_flush_has_to_be_set_as_the_others_are():
    for told in together(flushing_with_another_rate, 2):
        assert "members are set differently: learning rate is [" in told


def with_another_model(rank):
    try:
        offbeat.AsyncGradientAccumulator(nn.Linear(2, 3 + rank), 1)
    except ModelMismatchError as error:
        return str(error)
    return None


def test_members_with_different_models_are_told_where_they_differ():
    first, second = together(with_another_model, 2)
    assert first == (
        "members hold different models: here comes 'weight' of shape [3, 2] and dtype torch.float32, and in "
        "member 1 'weight' of shape [4, 2] and dtype torch.float32"
    )
    assert "in member 0 'weight' of shape [3, 2]" in second


def going_on(rank, went_on):
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    inputs, targets = micro_batch(rank, 0, 0)
    given = {"inputs": inputs, "targets": targets, "optimizer": SPEC, "loss_fn": LOSS}
    if rank == 0:
        ours.train_step(**given)
        went_on.touch()
    else:
        wait_for(went_on.exists, timeout_s=60)  # with its first window not ended
        ours.train_step(**given)
    ours.flush()
    return ours.updates


def test_a_member_goes_on_before_the_others_have_ended_their_window(tmp_path):
    assert together(going_on, 2, tmp_path / "went-on") == [1, 1]


def with_nan(rank):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 1)
    told = []
    for window in range(4):
        inputs, targets = micro_batch(rank, window, 0)
        if rank == 0 and window == 1:
            inputs = torch.full_like(inputs, float("nan"))
        try:
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        except NonFiniteError as error:
            told.append((window, str(error).partition(":")[0]))
    ours.flush()
    return told, ours.updates, [p.detach().numpy() for p in trained.parameters()]


def test_what_is_not_finite_in_one_member_is_an_error_in_all_and_costs_its_window():
    first, second = together(with_nan, 2)
    said = (
        "the gradient of update 2 is NaN or infinite (a loss of member 0 was), so it was dropped and nothing "
        "was changed"
    )
    assert first[0] == second[0] == [(2, said)], "one window late"
    assert first[1] == second[1] == 3
    assert all(map(np.array_equal, first[2], second[2]))
    assert all(np.isfinite(value).all() for value in first[2])


def with_nan_at_the_end(rank, overlap, num_micro, num_batches, broken):
    """Train on so many micro-batches, with NaN in some windows of the members'; then flush."""
    records = logging.handlers.QueueHandler(queue.SimpleQueue())
    logging.getLogger("offbeat").addHandler(records)
    trained = nn.Sequential(nn.BatchNorm1d(6), model())
    ours = offbeat.AsyncGradientAccumulator(trained, num_micro, overlap=overlap)
    told = []
    for number in range(num_batches[rank]):
        inputs, targets = micro_batch(rank, 0, number)
        factor = float("nan") if (rank, number // num_micro) in broken else 1.0
        try:
            ours.train_step(
                inputs=inputs.repeat(2, 1),
                targets=targets.repeat(2),
                optimizer=optim.SGD(lr=0.1),  # without momentum, of which there is a warning
                loss_fn=lambda outputs, targets, factor=factor: LOSS(outputs, targets) * factor,
            )
        except NonFiniteError as error:
            told.append(str(error).partition(" is NaN")[0])
    try:
        ours.flush()
    except NonFiniteError as error:
        told.append("flush: " + str(error).partition(" is NaN")[0])
    is_through = ours.state_dict()["due"] is None
    logging.getLogger("offbeat").removeHandler(records)
    warnings = []
    while not records.queue.empty():
        if (record := records.queue.get()).levelno >= logging.WARNING:
            warnings.append(record.getMessage().partition(" is NaN")[0])
    return told, warnings, ours.updates, is_through, [v.numpy() for v in trained.state_dict().values()]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_not_finite_in_others_windows_ends_no_member_that_has_ended(overlap):
    first, second = together(with_nan_at_the_end, 2, overlap, 1, (5, 1), {(0, 2), (0, 3)})
    said = "the gradient of update 3"
    assert (first[0], first[1]) == ([said] * 2, [])
    assert (second[0], second[1]) == ([], [said]), "it is warned of, once"
    assert first[2] == second[2] == 3
    assert all(map(np.array_equal, first[4], second[4])), "buffers, too"
    assert all(np.isfinite(value).all() for value in first[4])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("broken", [{(0, 1)}, {(1, 2)}, {(0, 1), (1, 2)}], ids=str)
def test_flush_is_through_in_all_members_where_it_raises_of_what_is_not_finite(broken, overlap):
    """With overlap the update of the window before the last one is made in it, before that one is sent."""
    numbers = sorted({window + 1 for _, window in broken})
    said = [f"the gradient of update {numbers[0]}"] * len(numbers)
    if overlap or numbers == [3]:
        said = ["flush: " + said[0]]
    else:
        said[1:] = ["flush: " + one for one in said[1:]]
    ends = together(with_nan_at_the_end, 2, overlap, 2, (5, 5), broken)
    for told, warnings, updates, is_through, _ in ends:
        assert (told, warnings, updates, is_through) == (said, [], 3 - len(broken), True)
    assert all(map(np.array_equal, ends[0][4], ends[1][4]))


def flushing_twice(rank):
    """Catch what a flush raises, and flush again, which the others do when they have trained more."""
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    inputs, targets = micro_batch(rank, 0, 0)
    given = {"inputs": inputs, "targets": targets, "optimizer": SPEC}
    bad = float("nan") if rank == 1 else 1.0
    ours.train_step(**given, loss_fn=lambda outputs, targets: LOSS(outputs, targets) * bad)
    with pytest.raises(NonFiniteError) as raised:
        ours.flush()
    if rank == 0:
        ours.train_step(**given, loss_fn=LOSS)
    with warned() as told:
        ours.flush()
    return str(raised.value), told, ours.updates


def test_a_flush_that_raises_says_that_it_is_complete_and_the_next_one_for_what_it_waits():
    first, second = together(flushing_twice, 2)
    for said, _, updates in first, second:
        assert "update 1 is NaN or infinite (a loss of member 1 was)" in said
        assert "This flush() was complete in all members" in said
        assert updates == 1, "a member that flushes again takes part in what others have trained since"
    assert first[1] == []
    (text,) = second[1]
    assert text.startswith("nothing was trained here since the last flush()")


def gone_by_what_is_not_finite(rank, said):
    """End by a NaN of the other one's last window, as a script does; the other one flushes."""
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    given = {"optimizer": SPEC, "loss_fn": LOSS}
    inputs, targets = micro_batch(rank, 0, 0)
    if rank == 1:
        ours.train_step(inputs=inputs, targets=targets, **given)
        with pytest.raises(NonFiniteError):
            ours.train_step(inputs=inputs, targets=targets, **given)
        os.kill(os.getpid(), signal.SIGKILL)
    ours.train_step(inputs=inputs * float("nan"), targets=targets, **given)
    with pytest.raises(ConnectionLostError) as raised:
        ours.flush()
    said.write_text(str(raised.value))


def test_a_member_whose_nan_has_ended_the_others_is_told_of_it(tmp_path):
    with pytest.raises(EOFError):  # of the one that ends
        together(gone_by_what_is_not_finite, 2, tmp_path / "said")
    text = (tmp_path / "said").read_text()
    assert text.startswith("the gradient of update 1 is NaN or infinite (a loss of member 0 was)")
    assert "for one is gone" in text
    assert "caught" not in text


def freezing(rank, is_alone):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 1, overlap=False)
    try:
        for window in range(4):
            if window == 1 and (rank == 0 or not is_alone):
                trained[0].weight.requires_grad_(requires_grad=False)
            inputs, targets = micro_batch(rank, window, 0)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    except StateError as error:
        return str(error)
    return [p.detach().tolist() for p in trained.parameters()]


def unfreezing(rank, overlap, num_windows, large):
    """Train a part from the fourth window on; give the parts, and what one process makes of all batches."""
    with mock.patch.object(parcel, "LARGE", large):
        trained = model().double()
        trained[0].requires_grad_(requires_grad=False)
        alone = copy.deepcopy(trained)
        live = torch.optim.SGD(trained.parameters(), lr=0.1)
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        ours = offbeat.AsyncGradientAccumulator(trained, 2, overlap=overlap)
        for window in range(num_windows):
            if window == 3:
                trained[0].requires_grad_(requires_grad=True)
                alone[0].requires_grad_(requires_grad=True)
            for number in range(2):
                inputs, targets = micro_batch(rank, window, number)
                ours.train_step(inputs=inputs.double(), targets=targets, optimizer=live, loss_fn=LOSS)
            if not overlap:
                every = [micro_batch(one, window, number) for one in range(2) for number in range(2)]
                other.zero_grad()
                inputs, targets = (torch.cat(part) for part in zip(*every, strict=True))
                LOSS(alone(inputs.double()), targets).backward()
                other.step()
        ours.flush()
    return [[p.detach().tolist() for p in one.parameters()] for one in (trained, alone)]


@pytest.mark.parametrize("num_windows", [4, 6])
@pytest.mark.parametrize("large", [AS_IT_IS, ALL_LARGE])
def test_the_first_window_of_what_is_unfrozen_is_one_batch_of_all_members(num_windows, large):
    (first, alone), (second, _) = together(unfreezing, 2, False, num_windows, large)
    assert first == second
    for part, theirs in zip(first, alone, strict=True):
        assert np.abs(np.array(part) - np.array(theirs)).max() <= 1e-12


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return (self.one + self.other) * inputs.mean()


def in_turn(rank, overlap):
    """Train two parts in turn within each window; give how far each has come."""
    trained = Two()
    ours = offbeat.AsyncGradientAccumulator(trained, 2, overlap=overlap)
    for number in range(8):
        trained.one.requires_grad_(number % 2 == 0)
        trained.other.requires_grad_(number % 2 == 1)
        ours.train_step(
            inputs=torch.ones(1),
            targets=torch.zeros(1),
            optimizer=optim.SGD(lr=1.0),
            loss_fn=lambda outputs, _: -outputs.sum(),
        )
    ours.flush()
    return [p.item() for p in trained.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_frozen_again_by_the_window_s_end_is_in_its_sum(overlap):
    assert together(in_turn, 2, overlap) == [[2.0, 2.0]] * 2


def frozen_after_the_end(rank):
    """Freeze a part after the data's end, in one member before `flush` and in the other after it."""
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 1, overlap=False)

    def epoch(length):
        for window in range(length):
            inputs, targets = micro_batch(rank, window, 0)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)

    epoch(5 - rank)
    if rank == 0:
        trained[0].weight.requires_grad_(requires_grad=False)
    ours.flush()
    trained[0].weight.requires_grad_(requires_grad=False)
    before = trained[0].weight.detach().clone()
    epoch(3)
    ours.flush()
    return [p.detach().tolist() for p in trained.parameters()], torch.equal(before, trained[0].weight)


def test_freezing_around_the_end_leaves_sums_of_one_size():
    (first, is_kept), (second, also_kept) = together(frozen_after_the_end, 2)
    assert first == second
    assert is_kept
    assert also_kept


def test_the_first_window_of_what_is_unfrozen_moves_it_with_overlap_too():
    (four, _), (also_four, _) = together(unfreezing, 2, True, 4, AS_IT_IS)
    (three, _), _ = together(unfreezing, 2, True, 3, AS_IT_IS)
    assert four == also_four
    assert four[0] != three[0]


def test_freezing_in_mid_run_is_for_all_members():
    first, second = together(freezing, 2, False)
    assert first == second
    for told in together(freezing, 2, True):
        assert "requires_grad of '0.weight' is False in member 0 and True in member 1" in told


def dying(rank, gone, said):
    ours = offbeat.AsyncGradientAccumulator(model(), 1)
    inputs, targets = micro_batch(rank, 0, 0)
    given = {"inputs": inputs, "targets": targets, "optimizer": SPEC, "loss_fn": LOSS}
    ours.train_step(**given)
    if rank == 1:
        gone.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(gone.exists, timeout_s=60)
    try:
        for _ in range(4):
            ours.train_step(**given)
    except ConnectionLostError as error:
        said.write_text(str(error))


def test_a_member_that_dies_is_an_error_that_says_so(tmp_path):
    with pytest.raises(EOFError):  # of the one that is killed
        together(dying, 2, tmp_path / "gone", tmp_path / "said")
    told = (tmp_path / "said").read_text()
    assert "of all members could not be put together, for one is gone" in told
    remedy, _, cause = told.partition("; the cause: ")
    assert "start all of them again" in remedy
    assert len(f"offbeat.errors.ConnectionLostError: {remedy}") <= MAX_WORDS, "launch's summary has it whole"
    assert ".cc:" not in remedy
    assert cause


class Dies(nn.Module):
    """Ends its process where it is asked for its buffers: as accumulators are made, and end together."""

    dies = False

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))

    def forward(self, inputs):
        return self.inside(inputs)

    def named_buffers(self, *given, **named):  # which `buffers` asks, too
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().named_buffers(*given, **named)


def dying_outside_sums(rank, when, said):
    group = distributed.new_group(timeout=timedelta(seconds=5))
    if rank == 1 and when == "is compared with":  # it has come to the group of all, and no further
        own_group(group)
        os.kill(os.getpid(), signal.SIGKILL)
    trained = Dies()
    trained.dies = rank == 1 and when == "comes to the group"
    try:
        ours = offbeat.AsyncGradientAccumulator(trained, 1, overlap=False, process_group=group)
        inputs, targets = micro_batch(rank, 0, 1)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        assert ours.updates == 1
        trained.dies = rank == 1  # in flush, after its sums
        ours.flush()
    except ConnectionLostError as error:
        num = "".join(traceback.format_exception(error)).count("Traceback")
        said.write_text(json.dumps([str(error), num]))


@pytest.mark.parametrize("when", ["comes to the group", "is compared with", "ends"])
def test_a_member_that_dies_outside_sums_is_the_same_error_and_not_torchs(when, tmp_path):
    with pytest.raises(EOFError):
        together(dying_outside_sums, 2, when, tmp_path / "said")
    told, num = json.loads((tmp_path / "said").read_text())
    assert "the gradients of all members could not be put together, for one is gone" in told
    assert num == 1, "torch's own words are in it, and not its traceback beside it"


def broken_off(rank, overlap, interrupted):
    """Train on eight micro-batches; Ctrl-C comes while the first member waits for the other one."""
    ours = offbeat.AsyncGradientAccumulator(model(), 2, overlap=overlap)
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    asked = threading.Event()

    def interrupt():
        asked.wait()
        wait_for(lambda: sys._current_frames()[main].f_code is Sums.wait.__code__, timeout_s=60)
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.touch()

    if rank == 0:
        threading.Thread(target=interrupt, daemon=True).start()
    else:
        wait_for(interrupted.exists, timeout_s=60)
    num_interrupts = 0
    for number in range(8):
        if number == (3 if overlap else 1):
            asked.set()
        inputs, targets = micro_batch(rank, 0, number)
        try:
            ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)
        except KeyboardInterrupt:
            num_interrupts += 1
    ours.flush()
    signal.signal(signal.SIGINT, before)
    return [p.detach().numpy() for p in ours.model.parameters()], ours.updates, num_interrupts


def broken_off_at_the_end(rank, interrupted, goes_on):
    """End before the other one, by Ctrl-C while this waits for it; flush again, or train on at once."""
    ours = offbeat.AsyncGradientAccumulator(model(), 2, overlap=False)
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident

    def interrupt():
        wait_for(lambda: sys._current_frames()[main].f_code is Sums.wait.__code__, timeout_s=60)
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.touch()  # torch's wait ends, and Ctrl-C is heard, as the other one comes

    def train(num):
        for number in range(num):
            inputs, targets = micro_batch(rank, 0, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)

    train(2)
    if rank == 0:
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ours.flush()
        thread.join()
    else:
        wait_for(interrupted.exists, timeout_s=60)
        ours.flush()
    if goes_on:
        train(2)
    if goes_on or rank == 0:
        ours.flush()
    signal.signal(signal.SIGINT, before)
    return [p.detach().numpy() for p in ours.model.parameters()], ours.updates


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_flush_that_is_broken_off_ends_in_the_next_call(goes_on, tmp_path):
    """In which others have learnt from the same sum that all have ended, and wait for this one."""
    (first, num), (second, also_num) = together(broken_off_at_the_end, 2, tmp_path / "it", goes_on)
    assert num == also_num == 1 + goes_on
    assert all(map(np.array_equal, first, second))


def going_on_from_an_end(rank, adaptive):
    """Go on, with another group, from an end in which one member is in the sum, and one behind it."""

    def made():
        trained = model()
        trained.register_buffer("seen", torch.ones(2))  # members ask one another about it at the end
        return offbeat.AsyncGradientAccumulator(trained, 2, overlap=False, adaptive_accumulation=adaptive)

    def train(num, live):
        for number in range(num):
            inputs, targets = micro_batch(rank, 0, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=live, loss_fn=LOSS)

    def keep():
        kept.append(copy.deepcopy((ours.model.state_dict(), ours.state_dict())))

    def update(before):
        if ours._is_under_way and not ours._wait().num_at_work and rank == 0:
            keep()
        return before()

    def end(before, *arguments):
        if rank == 1:
            keep()
        return before(*arguments)

    kept = []
    ours = made()
    train(12, torch.optim.SGD(ours.model.parameters(), lr=0.1))
    ours._update = functools.partial(update, ours._update)
    ours._members.end = functools.partial(end, ours._members.end)
    ours.flush()
    ours.close()
    updates = ours.updates
    ours = made()
    ours.model.load_state_dict(kept[0][0])
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    ours.load_state_dict(kept[0][1], optimizer=live)
    due, meter = kept[0][1]["due"], ours.state_dict()["meter"]
    train(12, live)
    ours.flush()
    ends = [p.detach().numpy() for p in ours.model.parameters()], ours.updates - updates
    return *ends, None if due is None else due["num_at_work"], meter


@pytest.mark.parametrize("adaptive", [False, True])
def test_states_of_an_end_that_was_broken_off_are_gone_on_from_in_another_group(adaptive):
    (first, num, due, meter), (second, also_num, also_due, also_meter) = together(
        going_on_from_an_end, 2, adaptive
    )
    assert (due, also_due) == (0, None)
    assert (num, meter) == (also_num, also_meter)
    assert num >= 3
    assert all(map(np.array_equal, first, second))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wait_that_is_broken_off_loses_nothing(overlap, tmp_path):
    first, second = together(broken_off, 2, overlap, tmp_path / "interrupted")
    assert (first[2], second[2]) == (1, 0)
    assert all(map(np.array_equal, first[0], second[0]))
    ends = [[2, 4, 6, 8]] * 2
    if overlap:  # the window that was full stays, and ends with one more
        ends[0] = [2, 5, 7, 8]
    assert first[1] == second[1] == 4
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    waiting = []
    for window in range(4):
        batches = [
            micro_batch(rank, 0, number)
            for rank in range(2)
            for number in range(([0, *ends[rank]])[window], ends[rank][window])
        ]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        waiting.append(torch.autograd.grad(LOSS(trained(inputs), targets), list(trained.parameters())))
        if len(waiting) > overlap:
            apply(live, trained, waiting.pop(0))
    for gradients in waiting:
        apply(live, trained, gradients)
    for a, b in zip(first[0], trained.parameters(), strict=True):
        assert np.abs(a - b.detach().numpy()).max() <= 1e-6 * b.abs().max().item()


def steps_of(rank, ours, numbers):
    for number in numbers:
        inputs, targets = micro_batch(rank, number // 3, number % 3)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)


def resuming(rank, overlap, taken_after):
    made = [
        offbeat.AsyncGradientAccumulator(model(seed=rank), 3, overlap=overlap, normalizer=normalized)
        for _ in range(3)
    ]
    whole, first, second = made
    steps_of(rank, whole, range(14))
    whole.flush()
    steps_of(rank, first, range(taken_after))
    kept = copy.deepcopy((first.model.state_dict(), first.state_dict()))
    steps_of(rank, first, range(taken_after, 14))  # taking a state has changed nothing
    first.flush()
    steps_of(rank, second, range(4))  # what is here, gathered or under way, gives way
    second.model.load_state_dict(kept[0])
    second.load_state_dict(kept[1], optimizer=SPEC)
    steps_of(rank, second, range(taken_after, 14))
    second.flush()
    return [([p.detach().numpy() for p in ours.model.parameters()], ours.updates) for ours in made]


def normalized(_, targets):
    return len(targets) + 0.5


@pytest.mark.parametrize("taken_after", [6, 7, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_taken_in_mid_window_goes_on_bit_for_bit_in_all_members(overlap, taken_after):
    for whole, first, second in together(resuming, 2, overlap, taken_after):
        assert whole[1] == first[1] == second[1] == 5
        for a, b, c in zip(whole[0], first[0], second[0], strict=True):
            assert np.array_equal(a, b)
            assert np.array_equal(a, c)


def without_its_model(rank, overlap):
    whole, ours = (offbeat.AsyncGradientAccumulator(model(), 3, overlap=overlap) for _ in range(2))
    steps_of(rank, whole, range(7))
    kept = copy.deepcopy((whole.model.state_dict(), whole.state_dict()))
    steps_of(rank, whole, range(7, 14))
    whole.flush()
    steps_of(rank, ours, range(4))  # with overlap a sum is under way
    if rank == 0:
        ours.model.load_state_dict(kept[0])
    before = ours.updates
    with pytest.raises(StateError) as caught:
        ours.load_state_dict(kept[1])
    is_unchanged = ours.updates == before
    ours.model.load_state_dict(kept[0])
    ours.load_state_dict(kept[1])
    steps_of(rank, ours, range(7, 14))
    ours.flush()
    pairs = zip(whole.model.parameters(), ours.model.parameters(), strict=True)
    return str(caught.value), is_unchanged, all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_is_refused_in_all_members_where_one_has_not_its_model_back(overlap):
    first, second = together(without_its_model, 2, overlap)
    assert first[0].startswith("the model of another member is not the one of its state: load the model's")
    assert second[0].startswith("the model is not the one of the state: parameter '0.weight' has other val")
    for _, is_unchanged, goes_on in (first, second):
        assert is_unchanged
        assert goes_on, "once all have theirs back"


def from_different_updates(rank):
    ours = offbeat.AsyncGradientAccumulator(model(), 1, overlap=False)
    steps_of(rank, ours, range(2))
    kept = copy.deepcopy((ours.model.state_dict(), ours.state_dict()))
    steps_of(rank, ours, range(2, 3))
    if rank == 1:
        kept = copy.deepcopy((ours.model.state_dict(), ours.state_dict()))
    ours.model.load_state_dict(kept[0])
    ours.load_state_dict(kept[1])
    try:
        steps_of(rank, ours, range(3, 4))
    except StateError as error:
        return str(error)
    return None


def test_members_that_go_on_from_states_of_different_updates_are_told():
    for told in together(from_different_updates, 2):
        assert "members are set differently: updates is " in told
        assert "load states of the same update" in told


def going_no_further(rank, said):
    group = torch.distributed.new_group(timeout=timedelta(seconds=10))
    ours = offbeat.AsyncGradientAccumulator(model(), 1, overlap=False, process_group=group)
    if rank == 1:  # it has raised within its window, and its process is there all the same
        wait_for(said.exists, timeout_s=90)
        return None
    inputs, targets = micro_batch(rank, 0, 0)
    try:
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    except ConnectionLostError as error:
        said.touch()
        return str(error)
    return "no error"


def test_a_member_that_goes_no_further_is_waited_for_as_long_as_the_groups_timeout_says(tmp_path):
    told, _ = together(going_no_further, 2, tmp_path / "said")
    assert "of all members could not be put together, for one is gone or was waited for too long" in told


def closes(rank):
    groups = []
    for is_flushed in (True, False):
        with offbeat.AsyncGradientAccumulator(model(), 1) as ours:
            inputs, targets = micro_batch(rank, 0, 0)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
            if is_flushed:
                ours.flush()
            groups.append(len(distributed.distributed_c10d._world.pg_map))
        ours.close()  # a second time
        groups.append(len(distributed.distributed_c10d._world.pg_map))
    for call in (
        ours.flush,
        lambda: ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS),
    ):
        with pytest.raises(ClosedError, match="was closed, and takes part no more: make a new one"):
            call()
    return groups, ours.updates


def test_a_closed_one_has_given_back_its_group_and_takes_part_no_more():
    for (inside, after, again, last), updates in together(closes, 2):
        assert (inside, after, again, last) == (after + 1, after, after + 1, after)
        assert updates == 0, "a sum that was broken off is of nobody"


def of_a_size(rank, bases, target):
    """Make an update of micro-batches that are as large as was said, then one of others."""
    with warned() as told:
        ours = offbeat.AsyncGradientAccumulator(
            model(), base_batch_size=bases[rank], target_batch_size=target, overlap=False
        )
        sizes = []
        for size in (bases[rank], bases[rank] + (rank == 1)):
            for _ in range(ours.accumulation_steps):
                inputs, targets = torch.ones(size, 6), torch.zeros(size, dtype=torch.long)
                ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
            sizes.append(ours.effective_batch_size)
    ours.flush()
    return told, sizes


def test_members_of_unlike_micro_batches_say_what_an_update_is_of_in_all():
    """They go by their own sizes, each its micro-batches; and one that brings others counts its own anew."""
    bases, steps = (8, 40), (16, 4)  # of 256 in all: 128 and 160
    first, second = together(of_a_size, 2, bases, 256)
    for rank, (told, _) in enumerate((first, second)):
        assert told[0] == (
            f"target_batch_size is 256, and an update is of 288 samples: {steps[rank]} micro-batches of "
            f"{bases[rank]} of member {rank}, and what 1 other member(s) bring"
        )
    assert first[1] == [288, 288]
    assert second[1] == [288, 292]
    assert len(first[0]) == 1
    (odd,) = second[0][1:]
    assert "an update is of 4 of them, and what 1 other member(s) bring, so of 292 samples, where" in odd
