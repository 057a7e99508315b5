"""`train(validation=)`: measured after each epoch on other data, without a trace in training."""

import copy
import functools
import logging
import threading
from typing import ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError
from support.tracker import Told

LOSS = nn.CrossEntropyLoss()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5))


def data(length, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(length, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(5, (length,), generator=generator))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


TRAINED, OTHER = data(60, 1), data(37, 2)


def train(trainer, *, epochs=3, **keywords):
    torch.manual_seed(7)
    keywords = {"dataloader": DataLoader(TRAINED, batch_size=8, shuffle=True)} | keywords
    return trainer.train(
        epochs=epochs, **{"optimizer": optim.Adam(lr=0.01), "loss_fn": LOSS, "progress": False} | keywords
    )


class Sum:
    """A metric in torchmetrics' manner: samples seen since the last reset."""

    def __init__(self):
        self.total = 0

    def update(self, outputs, targets):
        self.total += len(targets)

    def compute(self):
        return self.total

    def reset(self):
        self.total = 0


class Measures:
    """Evaluates after each epoch, as a user would by hand."""

    def __init__(self):
        self.found, self.told, self.modes = [], [], []

    def on_epoch_end(self, trainer, epoch):
        self.modes.append(trainer.model.training)
        self.found.append(trainer.evaluate(OTHER, ["loss", "accuracy"]))
        self.told.append(trainer.history.validation[-1].epoch)


@pytest.mark.parametrize("strategy", ["local", "average", "accumulate"])
@pytest.mark.parametrize("given", [OTHER, DataLoader(OTHER, batch_size=5, shuffle=True)])
def test_it_is_what_evaluate_gives_after_each_epoch_and_moves_no_bit_of_training(strategy, given):
    by_hand = Measures()
    ours, plain = (
        offbeat.AsyncTrainer(model(), 0, 1, 2, strategy=strategy, callbacks=callbacks)
        for callbacks in ([by_hand], [])
    )
    history = train(ours, validation=given, metrics=["accuracy"])
    assert [one.epoch for one in history.validation] == by_hand.told == [0, 1, 2]
    assert [one.step for one in history.validation][-1] == history.steps
    for one, found in zip(history.validation, by_hand.found, strict=True):
        assert one.metrics == pytest.approx(found, rel=1e-6)
    assert all(by_hand.modes), "it goes on in training mode"
    assert set(history.records[-1].metrics) == {"accuracy"}
    drawn = torch.rand(3), np.random.rand()  # noqa: NPY002  the global one is what is asked about
    np.random.seed(0)  # noqa: NPY002
    train(plain, metrics=["accuracy"])
    assert all(map(torch.equal, ours.model.state_dict().values(), plain.model.state_dict().values()))
    assert torch.equal(drawn[0], torch.rand(3))


@pytest.mark.parametrize("given", [{}, {"scheduler_metric": "loss"}])
def test_a_plateau_is_one_of_the_validation_where_there_is_one(given):
    batches = list(DataLoader(TRAINED, batch_size=8))
    scheduler = functools.partial(ReduceLROnPlateau, patience=0, factor=0.5)
    trainer = offbeat.AsyncTrainer(plain())
    train(
        trainer,
        dataloader=batches,
        epochs=8,
        optimizer=optim.SGD(lr=0.5),
        scheduler=scheduler,
        validation=[OTHER[:]],
        **given,
    )
    theirs = plain()
    live = torch.optim.SGD(theirs.parameters(), lr=0.5)
    plateau = scheduler(live)
    for _ in range(8):
        for inputs, targets in batches:
            live.zero_grad()
            LOSS(theirs(inputs), targets).backward()
            live.step()
        with torch.no_grad():
            plateau.step(LOSS(theirs(OTHER[:][0]), OTHER[:][1]).item())
    assert trainer.optimizer.param_groups[0]["lr"] == live.param_groups[0]["lr"] < 0.5
    assert all(map(torch.equal, trainer.model.parameters(), theirs.parameters()))


def test_without_metrics_it_is_measured_by_the_loss_and_one_named_loss_is_measured_as_it_is():
    history = train(offbeat.AsyncTrainer(model()), validation=OTHER, metrics=[], epochs=1)
    assert list(history.validation[0].metrics) == ["loss"]

    def loss(outputs, targets):
        del outputs, targets
        return 3.0

    history = train(offbeat.AsyncTrainer(model()), validation=OTHER, metrics=loss, epochs=1)
    assert history.validation[0].metrics == {"loss": 3.0}


class Scaled(nn.Module):
    """A loss over a running scale, which each call moves, in eval mode, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.modes = []

    def forward(self, outputs, targets):
        self.modes.append(self.training)
        loss = LOSS(outputs, targets)
        self.move(loss.detach())
        return loss / self.scale

    def move(self, value):
        self.scale.mul_(0.9).add_(0.1 * value)


class Assigned(Scaled):
    """One whose scale is another tensor after each call."""

    def move(self, value):
        self.scale = 0.9 * self.scale + 0.1 * value


class Around(nn.Module):
    """A model that divides by such a scale."""

    def __init__(self, scaled):
        super().__init__()
        self.inside, self.scaled = model(), scaled

    def forward(self, inputs):
        self.scaled.move(inputs.detach().abs().mean())
        return self.inside(inputs) / self.scaled.scale


@pytest.mark.parametrize("kind", [Scaled, Assigned])
def test_a_loss_that_keeps_something_is_left_as_it_was(kind):
    ours, plain = (offbeat.AsyncTrainer(model()) for _ in range(2))
    one, other = kind(), kind()
    train(ours, validation=OTHER, loss_fn=one)
    train(plain, loss_fn=other)
    assert torch.equal(one.scale, other.scale)
    assert all(map(torch.equal, ours.model.state_dict().values(), plain.model.state_dict().values()))
    assert set(one.modes) == {True, False}
    assert one.training


@pytest.mark.parametrize("kind", [Scaled, Assigned])
def test_a_model_that_keeps_something_is_left_as_it_was(kind):
    ours, plain = (offbeat.AsyncTrainer(Around(kind())) for _ in range(2))
    train(ours, validation=OTHER)
    ours.evaluate(OTHER)
    train(plain)
    assert all(map(torch.equal, ours.model.state_dict().values(), plain.model.state_dict().values()))


class Holds(Sum):
    """A metric that has hold of the trainer, looks at its model and may stop it."""

    seen: ClassVar[list] = []  # of no copy's own

    def __init__(self):
        super().__init__()
        self.trainer, self.lock = None, None

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.seen.append(self.trainer.model)
        if not self.trainer.model.training:
            self.trainer.stop("seen in validation")


def test_a_metric_s_copy_for_validation_has_the_trainer_and_the_model_themselves():
    metric, trainer = Holds(), offbeat.AsyncTrainer(model())
    metric.trainer = trainer
    metric.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"metrics has a Holds that cannot be copied.*give a function"):
        train(trainer, validation=OTHER, metrics=metric)
    metric.lock = None
    history = train(trainer, validation=OTHER, metrics=metric)
    assert (history.stopped, history.stop_reason, history.epochs) == ("stop", "seen in validation", 1)
    assert {id(one) for one in Holds.seen} == {id(trainer.model)}


def test_so_has_its_copy_for_an_evaluation_in_between():
    metric, found = Holds(), []

    class Evaluates:
        def on_step(self, trainer, step):
            found.append(trainer.evaluate(OTHER, metric))

    trainer = metric.trainer = offbeat.AsyncTrainer(model(), callbacks=[Evaluates()])
    Holds.seen.clear()
    history = train(trainer, metrics=metric, epochs=1, log_frequency=100)
    assert found == [37]
    assert history.stop_reason == "seen in validation"
    assert {id(one) for one in Holds.seen} == {id(trainer.model)}
    assert history.records[-1].metrics["Holds"] == 8


class Measured(nn.Module):
    """A model with its metric in it, as Lightning's are."""

    def __init__(self):
        super().__init__()
        self.inner = model()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=5, average="micro")

    def forward(self, inputs):
        return self.inner(inputs)


