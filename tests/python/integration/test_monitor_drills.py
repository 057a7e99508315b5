"""Faults in real training: with each remedy it ends within two points of a run without fault; without, not.

Every drill, and every run without a fault, is judged at the default thresholds, of which `alert_threshold` is
a half; no drill sets another `warm_up` or `patience` than the default's. Of runs without a fault ten each
raise no alert: in a loop of one's own, by what each step shows; of members of a group that average, by their
variance, as in the drill on them; of workers at a server whose turns come in no order, by staleness. Some
faults do no harm on the digits, which are learnt too quickly: these drills need Fashion-MNIST.
"""

import contextlib
import functools
import inspect
import statistics
import threading

import pytest
import torch

from offbeat import AsyncTrainer, AsyncTrainingMonitor
from offbeat.demo import data as fashion_mnist
from offbeat.monitor.alert import is_finite
from support.drills import (
    NUM_STEPS,
    POINT,
    REPLICAS,
    Crowd,
    Fleet,
    Kept,
    Run,
    Uneven,
    flipped,
    replica,
)
from support.group import together

TWO_POINTS = 2 * POINT

on_fashion = pytest.mark.skipif(
    not fashion_mnist.DEBIAN_DIR.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)


@functools.cache
def clean(kind, seed, **keywords):
    """Give the accuracy of a run without a fault."""
    with contextlib.ExitStack() as stack:
        run = kind(stack, seed, **keywords) if kind is Fleet else kind(seed, **keywords)
        return run.train()


@functools.cache
def clean_replicas(seed):
    """Give what members that average make of a run without a fault."""
    return together(replica, REPLICAS, seed)


def assert_mended(guarded, *, unguarded, without_fault):
    assert unguarded < without_fault - TWO_POINTS
    assert guarded > without_fault - TWO_POINTS


def drill(fault, strategy, metrics=("loss",), *, seed=0, acts_on_optimizer=False, **keywords):
    """Do the run unguarded and guarded; give the monitor's report."""
    unguarded = Run(seed).train(fault)
    run = Run(seed)
    acts_on = run.optimizer if acts_on_optimizer else None
    with AsyncTrainingMonitor(
        run.model, metrics, remediation_strategy=strategy, acts_on=acts_on, **keywords
    ) as monitor:
        guarded = run.train(fault, monitor)
        report = monitor.report()
    assert_mended(guarded, unguarded=unguarded, without_fault=clean(Run, seed))
    return report


# ------------------------------------------------------------------------------------------- faults


def nan_batch(run, step, images, labels):
    if step == 300:
        images[0, 0] = float("nan")
    return images, labels


def flipped_shard(run, step, images, labels):
    return images, flipped(labels) if step >= 4 * NUM_STEPS // 5 else labels


def loud_batches(run, step, images, labels):
    return (1000 * images if step in (300, 301) else images), labels


def ten_times_the_lr(run, step, images, labels):
    run.lr_fault = 10.0 if step >= 250 else 1.0
    return images, labels


# ------------------------------------------------------------------------------------------- rungs


@pytest.mark.parametrize("seed", range(3))
def test_a_nan_batch_is_rejected(seed):
    report = drill(nan_batch, "reject", ["non_finite"], seed=seed)
    assert report.num_dropped == 1
    assert [(a.step, a.metric, a.action) for a in report.alerts] == [
        (301, "non_finite", "reject")
    ]  # the first step is 1
    assert [release.remedy for release in report.releases] == ["reject"]


@pytest.mark.parametrize("seed", range(3))
def test_a_shard_with_flipped_labels_is_rejected(seed):
    report = drill(flipped_shard, "reject", seed=seed)
    assert report.num_dropped == NUM_STEPS // 5
    assert report.alerts[0].step == 4 * NUM_STEPS // 5


@on_fashion
def test_batches_a_thousand_times_too_loud_are_clipped():
    report = drill(loud_batches, "clip", ["gradient_norm"])
    assert report.num_clipped >= 2
    assert report.num_dropped == 0


@on_fashion
@pytest.mark.parametrize("seed", range(3))
def test_a_learning_rate_that_blows_up_is_reduced_beside_its_scheduler(seed):
    report = drill(ten_times_the_lr, "reduce_lr", ["loss", "update_ratio"], seed=seed, acts_on_optimizer=True)
    assert {alert.action for alert in report.alerts} == {"reduce_lr"}
    assert 251 <= report.alerts[0].step <= 253
    assert report.releases


