"""`FaultTolerantTrainer`: what it trains is what a loop trains, and what it cannot do it refuses by name."""

import errno
import functools
import logging
import os
import re
import shutil
import signal
import threading
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import optim
from offbeat.errors import (
    CheckpointError,
    ConfigError,
    ModelMismatchError,
    StateError,
    UnsupportedTensorError,
)
from offbeat.frequency import Every
from offbeat.recovery import saver as saver_module
from offbeat.recovery import tensor_file
from offbeat.recovery.directory import Directory, entries, names
from offbeat.recovery.files import Parts
from offbeat.recovery.manifest import Manifest
from offbeat.recovery.nest import flatten
from offbeat.recovery.saver import Delays, Draft, Saver, is_due, words_of_delay
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.fault_tolerant import waited

LOSS = nn.CrossEntropyLoss()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(length=40):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(length, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (length,), generator=generator))


def made(folder, **keywords):
    return FaultTolerantTrainer(net(), folder, **{"checkpoint_frequency": 3} | keywords)


def run(trainer, **keywords):
    keywords = {
        "dataset": data(),
        "batch_size": 8,
        "optimizer": optim.Adam(lr=0.01),
        "loss_fn": LOSS,
    } | keywords
    if "dataloader" in keywords:  # with which neither of these goes
        keywords = {name: value for name, value in keywords.items() if name not in ("dataset", "batch_size")}
    return trainer.train(**keywords)


def values(module):
    return [p.detach().clone() for p in module.parameters()]


def equal(one, other):
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------------------------- a plain loop


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        (optim.SGD(lr=0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        (torch.optim.RAdam, torch.optim.RAdam),
    ],
)
def test_it_trains_as_a_plain_loop_does_with_scheduler_and_scaler(given, theirs, tmp_path):
    batches = list(DataLoader(data(), batch_size=8))
    step_lr = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    trainer = made(tmp_path)
    history = run(
        trainer,
        dataloader=batches,
        epochs=3,
        optimizer=given,
        scheduler=step_lr,
        scheduler_interval="step",
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        log_frequency=1,
    )
    module = net()
    optimizer, scaler = theirs(module.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler, losses = step_lr(optimizer), []
    for inputs, targets in batches * 3:
        loss = LOSS(module(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    assert equal(values(trainer.model), values(module))
    assert [record.metrics["loss"] for record in history.records] == losses
    assert (history.epochs, history.steps, history.samples, history.stopped) == (3, 15, 120, "epochs")


SCHEDULERS = torch.optim.lr_scheduler


def in_turn(optimizer, length):
    parts = [
        SCHEDULERS.ConstantLR(optimizer, total_iters=1),
        SCHEDULERS.CosineAnnealingLR(optimizer, T_max=length),
    ]
    return SCHEDULERS.SequentialLR(optimizer, parts, milestones=[1])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda live, length: SCHEDULERS.CosineAnnealingLR(live, T_max=length), "made with T_max="),
        (lambda live, length: SCHEDULERS.MultiStepLR(live, [1, length]), "made with milestones="),
        (in_turn, "made with a CosineAnnealingLR with T_max="),
        (
            lambda live, length: SCHEDULERS.CyclicLR(
                live, 0.01, 0.1, step_size_up=length, cycle_momentum=False
            ),
            "made with step_ratio=|made with total_size=",
        ),
        (
            lambda live, length: SCHEDULERS.OneCycleLR(
                live, 0.1, total_steps=99, pct_start=length / 10, cycle_momentum=False
            ),
            "made with schedule_phases=",
        ),
    ],
)
@pytest.mark.parametrize("length", [2, 4])
def test_a_schedule_of_another_length_than_the_checkpoint_s_is_warned_of(
    make, told, length, tmp_path, caplog
):
    for epochs, now in ((2, 2), (4, length)):
        caplog.clear()
        run(
            made(tmp_path),
            epochs=epochs,
            optimizer=optim.SGD(lr=0.1),
            scheduler=functools.partial(make, length=now),
        )
    said = [record.message for record in caplog.records if "is made with" in record.message]
    assert len(said) == (length != 2)
    assert all(re.search(told, one) for one in said)
    assert all("For a longer run make it as long from the beginning" in one for one in said)


class ByArrays(SCHEDULERS.LRScheduler):
    """Is made with an array, and moves a factor of its own."""

    def __init__(self, optimizer):
        self.milestones, self.factor = np.array([1, 3]), 1.0
        super().__init__(optimizer)

    def get_lr(self):
        self.factor *= 0.5
        return [base * self.factor for base in self.base_lrs]


def test_a_scheduler_of_one_s_own_is_brought_back_whatever_it_is_made_with(tmp_path, caplog):
    for epochs in (2, 4):
        trainer = made(tmp_path)
        run(trainer, epochs=epochs, optimizer=optim.SGD(lr=0.1), scheduler=ByArrays)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**5)
    assert "is made with" not in caplog.text


def test_a_sum_over_the_batch_is_shown_as_a_mean(tmp_path):
    history = run(
        made(tmp_path, loss_reduction="sum"),
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        optimizer=optim.SGD(lr=1e-9),
        log_frequency=1,
    )
    assert all(0.5 < record.metrics["loss"] < 2.5 for record in history.records)


def test_each_pass_has_an_order_of_its_own_that_follows_from_the_seed(tmp_path):
    def order(folder, seed):
        seen = []
        trainer = made(tmp_path / folder)
        numbered = TensorDataset(torch.randn(20, 4), torch.arange(20) % 3, torch.arange(20))
        pairs = [((x, i), y) for x, y, i in numbered]
        trainer.model.register_forward_pre_hook(
            lambda _, given: (seen.extend(given[0][1].tolist()), given[0][0])[1]
        )
        run(trainer, dataset=pairs, epochs=2, seed=seed)
        return seen

    one = order("a", 1)
    assert sorted(one[:20]) == sorted(one[20:]) == list(range(20))
    assert one[:20] != one[20:]
    assert one == order("b", 1) != order("c", 2)


# ---------------------------------------------------------------------------------------- going on


def test_epochs_are_a_total_and_more_of_them_go_on(tmp_path):
    whole = made(tmp_path / "whole")
    run(whole, epochs=4)
    trainer = made(tmp_path / "parts")
    run(trainer, epochs=2)
    history = run(trainer, epochs=4)
    assert (history.epochs, history.steps) == (4, 20)
    assert equal(values(trainer.model), values(whole.model))
    again = made(tmp_path / "parts")
    again.model[0].weight.data.zero_()
    assert run(again, epochs=3).steps == 20
    assert equal(values(again.model), values(whole.model))
    assert again.resumed_from.name == names(tmp_path / "parts")[0]


def test_means_between_log_lines_are_those_of_an_uninterrupted_run(tmp_path):
    """Those over steps of two lives, too."""
    keywords = {"epochs": 4, "log_frequency": 7, "metrics": ["loss", "accuracy"], "optimizer": None}
    optimizer = optim.SGD(lr=0.1)
    whole = run(made(tmp_path / "whole", monitor="loss"), **keywords | {"optimizer": optimizer})
    steps = []

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 12:
            raise KeyboardInterrupt
        return LOSS(outputs, targets)

    first = made(tmp_path / "parts", monitor="loss", checkpoint_frequency=5)
    with pytest.raises(KeyboardInterrupt):
        run(first, **keywords | {"optimizer": optimizer, "loss_fn": loss_fn})
    assert first.history.stopped == "interrupted"
    then = made(tmp_path / "parts", monitor="loss")
    parts = run(then, **keywords | {"optimizer": optimizer})
    assert then.resumed_from.name.rpartition("-")[2] not in ("7", "14")  # between two lines
    assert [(r.step, r.samples, r.metrics) for r in parts.records] == [
        (r.step, r.samples, r.metrics) for r in whole.records
    ]
    times = [record.seconds for record in parts.records]
    assert times == sorted(times)
    assert parts.seconds >= times[-1] > 0.0


