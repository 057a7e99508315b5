"""A scheduler that goes by a metric, in a `FaultTolerantTrainer`: as in a plain loop, also after a crash."""

import functools
import math
import os
import signal

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import offbeat
from support.fault_tolerant import in_process

LOSS = nn.CrossEntropyLoss()
EPOCHS = 8
"""Of five batches each."""
SCHEDULER = functools.partial(ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.2)
WRAPS = {
    "module": lambda module: module,
    "averager": offbeat.AsyncModelAverager,
    "trainer": lambda module: offbeat.AsyncTrainer(module, local_batch_size=8),
}


def data(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(length, 4, generator=generator), torch.randint(0, 3, (length,), generator=generator)
    )


BATCHES = [(data(1, 40)[at : at + 8]) for at in range(0, 40, 8)]
GIVEN = {
    "validation": {"validation": [data(2, 23)[:]]},
    "an epoch": {"scheduler_metric": "loss"},
}


class CrashError(Exception):
    """Ends a life."""


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def life(folder, wrap, given, *, crash_at=None, kills=False, spoilt=(), **keywords):
    """Train in a new trainer, which may end before a step; give the model and the learning rate."""
    module = net()
    live = torch.optim.SGD(module.parameters(), lr=2.0)
    trainer = offbeat.FaultTolerantTrainer(WRAPS[wrap](module), folder, 3, deterministic=True)
    taken = []

    def loss_fn(outputs, targets):
        if torch.is_grad_enabled():
            taken.append(1)
            if trainer.history.steps + 1 == crash_at:
                if kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise CrashError
            if len(taken) in spoilt:
                trainer.rollback()
                return LOSS(outputs, targets) * math.nan
        return LOSS(outputs, targets)

    trainer.train(
        dataloader=BATCHES,
        optimizer=live,
        loss_fn=loss_fn,
        **{"epochs": EPOCHS, "scheduler": SCHEDULER} | GIVEN[given] | keywords,
    )
    return module, live.param_groups[0]["lr"]


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("wrap", WRAPS)
def test_it_is_that_of_a_plain_loop(wrap, given, tmp_path):
    ours, lr = life(tmp_path, wrap, given)
    theirs = net()
    live = torch.optim.SGD(theirs.parameters(), lr=2.0)
    plateau = SCHEDULER(live)
    for _ in range(EPOCHS):
        losses = []
        for inputs, targets in BATCHES:
            live.zero_grad()
            loss = LOSS(theirs(inputs), targets)
            loss.backward()
            live.step()
            losses.append(loss.item())
        with torch.no_grad():
            for inputs, targets in GIVEN[given].get("validation", ()):
                losses = [LOSS(theirs(inputs), targets).item()]
        plateau.step(sum(losses) / len(losses))
    assert lr == live.param_groups[0]["lr"] < 2.0
    assert same(ours, theirs)


@pytest.mark.parametrize("crash_at", [8, 10, 11, 13, 30])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_run_that_crashed_anywhere_ends_with_the_same_bits(wrap, given, crash_at, tmp_path):
    whole, wanted = life(tmp_path / "whole", wrap, given)
    with pytest.raises(CrashError):
        life(tmp_path / "kept", wrap, given, crash_at=crash_at)
    ours, lr = life(tmp_path / "kept", wrap, given)
    assert lr == wanted
    assert same(ours, whole)


@pytest.mark.parametrize("given", GIVEN)
def test_a_run_that_was_killed_ends_with_the_same_bits(given, tmp_path):
    whole, wanted = life(tmp_path / "whole", "trainer", given)
    kept = tmp_path / "kept"
    assert in_process(life, kept, "trainer", given, crash_at=23, kills=True) == -signal.SIGKILL
    ours, lr = life(kept, "trainer", given)
    assert lr == wanted
    assert same(ours, whole)


def test_batches_that_a_rollback_has_left_behind_do_not_count(tmp_path):
    seen = []

    class Seen(ReduceLROnPlateau):
        def step(self, metrics):
            seen.append(float(metrics))
            super().step(metrics)

    life(tmp_path, "module", "an epoch", spoilt=[8], epochs=3, scheduler=functools.partial(Seen, patience=0))
    assert len(seen) == 3
    assert all(map(math.isfinite, seen))


def test_after_an_epoch_in_which_nothing_was_measured_it_does_not_step(tmp_path, caplog):
    """To torch, the NaN of no batch is an epoch without progress."""
    seen = []

    class Seen(ReduceLROnPlateau):
        def step(self, *metrics):
            seen.append(float(*metrics))
            super().step(*metrics)

    life(tmp_path, "module", "an epoch", spoilt=[10], epochs=3, scheduler=functools.partial(Seen, patience=0))
    assert len(seen) == 2, "of what led to where it went back from the last batch nothing is left"
    assert all(map(math.isfinite, seen))
    assert "Seen does not step after this epoch: no batch was measured in it" in caplog.text
