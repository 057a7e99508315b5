"""A `train` from its first pass to its end: callbacks, stops, Ctrl-C, threads, one within another."""

import json
import logging
import threading

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import offbeat
from offbeat import averaging, optim
from offbeat.errors import ConfigError, StateError
from support.trainer_loop import DATA, LOSS, model, plain, same, train


def test_a_train_of_a_fault_tolerant_trainer_within_another_costs_that_nothing(tmp_path):
    """It has a model, a monitor's meter and a loss function that the one at work goes by."""

    def trained(folder, *, calls_again):
        torch.manual_seed(3)
        trainer = offbeat.FaultTolerantTrainer(plain(), folder, 9, monitor="loss")
        live = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        given = {"dataloader": DATA, "optimizer": live, "epochs": 2}
        refused = []

        def loss_fn(outputs, targets):
            if calls_again and trainer.is_training and trainer.history.steps in (4, 12):
                with pytest.raises(
                    StateError, match="while a train\\(\\) of this trainer is at work"
                ) as said:
                    trainer.train(**given, loss_fn=lambda outputs, _: outputs.sum() * 0)
                refused.append(said.value)
            return LOSS(outputs, targets)

        trainer.train(**given, loss_fn=loss_fn, validation=DATA[:2])
        manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("save-*/manifest.json"))]
        monitored = [manifest["monitored"] for manifest in manifests]
        return trainer, monitored, len(refused)

    ours, our_means, num_refused = trained(tmp_path / "ours", calls_again=True)
    theirs, their_means, _ = trained(tmp_path / "theirs", calls_again=False)
    assert num_refused >= 2
    assert our_means == their_means
    assert same(ours.model, theirs.model)
    assert [one.metrics for one in ours.history.validation] == [
        one.metrics for one in theirs.history.validation
    ]


@pytest.mark.parametrize("around", ["trainer", "fault tolerant"])
def test_a_train_within_another_is_refused_and_costs_that_nothing(around, tmp_path):
    class Again:
        def __init__(self):
            self.refused = []

        def again(self, trainer, _):
            with pytest.raises(StateError, match="while a train\\(\\) of this trainer is at work") as said:
                trainer.train(dataloader=DATA, optimizer=optim.SGD(lr=9.0), loss_fn=LOSS)
            self.refused.append(str(said.value))

        on_step = on_epoch_end = on_train_end = again

    def trained(callbacks):
        inner = offbeat.AsyncTrainer(model(), callbacks=callbacks)
        outer = (
            inner
            if around == "trainer"
            else offbeat.FaultTolerantTrainer(inner, tmp_path / str(len(callbacks)))
        )
        torch.manual_seed(7)
        history = outer.train(dataloader=DATA, epochs=2, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
        assert inner.history is history
        return inner, history

    again = Again()
    ours, history = trained([again])
    theirs, _ = trained([])
    assert (history.steps, history.stopped, len(again.refused)) == (18, "epochs", 18 + 2 + 1)
    assert same(ours.model, theirs.model)


def test_of_two_threads_one_trains_and_the_other_is_refused(tmp_path):
    begun, ends = threading.Event(), threading.Event()

    class Waits:
        def on_step(self, trainer, step):
            begun.set()
            assert ends.wait(30)

    trainer = offbeat.AsyncTrainer(model(), callbacks=Waits())
    thread = threading.Thread(target=train, args=(trainer, optim.SGD(lr=0.1)))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(StateError, match="at work"):
        train(trainer, optim.SGD(lr=0.1))
    with pytest.raises(StateError, match="at work"):
        offbeat.FaultTolerantTrainer(trainer, tmp_path).train(
            dataloader=DATA, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS
        )
    ends.set()
    thread.join()
    assert trainer.history.steps == 18
    assert train(trainer, optim.SGD(lr=0.1)).steps == 18


class Once:
    """Gives an iterator that is used up after the first pass."""

    def __init__(self):
        self._batches = iter(DATA)

    def __iter__(self):
        return self._batches


@pytest.mark.parametrize("strategy", ["local", "accumulate", averaging.Average()])
def test_a_pass_that_gives_nothing_after_one_that_did_is_an_error(strategy):
    trainer = offbeat.AsyncTrainer(model(), 0, 1, 1, strategy=strategy)
    live = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"the data gave no batch in epoch 2, .* gone through again"):
        train(trainer, live, data=Once(), scheduler=StepLR(live, step_size=1, gamma=0.5))
    assert live.param_groups[0]["lr"] == 0.5  # of the epoch that was trained
    with pytest.raises(ConfigError, match="DataLoaderIter, which gives its batches once, and epochs is 2"):
        train(trainer, live, data=iter(DataLoader(DATA, batch_size=None)))


