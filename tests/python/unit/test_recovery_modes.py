"""Which parameters are trained, and which modules are in training mode, goes on after a crash as all else."""

import functools

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.recovery import run as run_module
from offbeat.recovery.trainer import FaultTolerantTrainer

LOSS = nn.CrossEntropyLoss()
FREED_AT = 7


def batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(5)]


def net():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    made[0].requires_grad_(False)
    return made


class Freeing:
    """A loss that, at a step, lets the first layer be trained, and puts the normalization to sleep."""

    def __init__(self, module, done, fails_at):
        self.module, self.steps, self.fails_at = module, done, fails_at

    def __call__(self, outputs, targets):
        self.steps += 1
        if self.steps == self.fails_at:
            raise ZeroDivisionError
        if self.steps == FREED_AT:
            self.module[0].requires_grad_(True)
            self.module[1].eval()
        return LOSS(outputs, targets)


def life(folder, *, max_steps, done=0, fails_at=None, wrap=lambda module: module, change=lambda module: None):
    module = net()
    change(module)
    trainer = FaultTolerantTrainer(wrap(module), folder, checkpoint_frequency=9)
    trainer.train(
        dataloader=batches(),
        epochs=4,
        max_steps=max_steps,
        optimizer=optim.Adam(lr=0.01),
        loss_fn=Freeing(module, done, fails_at),
    )
    return module, trainer


def equal(one, other):
    return all(
        a.equal(b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: module,
        offbeat.AsyncTrainer,
        functools.partial(offbeat.AsyncTrainer, strategy="diloco", regular_sync_frequency=4),
        functools.partial(offbeat.AsyncModelAverager, averaging_frequency=4, method="slowmo"),
    ],
    ids=["a module", "a trainer", "a trainer that averages", "an averager"],
)
def test_what_was_unfrozen_and_put_to_sleep_in_mid_run_stays_so_after_a_crash(wrap, tmp_path, caplog):
    whole, _ = life(tmp_path / "whole", max_steps=15, wrap=wrap)
    with pytest.raises(ZeroDivisionError):
        life(tmp_path / "kept", max_steps=15, fails_at=14, wrap=wrap)
    caplog.clear()
    module, trainer = life(tmp_path / "kept", max_steps=15, done=FREED_AT, wrap=wrap)
    assert int(trainer.resumed_from.name.rpartition("-")[2]) > FREED_AT
    assert module[0].weight.requires_grad
    assert (module[1].training, module[3].training) == (False, True)
    assert equal(module, whole)
    assert "requires_grad" not in caplog.text  # which a script begins with each time


def test_what_is_given_otherwise_than_the_run_began_with_is_told_and_the_checkpoint_s_is_taken(
    tmp_path, caplog
):
    life(tmp_path, max_steps=3)
    module, _ = life(tmp_path, max_steps=5, done=3, change=lambda module: module[0].requires_grad_(True))
    assert not module[0].weight.requires_grad
    assert "requires_grad of '0.weight' and 1 more is True, and the checkpoint's run began" in caplog.text


def test_what_a_user_sets_between_two_trains_counts(tmp_path, caplog):
    module, trainer = life(tmp_path, max_steps=5)
    before = module[0].weight.clone()
    module[0].requires_grad_(True)
    module[1].eval()
    module[4].bias.requires_grad_(False)
    held = module[4].bias.clone()
    trainer.train(dataloader=batches(), epochs=2, loss_fn=LOSS)
    assert not module[0].weight.equal(before)
    assert module[4].bias.equal(held)
    assert (module[1].training, module[3].training) == (False, True)
    assert "requires_grad" not in caplog.text


def test_a_look_at_the_model_in_eval_mode_between_two_trains_changes_no_mode(tmp_path):
    module, trainer = life(tmp_path, max_steps=9)
    module.eval()
    trainer.train(dataloader=batches(), epochs=2, loss_fn=LOSS)
    assert (module.training, module[1].training, module[3].training) == (True, False, True)


def test_a_checkpoint_without_modes_leaves_a_module_as_it_is(tmp_path, monkeypatch):
    rest = run_module.Run._rest

    def older(self, account):
        given = rest(self, account)
        return lambda: {name: value for name, value in given().items() if name != "modes"}

    with monkeypatch.context() as patched:
        patched.setattr(run_module.Run, "_rest", older)
        life(tmp_path, max_steps=8)
    module, _ = life(tmp_path, max_steps=9, done=8)
    assert not module[0].weight.requires_grad
    assert module[1].training
