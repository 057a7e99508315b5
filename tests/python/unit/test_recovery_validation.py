"""Validation within a `FaultTolerantTrainer`: it goes on after a crash, and leaves no trace in training."""

import copy
import dataclasses
import functools
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError
from support.tracker import Told

GUIDE = (Path(__file__).parents[3] / "docs/guide.md").read_text("utf-8")
LOSS = nn.CrossEntropyLoss()
EPOCHS = 4
"""Of five batches each."""


def data(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(length, 4, generator=generator), torch.randint(0, 3, (length,), generator=generator)
    )


TRAIN, OTHER = data(1, 40), data(2, 23)


class CrashError(Exception):
    """Ends a life."""


class Notes:
    """Takes down what a callback sees as a pass ends; ends the run at a step, or stops it at a pass."""

    def __init__(self, crash_at=None, stop_at=None):
        self.crash_at, self.stop_at, self.seen = crash_at, stop_at, []

    def on_step(self, trainer, step):
        if step.step == self.crash_at:
            raise CrashError

    def on_epoch_end(self, trainer, epoch):
        history = trainer.history
        self.seen.append((epoch, history.epochs, [record.step for record in history.validation]))
        if epoch == self.stop_at:
            trainer.stop()


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def life(folder, *, notes=None, others=(), validation=OTHER, wraps=True, trackers=(), **keywords):
    module = net()
    trained = module
    if wraps:
        callbacks = [*([] if notes is None else [notes]), *others]
        trained = offbeat.AsyncTrainer(module, local_batch_size=8, callbacks=callbacks, trackers=trackers)
    trainer = offbeat.FaultTolerantTrainer(trained, folder, 3, deterministic=True)
    run = {"dataset": TRAIN, "batch_size": 8, "optimizer": optim.Adam(lr=0.01), "loss_fn": LOSS}
    history = trainer.train(**run | {"epochs": EPOCHS, "validation": validation} | keywords)
    return module, history, trained


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def told(history):
    return [(one.epoch, one.step, one.metrics) for one in history.validation]


@pytest.mark.parametrize("wraps", [True, False])
def test_it_is_what_evaluate_gives_and_changes_no_bit(wraps, tmp_path):
    shuffles = DataLoader(OTHER, batch_size=8, shuffle=True)
    plain, nothing, _ = life(tmp_path / "plain", wraps=wraps, validation=None)
    ours, history, _ = life(tmp_path / "ours", wraps=wraps, validation=shuffles)
    assert same(plain, ours)
    assert nothing.validation == []
    assert [record.step for record in history.validation] == [5, 10, 15, 20]
    found = offbeat.AsyncTrainer(ours, local_batch_size=32).evaluate(OTHER, [LOSS])
    assert history.validation[-1].metrics["loss"] == pytest.approx(found["CrossEntropyLoss"], rel=1e-6)


def test_a_run_that_crashed_goes_on_with_what_was_measured(tmp_path):
    whole, wanted, _ = life(tmp_path / "whole", metrics=["accuracy"])
    with pytest.raises(CrashError):
        life(tmp_path / "kept", notes=Notes(crash_at=13), metrics=["accuracy"])
    ours, history, _ = life(tmp_path / "kept", metrics=["accuracy"])
    assert same(whole, ours)
    assert told(history) == told(wanted)
    assert history.validation[0].metrics.keys() == {"loss", "accuracy"}


def test_early_stopping_as_the_guide_has_it_ends_a_run_that_crashed_where_it_would_have_ended(tmp_path):
    found = {}
    exec(re.search(r"^class Patience:\n(?:    .*\n|\n)+", GUIDE, re.MULTILINE)[0], found)  # noqa: S102  its own
    whole, wanted, _ = life(tmp_path / "whole", others=[found["Patience"]()], epochs=100)
    assert wanted.stopped == "stop"
    losses = [one.metrics["loss"] for one in wanted.validation]
    assert losses.index(min(losses)) == len(losses) - 4
    with pytest.raises(CrashError):
        life(
            tmp_path / "kept",
            notes=Notes(crash_at=wanted.steps - 2),
            others=[found["Patience"]()],
            epochs=100,
        )
    ours, history, _ = life(tmp_path / "kept", others=[found["Patience"]()], epochs=100)
    assert (history.steps, history.stop_reason) == (wanted.steps, wanted.stop_reason)
    assert same(whole, ours)


