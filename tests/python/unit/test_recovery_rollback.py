"""Going back to a checkpoint in mid-run: by hand and by a monitor; what goes back, and what goes on."""

import functools
import math
import shutil
import threading

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.errors import CheckpointError, ConfigError, ModelMismatchError, StateError
from offbeat.recovery.directory import entries, names
from offbeat.recovery.files import read
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainer import FaultTolerantTrainer
from support.fault_tolerant import waited
from support.small_run import LOSS, batches, net


class Asks:
    """A loss function that goes back at some steps, or does something else there; of the step under way."""

    def __init__(self, at, what=None):
        self.at, self.what = at, what or (lambda trainer, step: trainer.rollback(step))
        self.trainer, self.folder, self.said, self.seen, self.kept = None, None, [], [], {}

    def __call__(self, outputs, targets):
        step = self.trainer.history.steps
        self.kept[step] = checkpoints(self.folder)
        self.seen.append(targets.tolist())
        if step + 1 in self.at and step + 1 not in dict(self.said):
            self.said.append((step + 1, self.what(self.trainer, self.at[step + 1])))
        return nn.functional.cross_entropy(outputs, targets)


def run(folder, asks=None, *, model=None, wrap=lambda module: module, **keywords):
    """Train with a checkpoint every five steps; give the trainer."""
    trainer = FaultTolerantTrainer(
        wrap(net() if model is None else model),
        folder,
        **{"checkpoint_frequency": 5}
        | {k: keywords.pop(k) for k in ("monitor", "deterministic") if k in keywords},
    )
    if asks is not None:
        asks.trainer, asks.folder = trainer, folder
    given = {"dataloader": batches(), "optimizer": optim.Adam(lr=0.01), "loss_fn": asks or LOSS}
    trainer.train(**given | keywords)
    return trainer


@pytest.fixture(autouse=True)
def _waited(monkeypatch):
    """Which checkpoints there are is then the same each time."""
    monkeypatch.setattr(Saver, "save", waited(Saver.save))


def checkpoints(folder):
    """Give (step, step of its values) of all, newest first."""
    return [(e.manifest.step, e.manifest.values_step) for e in entries(folder)]


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_model_goes_back_and_the_data_and_all_counts_go_on(tmp_path):
    asks, whole = Asks({18: 10}), Asks({})
    steps = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=12, gamma=0.1)
    how = {"scheduler": steps, "scheduler_interval": "step", "metrics": ["loss"], "log_frequency": 1}
    trainer = run(tmp_path / "back", asks, max_steps=18, **how)
    other = run(tmp_path / "whole", whole, max_steps=18, **how)
    assert asks.said == [(18, 10)]
    assert asks.seen == whole.seen
    assert trainer.history.steps == other.history.steps == 18
    assert len(trainer.history.records) == 18
    (folder,) = (tmp_path / "back").glob("save-*-step-10")
    model, rest = read(folder)
    assert equal(trainer.model.state_dict(), model)
    then, now = rest["trained"]["optimizer"], trainer.optimizer.state_dict()
    assert all(torch.equal(now["state"][0][name], value) for name, value in then["state"][0].items())
    # A scheduler that multiplies has done so at step 12, and will not do it again.
    assert then["param_groups"][0]["lr"] == pytest.approx(0.01)
    assert now["param_groups"][0]["lr"] == pytest.approx(0.001)


def test_nothing_of_the_step_under_way_stays(tmp_path):
    def spoil(trainer, step):
        for parameter in trainer.model.parameters():
            parameter.register_hook(lambda gradient: gradient * math.nan)
        return trainer.rollback(step)

    asks = Asks({12: None}, spoil)
    trainer = run(tmp_path, asks, max_steps=12)
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    (folder,) = tmp_path.glob("save-*-step-10")
    assert equal(trainer.model.state_dict(), read(folder)[0])


def test_a_loss_scale_and_a_loss_function_s_own_values_go_back(tmp_path):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, outputs, targets):
            self.seen += 1
            if trainer.history.steps == 11 and not self.has_gone:
                self.has_gone = True
                scales.append(float(scaler.get_scale()))
                trainer.rollback(5)
            return nn.functional.cross_entropy(outputs, targets)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scales, loss_fn = [], Weighted()
    loss_fn.has_gone = False
    trainer = FaultTolerantTrainer(net(), tmp_path, checkpoint_frequency=5)
    trainer.train(
        dataloader=batches(),
        optimizer=optim.SGD(lr=0.01),
        loss_fn=loss_fn,
        grad_scaler=scaler,
        max_steps=12,
    )
    assert scales == [64.0]
    assert float(scaler.get_scale()) == 16.0
    assert float(loss_fn.seen) == 5.0


