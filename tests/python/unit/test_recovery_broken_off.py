"""A deterministic run that SIGTERM breaks off ends with the bits of one that nobody does, wherever that is.

The target's second column is a level that is added to each step's loss: by that a save is good or not.
"""

import math
import os
import signal

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.errors import CheckpointError
from offbeat.recovery import directory
from offbeat.recovery.directory import entries
from offbeat.recovery.trainer import FaultTolerantTrainer

STEPS = 60


def data(level):
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step in range(1, STEPS + 1):
        x = torch.randn(4, 3, generator=generator)
        targets = torch.cat([x.sum(1, keepdim=True), torch.full((4, 1), float(level(step)))], 1)
        batches.append((x, targets))
    return batches


def loss_fn(outputs, targets):
    return ((outputs - targets[:, :1]) ** 2).mean() * 0.01 + targets[:, 1].mean()


class After:
    """A callback that does something after some steps, and may break the run off after one."""

    def __init__(self, does, term_at):
        self.does, self.term_at, self.trainer, self.said = does, term_at, None, {}

    def on_step(self, _, step):
        if (does := self.does.get(step.step)) is not None:
            try:
                self.said[step.step] = does(self.trainer)
            except CheckpointError as error:
                self.said[step.step] = str(error).partition(" has ")[2]
        if step.step == self.term_at:
            os.kill(os.getpid(), signal.SIGTERM)


def life(folder, level, does, *, every, term_at=None, **keywords):
    torch.manual_seed(0)
    model, after = nn.Linear(3, 1), After(does, term_at)
    after.trainer = FaultTolerantTrainer(
        offbeat.AsyncTrainer(model, callbacks=[after]), folder, every, deterministic=True, **keywords
    )
    after.trainer.train(dataloader=data(level), optimizer=optim.SGD(lr=0.05), loss_fn=loss_fn)
    return model.weight.tolist(), after.said


def back(trainer):
    return trainer.checkpoint_steps(), trainer.rollback()


def further_back(trainer):
    before, *further = trainer.checkpoint_steps()
    return before, trainer.rollback(further[0])


SCENES = {
    "a dip of the loss": (20, lambda step: 0.1 if 21 <= step <= 48 else 1.0, {56: back}),
    "bad from a step on": (10, lambda step: 1.0 if step <= 13 else 100.0, {55: back}),
    "two rollbacks": (10, lambda _: 1.0, {30: back, 35: back, 36: further_back}),
    "all well": (10, lambda _: 1.0, {45: back}),
}


@pytest.mark.parametrize("scene", SCENES)
def test_wherever_sigterm_comes_it_goes_back_to_the_same_and_ends_with_the_same_bits(scene, tmp_path):
    every, level, does = SCENES[scene]
    weights, said = life(tmp_path / "whole", level, does, every=every)
    assert said
    for term_at in sorted({*range(3, STEPS, 7), *does, 12, 29, 40, 48}):
        folder = tmp_path / str(term_at)
        with pytest.raises(SystemExit):
            life(folder, level, does, every=every, term_at=term_at)
        then, told = life(folder, level, does, every=every)
        assert then == weights, (term_at, told)
        assert told == {step: what for step, what in said.items() if step > term_at}, term_at


def test_the_best_is_the_same_and_no_batch_s_luck(tmp_path):
    """The mean that "best" goes by is since the last save that was due, and not since SIGTERM."""

    def level(step):
        return 0.0 if step == 1 else 1.0 - step / 100

    def values(folder):
        found = {e.manifest.step: e.manifest for e in entries(folder) if e.manifest is not None}
        return {step: (m.monitored, m.monitored_samples) for step, m in found.items() if step % 20 == 0}

    life(tmp_path / "whole", level, {}, every=20, monitor="loss")
    for term_at in (1, 33, 40, 59):
        folder = tmp_path / str(term_at)
        with pytest.raises(SystemExit):
            life(folder, level, {}, every=20, monitor="loss", term_at=term_at)
        life(folder, level, {}, every=20, monitor="loss")
        assert values(folder).items() <= values(tmp_path / "whole").items()
        assert max(values(folder)) == STEPS
        found = [e.manifest for e in entries(folder) if e.manifest is not None]
        best = FaultTolerantTrainer(nn.Linear(3, 1), folder, 20, "best", monitor="loss", deterministic=True)
        assert best is not None
        assert min(found, key=lambda m: m.monitored).step == STEPS


def test_where_only_what_sigterm_saved_is_good_a_rollback_says_so(tmp_path):
    does = {58: lambda trainer: trainer.rollback()}

    def level(step):
        return 1.0 if step <= 9 else math.nan

    with pytest.raises(SystemExit):
        life(tmp_path, level, does, every=30, term_at=9)
    _, said = life(tmp_path, level, does, every=30)
    assert "what was saved at step 9 is good, but at no time at which all runs save" in said[58]
    assert "rollback(9) goes back to it" in said[58]


def test_a_rollback_whose_checkpoint_could_not_be_written_is_told_by_the_next(tmp_path, monkeypatch):
    is_full, add = [False], directory.Directory.add

    def fills(folder, number, step, write):
        if is_full[0]:
            is_full[0] = False
            raise CheckpointError("no space left on device")
        return add(folder, number, step, write)

    def back_on_a_full_disk(trainer):
        is_full[0] = True
        return trainer.rollback(10)

    monkeypatch.setattr(directory.Directory, "add", fills)
    monkeypatch.setattr("offbeat.recovery.saver.RETRY_S", 0.0)
    does = {
        33: back_on_a_full_disk,
        34: lambda trainer: trainer.checkpoint_steps(),
        45: lambda trainer: trainer.checkpoint_steps(),
    }
    _, said = life(tmp_path, lambda _: 1.0, does, every=10)
    assert said == {33: 10, 34: [10], 45: [40, 10]}, "what was gone back from is not offered"