def test_state_that_torch_would_cast_comes_back_as_it_was(tmp_path):
    class Master(torch.optim.SGD):
        """Keeps its values in float32, as training in bfloat16 does."""

        def step(self, closure=None):
            del closure
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    master = state.setdefault("master", p.detach().float().clone())
                    master -= group["lr"] * p.grad.float()
                    p.data.copy_(master)

    def trainer(folder):
        own = FaultTolerantTrainer(net().bfloat16(), folder, checkpoint_frequency=3)
        return own, Master(own.model.parameters(), lr=0.01)

    brief = [(x.bfloat16(), y) for x, y in data()]
    (whole, optimizer), (first, one), (then, two) = (trainer(tmp_path / f) for f in ("a", "b", "b"))
    run(whole, dataset=brief, optimizer=optimizer, epochs=4)
    run(first, dataset=brief, optimizer=one, epochs=2)
    run(then, dataset=brief, optimizer=two, epochs=4)
    assert {s["master"].dtype for s in two.state.values()} == {torch.float32}
    assert equal([s["master"] for s in two.state.values()], [s["master"] for s in optimizer.state.values()])


def test_other_settings_than_the_checkpoint_s_are_warned_of_and_the_checkpoint_s_are_taken(tmp_path, caplog):
    run(made(tmp_path), epochs=1)
    trainer = made(tmp_path)
    run(trainer, epochs=2, optimizer=optim.Adam(lr=0.5))
    assert "optimizer's lr is 0.5, and the checkpoint's run began with 0.01" in caplog.text
    assert (
        "for one start alone: a command that a supervisor repeats would begin anew each time" in caplog.text
    )
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01


def test_each_start_with_another_rate_than_the_run_began_with_is_warned_of_and_no_other(tmp_path, caplog):
    step_lr = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for number, scheduler in enumerate((None, step_lr)):
        warned = []
        for epochs, lr in enumerate((0.05, 0.5, 0.5, 0.05), 1):
            caplog.clear()
            trainer = made(tmp_path / str(number))
            run(trainer, epochs=epochs, optimizer=optim.SGD(lr=lr), scheduler=scheduler)
            group = trainer.optimizer.param_groups[0]
            assert group.get("initial_lr", group["lr"]) == 0.05
            warned.append(
                "the optimizer's lr is 0.5, and the checkpoint's run began with 0.05" in caplog.text
            )
            assert warned[-1] == ("register_step_pre_hook" in caplog.text) == ("began with" in caplog.text)
        assert warned == [False, True, True, False]


def test_a_run_whose_optimizer_got_a_group_in_mid_run_goes_on_where_both_are_given(tmp_path):
    module = net()
    module[2].requires_grad_(False)
    live = torch.optim.SGD(module[0].parameters(), lr=0.1)
    steps = []

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 3:
            module[2].requires_grad_(True)
            live.add_param_group({"params": module[2].parameters(), "lr": 0.01})
        return LOSS(outputs, targets)

    run(FaultTolerantTrainer(module, tmp_path), optimizer=live, loss_fn=loss_fn, epochs=9, max_steps=4)
    module = net()
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.01}]
    live = torch.optim.SGD(groups, lr=0.1)
    assert run(FaultTolerantTrainer(module, tmp_path), optimizer=live, epochs=9, max_steps=6).steps == 6


def test_a_hook_changes_a_rate_in_a_run_that_goes_on_as_that_warning_says(tmp_path, caplog):
    batches = list(DataLoader(data(), batch_size=8))
    whole = net()
    theirs = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        theirs.param_groups[0]["lr"] = 0.5 if epoch else 0.05
        for inputs, targets in batches:
            theirs.zero_grad()
            LOSS(whole(inputs), targets).backward()
            theirs.step()

    def faster(optimizer, *_):
        optimizer.param_groups[0]["lr"] = 0.5

    for epochs in (1, 2, 3):
        trainer = made(tmp_path)
        lr = 0.5 if epochs == 3 else 0.05  # in effect since the second life
        live = torch.optim.SGD(trainer.model.parameters(), lr=lr, momentum=0.9)
        if epochs == 2:
            live.register_step_pre_hook(faster)
        run(trainer, dataloader=batches, epochs=epochs, optimizer=live)
    assert equal(values(trainer.model), values(whole))
    assert "began with" not in caplog.text


# ---------------------------------------------------------------------------------------- strategies


def test_a_path_goes_on_from_that_checkpoint(tmp_path):
    run(made(tmp_path / "kept"), epochs=2)
    middle = tmp_path / "kept" / names(tmp_path / "kept")[-1]
    trainer = made(tmp_path / "other", recovery_strategy=middle)
    history = run(trainer, epochs=2)
    assert trainer.resumed_from == middle
    assert history.steps == 10
    with pytest.raises(ConfigError, match=r"recovery_strategy is the path .*, which is no checkpoint"):
        run(made(tmp_path / "third", recovery_strategy=str(tmp_path / "nowhere")))


def test_a_server_s_checkpoint_is_none_of_a_trainer_s_and_neither_takes_the_other_s_directory(tmp_path):
    with offbeat.ParameterServer(nn.Linear(6, 5), checkpoint_dir=tmp_path / "served"):
        pass
    (theirs,) = (tmp_path / "served").glob("checkpoint-*")
    (tmp_path / "linked").symlink_to(theirs)
    for path in (theirs, tmp_path / "linked"):
        with pytest.raises(
            ConfigError, match="which is a server's checkpoint, and not a trainer's: give a folder"
        ):
            run(made(tmp_path / "kept", recovery_strategy=path))
    with pytest.raises(
        ConfigError, match=r"and a server keeps its checkpoints there \(checkpoint-000001\): give ano"
    ):
        run(made(tmp_path / "served"))
    run(made(tmp_path / "kept"), epochs=1)
    before = sorted(path.name for path in (tmp_path / "kept").iterdir())
    told = rf"a FaultTolerantTrainer keeps its checkpoints there \({names(tmp_path / 'kept')[0]}\)"
    for resume in ("auto", "never", "must"):
        with pytest.raises(ConfigError, match=told):
            offbeat.ParameterServer(nn.Linear(6, 5), checkpoint_dir=tmp_path / "kept", resume=resume).start()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == before
    shutil.copy(tmp_path / "served" / "life.json", tmp_path / "kept")  # as from before that was refused
    with pytest.raises(ConfigError, match=r"\(life\.json\): .* if no server needs them, remove them"):
        run(made(tmp_path / "kept"))


def test_none_begins_anew_in_an_empty_directory_or_where_it_may_overwrite(tmp_path):
    run(made(tmp_path, recovery_strategy="none"), epochs=1)
    refused = r"is 'none', and checkpoint_dir .* is not empty \(there is save-"
    with pytest.raises(ConfigError, match=refused) as caught:
        run(made(tmp_path, recovery_strategy="none"), epochs=1)
    assert "at each start: in a command that a supervisor repeats take 'latest'" in str(caught.value)
    trainer = made(tmp_path, recovery_strategy="none", overwrite=True)
    history = run(trainer, epochs=1)
    assert trainer.resumed_from is None
    assert history.steps == 5
    assert run(trainer, epochs=2).steps == 10  # in this process it goes on with what it has