@pytest.mark.parametrize("in_between", ["validation", "evaluate"])
@pytest.mark.parametrize("around", ["none", "a collection", "a collection in the model"])
def test_a_metric_that_is_a_part_of_the_model_keeps_its_account_of_training(in_between, around):
    class Evaluates:
        def on_step(self, trainer, step):
            if in_between == "evaluate":
                trainer.evaluate(OTHER, metric)

    def trained(metric, model, **more):
        return train(
            offbeat.AsyncTrainer(model, callbacks=[Evaluates()] if more else []),
            metrics=metric,
            epochs=1,
            log_frequency=100,
            **({"validation": OTHER} if more and in_between == "validation" else {}),
        )

    plain = Measured()
    expected = trained("accuracy", plain).records[-1].metrics["accuracy"]
    ours = Measured()
    metric = ours.accuracy if around == "none" else torchmetrics.MetricCollection({"found": ours.accuracy})
    if "model" in around:
        ours.also = metric
    history = trained(metric, ours, evaluates=True)
    (found,) = history.records[-1].metrics.values()
    assert found == pytest.approx(expected)
    if in_between == "validation":
        of_other = offbeat.AsyncTrainer(ours).evaluate(OTHER, "accuracy")
        assert [v for k, v in history.validation[-1].metrics.items() if k != "loss"] == pytest.approx(
            [of_other]
        )