def test_what_was_not_finite_is_in_the_history_and_no_warning_is_of_what_was_left(tmp_path, caplog):
    class Lost(Asks):
        def __call__(self, outputs, targets):
            loss = super().__call__(outputs, targets)
            return loss * math.nan if self.trainer.history.steps == 11 else loss

    trainer = run(tmp_path, Lost({13: 10}), max_steps=16)
    assert trainer.history.first_non_finite == 12
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    assert "not finite" not in caplog.text


def test_a_process_that_is_killed_right_after_it_goes_on_from_there(tmp_path):
    copies = []

    def look(trainer, _):
        copies.append(shutil.copytree(tmp_path / "kept", tmp_path / "copy"))

    class Both(Asks):
        def __call__(self, outputs, targets):
            if self.trainer.history.steps == 18 and not copies:
                look(self.trainer, None)  # in the first step after it
            return super().__call__(outputs, targets)

    trainer = run(tmp_path / "kept", Both({18: 10}), max_steps=25)
    assert checkpoints(tmp_path / "copy")[0] == (18, 10)
    assert (entries(tmp_path / "copy")[0].manifest).is_good
    again_there = run(tmp_path / "copy", max_steps=25)
    assert again_there.resumed_from.name.endswith("-step-18")
    assert equal(again_there.model.state_dict(), trainer.model.state_dict())


def test_where_its_checkpoint_is_damaged_what_was_gone_back_from_is_not_taken_for_it(tmp_path, caplog):
    run(tmp_path, Asks({13: 5}), max_steps=14)
    assert checkpoints(tmp_path) == [(14, 14), (13, 5), (10, 10), (5, 5)]
    for name in names(tmp_path)[:2]:
        (tmp_path / name / "state.json").write_text("{}", "utf-8")
    assert run(tmp_path, max_steps=20).resumed_from.name.endswith("-step-5")
    assert "is damaged" in caplog.text


def test_it_is_judged_by_what_it_was_judged_by_then(tmp_path):
    class Blows(Asks):
        def __call__(self, outputs, targets):
            loss = super().__call__(outputs, targets)
            return loss * 1e6 if self.trainer.history.steps in range(31, 37) else loss

    def look(trainer, _):
        return [e.manifest for e in entries(tmp_path)]

    asks = Blows({38: 30, 39: None}, lambda t, step: look(t, step) if step is None else t.rollback(step))
    run(tmp_path, asks, dataloader=batches(60), monitor="loss", max_steps=39)
    written, bad, then, *_ = asks.said[1][1]
    assert [(m.step, m.values_step) for m in (written, bad, then)] == [(38, 30), (35, 35), (30, 30)]
    for name in ("is_good", "loss", "band", "monitored", "monitored_samples"):
        assert getattr(written, name) == getattr(then, name), name
    assert (then.is_good, bad.is_good) == (True, False)


def test_without_a_step_it_is_the_newest_that_is_good(tmp_path):
    asks = Asks({18: None}, lambda trainer, _: (trainer.checkpoint_steps(), trainer.rollback()))
    run(tmp_path, asks, max_steps=18)
    assert asks.said == [(18, ([15, 10, 5], 15))]


def test_of_several_in_one_step_the_last_counts(tmp_path):
    asks = Asks({18: None}, lambda t, _: (t.rollback(5), t.rollback(10)))
    run(tmp_path, asks, max_steps=19)
    assert asks.kept[18][0] == (18, 10)


def test_a_callback_at_the_end_of_a_pass_may_go_back(tmp_path):
    class Back:
        def on_epoch_end(self, trainer, epoch):
            if epoch == 0:
                outer.rollback(5)

        def on_step(self, trainer, step):
            kept.append(checkpoints(tmp_path))

    kept = []
    trainer = offbeat.AsyncTrainer(net(), callbacks=[Back()])
    outer = FaultTolerantTrainer(trainer, tmp_path, checkpoint_frequency=5)
    outer.train(dataloader=batches(8), epochs=2, optimizer=optim.SGD(lr=0.01), loss_fn=LOSS)
    assert kept[8][0] == (8, 5)
    assert outer.history.steps == 16


def refusal(folder, what, at=12, **keywords):
    """Give what is said to who asks for something in a step, and see that training goes on."""

    def ask(trainer, _):
        with pytest.raises((CheckpointError, ConfigError, ModelMismatchError, StateError)) as error:
            what(trainer)
        return error.type, str(error.value)

    asks = Asks({at: None}, ask)
    trainer = run(folder, asks, max_steps=at, **keywords)
    assert trainer.history.steps == at
    return asks.said[0][1]