@pytest.mark.parametrize("epochs", [1, 2], ids=["where all is done", "in a run that goes on"])
@pytest.mark.parametrize(
    ("ruin", "said"),
    [
        ("a loss", "the loss is not finite"),
        ("a parameter", "parameters are not finite"),
        ("a loss that leaps", None),
        (None, None),
    ],
)
def test_who_goes_on_from_what_is_not_finite_is_warned(ruin, said, epochs, tmp_path, caplog):
    module = net()
    module.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    steps = []

    def loss_fn(outputs, targets):
        steps.append(1)
        loss = LOSS(outputs, targets)
        if len(steps) < 40:
            return loss
        if ruin == "a parameter":
            return ruined(loss, module.idle)
        return loss + {"a loss": torch.nan, "a loss that leaps": 1e3}.get(ruin, 0.0)  # no gradient has it

    trainer = FaultTolerantTrainer(module, tmp_path)
    run(trainer, loss_fn=loss_fn, epochs=8)
    caplog.clear()
    run(FaultTolerantTrainer(module, tmp_path), loss_fn=loss_fn, epochs=7 + epochs)
    began = tmp_path / names(tmp_path)[-1]
    told = [r.message for r in caplog.records if "which this goes on from" in r.getMessage()]
    back = "recovery_strategy='last_good' goes back to the newest checkpoint that is good"
    assert told == ([] if said is None else [f"{said} in {began}, which this goes on from: {back}"])


@pytest.mark.parametrize("ruin", ["a loss that is not finite", "a loss that leaps", "a parameter"])
def test_last_good_passes_over_a_checkpoint_that_is_not_good(ruin, tmp_path):
    factor = [1.0]

    def loss_fn(outputs, targets):
        return LOSS(outputs, targets) * factor[0]

    def trainer(**keywords):
        module = net()
        module.register_parameter("idle", nn.Parameter(torch.zeros(2)))
        return FaultTolerantTrainer(module, tmp_path, checkpoint_frequency=1000, **keywords)

    first = trainer()
    run(first, loss_fn=loss_fn, epochs=6)  # of 5 steps
    good = values(first.model)
    factor[0] = {"a loss that is not finite": float("nan"), "a loss that leaps": 100.0}.get(ruin, 1.0)
    for epochs in (7, 8, 9, 10):
        if ruin == "a parameter":
            run(first, loss_fn=lambda o, t: ruined(loss_fn(o, t), first.model.idle), epochs=epochs)
        else:
            run(first, loss_fn=loss_fn, epochs=epochs)
    assert len(names(tmp_path)) == 4  # the newest three, and the newest good one
    then = trainer(recovery_strategy="last_good")
    run(then, loss_fn=loss_fn, epochs=6)
    assert equal(values(then.model), good)


def ruined(loss, parameter):
    parameter.data[1] = torch.inf
    return loss


def test_best_goes_on_from_the_best_of_what_is_monitored(tmp_path):
    levels = iter([3.0] * 5 + [1.0] * 5 + [2.0] * 5)

    def level(outputs, targets):
        del outputs, targets
        return next(levels)

    first = made(tmp_path, monitor=level, mode="min", checkpoint_frequency=1000)
    for max_steps in (5, 10, 14):
        run(first, max_steps=max_steps, epochs=9)
    trainer = made(tmp_path, monitor=level, mode="min", recovery_strategy="best")
    assert run(trainer, max_steps=10, epochs=9).steps == 10
    assert trainer.resumed_from.name.endswith("step-10")


def test_each_checkpoint_says_of_how_many_samples_its_mean_is(tmp_path, monkeypatch):
    """Where a run ends shortly after a save, the last one is of few, and not taken for the best."""
    levels = iter([2.0] * 6 + [0.0] + [3.0] * 9)

    def level(outputs, targets):
        del outputs, targets
        return next(levels)

    monkeypatch.setattr(Saver, "save", waited(Saver.save))  # none is put off
    run(made(tmp_path, monitor=level, mode="min"), max_steps=7, epochs=9)
    found = {e.manifest.step: e.manifest for e in entries(tmp_path)}
    assert {step: m.monitored_samples for step, m in found.items()} == {3: 24, 6: 24, 7: 8}
    assert [found[step].monitored for step in (3, 6, 7)] == [2.0, 2.0, 0.0]
    trainer = made(tmp_path, monitor=level, mode="min", recovery_strategy="best")
    run(trainer, max_steps=8, epochs=9)
    assert trainer.resumed_from.name.endswith("step-6")


def test_the_best_stays_it_where_checkpoints_are_of_more_steps_from_then_on(tmp_path, monkeypatch):
    """As a warning of slow saves advises: it was shut out as a mean of few samples then, and removed."""
    levels = iter([2.0, 2.0, 1.0, 1.0, 2.0, 2.0] + [3.0] * 999)

    def level(outputs, targets):
        del outputs, targets
        return next(levels)

    monkeypatch.setattr(Saver, "save", waited(Saver.save))
    run(made(tmp_path, monitor=level, mode="min", checkpoint_frequency=2), max_steps=6, epochs=99)
    run(made(tmp_path, monitor=level, mode="min", checkpoint_frequency=12), max_steps=60, epochs=99)
    trainer = made(tmp_path, monitor=level, mode="min", checkpoint_frequency=12, recovery_strategy="best")
    run(trainer, max_steps=61, epochs=99)
    assert trainer.resumed_from.name.endswith("step-4")


@pytest.mark.parametrize(
    ("name", "mode", "step"),
    [
        ("accuracy", None, 6),
        ("accuracy", "min", 3),
        ("mse_loss", None, 3),
        ("MSELoss", None, 3),
        ("cross_entropy", None, 3),
        ("level", "min", 3),
        ("level", "max", 6),
    ],
)
def test_more_accuracy_is_better_and_less_of_a_loss_unless_it_is_said(
    name, mode, step, tmp_path, monkeypatch
):
    levels = iter([0.5] * 3 + [0.9] * 3 + [0.7] * 99)
    keywords = {"monitor": lambda *_: next(levels)} | ({} if mode is None else {"mode": mode})
    keywords["monitor"].__name__ = name
    monkeypatch.setattr(Saver, "save", waited(Saver.save))
    run(made(tmp_path, **keywords), max_steps=9, epochs=9)
    trainer = made(tmp_path, **keywords, recovery_strategy="best")
    run(trainer, max_steps=12, epochs=9)
    assert trainer.resumed_from.name.endswith(f"step-{step}")


def test_whether_less_or_more_of_another_metric_is_better_has_to_be_said(tmp_path):
    """Else the worst F1 score would be kept, and gone back to, as the best."""

    def f1(outputs, targets):
        return 1.0

    for monitor, name in ((f1, "f1"), (functools.partial(f1), "partial")):
        with pytest.raises(ConfigError, match=rf"monitor is '{name}', .*: give mode='min' or mode='max'"):
            made(tmp_path, monitor=monitor)
    for mode in ("min", "max"):
        made(tmp_path, monitor=f1, mode=mode)


def test_what_a_train_had_measured_that_broke_off_before_it_saved_is_in_no_mean(tmp_path):
    levels = iter([9.0] * 2 + [2.0] * 3)

    def level(outputs, targets):
        del outputs, targets
        return next(levels)

    trainer, steps = made(tmp_path, monitor=level, mode="min"), []

    def fails(outputs, targets):
        steps.append(1)
        if len(steps) == 3:
            raise ZeroDivisionError
        return LOSS(outputs, targets)

    with pytest.raises(ZeroDivisionError):
        run(trainer, loss_fn=fails)
    run(trainer, max_steps=3)
    assert {(e.manifest.monitored, e.manifest.monitored_samples) for e in entries(tmp_path)} == {(2.0, 24)}


def cut_off(folder, *, after, **keywords):
    """Start the command of a run, and kill it by an exception after so many steps; give where it began."""
    steps = []

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) > after:
            raise ZeroDivisionError
        return LOSS(outputs, targets)

    trainer = made(folder, checkpoint_frequency=2, **keywords)
    with pytest.raises(ZeroDivisionError):
        run(trainer, loss_fn=loss_fn, epochs=9)
    return trainer.resumed_from


