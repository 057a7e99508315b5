"""A monitor hears what trains its model, and acts on it: every trainer of ours, by its `train` alone."""

import math

import pytest
import torch
from torch import nn

import offbeat
from offbeat import AsyncTrainingMonitor, optim
from offbeat.errors import ConfigError
from offbeat.local.lr_scale import factor_of
from support.small_net import net

BATCHES = [(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))] * 10


class Loss:
    """Cross entropy, whose tenth batch is NaN."""

    def __init__(self, reduction="mean"):
        self._loss = nn.CrossEntropyLoss(reduction=reduction)
        self._num = 0

    def __call__(self, outputs, targets):
        self._num += 1
        return self._loss(outputs, targets) * (math.nan if self._num == 10 else 1.0)


def trained(kind, model, directory, reduction="mean"):
    """Give a trainer, and a function that trains by a loss."""
    if kind == "fault_tolerant":
        trainer, more = offbeat.FaultTolerantTrainer(model, checkpoint_dir=directory), {}
    else:
        trainer = offbeat.AsyncTrainer(model, strategy=kind, loss_reduction=reduction)
        more = {"progress": False}

    def train(loss_fn):
        trainer.train(dataloader=BATCHES, epochs=1, loss_fn=loss_fn, optimizer=optim.SGD(lr=0.1), **more)

    return trainer, train


@pytest.mark.parametrize("kind", ["local", "average", "accumulate", "fault_tolerant"])
def test_a_monitor_of_the_model_hears_each_loss_once_and_drops_the_gradient_of_a_nan(kind, tmp_path):
    model = net()
    _, train = trained(kind, model, tmp_path / "kept")
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        train(Loss())
    report = monitor.report()
    assert report.series["loss"].num_seen == 10
    assert report.num_alerts == {"loss": 1}
    assert report.num_dropped == 1
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("watches", ["nothing", "the model", "a part"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_monitor_among_the_callbacks_hears_each_loss_once(watches, reduction):
    model = net()
    watched = {"nothing": None, "the model": model, "a part": model[0]}[watches]
    loss_fn, alerts = nn.CrossEntropyLoss(reduction=reduction), []
    spoilt = torch.full((6, 4), math.nan), torch.zeros(6, dtype=torch.long)
    with AsyncTrainingMonitor(watched, warm_up=5, callbacks=alerts.append) as monitor:
        trainer = offbeat.AsyncTrainer(model, callbacks=[monitor], loss_reduction=reduction)
        history = trainer.train(
            dataloader=[*BATCHES[:9], spoilt],
            loss_fn=loss_fn,
            optimizer=optim.SGD(lr=0.01),
            log_frequency=1,
            progress=False,
        )
    series = monitor.report().series["loss"]
    assert series.num_seen == 10
    assert [alert.step for alert in alerts] == [
        10 if watches == "a part" else 9
    ]  # before that's step, or after
    assert series.values[:9] == pytest.approx([record.metrics["loss"] for record in history.records[:9]])
    trainer.train(dataloader=BATCHES, loss_fn=loss_fn, progress=False)
    assert monitor.report().series["loss"].num_seen == 10  # a closed one hears no more


def test_a_monitor_among_the_callbacks_counts_steps_over_all_trains_and_hears_a_norm_that_is_measured():
    monitor = AsyncTrainingMonitor(divergence_metrics=["loss", "gradient_norm"])
    trainer = offbeat.AsyncTrainer(net(), callbacks=monitor, max_grad_norm=1.0)
    for _ in range(2):
        trainer.train(
            dataloader=BATCHES, loss_fn=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), progress=False
        )
    assert {name: series.num_seen for name, series in monitor.report().series.items()} == {
        "loss": 20,
        "gradient_norm": 20,
    }
    assert [alert.step for alert in monitor.observe(20, loss=math.nan)] == [20]


def test_a_monitor_among_the_callbacks_goes_on_after_a_restart(tmp_path):
    for max_steps in (4, 9):
        monitor = AsyncTrainingMonitor()
        trainer = offbeat.AsyncTrainer(net(), callbacks=monitor)
        offbeat.FaultTolerantTrainer(trainer, tmp_path).train(
            dataloader=BATCHES,
            optimizer=optim.SGD(lr=0.1),
            loss_fn=nn.CrossEntropyLoss(),
            max_steps=max_steps,
        )
        assert monitor.state_dict()["num_steps"] == max_steps


def test_the_loss_is_the_mean_over_samples_where_it_is_a_sum(tmp_path):
    found = []
    for reduction in ("mean", "sum"):
        model = net()
        _, train = trained("local", model, tmp_path, reduction)
        with AsyncTrainingMonitor(model, warm_up=5) as monitor:
            train(nn.CrossEntropyLoss(reduction=reduction))
        found.append(monitor.report().series["loss"].values[0])
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("kind", ["local", "average", "fault_tolerant"])
def test_a_trainer_is_found_by_its_model_and_its_rate_is_reduced_once(kind, tmp_path):
    model = net()
    trainer, train = trained(kind, model, tmp_path / "kept")
    train(nn.CrossEntropyLoss())
    with AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", warm_up=2) as monitor:
        for step, loss in enumerate([1.0, 1.0, 1.0, 9.0]):
            monitor.observe(step, loss=loss)
        assert factor_of(trainer.optimizer) == 0.5
    assert factor_of(trainer.optimizer) == 1.0


def test_a_monitor_made_before_the_first_train_reduces_the_rate_of_the_optimizer_that_came_with_it(tmp_path):
    for kind in ("local", "average", "fault_tolerant"):
        model = net()
        trainer, train = trained(kind, model, tmp_path / kind)
        with AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", warm_up=2) as monitor:
            train(nn.CrossEntropyLoss())
            monitor.observe(99, loss=1e9)
            assert factor_of(trainer.optimizer) == 0.5


def test_a_trainer_that_will_average_is_asked_for_its_averager_when_it_is_time_to():
    model = net()
    trainer = offbeat.AsyncTrainer(model, strategy={0: "local", 1: "average"}, regular_sync_frequency=4)
    with AsyncTrainingMonitor(model, remediation_strategy="increase_sync_frequency", warm_up=2) as monitor:
        run = {"dataloader": BATCHES, "loss_fn": nn.CrossEntropyLoss(), "progress": False}
        trainer.train(**run, optimizer=optim.SGD(lr=0.1))
        (early,) = monitor.observe(20, loss=1e9)
        assert "could not be done: there is nothing" in early.result
        monitor.reset()
        trainer.train(**run)
        (alert,) = monitor.observe(30, loss=1e9)
        assert alert.result == "averaging_frequency is to be 2 instead of 4"


def test_a_trainer_that_averages_nothing_will_not_do():
    model = net()
    trainer = offbeat.AsyncTrainer(model)
    with pytest.raises(ConfigError, match=r"AsyncTrainer will not do.*; give it as acts_on="):
        AsyncTrainingMonitor(model, remediation_strategy="increase_sync_frequency")
    assert not trainer.averages_models


def test_an_optimizer_that_two_objects_have_is_scaled_once():
    live = torch.optim.SGD(net().parameters(), lr=0.5)

    class Holds:
        optimizer = live

    with AsyncTrainingMonitor(
        remediation_strategy="reduce_lr", acts_on=[live, Holds()], warm_up=2
    ) as monitor:
        for step, loss in enumerate([1.0, 1.0, 1.0, 9.0]):
            monitor.observe(step, loss=loss)
        assert factor_of(live) == 0.5
    assert factor_of(live) == 1.0