@on_fashion
def test_an_alert_lets_a_callback_act():
    run = Run(0)
    fault = ten_times_the_lr

    def mend(alert):
        nonlocal fault
        fault = None
        run.lr_fault = 1.0

    with AsyncTrainingMonitor(run.model, ["update_ratio"], callbacks=mend):
        guarded = run.train(lambda run, *batch: fault(run, *batch) if fault else batch[1:])
    assert_mended(guarded, unguarded=Run(0).train(ten_times_the_lr), without_fault=clean(Run, 0))


def test_a_paused_run_waits_until_somebody_has_mended_it():
    def fault(run, step, images, labels):
        run.lr_fault = 100.0 if 250 <= step < 256 and not mended.is_set() else 1.0
        return images, labels

    mended = threading.Event()
    unguarded = Run(0).train(fault)
    run = Run(0)
    good = {name: value.clone() for name, value in run.model.state_dict().items()}
    asked = threading.Event()

    def keep(run, step, images, labels):
        if step == 240:
            good.update({name: value.clone() for name, value in run.model.state_dict().items()})
        return fault(run, step, images, labels)

    with AsyncTrainingMonitor(
        run.model, remediation_strategy="pause", callbacks=lambda _: asked.set()
    ) as monitor:

        def operate():
            assert asked.wait(30)
            run.model.load_state_dict(good)
            run.optimizer.state.clear()
            mended.set()
            monitor.resume()

        operator = threading.Thread(target=operate)
        operator.start()
        guarded = run.train(keep, monitor)
        operator.join()
        assert monitor.report().num_dropped >= 1
    assert_mended(guarded, unguarded=unguarded, without_fault=clean(Run, 0))


@on_fashion
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(3))
def test_replicas_whose_shards_become_unlike_average_more_often(seed):
    (without_fault, *_), *_ = clean_replicas(seed)
    (unguarded, *_), *_ = together(replica, REPLICAS, seed, 540)
    first, *others = together(replica, REPLICAS, seed, 540, True)
    assert all(other == first for other in others), "they see the same, act alike, and have one model"
    guarded, steps, _, frequencies = first
    assert steps[0] == 580, "the round after 560 is the first of the fault, and all hear of it in the next"
    assert frequencies[539] == 20
    assert frequencies[-2] <= 5
    assert frequencies[-1] == 20, "once the monitors let go"
    assert_mended(guarded, unguarded=unguarded, without_fault=without_fault)


@on_fashion
@pytest.mark.parametrize("seed", range(2))
def test_gradients_that_become_very_late_are_no_longer_taken(stack, seed):
    without_fault, unguarded = Crowd(stack, seed).train(), Crowd(stack, seed).train(late_from=250)
    run = Crowd(stack, seed)
    with AsyncTrainingMonitor(
        None, ["staleness"], remediation_strategy="tighten_staleness", acts_on=run.server
    ) as monitor:
        guarded = run.train(late_from=250, monitor=monitor)
        assert {alert.action for alert in monitor.report().alerts} == {"tighten_staleness"}
        assert run.server.status()["rejected"]["stale"] > 0
    assert run.server.max_staleness is None
    assert_mended(guarded, unguarded=unguarded, without_fault=without_fault)


# ------------------------------------------------------------------------------------------- with a server


def random_from_500(fleet, step, i, images, labels):
    """The third worker's gradients are noise from step 500 on."""
    if i == 2 and step == 500:
        for parameter in fleet.workers[i].model.parameters():
            parameter.register_hook(torch.randn_like)
    return images, labels


def mislabelled_from_400(fleet, step, i, images, labels):
    return images, flipped(labels) if i >= 2 and step >= 400 else labels


@pytest.mark.parametrize(
    ("fault", "metric"), [(random_from_500, "gradient_norm"), (mislabelled_from_400, "loss")]
)
@pytest.mark.parametrize("strategy", ["quarantine", ["reject", "quarantine"]], ids=str)
def test_a_worker_that_goes_astray_is_left_out(stack, fault, metric, strategy):
    torch.manual_seed(0)
    unguarded = Fleet(stack, 0).train(fault)
    fleet = Fleet(stack, 0)
    monitors = [
        stack.enter_context(AsyncTrainingMonitor(w.model, [metric], remediation_strategy=strategy))
        for w in fleet.workers
    ]
    guarded = fleet.train(fault, monitors)
    are_left_out = [worker.is_quarantined for worker in fleet.workers]
    assert are_left_out == [False, False, True, fault is mislabelled_from_400]
    assert_mended(guarded, unguarded=unguarded, without_fault=clean(Fleet, 0))