def test_hooks_may_take_what_they_get_in_any_way():
    seen = []
    kind = type(
        "Mine", (), {"on_log": lambda *args: None, "on_epoch_end": lambda *_, **more: seen.append(more)}
    )
    builtin = type("Named", (), {"on_train_end": print})
    train(offbeat.AsyncTrainer(model(), callbacks=[kind(), builtin()]), optim.SGD(lr=0.1))
    assert seen == [{}, {}]


def test_callbacks_are_told_in_order_and_their_errors_are_raised():
    told = []

    class Tells:
        def on_step(self, trainer, step):
            told.append(("step", step.step, step.epoch, step.samples, step.is_skipped, float(step.loss) > 0))

        def on_log(self, trainer, record):
            told.append(("log", record.step))

        def on_epoch_end(self, trainer, epoch):
            told.append(("epoch", epoch))

        def on_train_end(self, trainer, history):
            told.append(("end", history.stopped, trainer.history is history))

    class Raises:
        def on_epoch_end(self, trainer, epoch):
            raise RuntimeError(f"after epoch {epoch}")

    trainer = offbeat.AsyncTrainer(model(), callbacks=[Tells()])
    train(trainer, optim.SGD(lr=0.1), data=DATA[:2], log_frequency=2)
    steps = [("step", n, (n - 1) // 2, len(DATA[(n - 1) % 2][1]), False, True) for n in (1, 2, 3, 4)]
    assert told == [
        *steps[:2], ("log", 2), ("epoch", 0), *steps[2:], ("log", 4), ("epoch", 1), ("end", "epochs", True)
    ]  # fmt: skip
    trainer = offbeat.AsyncTrainer(model(), callbacks=[Raises()])
    with pytest.raises(RuntimeError, match="after epoch 0"):
        train(trainer, optim.SGD(lr=0.1))
    assert (trainer.history.stopped, trainer.history.epochs) == ("failed", 1)
    assert train(offbeat.AsyncTrainer(model()), optim.SGD(lr=0.1), max_steps=5).stopped == "max_steps"


class Stops:
    """Wants an end at a step, or after an epoch."""

    def __init__(self, *, step=None, epoch=None):
        self.step, self.epoch, self.ends = step, epoch, []

    def on_step(self, trainer, step):
        if step.step == self.step:
            trainer.stop("enough")
            trainer.stop("more than enough")

    def on_epoch_end(self, trainer, epoch):
        if epoch == self.epoch:
            trainer.stop()

    def on_train_end(self, trainer, history):
        self.ends.append(history.stopped)


@pytest.mark.parametrize("strategy", ["local", "average", "diloco", "accumulate"])
def test_a_stop_ends_a_train_as_so_many_steps_do_and_the_next_one_goes_on(strategy, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    callback = Stops(step=4)
    stopped, limited = (
        offbeat.AsyncTrainer(model(), 0, 1, 1, strategy=strategy, callbacks=callbacks)
        for callbacks in ([callback], [])
    )
    history = train(stopped, optim.SGD(lr=0.1))
    assert (history.stopped, history.stop_reason, history.steps) == ("stop", "enough", 4)
    assert callback.ends == ["stop"]
    assert "training ends at step 4: enough" in caplog.text
    wanted = train(limited, optim.SGD(lr=0.1), max_steps=4)
    assert history.records[-1].metrics == wanted.records[-1].metrics
    assert all(map(torch.equal, stopped.model.parameters(), limited.model.parameters()))
    callback.step = None
    assert train(stopped, None, epochs=1).stopped == "epochs"
    assert stopped.history.stop_reason is None


def test_a_stop_after_an_epoch_ends_with_it_and_one_out_of_train_is_refused():
    trainer = offbeat.AsyncTrainer(model(), callbacks=[Stops(epoch=1)])
    with pytest.raises(StateError, match=r"stop\(\) was called outside of train\(\)"):
        trainer.stop()
    history = train(trainer, optim.SGD(lr=0.1), epochs=5)
    assert (history.stopped, history.stop_reason, history.epochs) == ("stop", None, 2)
    assert history.steps == 2 * len(DATA)
    with pytest.raises(StateError, match="call it in a callback"):
        trainer.stop()


def test_a_reason_that_is_no_text_is_refused_and_training_goes_on():
    class Fails:
        def on_step(self, trainer, step):
            with pytest.raises(ConfigError, match="reason is 3: give text, or nothing"):
                trainer.stop(3)

    assert train(offbeat.AsyncTrainer(model(), callbacks=[Fails()]), optim.SGD(lr=0.1)).stopped == "epochs"


def test_another_thread_may_stop_a_train():
    going = threading.Event()

    class Tells:
        def on_step(self, trainer, step):
            going.set()

    trainer = offbeat.AsyncTrainer(model(), callbacks=[Tells()])
    thread = threading.Thread(target=lambda: going.wait(50) and trainer.stop("by hand"))
    thread.start()
    history = train(trainer, optim.SGD(lr=0.1), epochs=1_000_000)
    thread.join()
    assert (history.stopped, history.stop_reason) == ("stop", "by hand")


def test_ctrl_c_keeps_the_history_and_the_next_train_goes_on():
    class Interrupts:
        def on_step(self, trainer, step):
            if step.step == 4:
                raise KeyboardInterrupt

    for strategy in ("local", "average", "accumulate"):
        trainer = offbeat.AsyncTrainer(model(), 0, 1, 2, strategy=strategy, callbacks=[Interrupts()])
        with pytest.raises(KeyboardInterrupt):
            train(trainer, optim.SGD(lr=0.1))
        assert (trainer.history.stopped, trainer.history.steps) == ("interrupted", 4)
        assert train(trainer, None, max_steps=3).steps == 3
        assert trainer.history.stopped == "max_steps"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_ends_a_train_between_two_passes_leaves_no_number_out(error):
    epochs = []

    class Ends:
        def on_step(self, trainer, step):
            epochs.append(step.epoch)

        def on_epoch_end(self, trainer, epoch):
            if epoch == 1:
                raise error

    trainer = offbeat.AsyncTrainer(model(), callbacks=Ends())
    with pytest.raises(error):
        train(trainer, optim.SGD(lr=0.1), data=DATA[:2], epochs=3)
    train(trainer, None, data=DATA[:2], epochs=2)
    assert epochs == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_pass_that_was_begun_and_not_finished_is_not_begun_again_and_one_without_a_batch_is():
    epochs = []

    class Seen:
        def on_step(self, trainer, step):
            epochs.append(step.epoch)

    def broken(number):
        yield from DATA[:number]
        raise ZeroDivisionError

    trainer = offbeat.AsyncTrainer(model(), callbacks=Seen())
    for number in (0, 1):
        with pytest.raises(ZeroDivisionError):
            train(trainer, optim.SGD(lr=0.1), data=broken(number), epochs=1)
    train(trainer, None, data=DATA[:2], epochs=1)
    assert epochs == [0, 1, 1]


def test_callbacks_none_are_none():
    train(offbeat.AsyncTrainer(model(), callbacks=None), optim.SGD(lr=0.1))
