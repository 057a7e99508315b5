"""`AsyncTrainer.stop` within a `FaultTolerantTrainer`: an end that is saved, and goes on if more is asked."""

import os
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat import optim
from offbeat.cli import main
from offbeat.errors import StateError
from offbeat.recovery.directory import entries
from offbeat.recovery.saver import Saver
from support.averaging import arrays
from support.fault_tolerant import waited
from support.group import together

LOSS = nn.CrossEntropyLoss()
STOP_AT = 7
"""Batches, of which a pass has five."""


class Stops:
    """Stops the trainer after some batches of this life."""

    def __init__(self, after):
        self.left, self.ends = after, []

    def on_step(self, trainer, step):
        self.left -= 1
        if self.left == 0:
            trainer.stop("no better")

    def on_train_end(self, trainer, history):
        self.ends.append(history.stopped)


def data(rank=0, length=40):
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(length, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (length,), generator=generator))


def life(folder, *, after=0, strategy="local", rank=0, every=3, again="latest", loss_fn=LOSS, **asked):
    """Train in a new trainer, which is stopped after some batches; 0: which is not."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    stops = Stops(after)
    inner = offbeat.AsyncTrainer(
        module,
        strategy=strategy,
        regular_sync_frequency=2,
        overlap=False,
        local_batch_size=8,
        callbacks=[stops],
    )
    trainer = offbeat.FaultTolerantTrainer(inner, folder, every, again)
    history = trainer.train(dataset=data(rank), optimizer=optim.Adam(lr=0.01), loss_fn=loss_fn, **asked)
    return module, history, trainer, stops.ends


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_the_end_is_saved_and_the_same_command_trains_nothing_and_says_so(tmp_path, caplog, capsys):
    stopped, history, _, ends = life(tmp_path, after=STOP_AT, epochs=3)
    assert (history.steps, history.epochs) == (STOP_AT, 1)
    assert (history.stopped, history.stop_reason) == ("stop", "no better")
    assert ends == ["stop"]
    newest = entries(tmp_path)[0].manifest
    assert (newest.step, newest.is_finished, newest.is_stopped, newest.epochs) == (STOP_AT, True, True, 3)
    with caplog.at_level("INFO", logger="offbeat"):
        again, history, trainer, ends = life(tmp_path, epochs=3)
    assert (history.steps, history.stopped, history.stop_reason) == (STOP_AT, "stop", "no better")
    assert trainer.resumed_from.name == entries(tmp_path)[0].name
    assert ends == []
    assert same(again, stopped)
    main.main(["checkpoint", "inspect", str(trainer.resumed_from)])
    assert ", stopped (no better)" in capsys.readouterr().out
    (said,) = (text for text in caplog.messages if "nothing is trained" in text)
    assert said.startswith("stop() has ended this run after step 7 (no better), and nothing is trained: ")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"epochs": 2}, {"epochs": 3}),
        ({"epochs": 3, "max_steps": 9}, {"epochs": 3}),
        ({"epochs": 3, "max_steps": 9}, {"epochs": 3, "max_steps": 15}),
    ],
)
@pytest.mark.parametrize("strategy", ["local", "average"])
def test_where_more_is_asked_for_it_goes_on_with_the_bits_of_a_run_that_was_not_stopped(
    first, then, strategy, tmp_path
):
    whole, wanted, _, _ = life(tmp_path / "whole", strategy=strategy, epochs=3)
    life(tmp_path / "kept", after=STOP_AT, strategy=strategy, **first)
    more, history, _, ends = life(tmp_path / "kept", strategy=strategy, **then)
    assert (history.steps, history.stop_reason) == (wanted.steps, None)
    assert ends == [history.stopped]
    assert history.stopped != "stop"
    assert same(more, whole)
    newest = entries(tmp_path / "kept")[0].manifest
    assert not newest.is_stopped


def test_it_is_stopped_again_where_it_has_gone_on(tmp_path):
    life(tmp_path, after=2, epochs=1)
    _, history, _, _ = life(tmp_path, after=3, epochs=2)
    assert (history.steps, history.stopped) == (5, "stop")
    assert life(tmp_path, epochs=2)[1].steps == 5


def test_a_callback_that_stops_it_as_a_pass_ends_has_the_pass_counted(tmp_path):
    class AtEnd(Stops):
        def on_step(self, trainer, step):
            pass

        def on_epoch_end(self, trainer, epoch):
            trainer.stop()

    inner = offbeat.AsyncTrainer(nn.Linear(4, 3), local_batch_size=8, callbacks=[AtEnd(1)])
    run = {"dataset": data(), "optimizer": optim.SGD(lr=0.1), "loss_fn": LOSS}
    history = offbeat.FaultTolerantTrainer(inner, tmp_path).train(**run, epochs=3)
    assert (history.epochs, history.steps, history.stopped) == (1, 5, "stop")


def test_an_end_that_is_not_good_is_an_end_to_last_good_as_well(tmp_path, monkeypatch):
    """Else each start would train to it once more."""
    monkeypatch.setattr(Saver, "save", waited(Saver.save))  # so that none is put off
    taken = []

    def loss_fn(outputs, targets):
        taken.append(1)
        return LOSS(outputs, targets) * (1 if len(taken) < 40 else 100)

    run = {"every": 10, "again": "last_good", "loss_fn": loss_fn, "epochs": 20}
    _, history, _, _ = life(tmp_path, after=43, **run)
    assert not entries(tmp_path)[0].manifest.is_good
    before = len(taken)
    _, history, _, _ = life(tmp_path, **run)
    assert (history.steps, history.stopped, len(taken)) == (43, "stop", before)


def in_a_group(rank, folder, after, epochs):
    module, history, _, _ = life(
        folder / str(rank), after=after[rank], strategy="average", rank=rank, epochs=epochs
    )
    return arrays(module), history.steps, history.stopped


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_members_of_which_one_stops_end_together_and_go_on_together(tmp_path):
    found = together(in_a_group, 2, tmp_path, [0, STOP_AT], 2)
    assert [rest for _, *rest in found] == [[10, "epochs"], [STOP_AT, "stop"]]
    again = together(in_a_group, 2, tmp_path, [0, 0], 2)
    assert [rest for _, *rest in again] == [[10, "epochs"], [STOP_AT, "stop"]]
    more = together(in_a_group, 2, tmp_path, [0, 0], 3)
    assert [rest for _, *rest in more] == [[15, "epochs"], [15, "epochs"]]
    for members in (found, again, more):
        assert all(map(np.array_equal, members[0][0], members[1][0]))


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stop_at_the_end_of_the_last_pass_is_one_as_well(is_last, tmp_path):
    class AtEnd:
        def on_epoch_end(self, trainer, epoch):
            if epoch == 1:
                trainer.stop("flat")

        def on_train_end(self, trainer, history):
            with pytest.raises(StateError, match="at its end"):
                trainer.stop()

    inner = offbeat.AsyncTrainer(nn.Linear(4, 3), local_batch_size=8, callbacks=[AtEnd()])
    run = {"dataset": data(), "optimizer": optim.SGD(lr=0.1), "loss_fn": LOSS}
    history = offbeat.FaultTolerantTrainer(inner, tmp_path).train(**run, epochs=2 if is_last else 5)
    assert (history.epochs, history.stopped, history.stop_reason) == (2, "stop", "flat")
    assert entries(tmp_path)[0].manifest.stop_reason == "flat"


@pytest.mark.parametrize("wraps", [False, True])
def test_a_stop_at_the_last_log_line_is_one_as_well(wraps, tmp_path):
    class AtLine:
        ends = None

        def on_log(self, trainer, record):
            trainer.stop("late")

        def on_train_end(self, trainer, history):
            self.ends = history.stopped

    callback = AtLine()
    trainer = offbeat.AsyncTrainer(nn.Linear(4, 3), local_batch_size=8, callbacks=[callback])
    trains = offbeat.FaultTolerantTrainer(trainer, tmp_path) if wraps else trainer
    history = trains.train(dataset=data(), optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
    assert (history.epochs, history.stopped, history.stop_reason) == (1, "stop", "late")
    assert callback.ends == "stop"
    if wraps:
        assert entries(tmp_path)[0].manifest.stop_reason == "late"


def test_a_stop_that_sigterm_follows_in_the_same_batch_is_kept(tmp_path):
    """Who stops at a deadline, before the machine is taken away."""

    class Leaves(Stops):
        def on_step(self, trainer, step):
            super().on_step(trainer, step)
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    def around():
        inner = offbeat.AsyncTrainer(nn.Linear(4, 3), local_batch_size=8, callbacks=[Leaves(4)])
        return offbeat.FaultTolerantTrainer(inner, tmp_path)

    run = {"dataset": data(), "optimizer": optim.SGD(lr=0.1), "loss_fn": LOSS, "epochs": 3}
    trainer = around()
    with pytest.raises(SystemExit):
        trainer.train(**run)
    assert (trainer.history.stopped, trainer.history.stop_reason) == ("interrupted", "no better")
    assert entries(tmp_path)[0].manifest.is_stopped
    history = around().train(**run)
    assert (history.stopped, history.stop_reason, history.steps) == ("stop", "no better", 4)


def test_what_would_go_on_from_a_stop_is_said_by_what_was_asked_for(tmp_path, caplog):
    caplog.set_level("INFO", "offbeat")
    for folder, asked in (("one", {"epochs": 2}), ("other", {"epochs": 2, "max_steps": 9})):
        life(tmp_path / folder, after=2, **asked)
        life(tmp_path / folder, **asked)
    one, other = (text for text in caplog.messages if "nothing is trained" in text)
    assert one.endswith("is its end; more epochs= would go on from there")
    assert other.endswith("is its end; more epochs=, or a higher max_steps=, would go on from there")


@pytest.mark.parametrize("wraps", [False, True])
def test_on_step_finds_its_batch_in_the_history(wraps, tmp_path):
    """Else who ends by `history.steps` trains a step more in a `FaultTolerantTrainer`."""
    seen = []

    class AtFive:
        def on_step(self, trainer, step):
            seen.append((step.step, trainer.history.steps, trainer.history.samples))
            if trainer.history.steps == 5:
                trainer.stop()

    trainer = offbeat.AsyncTrainer(nn.Linear(4, 3), local_batch_size=8, callbacks=[AtFive()])
    trains = offbeat.FaultTolerantTrainer(trainer, tmp_path) if wraps else trainer
    history = trains.train(dataset=data(), optimizer=optim.SGD(lr=0.1), loss_fn=LOSS, epochs=2)
    assert seen == [(number, number, 8 * number) for number in range(1, 6)]
    assert history.steps == 5