def test_callbacks_and_trackers_have_it_and_an_early_end_keeps_it(tmp_path, caplog):
    notes, kept = Notes(stop_at=1), Told()
    with caplog.at_level("INFO", logger="offbeat"):
        _, history, trainer = life(tmp_path, notes=notes, trackers=kept)
    assert notes.seen == [(0, 1, [5]), (1, 2, [5, 10])]
    assert history.stopped == "stop"
    assert trainer.history is history
    for record in history.validation:
        assert kept.by_step[record.step]["validation/loss"] == record.metrics["loss"]
        assert f"step {record.step}, validation: loss {record.metrics['loss']:.4g}" in caplog.text
    _, again, trainer = life(tmp_path)
    assert told(again) == told(history)
    assert trainer.history is again
    assert [epoch for epoch, *_ in notes.seen] == [0, 1]


def test_a_train_of_the_trainer_s_own_has_its_own_history_again(tmp_path):
    _, _, trainer = life(tmp_path, epochs=1)
    history = trainer.train(
        dataset=TRAIN, optimizer=optim.Adam(lr=0.01), loss_fn=LOSS, epochs=1, progress=False
    )
    assert trainer.history is history
    assert history.validation == []


def test_the_state_of_the_trainer_has_the_run_s_history_too(tmp_path):
    _, history, trainer = life(tmp_path)
    state = trainer.state_dict()
    assert state["history"] == dataclasses.asdict(history)
    again = offbeat.AsyncTrainer(copy.deepcopy(trainer.model), local_batch_size=8)
    again.load_state_dict(state, optimizer=optim.Adam(lr=0.01))
    assert again.history == history == trainer.history


def test_what_cannot_be_measured_on_is_refused_and_no_directory_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"validation is a generator, which gives its batches once.*is 4"):
        life(tmp_path / "none", validation=(pair for pair in [OTHER[:]]))
    assert not (tmp_path / "none").exists()


class Meanwhile:
    """Batches of which the second of a pass comes with something."""

    def __init__(self, does):
        self.does = does

    def __iter__(self):
        for number, batch in enumerate(DataLoader(OTHER, batch_size=8)):
            if number == 1:
                self.does()
            yield batch


def test_what_a_signal_broke_off_is_due_also_where_nothing_is_measured_any_more(tmp_path):
    run = {"scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)}
    whole, _, _ = life(tmp_path / "whole", validation=None, **run)
    notes = Notes()
    ends = Meanwhile(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        life(tmp_path / "kept", notes=notes, validation=ends, **run)
    assert notes.seen == []
    ours, history, _ = life(tmp_path / "kept", notes=notes, validation=None, **run)
    assert same(whole, ours)  # whose learning rate was lowered after each pass
    assert history.validation == []
    assert [epoch for epoch, *_ in notes.seen] == list(range(EPOCHS))


def test_a_stop_lets_a_validation_under_way_end(tmp_path):
    notes = Notes()
    trained = offbeat.AsyncTrainer(net(), local_batch_size=8, callbacks=[notes])
    trainer = offbeat.FaultTolerantTrainer(trained, tmp_path)
    run = {"dataset": TRAIN, "optimizer": optim.Adam(lr=0.01), "loss_fn": LOSS, "epochs": EPOCHS}
    history = trainer.train(**run, validation=Meanwhile(trainer.stop))
    assert (history.stopped, history.epochs) == ("stop", 1)
    assert notes.seen == [(0, 1, [5])]