def test_a_run_whose_parameters_are_lost_goes_back_to_a_checkpoint(stack, tmp_path):
    def fault(fleet, step, i, images, labels):
        if i == 0 and step in (400, 402):
            fleet.server.set_lr(20.0 if step == 400 else 0.05)
        return images, labels

    unguarded = Fleet(stack, 0).train(fault)
    fleet = Fleet(stack, 0, checkpoint_dir=tmp_path, checkpoint_frequency=100)
    monitor = stack.enter_context(
        AsyncTrainingMonitor(fleet.workers[0].model, remediation_strategy="rollback", acts_on=fleet.server)
    )
    unwatched = [stack.enter_context(AsyncTrainingMonitor()) for _ in fleet.workers[1:]]
    guarded = fleet.train(fault, [monitor, *unwatched])
    assert monitor.report().alerts[0].action == "rollback"
    assert fleet.server.status()["term"] > 1
    assert_mended(guarded, unguarded=unguarded, without_fault=clean(Fleet, 0))


# ------------------------------------------------------------------------------------------- with checkpoints


def a_rate_that_blows_up(run, step):
    """From step 250 on, for five steps, it is far too high: the model is lost, finite or not."""
    run.lr_fault = 300.0 if 250 <= step < 255 else 1.0


def parameters_that_become_nan(run, step):
    if step == 300:
        with torch.no_grad():
            run.model[0].weight[0, 0] = float("nan")


def both(run, step):
    a_rate_that_blows_up(run, step)
    parameters_that_become_nan(run, step)


@pytest.mark.parametrize("wrap", [lambda model: model, AsyncTrainer], ids=["module", "trainer"])
@pytest.mark.parametrize("ladder", ["rollback", ["reject", "rollback"]], ids=str)
@pytest.mark.parametrize("fault", [a_rate_that_blows_up, parameters_that_become_nan, both])
def test_a_trainer_whose_parameters_are_lost_goes_back_to_a_checkpoint_of_its_own(
    fault, ladder, wrap, tmp_path
):
    without_fault = Kept(0, tmp_path / "clean").train()
    unguarded = Kept(0, tmp_path / "unguarded").train(fault)
    run = Kept(0, tmp_path / "guarded", wrap=wrap)
    with AsyncTrainingMonitor(run.model, remediation_strategy=ladder) as monitor:
        guarded = run.train(fault)
        report = monitor.report()
    went = [alert.result for alert in report.alerts if alert.action == "rollback" and alert.is_taken]
    assert all(text.startswith("went back to step") for text in went)
    assert went
    assert_mended(guarded, unguarded=unguarded, without_fault=without_fault)


def a_rate_that_stays_too_high(run, step, *, times):
    """The model does not become infinite, and is lost all the same."""
    run.lr_fault = times if step >= 250 else 1.0


@on_fashion
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("times", [40.0, 100.0])
def test_a_trainer_whose_rate_stays_too_high_goes_back_with_each_lower_one(times, seed, tmp_path):
    fault = functools.partial(a_rate_that_stays_too_high, times=times)
    without_fault = Kept(seed, tmp_path / "clean").train()
    unguarded = Kept(seed, tmp_path / "unguarded").train(fault)
    run = Kept(seed, tmp_path / "guarded")
    with AsyncTrainingMonitor(run.model, remediation_strategy=["rollback", "reduce_lr"]) as monitor:
        guarded = run.train(fault)
        report = monitor.report()
    assert all(is_finite(alert) for alert in report.alerts)
    cuts = [alert.result for alert in report.alerts if alert.action == "reduce_lr" and alert.is_taken]
    assert len(cuts) >= 2
    assert all('; "rollback" once more: went back to step' in text for text in cuts)
    assert_mended(guarded, unguarded=unguarded, without_fault=without_fault)


def inverted(images, labels):
    return 1 - images, labels


