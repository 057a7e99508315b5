"""A monitor hears what trains its model, and acts on it: every trainer of ours, by its `train` alone."""

import contextlib
import functools
import itertools
import logging
import math
import statistics
import types

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

import offbeat
from offbeat import AsyncTrainingMonitor, optim
from offbeat.errors import ConfigError, NonFiniteError
from offbeat.local.lr_scale import factor_of
from offbeat.recovery.directory import entries
from support.small_net import net, normed
from support.tracker import Told

BATCHES = [(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))] * 10


class Loss:
    """Cross entropy, whose tenth batch is NaN, or whatever the factor makes of it."""

    def __init__(self, factor=math.nan):
        self._loss = nn.CrossEntropyLoss()
        self._num, self._factor = 0, factor

    def __call__(self, outputs, targets):
        self._num += 1
        return self._loss(outputs, targets) * (self._factor if self._num == 10 else 1.0)


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


def test_a_monitor_that_another_one_s_callback_has_closed_hears_no_more():
    model = net()

    def close(alert):
        if alert.num == 2:  # which the other one, told next, would judge with nothing in effect
            second.close()

    def loss_fn(outputs, targets, num=[0]):  # noqa: B006  counts the calls
        num[0] += 1
        return nn.functional.cross_entropy(outputs, targets) * (100.0 if num[0] > 6 else 1.0)

    keywords = {"divergence_metrics": ["loss"], "remediation_strategy": "alert", "warm_up": 5}
    with AsyncTrainingMonitor(model, callbacks=close, **keywords) as first:
        second = AsyncTrainingMonitor(model, **keywords)
        trainer = offbeat.AsyncTrainer(model)
        trainer.train(dataloader=BATCHES, loss_fn=loss_fn, optimizer=optim.SGD(lr=1e-6), progress=False)
    assert (first.report().num_alerts, second.report().num_alerts) == ({"loss": 4}, {"loss": 1})


@pytest.mark.parametrize("is_monitor_given_it", [False, True])
@pytest.mark.parametrize("kind", ["local", "average", "accumulate", "fault_tolerant"])
def test_a_module_and_what_torch_compile_made_of_it_are_one_to_a_monitor(kind, is_monitor_given_it, tmp_path):
    plain = net()
    compiled = torch.compile(plain, backend="eager")
    trainer, train = trained(kind, plain if is_monitor_given_it else compiled, tmp_path / "kept")
    watched = compiled if is_monitor_given_it else plain
    with AsyncTrainingMonitor(watched, remediation_strategy="reject", warm_up=5) as monitor:
        assert offbeat.trained_by.trainers_of(watched) == [trainer]
        train(Loss())
    report = monitor.report()
    assert report.series["loss"].num_seen == 10
    assert report.num_alerts == {"loss": 1}
    assert all(bool(p.isfinite().all()) for p in plain.parameters())


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


def test_a_run_of_which_all_batches_were_dropped_is_not_good_and_moves_no_scheduler(tmp_path):
    def loss_fn(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * float("nan")

    live = torch.optim.SGD((model := net()).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(live, step_size=1, gamma=0.5)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5):
        history = offbeat.FaultTolerantTrainer(model, tmp_path).train(
            dataloader=BATCHES,
            loss_fn=loss_fn,
            optimizer=live,
            scheduler=scheduler,
            scheduler_interval="step",
        )
    assert history.skipped == history.steps == len(BATCHES)
    assert live.param_groups[0]["lr"] == 0.1
    assert not entries(tmp_path)[0].manifest.is_good


@pytest.mark.parametrize("kind", ["local", "average", "fault_tolerant", "around it"])
def test_a_batch_that_a_remedy_dropped_moves_no_scheduler(kind, tmp_path):
    model = net()
    live = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(live, 0.9)
    run = {"dataloader": BATCHES, "loss_fn": Loss(), "optimizer": live}
    run |= {"scheduler": scheduler, "scheduler_interval": "step"}
    trainer = offbeat.AsyncTrainer(model, strategy="average" if kind == "average" else "local")
    around = {"fault_tolerant": model, "around it": trainer}.get(kind)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5):
        if around is None:
            history = trainer.train(**run, progress=False)
        else:
            history = offbeat.FaultTolerantTrainer(around, tmp_path).train(**run)
    assert (history.skipped, history.steps) == (1, 10)
    assert scheduler.last_epoch == 9
    assert live.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**9)