@pytest.mark.parametrize("strategy", ["a path elsewhere", "a path in the directory", "best"])
def test_the_same_command_goes_back_once_and_then_on_from_the_newest(strategy, tmp_path, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    levels = iter(range(100))

    def level(outputs, targets):
        del outputs, targets
        return next(levels)  # the first checkpoint is the best

    keywords = {"monitor": level, "mode": "min"} if strategy == "best" else {}
    where = "kept" if strategy == "a path elsewhere" else "fork"
    run(made(tmp_path / where, **keywords), epochs=2, max_steps=7)
    oldest = tmp_path / where / names(tmp_path / where)[-1]
    assert oldest.name == "save-000001-step-3"
    asked = keywords | {"recovery_strategy": "best" if strategy == "best" else str(oldest)}
    began = [cut_off(tmp_path / "fork", after=4, **asked) for _ in range(3)]
    steps = [int(path.name.rpartition("-")[2]) for path in began]
    assert began[0] == oldest
    assert steps[0] < steps[1] < steps[2]  # what was made since is not thrown away
    assert caplog.text.count("was made under the same recovery_strategy") == 2
    finished = made(tmp_path / "fork", **asked)
    run(finished, epochs=9)
    again = made(tmp_path / "fork", **asked)
    called = []
    history = run(again, epochs=9, loss_fn=lambda outputs, targets: called.append(1))
    assert (history.steps, called) == (45, [])
    assert equal(values(again.model), values(finished.model))
    assert again.resumed_from.name == names(tmp_path / "fork")[0]
    if strategy == "a path in the directory":
        assert not oldest.exists()  # and nobody misses it


def test_another_request_than_the_newest_s_goes_back(tmp_path):
    run(made(tmp_path / "kept"), epochs=2)
    middle = tmp_path / "kept" / names(tmp_path / "kept")[-1]
    for epochs, strategy in enumerate([middle, "latest", middle, middle], 2):
        trainer = made(tmp_path / "fork", recovery_strategy=strategy)
        run(trainer, epochs=epochs)
        assert (trainer.resumed_from == middle) == (epochs in (2, 4))


def test_where_what_came_of_a_request_is_damaged_it_goes_back_again(tmp_path, caplog):
    run(made(tmp_path / "kept"), epochs=2, max_steps=7)
    middle = tmp_path / "kept" / "save-000001-step-3"
    run(made(tmp_path / "fork", recovery_strategy=middle), max_steps=4)
    (newest,) = names(tmp_path / "fork")
    (tmp_path / "fork" / newest / "state.json").write_text("{}", "utf-8")
    again = made(tmp_path / "fork", recovery_strategy=middle)
    run(again, epochs=2)
    assert again.resumed_from == middle
    assert f"{newest}: state.json has 2 bytes" in again.passed_over[0]


def test_last_good_goes_back_where_the_newest_is_not_good_and_trains_nothing_where_a_good_one_is_done(
    tmp_path, caplog
):
    caplog.set_level(logging.INFO, "offbeat")
    run(made(tmp_path), epochs=1)
    good = names(tmp_path)[0]
    asked = {"recovery_strategy": "last_good"}
    run(
        made(tmp_path, **asked), epochs=2, loss_fn=lambda outputs, targets: LOSS(outputs, targets) * torch.nan
    )
    again = made(tmp_path, **asked)
    assert run(again, epochs=2).steps == 10  # the same command: a model that is NaN is no end
    assert again.resumed_from.name == good
    assert all(torch.isfinite(value).all() for value in again.model.state_dict().values())
    assert "step-10 is not good (its loss is nan, or parameters are not finite)" in caplog.text
    called = []
    once_more = made(tmp_path, **asked)
    assert run(once_more, epochs=2, loss_fn=lambda outputs, targets: called.append(1)).steps == 10
    assert (called, once_more.resumed_from.name) == ([], names(tmp_path)[0])
    assert equal(values(once_more.model), values(again.model))
    assert caplog.text.count("is not good") == 1


def with_a_harder_end(folder, *, ruins=False, **keywords):
    """Train 7 epochs of 5 steps, the last of which has a finite loss that is far beyond the band."""
    module, num = net(), [0]
    module.register_parameter("idle", nn.Parameter(torch.zeros(2)))

    def loss_fn(outputs, targets):
        num[0] += 1
        if ruins and num[0] == 35:
            ruined(None, module.idle)
        return LOSS(outputs, targets) * (100.0 if num[0] > 30 else 1.0)

    trainer = FaultTolerantTrainer(module, folder, **keywords)
    for epochs in (6, 7):  # each end is saved, whatever the disk is at
        history = run(trainer, loss_fn=loss_fn, epochs=epochs, log_frequency=1)
    newest = entries(folder)[0].manifest
    assert (newest.is_good, newest.is_finished, newest.step) == (False, True, 35)
    assert newest.band < newest.loss < torch.inf
    return trainer, history


def begun_again(folder):
    """Give a trainer for the same command, a list with an entry for each loss, and what computes these."""
    module, called = net(), []
    module.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    trainer = FaultTolerantTrainer(module, folder, recovery_strategy="last_good")
    return trainer, called, lambda outputs, targets: called.append(1) or LOSS(outputs, targets)


@pytest.mark.parametrize("has_good", [True, False])
def test_last_good_trains_nothing_where_all_is_done_and_only_the_loss_is_beyond_its_band(
    has_good, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "offbeat")
    first, history = with_a_harder_end(tmp_path, recovery_strategy="last_good")
    kept = names(tmp_path)
    assert [entry.manifest.is_good for entry in entries(tmp_path)] == [False, True]
    if not has_good:
        shutil.rmtree(tmp_path / kept.pop())
    again, called, loss_fn = begun_again(tmp_path)
    told = run(again, loss_fn=loss_fn, epochs=7)
    assert (called, told.steps, told.epochs, told.stopped) == ([], 35, 7, "epochs")
    assert told.records == history.records
    assert (again.resumed_from.name, names(tmp_path)) == (kept[0], kept)
    assert equal(values(again.model), values(first.model))
    assert "is beyond its band), and is the end of the run" in caplog.text


@pytest.mark.parametrize("why", ["a parameter is not finite", "more is asked for", "another command made it"])
def test_last_good_goes_back_from_a_harder_end_where(why, tmp_path):
    strategy = "latest" if why == "another command made it" else "last_good"
    with_a_harder_end(tmp_path, ruins=why == "a parameter is not finite", recovery_strategy=strategy)
    again, called, loss_fn = begun_again(tmp_path)
    epochs = 8 if why == "more is asked for" else 7
    assert run(again, loss_fn=loss_fn, epochs=epochs).steps == 5 * epochs
    assert again.resumed_from.name.endswith("step-30")
    assert len(called) == 5 * epochs - 30
    assert all(value.isfinite().all() for value in values(again.model))


def test_what_last_good_has_made_since_it_went_back_is_not_thrown_away(tmp_path):
    run(made(tmp_path), epochs=1)
    asked = {"recovery_strategy": "last_good"}
    run(
        made(tmp_path, **asked), epochs=9, loss_fn=lambda outputs, targets: LOSS(outputs, targets) * torch.nan
    )
    began = [cut_off(tmp_path, after=4, **asked) for _ in range(3)]
    steps = [int(path.name.rpartition("-")[2]) for path in began]
    assert steps[0] == 5 < steps[1] < steps[2]


def test_an_end_that_is_not_good_is_gone_back_from_once_and_then_told_with_the_remedy(tmp_path):
    run(made(tmp_path), epochs=1)
    good = tmp_path / names(tmp_path)[0]
    asked, called = {"recovery_strategy": "last_good"}, []

    def loss_fn(outputs, targets):
        called.append(1)
        return LOSS(outputs, targets) * torch.nan

    for again in (1, 2):
        trainer = made(tmp_path, **asked)
        run(trainer, epochs=2, loss_fn=loss_fn)
        assert (trainer.resumed_from, len(called)) == (good, 5 * again)
    kept = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"once more since it went back to save-\d+-step-5") as told:
        run(made(tmp_path, **asked), epochs=2, loss_fn=loss_fn)
    assert (len(called), names(tmp_path)) == (10, kept)
    assert f"recovery_strategy={str(good)!r}" in str(told.value)
    ended = made(tmp_path)  # as "latest" gives it
    assert (run(ended, epochs=2, loss_fn=loss_fn).steps, len(called)) == (10, 10)
    mended = made(tmp_path, recovery_strategy=str(good))
    assert run(mended, epochs=2).steps == 10
    done = made(tmp_path, **asked)  # the newest is good, whoever made it
    assert run(done, epochs=2, loss_fn=loss_fn).steps == 10
    assert equal(values(done.model), values(mended.model))