def renamed(images, labels):
    return images, (labels + 3) % 10


@on_fashion
@pytest.mark.parametrize("ladder", ["reduce_lr", ["rollback", "reduce_lr"], "rollback", "reject"], ids=str)
@pytest.mark.parametrize("change", [inverted, renamed])
def test_a_run_whose_data_changes_for_good_is_not_ended_by_a_remedy(change, ladder, tmp_path):
    alone = Kept(0, tmp_path / "alone", num_steps=1500).train(change=change)
    run = Kept(0, tmp_path / "guarded", num_steps=1500)
    with AsyncTrainingMonitor(run.model, remediation_strategy=ladder) as monitor:
        guarded = run.train(change=change)
        assert monitor.report().num_alerts["loss"] > 0
    assert guarded > alone - 25 * POINT, "none of it has time to learn all that a run without it does"


@on_fashion
def test_data_that_changes_for_good_is_learnt_with_momentum_as_without_a_monitor(tmp_path):
    """What a low rate has gathered, with the whole rate at once, ended one run of these in eight."""
    alone, guarded = [], []
    for seed in range(3):
        folder = tmp_path / str(seed)
        alone.append(Kept(seed, folder / "alone", num_steps=1500).train(change=inverted))
        run = Kept(seed, folder / "guarded", num_steps=1500)
        with AsyncTrainingMonitor(run.model, remediation_strategy=["rollback", "reduce_lr"]):
            guarded.append(run.train(change=inverted))
    assert statistics.median(guarded) > statistics.median(alone) - TWO_POINTS
    assert min(guarded) > min(alone) - 5 * POINT


def a_hundred_times(images, labels):
    return 100 * images, labels


@on_fashion
@pytest.mark.parametrize("num", [17, 25])
def test_a_burst_of_broken_batches_is_no_change_of_the_data(num, tmp_path):
    given = {"change": a_hundred_times, "change_in": slice(300, 300 + num)}
    without_fault = Kept(0, tmp_path / "clean").train()
    unguarded = Kept(0, tmp_path / "unguarded").train(**given)
    run = Kept(0, tmp_path / "guarded")
    with AsyncTrainingMonitor(run.model, remediation_strategy=["rollback", "reduce_lr"]) as monitor:
        guarded = run.train(**given)
        assert not any("taken for usual" in alert.result for alert in monitor.report().alerts)
    assert guarded > without_fault - 4 * POINT > unguarded, "the rate was cut for some steps meanwhile"


# ------------------------------------------------------------------------------------------- without a fault


@pytest.mark.parametrize("seed", range(10))
def test_a_run_without_a_fault_raises_no_alert(seed):
    run = Run(seed)
    metrics = ["loss", "loss_variance", "gradient_norm", "update_ratio", "non_finite"]
    with AsyncTrainingMonitor(run.model, metrics) as monitor:
        run.train(None, monitor)
        report = monitor.report()
    assert report.alerts == ()
    assert {metric: series.num_seen for metric, series in report.series.items()} == {
        "loss": NUM_STEPS,
        "loss_variance": NUM_STEPS // 5,
        "gradient_norm": NUM_STEPS,
        "update_ratio": NUM_STEPS - 1,
        "non_finite": NUM_STEPS,
    }


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(10))
def test_members_that_average_without_a_fault_raise_no_alert(seed):
    for _, alerts, num_seen, frequencies in clean_replicas(seed):
        assert alerts == []
        assert num_seen == 37, "of 38 rounds, each told in the next one"
        assert set(frequencies) == {20}


@pytest.mark.parametrize("seed", range(10))
def test_workers_of_a_server_without_a_fault_raise_no_alert(stack, seed):
    fleet = Uneven(stack, seed, num_steps=200)
    monitors = [stack.enter_context(AsyncTrainingMonitor(w.model, ["staleness"])) for w in fleet.workers]
    fleet.train()
    reports = [monitor.report() for monitor in monitors]
    assert [report.alerts for report in reports] == [()] * len(reports)
    assert min(report.series["staleness"].num_seen for report in reports) > 80
    assert max(reports[-1].series["staleness"].values) > 20, "the slow one's is uneven"


def test_the_threshold_of_all_of_them_is_a_half():
    parameters = inspect.signature(AsyncTrainingMonitor).parameters
    assert parameters["alert_threshold"].default == 0.5