class ByBias(torchmetrics.Metric):
    """A metric that has hold of a part of the model."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.add_state("seen", torch.zeros(()))

    def update(self, outputs, targets):
        self.seen = self.part.bias.detach().sum().clone()

    def compute(self):
        return self.seen


def test_a_metric_in_the_model_that_has_hold_of_another_part_measures_by_that_one():
    ours, found = Measured(), []
    ours.by_bias = ByBias(ours.inner[3])

    class Notes:
        def on_epoch_end(self, trainer, epoch):
            found.append(ours.inner[3].bias.sum().item())

    trainer = offbeat.AsyncTrainer(ours, callbacks=[Notes()])
    history = train(trainer, metrics=ours.by_bias, epochs=2, validation=OTHER)
    assert [one.metrics["ByBias"] for one in history.validation] == pytest.approx(found)
    assert found[0] != found[1]


@pytest.mark.parametrize(("metric", "mode", "better"), [("accuracy", "min", "max"), ("loss", "max", "min")])
def test_a_plateau_that_would_lower_the_rate_while_the_model_gets_better_is_refused(metric, mode, better):
    def trained(mode):
        scheduler = functools.partial(ReduceLROnPlateau, mode=mode, patience=0)
        return train(offbeat.AsyncTrainer(model()), scheduler=scheduler, scheduler_metric=metric)

    with pytest.raises(ConfigError, match=f"goes by '{metric}', of which .* make it with mode='{better}'"):
        trained(mode)
    assert trained(better).epochs > 0


def test_an_object_is_not_both_a_metric_and_the_schedulers():
    metric = Sum()
    with pytest.raises(ConfigError, match="scheduler_metric is one of metrics, and keeps one account"):
        train(
            offbeat.AsyncTrainer(model()),
            metrics=["loss", metric],
            scheduler=functools.partial(ReduceLROnPlateau),
            scheduler_metric=metric,
        )


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_fails_in_it_costs_no_step_of_a_scheduler_and_the_next_train_goes_on(error):
    class Broken(TensorDataset):
        is_whole = False

        def __getitem__(self, index):
            if not self.is_whole:
                raise error("the disk is gone")
            return super().__getitem__(index)

    other = Broken(*OTHER.tensors)
    trainer = offbeat.AsyncTrainer(model())
    keywords = {
        "validation": other,
        "scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    }
    with pytest.raises(error):
        train(trainer, epochs=1, **keywords)
    assert trainer.model.training
    assert trainer.history.epochs == 1
    other.is_whole = True
    history = train(trainer, epochs=2, **keywords)
    assert [one.epoch for one in history.validation] == [1, 2]
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 8)


def test_a_batch_that_is_none_is_told_to_be_of_the_validation():
    with pytest.raises(ConfigError, match=r"a batch is a pair .*, and validation gave a Tensor"):
        train(offbeat.AsyncTrainer(model()), validation=list(OTHER.tensors))


def test_a_generator_that_both_loaders_have_is_moved_by_training_alone():
    def trained(validated):
        generator = torch.Generator().manual_seed(3)
        one, other = (
            DataLoader(each, batch_size=8, shuffle=True, generator=generator) for each in (TRAINED, OTHER)
        )
        trainer = offbeat.AsyncTrainer(model())
        train(trainer, dataloader=one, validation=other if validated else None)
        return trainer.model.state_dict().values()

    assert all(map(torch.equal, trained(True), trained(False)))


def test_a_state_has_it():
    ours = offbeat.AsyncTrainer(model())
    history = train(ours, validation=OTHER)
    again = offbeat.AsyncTrainer(copy.deepcopy(ours.model))
    again.load_state_dict(ours.state_dict(), optimizer=optim.Adam(lr=0.01))
    assert again.history == history
    assert again.history.validation[2].epoch == 2


def test_an_object_that_keeps_its_own_account_has_one_for_validation():
    history = train(offbeat.AsyncTrainer(model()), validation=OTHER, metrics=Sum(), log_frequency=5, epochs=2)
    assert [one.metrics["Sum"] for one in history.validation] == [37, 37]
    # Passes of 8 batches, the last of 4 samples.
    assert [record.metrics["Sum"] for record in history.records] == [40, 8 * 2 + 4 + 8 * 2, 40, 4]


def test_it_is_told_to_log_and_trackers_and_drawn_beside_training(caplog, tmp_path):
    caplog.set_level(logging.INFO, "offbeat")
    tracker = Told()
    trainer = offbeat.AsyncTrainer(model(), trackers=tracker)
    train(trainer, validation=OTHER, epochs=1)
    history = train(trainer, validation=OTHER, epochs=2)
    losses = [one.metrics["loss"] for one in history.validation]
    assert [one.epoch for one in history.validation] == [1, 2]
    assert f"epoch 2/2, step 16, validation: loss {losses[1]:.4g}" in caplog.text
    told = [(step, told["validation/loss"]) for told, step in tracker.calls if "validation/loss" in told]
    assert told[1:] == [(16, losses[0]), (24, losses[1])], "steps are counted over the trainer's life"
    (axes,) = history.plot(tmp_path / "loss.png").axes
    assert [line.get_label() for line in axes.lines] == ["training", "validation"]
    assert axes.lines[1].get_ydata().tolist() == losses


def test_the_time_that_it_takes_is_of_no_log_line(monkeypatch, caplog):
    """A clock that goes on by a second a look, and by an hour where the model is measured."""
    now = 0.0

    def clock():
        nonlocal now
        now += 1.0
        return now

    class Slow(TensorDataset):
        def __getitem__(self, index):
            nonlocal now
            now += 3600 / len(OTHER)
            return super().__getitem__(index)

    monkeypatch.setattr("time.monotonic", clock)
    caplog.set_level(logging.INFO, "offbeat")
    train(offbeat.AsyncTrainer(model()), validation=Slow(*OTHER.tensors), epochs=2, log_frequency=6)
    rates = [
        float(line.rpartition("(")[2].partition(" samples/s")[0])
        for line in caplog.messages
        if "samples/s" in line
    ]
    assert len(rates) == 3
    assert min(rates) > 0.9, rates


def test_early_stopping_is_a_callback():
    class Patience:
        def __init__(self, epochs):
            self.epochs, self.best, self.since = epochs, float("inf"), 0

        def on_epoch_end(self, trainer, epoch):
            loss = trainer.history.validation[-1].metrics["loss"]
            self.since = 0 if loss < self.best else self.since + 1
            self.best = min(loss, self.best)
            if self.since == self.epochs:
                trainer.stop(f"no better for {self.since} epochs")

    trainer = offbeat.AsyncTrainer(model(), callbacks=Patience(3))
    history = train(trainer, validation=OTHER, epochs=500)  # labels are random: it gets worse soon
    assert history.stopped == "stop"
    assert history.epochs < 500
    losses = [one.metrics["loss"] for one in history.validation]
    assert min(losses) == losses[-4]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            (batch for batch in [OTHER[:]]),
            "validation is a generator, which gives its batches once, and epochs is 3",
        ),
        (torch.ones(3, 6), "validation is a tensor of shape"),
        (5, "validation is 5, which gives no batches"),
        (TensorDataset, "validation is the class TensorDataset"),
    ],
)
def test_data_that_cannot_be_used_is_told_with_all_else_before_training(given, words):
    trained = model()
    trainer = offbeat.AsyncTrainer(trained)
    before = [p.clone() for p in trained.parameters()]
    with pytest.raises(ConfigError) as raised:
        train(trainer, validation=given, max_steps=0)
    assert words in str(raised.value)
    assert "max_steps is 0" in str(raised.value)
    assert all(map(torch.equal, before, trained.parameters()))


def test_data_without_a_sample_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match="validation gave no sample, and of none there is no mean"):
        train(offbeat.AsyncTrainer(model()), validation=[])