def test_an_end_that_is_not_good_is_gone_back_from_again_where_a_newer_good_one_came_of_it(tmp_path):
    run(made(tmp_path), epochs=1)
    asked, num = {"recovery_strategy": "last_good"}, [0]

    def loss_fn(outputs, targets):
        num[0] += 1
        return LOSS(outputs, targets) * (torch.nan if num[0] % 5 == 0 else 1.0)

    run(
        made(tmp_path, **asked), epochs=2, loss_fn=lambda outputs, targets: LOSS(outputs, targets) * torch.nan
    )
    run(made(tmp_path, checkpoint_frequency=2, **asked), epochs=2, loss_fn=loss_fn)
    begun = made(tmp_path, **asked)
    run(begun, epochs=2)
    assert int(begun.resumed_from.name.rpartition("-")[2]) in range(6, 10)  # as the disk was done with


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"model": 3}, r"model is of type int: give an nn.Module, or the AsyncWorker"),
        ({"model": nn.ReLU()}, "model is a ReLU without parameters to train"),
        ({"model": nn.LazyLinear(3)}, "parameters without a shape yet"),
        ({"checkpoint_dir": 3}, "checkpoint_dir is 3: give the path"),
        ({"checkpoint_frequency": "30"[:0]}, "checkpoint_frequency is '': give a number of steps"),
        ({"checkpoint_frequency": 0}, "checkpoint_frequency is 0"),
        ({"recovery_strategy": "lates"}, r"unknown recovery_strategy 'lates'; did you mean 'latest'\?"),
        ({"recovery_strategy": 3}, "unknown recovery_strategy 3"),
        ({"recovery_strategy": "best"}, "is 'best', and there is no monitor"),
        ({"recovery_strategy": "newest"}, "did you mean 'latest'"),
        ({"monitor": "los"}, "monitor: unknown metric 'los'; did you mean 'loss'"),
        ({"monitor": 5}, "monitor: 5 is no metric: give"),
        ({"mode": "max"}, "mode is 'max', and there is no monitor"),
        ({"checkpoint_frequency": "30"}, "checkpoint_frequency is '30': give a number of steps"),
        ({"monitor": ["loss", "accuracy"]}, "give one metric"),
        ({"mode": "least"}, "mode is 'least'"),
        ({"overwrite": True}, "overwrite is True, which is for recovery_strategy='none'"),
        ({"deterministic": 1}, "deterministic is 1: give True or False"),
        ({"device": "nowhere"}, "device is 'nowhere'"),
        ({"loss_reduction": "none"}, "loss_reduction is 'none'"),
        ({"checkpoint_every": 3}, "unknown keyword of FaultTolerantTrainer 'checkpoint_every'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(keywords, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        FaultTolerantTrainer(**{"model": net(), "checkpoint_dir": tmp_path} | keywords)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"log_frequency": 1.5}, "log_frequency is 1.5"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"loss_fn": nn.CrossEntropyLoss}, "loss_fn is the class CrossEntropyLoss"),
        ({"grad_scaler": 3}, "grad_scaler is 3"),
        ({"scheduler": 3}, "scheduler is 3"),
        ({"scheduler_interval": "batch"}, "scheduler_interval is 'batch'"),
        ({"scheduler_interval": "step"}, 'scheduler_interval is "step", and there is no scheduler'),
        ({"metrics": "los"}, "unknown metric"),
        ({"optimizer": None}, "there is no optimizer"),
        ({"dataset": None}, "got neither"),
        ({"dataloader": iter([]), "epochs": 2}, "gives its batches once"),
        ({"shuffle": True}, "unknown keyword of FaultTolerantTrainer.train 'shuffle'"),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "ReduceLROnPlateau goes by a metric: give scheduler_metric=",
        ),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            r"step_size.*: give functools\.partial\(StepLR, …\)",
        ),
        ({"scheduler_metric": "loss"}, "scheduler_metric is given, and no scheduler"),
        ({"scheduler_metric": ["loss", "accuracy"]}, r"scheduler_metric is \['loss', 'accuracy'\]: give one"),
        (
            {
                "scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
                "scheduler_metric": "loss",
            },
            "StepLR goes by no metric: leave it out",
        ),
    ],
)
def test_what_cannot_be_trained_with_is_refused_by_name_and_no_directory_is_made(keywords, said, tmp_path):
    trainer = made(tmp_path / "kept")
    with pytest.raises(ConfigError, match=said):
        run(trainer, **keywords)
    assert not (tmp_path / "kept").exists()
    assert run(trainer).steps == 5  # nothing is left of it


def test_every_fault_of_a_call_is_named_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"model is .*; checkpoint_dir is .*; .*_frequency is .*; mode"):
        FaultTolerantTrainer(3, 3, 0, mode=3)
    with pytest.raises(ConfigError, match=r"epochs is .*; seed is .*; loss_fn is .*; there is no"):
        run(made(tmp_path), epochs=0, seed=-1, loss_fn=3, optimizer=None)


def test_what_is_only_for_a_dataset_is_refused_beside_a_dataloader(tmp_path):
    with pytest.raises(ConfigError, match=r"seed is 3, .* for dataset=.*; batch_size is 64, which is for"):
        made(tmp_path).train(
            dataloader=DataLoader(data()), batch_size=64, seed=3, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS
        )


def test_a_torchmetrics_object_is_refused_with_the_remedy(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")
    with pytest.raises(ConfigError, match=r"MulticlassAccuracy keeps an account.*evaluate\(\) takes any"):
        run(made(tmp_path), metrics=[torchmetrics.classification.MulticlassAccuracy(num_classes=3)])


def test_another_model_or_optimizer_than_the_checkpoint_s_is_refused_and_nothing_changes(tmp_path):
    run(made(tmp_path))
    other = FaultTolerantTrainer(nn.Sequential(nn.Linear(4, 3)), tmp_path)
    before = values(other.model)
    with pytest.raises(
        ModelMismatchError, match=r"'0\.weight' is \[3, 4\] float32, .* is \[8, 4\] float32"
    ) as caught:
        run(other, optimizer=optim.SGD(lr=0.1), epochs=3)
    assert "the optimizer is SGD, and the checkpoint's is Adam" in str(caught.value)
    assert "has a '2.weight', which the model has not" in str(caught.value)
    assert equal(values(other.model), before)
    assert str(caught.value).endswith(
        ": build the model that was saved, and give all else as then, or begin anew in another checkpoint_dir"
    )
    same = "give the same, or begin anew in another checkpoint_dir$"
    with pytest.raises(
        ModelMismatchError, match=f"grad_scaler is GradScaler, and the checkpoint's is none: {same}"
    ):
        run(made(tmp_path), grad_scaler=torch.amp.GradScaler("cpu"), epochs=3)


def test_of_a_model_that_differs_in_many_tensors_the_first_are_named_and_the_rest_counted(tmp_path):
    run(made(tmp_path))
    deep = nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(100)), nn.Linear(8, 3))
    with pytest.raises(ModelMismatchError) as caught:
        run(FaultTolerantTrainer(deep, tmp_path), epochs=3)
    text = str(caught.value)
    assert "the checkpoint has no '1.weight', which the model has; " in text
    ours, theirs = set(deep.state_dict()), set(net().state_dict())
    named = sum(text.count(f"the checkpoint has no {name!r},") for name in ours - theirs)
    assert f"(and so {len(ours - theirs) - named} more)" in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"dataset": data(41)}, "the dataset has 41 samples, and had 40 when"),
        ({"batch_size": 4}, "the batch size is 4, and was 8 when"),
        ({"seed": 8}, "seed is 8, and was 7 when .*: give the same, or begin anew in another checkpoint_dir"),
        (
            {"dataloader": DataLoader(data(), batch_size=8), "seed": None},
            "data is a dataloader= without .* was a dataset=",
        ),
    ],
)
def test_other_data_than_the_checkpoint_s_is_refused_by_name(keywords, said, tmp_path):
    run(made(tmp_path), seed=7)
    with pytest.raises(ConfigError, match=said):
        run(made(tmp_path), epochs=3, **{"seed": 7} | keywords)