def test_what_cannot_be_gone_back_to_is_refused_with_what_there_is_and_training_goes_on(tmp_path):
    kind, said = refusal(tmp_path / "none", lambda t: t.rollback(), at=3)
    assert kind is CheckpointError
    assert "has no checkpoint yet to go back to: the first one is written after 5 steps" in said
    kind, said = refusal(tmp_path / "other", lambda t: t.rollback(7))
    assert kind is CheckpointError
    assert "no checkpoint of step 7: there are those of 5, 10" in said
    kind, said = refusal(tmp_path / "odd", lambda t: t.rollback(-1))
    assert kind is ConfigError
    assert "step is -1: give a checkpoint's" in said


def test_a_damaged_one_is_set_aside_and_the_next_is_there(tmp_path):
    def damage(trainer):
        newest = names(tmp_path)[0]
        (tmp_path / newest / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*set aside: go back to another"):
            trainer.rollback()
        assert trainer.checkpoint_steps() == [5]
        trainer.rollback(10)

    _, said = refusal(tmp_path, damage)
    assert "there are those of 5" in said
    assert list(tmp_path.glob("damaged-*"))


def test_one_that_is_not_good_is_gone_back_to_by_its_step_alone(tmp_path):
    def spoil(trainer, _):
        with torch.no_grad():
            trainer.model[0].bias[0] = math.nan

    def look(trainer, step):
        if step == 5:
            return spoil(trainer, step)
        with pytest.raises(CheckpointError, match=r"no good checkpoint.*of the 2 there none has finite"):
            trainer.rollback()
        return trainer.checkpoint_steps(), trainer.rollback(5)

    class Idle(nn.Module):  # whose first bias is in no loss
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Parameter(torch.zeros(1))

        def forward(self, inputs):
            return self.used(inputs)

        def __getitem__(self, index):
            return type("Holder", (), {"bias": self.idle})

    asks = Asks({5: 5, 12: 12}, look)
    run(tmp_path, asks, model=Idle(), max_steps=12)
    assert asks.said[-1] == (12, ([], 5))


def test_a_model_that_has_become_another_is_refused(tmp_path):
    def grow(trainer):
        trainer.model.register_parameter("more", nn.Parameter(torch.zeros(2)))
        trainer.rollback(10)

    kind, said = refusal(tmp_path, grow)
    assert kind is ModelMismatchError
    assert "'more'" in said


def test_another_thread_is_refused(tmp_path):
    def elsewhere(trainer):
        caught = []

        def ask():
            try:
                trainer.rollback()
            except StateError as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        raise caught[0]

    _, said = refusal(tmp_path, elsewhere)
    assert "another thread than the one that trains" in said


def test_outside_of_train_it_is_refused_with_what_to_do(tmp_path):
    class Late:
        def on_train_end(self, trainer, history):
            with pytest.raises(StateError, match="has saved its end"):
                outer.rollback()
            told.append(outer.is_training)

    told = []
    outer = FaultTolerantTrainer(offbeat.AsyncTrainer(net(), callbacks=[Late()]), tmp_path)
    with pytest.raises(StateError, match=r"not at work.*recovery_strategy='last_good'"):
        outer.rollback()
    outer.train(dataloader=batches(3), optimizer=optim.SGD(lr=0.01), loss_fn=LOSS)
    with pytest.raises(StateError, match="not at work"):
        outer.checkpoint_steps()
    assert (told, outer.is_training, outer.keeps_checkpoints) == ([False], False, True)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (offbeat.AsyncModelAverager, "an AsyncModelAverager's model is its members'.*of whom none goes back"),
        (functools.partial(offbeat.AsyncTrainer, strategy="bmuf"), "strategy .*none goes back alone"),
        (functools.partial(offbeat.AsyncTrainer, strategy="accumulate"), "strategy 'accumulate'"),
    ],
)
def test_where_the_model_is_others_as_well_it_is_refused(wrap, said, tmp_path):
    trainer = FaultTolerantTrainer(wrap(net()), tmp_path)
    with pytest.raises(StateError, match=said):
        trainer.rollback()
    assert not trainer.keeps_checkpoints


def test_a_deterministic_run_waits_for_a_save_rather_than_putting_it_off(tmp_path, monkeypatch):
    waits = []
    plain = Saver.__init__

    def noted(saver, *arguments, **keywords):
        waits.append(keywords["waits"])
        plain(saver, *arguments, **keywords)

    monkeypatch.setattr(Saver, "__init__", noted)
    for number, deterministic in enumerate((True, False)):
        run(tmp_path / str(number), deterministic=deterministic, max_steps=2)
    run(tmp_path / "members", wrap=offbeat.AsyncModelAverager, deterministic=True, max_steps=2)
    assert waits == [True, False, False]