@pytest.mark.parametrize("kind", ["local", "average", "fault_tolerant", "around an averager", "around it"])
def test_a_batch_whose_gradients_a_remedy_dropped_is_skipped_and_counts_in_no_mean(kind, tmp_path):
    model, steps = net(), []
    loss_fn, plain = Loss(), nn.CrossEntropyLoss()
    losses = []  # those of the other batches, as the loss function gave them

    def counted(outputs, targets):
        loss = loss_fn(outputs, targets)
        losses.append(float(plain(outputs.detach(), targets)))
        return loss

    told = types.SimpleNamespace(on_step=lambda _, step: steps.append(step.is_skipped))
    run = {"dataloader": BATCHES * 2, "loss_fn": counted, "optimizer": optim.SGD(lr=0.1), "log_frequency": 10}
    averager = (
        offbeat.AsyncModelAverager(model, averaging_frequency=1000) if kind == "around an averager" else None
    )
    trainer = offbeat.AsyncTrainer(
        model, strategy=kind if kind in ("local", "average") else "local", callbacks=[told]
    )
    around = {"fault_tolerant": model, "around an averager": averager, "around it": trainer}.get(kind)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        if around is None:
            history = trainer.train(**run, progress=False)
        else:
            history = offbeat.FaultTolerantTrainer(around, tmp_path, monitor="loss").train(**run)
    assert monitor.report().num_dropped == 1
    assert (history.skipped, history.steps, history.first_non_finite) == (1, 20, None)
    del losses[9]
    shown = [record.metrics["loss"] for record in history.records]
    assert shown == pytest.approx([statistics.fmean(losses[:9]), statistics.fmean(losses[9:])])
    assert steps == ([] if kind in ("fault_tolerant", "around an averager") else [i == 9 for i in range(20)])
    if averager is not None:
        assert averager.iterations == 20, "others do not wait for a batch that a member drops"
    if around is not None:
        newest = entries(tmp_path)[0].manifest
        assert newest.is_good
        assert (newest.loss, newest.monitored) == pytest.approx((statistics.fmean(losses),) * 2)
        assert newest.monitored_samples == 19 * 6


@pytest.mark.parametrize("kind", ["local", "fault_tolerant", "around"])
def test_a_trainer_s_own_loss_scale_is_none_to_tell_the_monitor_of(kind, tmp_path, caplog):
    def norms(amp, **scaled):
        model = net()
        run = {"dataloader": BATCHES, "loss_fn": nn.CrossEntropyLoss(), "optimizer": optim.SGD(lr=0.1)}
        if kind == "fault_tolerant":
            trainer = offbeat.FaultTolerantTrainer(model, checkpoint_dir=tmp_path / amp)
            run |= scaled
        else:
            trainer = offbeat.AsyncTrainer(model, amp=amp, max_grad_norm=0.05)
            run |= {"progress": False} if kind == "local" else {}
        if kind == "around":
            trainer = offbeat.FaultTolerantTrainer(trainer, checkpoint_dir=tmp_path / amp)
        with AsyncTrainingMonitor(model, ["gradient_norm"]) as monitor:
            trainer.train(**run)
        return monitor.report().series["gradient_norm"].values

    scaled = norms("fp16", grad_scaler=torch.amp.GradScaler("cpu"))
    assert scaled == pytest.approx(norms("none"), rel=0.01)
    assert not [record for record in caplog.records if "GradScaler" in record.getMessage()]


@pytest.mark.parametrize("kind", ["local", "average", "fault_tolerant"])
def test_an_alert_on_a_batch_that_a_loss_scale_skips_costs_no_other(kind, tmp_path):
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=8.0)
    run = {"dataloader": BATCHES * 2, "loss_fn": Loss(math.inf), "optimizer": optim.SGD(lr=0.1)}
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        if kind == "fault_tolerant":
            trainer = offbeat.FaultTolerantTrainer(model, checkpoint_dir=tmp_path / "kept")
            history = trainer.train(**run, grad_scaler=scaler)
        else:
            trainer = offbeat.AsyncTrainer(model, strategy=kind, amp="fp16")
            trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 8.0})
            history = trainer.train(**run, progress=False)
    report = monitor.report()
    assert report.num_alerts == {"loss": 1}
    assert (history.skipped, history.steps, report.num_dropped) == (1, 19, 0)