def test_a_trainer_s_own_seed_is_the_run_s_or_refused(tmp_path):
    def life(folder, own, **keywords):
        inner = offbeat.AsyncTrainer(net(), local_batch_size=8, seed=own)
        return run(FaultTolerantTrainer(inner, tmp_path / folder), **keywords)

    life("own", 1)
    with pytest.raises(
        ConfigError, match=r"the AsyncTrainer's seed is 2, and was 1 when the .*: give the same"
    ):
        life("own", 2, epochs=2)
    assert life("own", 1, epochs=2).steps == 10
    assert life("own", None, epochs=3).steps == 15, "as of train's, none given is the run's"
    life("none", None)
    with pytest.raises(
        ConfigError, match="the AsyncTrainer's seed is 2, and none was given then: leave it out"
    ):
        life("none", 2, epochs=2)
    life("train's", 2, seed=7)
    with pytest.raises(
        ConfigError, match=r"the AsyncTrainer's seed is 2, and train\(seed=7\) was given then"
    ):
        life("train's", 2, epochs=2)
    assert life("train's", 3, seed=7, epochs=2).steps == 10


def test_a_seed_where_none_was_given_is_to_be_left_out(tmp_path):
    run(made(tmp_path))
    for _ in range(2):  # the second, of a checkpoint of a life that went on
        with pytest.raises(ConfigError, match="seed is 5, and none was given then: leave it out"):
            run(made(tmp_path), epochs=3, seed=5)
        run(made(tmp_path), epochs=2)


def test_a_loader_of_another_batch_size_or_length_is_refused_by_name(tmp_path):
    run(made(tmp_path), dataloader=DataLoader(data(), batch_size=8))
    with pytest.raises(ConfigError, match=r"has 30 samples, and had 40 .*; the batch size is 4, and was 8"):
        run(made(tmp_path), dataloader=DataLoader(data(30), batch_size=4), epochs=2)


def test_state_that_no_checkpoint_holds_is_refused_before_the_first_step(tmp_path):
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self):
            return super().state_dict() | {"odd": object()}

    trainer = made(tmp_path)
    before = values(trainer.model)
    with pytest.raises(UnsupportedTensorError, match=r"state\['trained'\]\['scheduler'\]\['odd'\] is a b"):
        run(trainer, scheduler=lambda o: Odd(o, lambda _: 1.0))
    assert equal(values(trainer.model), before)


class Collecting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = {1, 2}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        functools.partial(offbeat.AsyncTrainer, strategy="accumulate", regular_sync_frequency=4),
        functools.partial(offbeat.AsyncTrainer, strategy="average", regular_sync_frequency=2),
    ],
)
def test_state_that_the_first_step_makes_is_refused_right_after_it(wrap, tmp_path):
    trainer = FaultTolerantTrainer(wrap(net()), tmp_path)
    optimizer = Collecting(trainer.model.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedTensorError, match=r"\['optimizer'\]\['state'\]\[0\]\['seen'\] is a builtins.set"
    ):
        run(trainer, optimizer=optimizer)
    assert trainer.history.steps == 1


def test_more_tensors_than_a_file_can_name_are_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "LARGEST_HEADER_BYTES", 100)
    trainer = made(tmp_path)
    before = values(trainer.model)
    with pytest.raises(UnsupportedTensorError, match=r"bytes of names and shapes, and .* allows 100: keep"):
        run(trainer)
    assert equal(values(trainer.model), before)


# ---------------------------------------------------------------------------------------- saves


@pytest.mark.parametrize(
    ("step", "saved", "since_s", "due"),
    [(49, 0, 0, False), (50, 0, 0, True), (53, 50, 0, False), (99, 53, 0, False), (100, 53, 0, True)],
)
def test_saves_are_due_at_the_multiples_also_after_one_that_was_put_off(step, saved, since_s, due):
    assert is_due(Every(count=50), step=step, saved_step=saved, since_s=since_s) is due


def test_a_save_by_time_is_due_when_it_has_passed_and_a_step_was_made():
    every = Every(seconds=30.0)
    assert is_due(every, step=2, saved_step=1, since_s=30.0)
    assert not is_due(every, step=2, saved_step=1, since_s=29.0)
    assert not is_due(every, step=1, saved_step=1, since_s=31.0)


def test_a_save_that_is_due_during_another_is_put_off_and_training_goes_on(tmp_path, monkeypatch, caplog):
    steps, writing = [], threading.Event()
    write = saver_module.write

    def slow(folder, parts):
        assert writing.wait(30)
        return write(folder, parts)

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 10:  # ten steps were made during the first save
            writing.set()
        return LOSS(outputs, targets)

    monkeypatch.setattr(saver_module, "write", slow)
    trainer = made(tmp_path, checkpoint_frequency=2)
    with caplog.at_level(logging.DEBUG, logger="offbeat"):
        run(trainer, loss_fn=loss_fn, epochs=8)
        assert names(tmp_path)[0].endswith("step-40")
        steps.clear()
        writing.clear()
        run(trainer, loss_fn=loss_fn, epochs=16)  # the next `train` is of the same trainer
    said = [r for r in caplog.records if "saves are put off until the disk is done" in r.getMessage()]
    assert [r.levelno for r in said][:2] == [logging.WARNING, logging.DEBUG]
    assert [r.levelno for r in said].count(logging.WARNING) == 1
    numbers = r"took [\d.e-]+ s to write, and the next one was due [\d.e-]+ s after"
    assert re.search(
        numbers + r".*\(checkpoint_frequency, 2 steps\).*checkpoint_frequency=\d+, or more", said[0].message
    )
    assert "number 2" in said[1].getMessage()


@pytest.mark.parametrize(
    ("every", "due_s", "took_s", "enough"),
    [
        (Every(count=10), 2.0, 5.0, "checkpoint_frequency=25, or more"),
        (Every(count=3), 2.0, 2.0, "checkpoint_frequency=3, or more"),
        (Every(count=3), 0.0, 0.0, "checkpoint_frequency=3, or more"),
        (Every(seconds=0.5), 0.6, 1.2, "checkpoint_frequency='2s', or more"),
    ],
)
def test_a_save_that_is_put_off_says_which_frequency_would_be_enough(every, due_s, took_s, enough):
    assert enough in words_of_delay(every, due_s=due_s, took_s=took_s)


class FullDisk:
    """Lets writing fail while it is full; `has_failed` from the first time on."""

    def __init__(self, monkeypatch):
        self.is_full, self.has_failed, self._write = True, threading.Event(), saver_module.write
        monkeypatch.setattr(saver_module, "write", self.write)

    def write(self, folder, parts):
        if self.is_full:
            self.has_failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(folder, parts)


def test_a_save_that_fails_in_mid_run_is_warned_of_and_saving_goes_on(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    monkeypatch.setattr(saver_module, "RETRY_S", 0.0)
    disk, steps = FullDisk(monkeypatch), []

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 20:
            assert disk.has_failed.wait(30)
            disk.is_full = False
        return LOSS(outputs, targets)

    assert run(made(tmp_path), loss_fn=loss_fn, epochs=8).stopped == "epochs"
    assert len(steps) == 40
    first, *_ = [r for r in caplog.records if "could not be written" in r.getMessage()]
    assert first.levelno == logging.WARNING
    assert f"{tmp_path / 'save-000001-step-3'} cannot be written: No space left on device" in first.message
    assert "training goes on, and the next save that is due, 0 s from now at the earliest" in first.message
    assert "after a crash until then, run the same command, which begins anew" in first.message
    assert caplog.text.count("saving goes on again, after ") == 1
    assert names(tmp_path)[0].endswith("-step-40")
    assert Directory(tmp_path).others() == sorted(names(tmp_path))  # nothing is left of what failed


def test_a_directory_that_is_removed_in_mid_run_is_made_again_by_the_next_save(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    monkeypatch.setattr(Saver, "save", waited(Saver.save))  # so that none is under way then
    folder, steps = tmp_path / "kept", []

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 8:
            shutil.rmtree(folder)
        return LOSS(outputs, targets)

    assert run(made(folder), loss_fn=loss_fn, epochs=3).steps == 15
    assert f"checkpoint_dir {folder} was removed or moved in mid-run" in caplog.text
    assert "could not be written" not in caplog.text
    assert [name.rpartition("-")[2] for name in names(folder)] == ["15", "12", "9"]
    assert run(made(folder), epochs=4).steps == 20


def test_what_is_said_to_go_on_from_is_there(tmp_path):
    (tmp_path / "kept").mkdir()
    saver = Saver(
        Directory(tmp_path / "kept"),
        Every(count=10),
        step=0,
        newest=None,
        again="the same command",
        needs_good=False,
        chosen=lambda found: {m.number for m in found},
        delays=Delays(),
    )
    for step in (10, 20):
        saver.save(draft(step))
        saver.settle()
    older, newest = "save-000001-step-10", "save-000002-step-20"
    assert saver.to_go_on == f"run the same command, which goes on from {tmp_path / 'kept' / newest}"
    shutil.rmtree(tmp_path / "kept" / newest)
    assert saver.to_go_on == f"run the same command, which goes on from {tmp_path / 'kept' / older}"
    shutil.rmtree(tmp_path / "kept")
    assert saver.to_go_on == "run the same command, which begins anew, since there is no checkpoint"
    saver.close()


def draft(step):
    parts = Parts(flatten({"w": torch.ones(2)}, what="model"), flatten({}, what="state"))
    known = dict.fromkeys(("number", "epoch", "batch", "samples", "num_parameters"), 0) | {"step": step}
    known |= {"seconds": 0.0, "written_unix_s": 0.0, "loss": 1.0, "band": None, "monitored": None}
    known |= {"is_finished": False, "is_good": True, "monitor": None, "optimizer": "SGD"}
    return Draft(parts, Manifest(**known, offbeat="1", torch="2", files=()), frozenset())


def test_saves_that_fail_are_tried_when_due_after_ten_seconds_and_told_of_at_doubling_distances(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.DEBUG, "offbeat")
    disk, now, before = FullDisk(monkeypatch), [100.0], tmp_path / "elsewhere"
    before.mkdir()
    saver = Saver(
        Directory(tmp_path),
        Every(count=10),
        step=4,
        newest=before,
        again="the same command",
        needs_good=False,
        chosen=lambda found: {m.number for m in found},
        delays=Delays(),
        clock=lambda: now[0],
    )
    for number in range(1, 9):
        step = 10 * number
        assert saver.is_wanted(step)
        saver.save(draft(step))
        futures.wait([saver._writing])
        assert not saver.is_wanted(step + 1)  # which hears of it
        now[0] += 9.9
        assert not saver.is_wanted(step + 10)
        now[0] += 0.1
    told = [r for r in caplog.records if "could not be written" in r.getMessage()]
    assert [n for n, r in enumerate(told, 1) if r.levelno == logging.WARNING] == [1, 2, 4, 8]
    assert len(told) == 8
    assert "the 8 newest checkpoints could not be written: " in told[-1].message
    assert f"after a crash until then, run the same command, which goes on from {before}" in told[-1].message
    disk.is_full = False
    assert saver.is_wanted(90)
    saver.save(draft(90))
    saver.wait()
    (name,) = names(tmp_path)
    assert f"{tmp_path / name} was written: saving goes on again, after 8 that could not be" in caplog.text
    assert saver.is_wanted(100)  # as ever
    saver.close()


@pytest.mark.parametrize("ends_by", ["itself", "SIGTERM"])
@pytest.mark.parametrize("strategy", ["latest", "none", "last_good"])
def test_a_last_save_that_fails_is_raised_with_what_to_do(ends_by, strategy, tmp_path, monkeypatch):
    disk, steps = FullDisk(monkeypatch), []
    disk.is_full = False
    monkeypatch.setattr(Saver, "save", waited(Saver.save))

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 4:
            disk.is_full = True
            if ends_by == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
        return LOSS(outputs, targets)

    saved = tmp_path / "save-000001-step-3"
    again = "it again with recovery_strategy='latest'" if strategy == "none" else "the same command"
    found = "the newest checkpoint that is good" if strategy == "last_good" else saved
    with pytest.raises(CheckpointError) as caught:
        run(made(tmp_path, recovery_strategy=strategy), loss_fn=loss_fn, epochs=1)
    step = 4 if ends_by == "SIGTERM" else 5
    assert str(caught.value) == (
        f"the last checkpoint could not be written: {tmp_path / f'save-000002-step-{step}'} cannot be "
        f"written: No space left on device; mend that (a full disk needs space), and run "
        f"{again}, which goes on from {found}"
    )
    disk.is_full = False
    trainer = made(tmp_path)
    assert run(trainer, epochs=1).steps == 5
    assert trainer.resumed_from == saved


def test_a_directory_that_cannot_be_written_to_is_an_error_at_the_start(tmp_path, monkeypatch):
    run(made(tmp_path))
    mkdir = Path.mkdir

    def denied(path, *arguments, **keywords):
        if path.parent == tmp_path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        mkdir(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "mkdir", denied)
    called = []
    with pytest.raises(
        CheckpointError, match=r"checkpoint_dir .* cannot be written to: Read-only file system"
    ):
        run(made(tmp_path), epochs=2, loss_fn=called.append)
    assert not called


def test_a_checkpoint_is_of_its_step_although_training_went_on(tmp_path, monkeypatch):
    """The snapshot is a copy: what is written late is not what the parameters are by then."""
    seen, writing = [], threading.Event()
    write = saver_module.write

    def late(folder, parts):
        assert writing.wait(30)
        return write(folder, parts)

    monkeypatch.setattr(saver_module, "write", late)
    trainer = made(tmp_path, checkpoint_frequency=3)

    def loss_fn(outputs, targets):
        seen.append(values(trainer.model))
        if len(seen) == 5:
            writing.set()
        return LOSS(outputs, targets)

    run(trainer, loss_fn=loss_fn, epochs=1)
    import safetensors.torch

    saved = safetensors.torch.load_file(tmp_path / "save-000001-step-3" / "model.safetensors")
    assert equal([saved[name] for name in trainer.model.state_dict()], seen[3])


def test_sigterm_saves_then_leaves_with_143_and_gives_the_handler_back(tmp_path):
    trainer = made(tmp_path, checkpoint_frequency=1000)
    steps = []

    def loss_fn(outputs, targets):
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return LOSS(outputs, targets)

    with pytest.raises(SystemExit) as caught:
        run(trainer, loss_fn=loss_fn, epochs=50)
    assert caught.value.code == 143
    assert names(tmp_path) == ["save-000001-step-4"]
    assert trainer.history.stopped == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# ---------------------------------------------------------------------------------------- the same bits


def test_determinism_is_torch_s_inside_train_and_as_it_was_after_it(tmp_path):
    inside = []

    def loss_fn(outputs, targets):
        inside.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
        return LOSS(outputs, targets)

    threads = torch.get_num_threads()
    run(made(tmp_path, deterministic=True), loss_fn=loss_fn)
    assert set(inside) == {(True, threads)}
    assert not torch.are_deterministic_algorithms_enabled()
    inside.clear()
    torch.set_num_threads(threads + 1)
    try:
        run(made(tmp_path, deterministic=True), loss_fn=loss_fn, epochs=2)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert set(inside) == {(True, threads)}  # as many as the run began with


def test_an_operation_without_a_deterministic_form_is_named(tmp_path):
    def loss_fn(outputs, targets):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        return LOSS(outputs, targets)

    with pytest.raises(StateError, match=r"deterministic=True, and put_.* has no deterministic form"):
        run(made(tmp_path, deterministic=True), loss_fn=loss_fn)
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------------------------------- the rest


def test_evaluate_measures_the_model(tmp_path):
    trainer = made(tmp_path)
    run(trainer, epochs=40)
    inputs, targets = data().tensors
    expected = float((trainer.model(inputs).argmax(1) == targets).float().mean())
    assert trainer.evaluate(data()) == pytest.approx(expected)
    assert set(trainer.evaluate(data(), ["loss", "accuracy"])) == {"loss", "accuracy"}


def test_the_log_tells_what_it_goes_on_from(tmp_path, caplog):
    run(made(tmp_path))
    caplog.set_level(logging.INFO, "offbeat")
    run(made(tmp_path), epochs=2)
    assert f"goes on from step 5, as {tmp_path / 'save-000002-step-5'} has it" in caplog.text


def test_it_is_public():
    assert offbeat.FaultTolerantTrainer is FaultTolerantTrainer


# ---------------------------------------------------------------------------------------- stop


class StopsAt:
    """A loss that wants an end in the third batch of the second pass."""

    def __init__(self, num):
        self.trainer, self.num = None, num

    def __call__(self, outputs, targets):
        self.num -= 1
        if self.num == 0:
            self.trainer.stop("good enough")
        return LOSS(outputs, targets)


@pytest.fixture
def stopped(tmp_path):
    """A run of 5 batches a pass, stopped at step 8 of 15."""
    loss_fn = StopsAt(8)
    loss_fn.trainer = made(tmp_path)
    history = run(loss_fn.trainer, loss_fn=loss_fn, epochs=3)
    assert (history.stopped, history.stop_reason, history.steps) == ("stop", "good enough", 8)
    return loss_fn.trainer


def test_a_run_that_was_stopped_is_saved_and_the_same_command_trains_no_more(stopped, tmp_path, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    manifest = entries(tmp_path)[0].manifest
    assert (manifest.step, manifest.is_finished, manifest.is_stopped) == (8, True, True)
    again = made(tmp_path)
    history = run(again, epochs=3)
    assert (history.stopped, history.stop_reason, history.steps) == ("stop", "good enough", 8)
    assert equal(values(again.model), values(stopped.model))
    assert "stop() has ended this run after step 8 (good enough), and nothing is" in caplog.text
    assert run(made(tmp_path), epochs=2, max_steps=99).steps == 8, "it is asked for no more than it was"
    assert run(stopped, epochs=3).steps == 8, "in the same process, too"


@pytest.mark.parametrize("more", [{"epochs": 4}, {"epochs": 4, "max_steps": 17}])
def test_with_more_epochs_it_goes_on_where_it_was_stopped_with_the_same_bits(stopped, more, tmp_path):
    whole = made(tmp_path / "whole")
    run(whole, **more)
    again = made(tmp_path)
    history = run(again, **more)
    assert history.stopped == ("max_steps" if "max_steps" in more else "epochs")
    assert history.stop_reason is None
    assert history.steps == whole.history.steps > 8
    assert equal(values(again.model), values(whole.model))
    manifest = entries(tmp_path)[0].manifest
    assert (manifest.is_finished, manifest.is_stopped) == (True, False)


def test_a_trainer_s_own_stop_ends_the_run_around_it(tmp_path):
    class Stops:
        def on_epoch_end(self, trainer, epoch):
            if epoch == 1:
                trainer.stop("flat")

    def around():
        inner = offbeat.AsyncTrainer(net(), callbacks=[Stops()], local_batch_size=8, seed=0)
        return FaultTolerantTrainer(inner, tmp_path, checkpoint_frequency=3)

    keywords = {"dataset": data(), "optimizer": optim.Adam(lr=0.01), "loss_fn": LOSS, "epochs": 5}
    trainer = around()
    history = trainer.train(**keywords)
    assert (history.stopped, history.stop_reason, history.epochs, history.steps) == ("stop", "flat", 2, 10)
    assert around().train(**keywords).steps == 10
    with pytest.raises(StateError, match="outside of train"):
        trainer.stop()


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_a_trainer_s_callbacks_find_the_strategy_of_the_epoch_that_has_ended_in_another_life_too(
    tmp_path, is_broken_off
):
    found, steps, signals = [], [], [signal.SIGTERM] * is_broken_off

    class Notes:
        def on_step(self, trainer, step):
            steps.append(step.epoch)

        def on_epoch_end(self, trainer, epoch):
            found.append((epoch, trainer.strategy))

    def validate(outputs, targets):
        if signals and not torch.is_grad_enabled():
            os.kill(os.getpid(), signals.pop())
        return torch.tensor(0.0)

    def around():
        strategy = {0: "local", 1: "accumulate", 2: "local"}
        inner = offbeat.AsyncTrainer(
            net(), 0, 1, 1, strategy=strategy, callbacks=[Notes()], local_batch_size=8, seed=0
        )
        return FaultTolerantTrainer(inner, tmp_path, checkpoint_frequency=5, deterministic=True)

    keywords = {"dataset": data(), "optimizer": optim.Adam(lr=0.01), "loss_fn": LOSS, "epochs": 3}
    keywords |= {"validation": data(8), "metrics": [validate]}
    trainer = around()
    if is_broken_off:
        with pytest.raises(SystemExit):
            trainer.train(**keywords)
        assert found == [], "it ended before callbacks heard of the epoch"
        trainer = around()
    trainer.train(**keywords)
    assert found == [(0, "local"), (1, "accumulate"), (2, "local")]
    assert steps == [0] * 5 + [1] * 5 + [2] * 5, "no epoch was trained twice"


def test_a_step_that_a_trainer_s_strategy_makes_as_it_ends_is_in_the_history(tmp_path):
    """Five batches of a pass are two updates of two, and one of the rest, as the next pass begins."""

    def inner():
        strategy = {0: "accumulate", 1: "local"}
        return offbeat.AsyncTrainer(net(), 0, 1, 2, strategy=strategy, local_batch_size=8, seed=0)

    keywords = {"dataset": data(), "optimizer": optim.Adam(lr=0.01), "loss_fn": LOSS, "epochs": 2}
    alone = inner().train(**keywords, progress=False)
    around = FaultTolerantTrainer(inner(), tmp_path).train(**keywords)
    assert around.steps == alone.steps == 3 + 5