@pytest.mark.parametrize("kind", ["local", "average", "fault_tolerant", "around"])
def test_what_a_batch_has_broken_that_a_loss_scale_skips_goes_back(kind, tmp_path):
    model = normed()
    batches = [
        (inputs * (math.nan if num == 4 else 1.0), targets) for num, (inputs, targets) in enumerate(BATCHES)
    ]
    run = {"dataloader": batches, "loss_fn": nn.CrossEntropyLoss(), "optimizer": optim.SGD(lr=0.1)}
    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject") as monitor:
        if kind == "fault_tolerant":
            trainer = offbeat.FaultTolerantTrainer(model, checkpoint_dir=tmp_path / "kept")
            history = trainer.train(**run, grad_scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        else:
            trainer = offbeat.AsyncTrainer(model, strategy="local" if kind == "around" else kind, amp="fp16")
            trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 8.0})
            if kind == "around":
                trainer = offbeat.FaultTolerantTrainer(trainer, checkpoint_dir=tmp_path / "kept")
            history = trainer.train(**run, **({} if kind == "around" else {"progress": False}))
    assert (history.skipped, monitor.report().num_dropped) == (1, 0)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


@pytest.mark.parametrize("kind", ["local", "fault_tolerant"])
def test_a_log_line_says_how_many_batches_were_skipped_since_the_one_before(kind, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trainer, _ = trained(kind, model := net(), tmp_path)
    bad, num = (3, 6, 7), itertools.count(1)

    def loss_fn(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * (math.nan if next(num) in bad else 1.0)

    with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject"):
        run = {"dataloader": BATCHES, "epochs": 1, "loss_fn": loss_fn, "optimizer": optim.SGD(lr=0.1)}
        trainer.train(**run, log_frequency=5)
    lines = [
        text for record in caplog.records if " step " in (text := record.getMessage()) and "loss " in text
    ]
    lines = [text.rpartition("samples/s")[2] for text in lines if "samples/s" in text]
    assert lines == ["; 1 batch skipped)", "; 2 batches skipped)"]


def test_a_log_line_after_a_crash_counts_what_was_skipped_before_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def life(crash_in):
        num = itertools.count(1)

        def loss_fn(outputs, targets):
            if (at := next(num)) == crash_in:
                raise KeyError("a crash")
            return nn.functional.cross_entropy(outputs, targets) * (math.nan if at in (6, 7) else 1.0)

        trainer = offbeat.FaultTolerantTrainer(
            model := net(), checkpoint_dir=tmp_path, checkpoint_frequency=8
        )
        run = {"dataloader": BATCHES, "epochs": 1, "loss_fn": loss_fn, "optimizer": optim.SGD(lr=0.1)}
        with AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject"):
            trainer.train(**run, log_frequency=5)

    with pytest.raises(KeyError, match="a crash"):
        life(crash_in=9)
    life(crash_in=0)
    lines = [text for record in caplog.records if "samples/s" in (text := record.getMessage())]
    assert [text.rpartition("samples/s")[2] for text in lines] == [")", "; 2 batches skipped)"]


def test_an_alert_on_an_update_that_an_accumulator_s_loss_scale_skips_costs_no_other():
    model, scaler, loss_fn = net(), torch.amp.GradScaler("cpu"), Loss(math.inf)
    accumulator = offbeat.AsyncGradientAccumulator(model, accumulation_steps=2, grad_scaler=scaler)
    with AsyncTrainingMonitor(model, remediation_strategy="reject", warm_up=5) as monitor:
        for inputs, targets in BATCHES * 2:
            accumulator.train_step(
                inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=loss_fn
            )
        accumulator.flush()
    report = monitor.report()
    assert report.num_alerts == {"loss": 1}
    assert (accumulator.skipped_updates, accumulator.updates, report.num_dropped) == (1, 9, 0)


@pytest.mark.parametrize("remedy", ["alert", "reject"])
@pytest.mark.parametrize("kind", ["local", "average", "accumulate", "fault_tolerant"])
def test_an_alert_counts_steps_as_histories_log_lines_and_callbacks_do(kind, remedy, tmp_path):
    model, alerts, steps = net(), [], []

    def on_step(_, step):
        if step.loss.isnan():
            steps.append(step.step)

    run = {"loss_fn": Loss(), "optimizer": optim.SGD(lr=0.1), "log_frequency": 1}
    with AsyncTrainingMonitor(model, remediation_strategy=remedy, callbacks=alerts.append):
        if kind == "fault_tolerant":
            history = offbeat.FaultTolerantTrainer(model, tmp_path).train(**run, dataloader=BATCHES)
        else:
            told = types.SimpleNamespace(on_step=on_step)
            trainer = offbeat.AsyncTrainer(
                model, strategy=kind, regular_sync_frequency=1, warm_up_epochs=0, callbacks=[told]
            )
            # An update that is not finite is an error, and so is a mean.
            raised = kind in ("accumulate", "average") and remedy == "alert"
            with pytest.raises(NonFiniteError) if raised else contextlib.nullcontext():
                trainer.train(**run, dataloader=BATCHES, progress=False)
            history = trainer.history
    assert [alert.step for alert in alerts] == [10]
    if remedy == "alert" and kind in ("local", "fault_tolerant"):
        assert history.first_non_finite == 10
        assert [record.step for record in history.records if math.isnan(record.metrics["loss"])] == [10]
        assert steps == ([] if kind == "fault_tolerant" else [10])
    elif kind in ("local", "average") and remedy == "reject":
        assert steps == [10]


@pytest.mark.parametrize("kind", ["trainer", "fault_tolerant"])
def test_a_log_line_of_dropped_batches_alone_says_so_and_gives_trackers_no_value(kind, tmp_path, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    model, tracker = net(), Told()
    trainer = offbeat.AsyncTrainer(model, trackers=tracker)
    run = {"loss_fn": Loss(), "optimizer": optim.SGD(lr=0.1), "log_frequency": 1, "dataloader": BATCHES}
    with AsyncTrainingMonitor(model, remediation_strategy="reject"):
        if kind == "trainer":
            trainer.train(**run, progress=False)
        else:
            offbeat.FaultTolerantTrainer(trainer, tmp_path).train(**run)
    (line,) = [line for line in caplog.messages if "step 10" in line and "samples/s" in line]
    assert "step 10: all batches since the last line were skipped (" in line
    assert not any("loss nan" in line for line in caplog.messages)
    assert [step for step, told in tracker.by_step.items() if "loss" not in told] == [10]


def test_a_monitor_that_is_told_of_numbers_has_those():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AsyncTrainingMonitor(model, ["loss", "non_finite"], warm_up=5) as monitor:
        for step in range(100, 103):  # by the user's own count
            model(BATCHES[0][0]).sum().backward()
            monitor.observe(step, loss=math.nan if step == 102 else 1.0)
            if step == 101:
                model[0].weight.grad.fill_(math.nan)
            optimizer.step()
            optimizer.zero_grad()
            model.load_state_dict(net().state_dict())
    assert [alert.step for alert in monitor.report().alerts] == [101, 102]


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
    assert [alert.step for alert in alerts] == [10]  # told before that step was made, or after
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


@pytest.mark.parametrize("kind", ["local", "average", "fault_tolerant"])
@pytest.mark.parametrize(
    ("schedule", "closed_form"),
    [
        (
            functools.partial(CosineAnnealingLR, T_max=40),
            lambda step: 0.5 * (1 + math.cos(math.pi * step / 40)),
        ),
        (functools.partial(ExponentialLR, gamma=0.9), lambda step: 0.9**step),
    ],
    ids=["cosine", "exponential"],
)
def test_a_scheduler_that_steps_with_the_optimizer_goes_on_as_if_the_rate_were_not_reduced(
    kind, schedule, closed_form, tmp_path
):
    model = nn.Linear(1, 1, bias=False)
    live = torch.optim.SGD(model.parameters(), lr=1.0)
    places = []

    def loss_fn(outputs, targets):
        places.append(model.weight.item())
        return outputs.sum()  # whose gradient is 1: a step is as long as its rate

    run = {"dataloader": [(torch.ones(1, 1), torch.zeros(1))] * 20, "loss_fn": loss_fn, "optimizer": live}
    with AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=live, warm_up=2) as monitor:
        for step, loss in enumerate([1.0, 1.0, 1.0, 9.0]):
            monitor.observe(step, loss=loss)
        if kind == "fault_tolerant":
            trainer = offbeat.FaultTolerantTrainer(model, checkpoint_dir=tmp_path / "kept")
            trainer.train(**run, scheduler=schedule, scheduler_interval="step")
        else:
            trainer = offbeat.AsyncTrainer(model, strategy=kind)
            trainer.train(**run, scheduler=schedule, scheduler_interval="step", progress=False)
    used = [before - after for before, after in itertools.pairwise([*places, model.weight.item()])]
    assert used == pytest.approx([0.5 * closed_form(step) for step in range(20)], abs=1e-5)
    assert live.param_groups[0]["lr"] == pytest.approx(closed_form(20))


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


def test_the_end_of_a_warm_up_ends_what_a_remedy_had_set_and_is_told_of():
    model = net()
    trainer = offbeat.AsyncTrainer(
        model,
        strategy="average",
        warm_up_epochs=1,
        warm_up_sync_frequency=8,
        regular_sync_frequency=4,
        overlap=False,
    )
    run = {"dataloader": BATCHES, "loss_fn": nn.CrossEntropyLoss(), "progress": False}
    with AsyncTrainingMonitor(model, remediation_strategy="increase_sync_frequency", warm_up=2) as monitor:
        trainer.train(**run, optimizer=optim.SGD(lr=0.1))
        (alert,) = monitor.observe(20, loss=1e9)
        assert alert.result == "averaging_frequency is to be 4 instead of 8"
        trainer.train(**run)
        assert monitor.in_effect == ()
        (release,) = monitor.report().releases
        assert release.result == "averaging_frequency was set to 4 since, and stays"
        (alert,) = monitor.observe(30, loss=1e9)
        assert alert.result == "averaging_frequency is to be 2 instead of 4"
    assert monitor.report().releases[-1].result == "averaging_frequency is 4"


def test_an_averager_that_a_change_of_strategy_has_closed_is_asked_no_more():
    model = net()
    trainer = offbeat.AsyncTrainer(
        model, strategy={0: "average", 1: "diloco"}, regular_sync_frequency=8, overlap=False
    )
    run = {"dataloader": BATCHES, "loss_fn": nn.CrossEntropyLoss(), "progress": False}
    with AsyncTrainingMonitor(
        model, remediation_strategy="increase_sync_frequency", warm_up=2, patience=1
    ) as monitor:
        trainer.train(**run, optimizer=optim.SGD(lr=0.1))
        (alert,) = monitor.observe(20, loss=1e9)
        assert alert.result == "averaging_frequency is to be 4 instead of 8"
        trainer.train(**run)
        (alert,) = monitor.observe(30, loss=1e9)
        assert alert.result == "averaging_frequency is to be 4 instead of 8"
    assert "what it acted on has ended" in monitor.report().releases[-1].result


@pytest.mark.parametrize("overlap", [False, True])
def test_a_round_s_move_is_no_update_of_the_optimizer_s(overlap):
    model = net()
    trainer = offbeat.AsyncTrainer(model, strategy="diloco", regular_sync_frequency=2, overlap=overlap)
    live, moved = torch.optim.SGD(model.parameters(), lr=0.1), []

    def values(*_):
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

    live.register_step_pre_hook(lambda *_: moved.append(values()))
    live.register_step_post_hook(
        lambda *_: moved.append(float((values() - moved[-1]).norm() / moved.pop().norm()))
    )
    with AsyncTrainingMonitor(model, ["update_ratio"], warm_up=5) as monitor:
        trainer.train(
            dataloader=BATCHES, epochs=4, loss_fn=nn.CrossEntropyLoss(), optimizer=live, progress=False
        )
    assert monitor.report().series["update_ratio"].values == pytest.approx(moved[:-1], rel=1e-4)


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
