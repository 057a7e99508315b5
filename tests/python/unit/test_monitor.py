"""What `AsyncTrainingMonitor` takes, tells and acts on."""

import dataclasses
import json
import logging
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from offbeat import (
    AsyncGradientAccumulator,
    AsyncModelAverager,
    AsyncTrainer,
    AsyncTrainingMonitor,
    ParameterServer,
    trained_by,
)
from offbeat.errors import ClosedError, ConfigError, StateError
from offbeat.local.lr_scale import factor_of
from offbeat.monitor import Alert, Recovery
from offbeat.monitor.detector import METRICS
from offbeat.monitor.report import MOST_POINTS, Series, bulk
from support.small_net import net


class Averages:
    """Something of a user's own, with what a remedy looks for."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Keeps:
    def __init__(self):
        self.calls = []

    def rollback(self, version=None):
        self.calls.append(version)
        return "yesterday"


class Workers:
    def __init__(self):
        self.left_out = []

    def quarantine(self, worker_id):
        self.left_out.append(worker_id)

    def release(self, worker_id):
        self.left_out.remove(worker_id)


def warmed(*arguments, num_steps=10, **keywords):
    """Make a monitor that has seen as many losses of 1."""
    monitor = AsyncTrainingMonitor(*arguments, warm_up=5, **keywords)
    for step in range(num_steps):
        assert monitor.observe(step, loss=1.0) == ()
    return monitor


# ------------------------------------------------------------------------------------------- telling


def test_an_alert_says_step_metric_value_range_action_and_result_to_all_who_listen(caplog):
    told = []
    monitor = warmed(callbacks=[told.append, told.append])
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        alerts = monitor.observe(10, loss=torch.tensor(2.0), worker="w7")
    alert = Alert(10, "loss", 2.0, (1.0, 1.0), "alert", "told", "w7", limit=1.5, is_taken=True)
    assert alerts == (alert,)
    assert told == [alert, alert]
    assert monitor.report().alerts == (alert,)
    assert caplog.records[-1].message.endswith(
        "step 10: loss of worker w7 is 2, expected 1.5 at most (its range ends at 1); alert: told"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        alert.value = 3.0


@pytest.mark.parametrize("value", [9.0, math.nan])
def test_an_alert_that_persists_is_told_ever_more_seldom_and_counted_each_time(caplog, value):
    told = []
    monitor = warmed(callbacks=told.append)
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        found = [monitor.observe(step, loss=value)[0] for step in range(10, 1010)]
    assert [alert.num for alert in found] == list(range(1, 1001))
    assert [alert.num for alert in told] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [alert for alert in found if alert.is_news] == told
    assert len(caplog.records) == len(told)
    assert caplog.records[-1].message.endswith("alert: in effect since step 10 (alert number 512)")
    assert monitor.report().alerts == tuple(told)
    assert monitor.report().num_alerts == {"loss": 1000}
    assert monitor.report().alerts[-1].result == "in effect since step 10"


@pytest.mark.parametrize("threshold", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("metric", ["loss", "gradient_norm", "staleness", "parameter_variance"])
def test_what_an_alert_says_is_expected_at_most_is_where_alerts_begin(metric, threshold):
    def observed(value):
        monitor = AsyncTrainingMonitor(divergence_metrics=[metric], warm_up=10, alert_threshold=threshold)
        for step in range(10):
            monitor.observe(step, **{metric: 40.0 if step == 4 else 1.0})  # a range that reaches below 0
        alerts = [alert for step in range(10, 15) for alert in monitor.observe(step, **{metric: value})]
        return alerts, monitor

    (first, *_), monitor = observed(1e9)
    assert monitor.report().alerts[0].limit == first.limit
    assert f"expected {first.limit:.4g} at most" in str(first)
    assert "-" not in str(first)
    assert observed(first.limit * 1.001)[0]
    assert not observed(first.limit * 0.99)[0]  # where it is by then, with what it has taken up
    assert first.expected[1] <= first.limit
    assert (first.expected[0] < 0) == (metric == "loss"), "of what is never below 0 no range is"


def test_that_a_metric_is_in_its_range_again_says_which_that_is_and_which_it_was():
    monitor = AsyncTrainingMonitor(warm_up=10)
    for step in range(10):
        monitor.observe(step, loss=0.9 + step % 2 * 0.2)
    then = monitor.observe(10, loss=9.0)[0].expected
    assert then == pytest.approx((0.75, 1.25))
    for step in range(11, 60):
        monitor.observe(step, loss=1.3)  # within the limit, so that the range follows
    (recovery,) = monitor.report().recoveries
    assert recovery.expected_then == then
    assert recovery.expected[1] > recovery.value == 1.3
    now = f"usual by now (up to {recovery.expected[1]:.4g}) and was not when that began (up to 1.25), after"
    assert f"loss is 1.3, which is {now} 1 alert since" in str(recovery)
    monitor.observe(60, loss=9.0)
    for step in range(61, 70):
        monitor.observe(step, loss=1.2)
    back = monitor.report().recoveries[-1]
    moved = f"(up to {back.expected[1]:.4g}; when that began up to {back.expected_then[1]:.4g})"
    assert f"loss is 1.2, in its range again {moved}, after 1 al" in str(back)


def test_where_there_is_no_range_yet_what_is_in_it_again_says_so():
    monitor = AsyncTrainingMonitor(warm_up=10)
    assert monitor.observe(0, loss=math.nan)
    for step in range(1, 6):
        monitor.observe(step, loss=1.0)
    (recovery,) = monitor.report().recoveries
    assert recovery.expected == recovery.expected_then == (-math.inf, math.inf)
    assert str(recovery).startswith("step 5: loss is 1, in its range again (which is still learnt), after 1")


def test_the_end_of_alerts_is_told_once_and_what_comes_after_is_a_new_matter(caplog):
    monitor = warmed(quiet_steps=1000)
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        for step in range(10, 40):  # one of each two is one matter
            monitor.observe(step, loss=math.nan if step % 2 else 1.0, worker="w7")
        assert monitor.report().recoveries == ()
        for step in range(40, 60):
            monitor.observe(step, loss=1.0, worker="w7")
    (recovery,) = monitor.report().recoveries
    ranges = {"expected": (1.0, 1.0), "expected_then": (1.0, 1.0)}
    assert recovery == Recovery(44, "loss", 1.0, 11, 15, "w7", **ranges)
    assert str(recovery) == (
        "step 44: loss of worker w7 is 1, in its range again (up to 1), after 15 alerts since step 11"
    )
    assert [record.message for record in caplog.records].count(str(recovery)) == 1
    assert [alert.num for alert in monitor.report().alerts] == [1, 2, 4, 8]
    assert json.loads(monitor.report().to_json())["recoveries"][0]["num_alerts"] == 15
    assert monitor.observe(60, loss=math.nan, worker="w7")[0].num == 1


def test_each_worker_s_alerts_are_told_by_themselves():
    monitor = warmed()
    found = [monitor.observe(10, loss=math.nan, worker=name)[0] for name in "abc"]
    assert [(alert.num, alert.is_news) for alert in found] == [(1, True)] * 3


def test_an_alert_at_which_a_remedy_is_taken_is_always_told():
    averager = Averages(averaging_frequency=1024)
    told = []
    monitor = warmed(
        remediation_strategy="increase_sync_frequency", acts_on=averager, patience=5, callbacks=told.append
    )
    for step in range(10, 21):
        monitor.observe(step, loss=9.0)
    assert [alert.num for alert in told] == [1, 2, 4, 6, 8, 11]
    assert [a.num for a in told if a.result.startswith("averaging_frequency is")] == [1, 6, 11]


def test_who_lets_a_paused_run_go_on_has_peace_for_ever_longer():
    monitor = warmed(remediation_strategy="pause", pause_timeout_s=0.001, patience=5)
    results = [monitor.observe(step, loss=math.nan)[0].result for step in range(10, 200)]
    assert [i for i, result in enumerate(results) if result.startswith("training waits")] == [
        0,
        10,
        30,
        70,
        150,
    ]


def test_an_alert_after_a_pause_says_when_the_next_one_may_come():
    monitor = warmed(remediation_strategy="pause", pause_timeout_s=0.001, patience=3, quiet_steps=20)
    results = [monitor.observe(step, loss=math.nan)[0].result for step in range(10, 17)]
    begin = "training was paused at step 10, and is not again before 20 steps are in the range with no alert"
    assert results[1:6] == [
        *(f"{begin} in between, or {num} more have an alert" for num in (5, 4, 3, 2)),
        f"{begin} in between, or 1 more has an alert",
    ]
    assert results[6].startswith("training waits")
    for step in range(17, 38):
        monitor.observe(step, loss=1.0)  # lets go of the second one
    monitor.observe(38, loss=math.nan)
    for step in range(39, 60):
        monitor.observe(step, loss=1.0)
    assert monitor.in_effect == ()
    assert monitor.observe(60, loss=math.nan)[0].result.startswith("training waits")
    assert " before 40 steps are in the range" in monitor.observe(61, loss=math.nan)[0].result  # a relapse


def test_where_another_remedy_comes_after_a_pause_only_steps_in_the_range_lead_to_another():
    monitor = warmed(remediation_strategy=["pause", "alert"], pause_timeout_s=0.001, quiet_steps=1)
    monitor.observe(10, loss=9.0)
    assert monitor.observe(11, loss=9.0)[0].result == (
        "training was paused at step 10, and is not again before 1 step is in the range with no alert in "
        "between"
    )


def test_a_callback_that_fails_is_told_of_once_and_costs_neither_training_nor_other_callbacks(caplog):
    told = []

    def fail(alert):
        raise ConnectionError("no way to the chat")

    monitor = warmed(callbacks=[fail, told.append])
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        alerts = [*monitor.observe(10, loss=9.0), *monitor.observe(11, loss=9.0)]
    assert told == alerts
    assert len(alerts) == 2
    said = [record for record in caplog.records if "the callback" in record.message]
    assert len(said) == 1
    assert "ConnectionError: no way to the chat" in said[0].message
    assert said[0].exc_info is not None


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_a_callback_may_end_the_run(ends):
    def end(alert):
        raise ends

    with pytest.raises(ends):
        warmed(callbacks=end).observe(10, loss=9.0)


def test_the_report_is_json_and_a_picture(tmp_path):
    monitor = warmed(divergence_metrics=["loss", "gradient_norm"], quiet_steps=3, num_steps=20)
    monitor.observe(20, loss=math.nan, gradient_norm=3.0)
    for step in range(21, 30):
        monitor.observe(step, loss=1.0)
    report = monitor.report()
    data = json.loads(report.to_json(indent=1))
    assert data["alerts"][0]["value"] is None
    assert data["num_alerts"] == {"loss": 1}
    assert data["releases"][0]["remedy"] == "alert"
    assert len(data["series"]["loss"]["steps"]) == 30
    assert data["series"]["loss"]["high"][:5] == [None] * 5
    for name in ("run.png", "run.svg"):
        report.plot(tmp_path / name)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"run\.what"):
        report.plot(tmp_path / "run.what")


def test_a_few_values_that_are_far_out_flatten_no_others():
    usual = [1.0 + 0.01 * (number % 50) for number in range(1000)]
    low, high = bulk([*usual, 1e6, math.nan, math.inf])
    assert (low, high) == pytest.approx((1.0, 1.49 + 0.48), abs=0.02)
    assert bulk(usual) == (min(usual), max(usual))
    many = [*usual, *[10.0 + number % 50 for number in range(200)]]
    assert bulk(many) == (min(many), max(many)), "a level of its own is no outlier"
    for nothing_to_choose in ([], [math.nan] * 5, [0.0] * 500 + [7.0]):
        assert bulk(nothing_to_choose) is None


def test_a_picture_shows_remedies_and_says_how_many_alerts_it_has_a_cross_of(tmp_path):
    model = net()
    settings = {"remediation_strategy": ["clip", "reject"], "patience": 2, "quiet_steps": 5, "warm_up": 10}
    with AsyncTrainingMonitor(model, **settings) as monitor:
        for step in range(100):
            spoilt = {50: math.nan, 51: 1e6, 52: 9.0, 53: 9.0, 54: 9.0}
            monitor.observe(step, loss=spoilt.get(step, 1.0 + step % 3))
        report = monitor.report()
        (axes,) = report.plot(tmp_path / "run.png").axes
    assert axes.get_ylim()[1] < 20
    assert axes.collections, "the range"
    labels = {line.get_label(): line for line in axes.lines}
    assert "loss (2 values beyond the axis, or not finite)" in labels
    crosses = labels["4 of 5 alerts (those that were told)"]
    assert list(crosses.get_xdata()) == [alert.step for alert in report.alerts] == [50, 51, 52, 53]
    assert list(crosses.get_ydata()) == [axes.get_ylim()[1]] * 2 + [9.0] * 2
    taken = [(alert.step, alert.action) for alert in report.alerts if alert.is_taken]
    gone = [(release.step, release.remedy) for release in report.releases]
    assert [action for _, action in taken] == ["clip", "reject"]
    assert [remedy for _, remedy in gone] == ["reject", "clip"]
    upright = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert upright == [step for step, _ in (*taken, *gone)]
    assert [(text.get_position()[0], text.get_text()) for text in axes.texts] == [*taken, *gone]
    assert {"remedy taken", "let go of"} <= labels.keys()


def test_a_report_does_not_change_any_more():
    monitor = warmed()
    report = monitor.report()
    monitor.observe(10, loss=9.0)
    assert (report.alerts, report.series["loss"].num_seen) == ((), 10)


def test_before_the_warm_up_a_finite_number_is_expected_and_a_report_is_told_in_a_line():
    monitor = AsyncTrainingMonitor()
    for step in range(50):
        (alert,) = monitor.observe(step, loss=math.inf)
    assert (
        str(alert)
        == "step 49: loss is inf, expected a finite number; alert: in effect since step 0 (alert number 50)"
    )
    assert (
        str(monitor.report())
        == repr(monitor.report())
        == (
            "<MonitorReport: alerts: loss 50; in effect: alert; gradients dropped: 0, clipped: 0; "
            "values: loss 50>"
        )
    )


def test_there_is_no_picture_of_nothing(tmp_path):
    with pytest.raises(StateError, match="nothing to draw"):
        AsyncTrainingMonitor().report().plot(tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_metric_that_nobody_measures_is_told_of_once(caplog):
    def trained(num_steps, metrics, observed=()):
        caplog.clear()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with AsyncTrainingMonitor(model, metrics) as monitor:
            for step in range(num_steps):
                model(torch.ones(2, 4)).sum().backward()
                monitor.observe(step, **dict.fromkeys(observed, 1.0))
                optimizer.step()
                optimizer.zero_grad()
        return [record.getMessage() for record in caplog.records if "measured" in record.getMessage()]

    metrics = ["loss", "loss_variance", "gradient_norm", "update_ratio", "parameter_variance"]
    assert trained(99, metrics) == []
    (said,) = trained(201, metrics)
    assert "nobody has measured loss, loss_variance, parameter_variance:" in said
    assert "monitor.observe(step, loss=…, parameter_variance=…)" in said
    assert trained(101, metrics, ("loss", "parameter_variance")) == []


@pytest.mark.parametrize("is_alone", [False, True])
def test_of_what_an_averager_tells_once_there_are_two_rounds_nobody_is_asked_to_observe_it(caplog, is_alone):
    with ParameterServer(transaction="model") as server:
        where = {"communication_backend": "tcp", "server_address": server.address}  # others may come
        ours = AsyncModelAverager(
            net(), averaging_frequency=200, **({"process_group": False} if is_alone else where)
        )
        optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.01)
        with ours, AsyncTrainingMonitor(ours.model, ["loss", "parameter_variance"]):
            for _ in range(101):
                ours.model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    (said,) = [record.getMessage() for record in caplog.records if "measured" in record.getMessage()]
    assert f"nobody has measured loss{', parameter_variance' if is_alone else ''}:" in said


@pytest.mark.parametrize(
    ("settings", "is_alone"),
    [
        ({"process_group": False}, True),
        ({"asynchronous": True, "strategy": "diloco"}, True),
        ({}, False),
        ({"strategy": {0: "local", 9: "average"}}, False),
        ({"strategy": {0: "local", 9: "average"}, "process_group": False}, True),
    ],
)
def test_nor_is_it_asked_for_where_a_trainer_averages_with_others_now_or_later(caplog, settings, is_alone):
    with ParameterServer(transaction="model") as server:
        where = {} if "process_group" in settings else {"server_address": server.address}
        settings = {"strategy": "average", "overlap": False} | settings
        model = net()
        with (
            AsyncTrainer(model, 0, 200, 200, **where, **settings) as trainer,
            AsyncTrainingMonitor(model, ["loss", "parameter_variance"]),
        ):
            trainer.train(
                dataloader=[(torch.ones(2, 4), torch.zeros(2, 2))] * 101,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                loss_fn=torch.nn.functional.mse_loss,
                progress=False,
            )
    said = [record.getMessage() for record in caplog.records if "measured" in record.getMessage()]
    assert ["nobody has measured parameter_variance:" in text for text in said] == [True] * is_alone


def test_a_push_or_two_that_are_late_are_no_alert_however_late_and_a_worker_that_stays_late_is_one():
    """One stands still for a moment where a machine is busy; that costs a push, or two that are in flight."""

    def alerts_after(values, state=None):
        monitor = AsyncTrainingMonitor(divergence_metrics=["staleness"])
        for step in range(200):
            monitor.observe(step, worker=f"w{step % 8}", staleness=3 + step // 8 % 2)
        found = []
        for number, value in enumerate(values):
            found += monitor.observe(200 + number, worker=f"w{number % 8}", staleness=value)
            state = json.loads(json.dumps(monitor.state_dict()))  # a restart forgets none of it
            monitor = AsyncTrainingMonitor(divergence_metrics=["staleness"])
            monitor.load_state_dict(state)
        return [alert.step for alert in found]

    one_late = [500] + [3] * 60
    two_late = ([500] + [3] * 7) * 2 + [3] * 60
    stays_late = ([60] + [3] * 7) * 4
    every_second = ([60] + [3] * 15) * 3
    assert alerts_after(one_late) == alerts_after(two_late) == []
    assert alerts_after(stays_late) == [216, 224]
    assert alerts_after(every_second) == [232]


def test_of_workers_without_a_name_each_late_push_is_an_alert():
    monitor = AsyncTrainingMonitor(divergence_metrics=["staleness"])
    for step in range(400):
        monitor.observe(step, staleness=60 if step > 200 and step % 8 == 0 else 3 + step % 2)
    assert monitor.report().num_alerts["staleness"] == 24


@pytest.mark.parametrize("length", [10, MOST_POINTS + 1, 10 * MOST_POINTS])
def test_a_long_series_is_thinned_out_evenly(length):
    series = Series()
    for step in range(length):
        series.add(step, float(step), (0.0, 1.0))
    assert series.steps == list(range(0, length, series.stride))
    assert series.values == [float(step) for step in series.steps]
    assert len(series.low) == len(series.high) == len(series.steps) <= MOST_POINTS
    assert series.num_seen == length


# ------------------------------------------------------------------------------------------- acting


def test_rungs_are_taken_in_order_and_let_go_of_in_reverse():
    averager, keeper = Averages(averaging_frequency=16), Keeps()
    monitor = warmed(
        remediation_strategy=["alert", "increase_sync_frequency", "rollback"],
        acts_on=[averager, keeper],
        patience=2,
        quiet_steps=4,
    )
    for step in range(10, 16):
        monitor.observe(step, loss=9.0)
    assert monitor.in_effect == ("alert", "increase_sync_frequency", "rollback")
    assert (averager.averaging_frequency, keeper.calls) == (8, [None])
    assert [a.result for a in monitor.report().alerts[::2]] == [
        "told",
        "averaging_frequency is 8 instead of 16",
        "went back to yesterday",
    ]
    for step in range(16, 40):
        monitor.observe(step, loss=1.0)
    assert monitor.in_effect == ()
    assert [release.remedy for release in monitor.report().releases] == [
        "rollback",
        "increase_sync_frequency",
        "alert",
    ]
    assert averager.averaging_frequency == 16


@pytest.mark.parametrize("unusable", [math.nan, math.inf])
def test_what_is_not_finite_goes_on_up_the_ladder_at_its_next_occurrence(unusable):
    live, keeper = torch.optim.SGD(net().parameters(), lr=0.5), Keeps()
    ladder = ["alert", "reduce_lr", "rollback"]
    monitor = warmed(remediation_strategy=ladder, acts_on=[live, keeper], patience=5)
    found = [monitor.observe(step, loss=unusable)[0].action for step in range(10, 17)]
    assert found == ["alert", "reduce_lr", *["rollback"] * 5]
    assert keeper.calls == [None]  # what is taken again has its patience
    monitor.observe(17, loss=unusable)
    assert keeper.calls == [None, None]
    assert factor_of(live) == 0.5


def test_what_is_not_finite_has_patience_with_a_remedy_that_keeps_it_out():
    keeper = Keeps()
    monitor = warmed(net(), remediation_strategy=["reject", "alert", "rollback"], acts_on=keeper, patience=3)
    found = [monitor.observe(step, loss=math.nan)[0].action for step in range(10, 18)]
    assert found == [*["reject"] * 3, *["alert"] * 3, *["rollback"] * 2]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"averaging_frequency": 16}, [8, 4, 2, 1, 1]),
        ({"averaging_frequency": 16, "min_averaging_frequency": 4}, [8, 4, 4]),
        ({"sync_frequency": 7}, [3, 1, 1]),
        ({"averaging_frequency": "30s"}, ["15s", "7.5s"]),
        ({"sync_frequency": "500 ms"}, ["250ms", "125ms"]),
    ],
    ids=str,
)
def test_frequencies_are_halved_as_long_as_an_alert_persists(before, after):
    thing = Averages(**before)
    name = next(iter(before))
    monitor = warmed(remediation_strategy="increase_sync_frequency", acts_on=thing, patience=1)
    found = []
    for step in range(10, 10 + len(after)):
        monitor.observe(step, loss=9.0)
        found.append(getattr(thing, name))
    assert found == after
    monitor.close()
    assert vars(thing) == before


def test_what_somebody_else_has_set_since_is_left_alone():
    thing = Averages(max_staleness=None)
    monitor = warmed(remediation_strategy="tighten_staleness", acts_on=thing, patience=1)
    for step in range(10, 13):
        monitor.observe(step, loss=9.0)
    assert thing.max_staleness == 2
    thing.max_staleness = 5
    monitor.close()
    assert thing.max_staleness == 5


def test_a_quarantine_is_of_the_worker_whose_metric_it_was():
    workers = Workers()
    monitor = warmed(remediation_strategy="quarantine", acts_on=workers, quiet_steps=3)
    monitor.observe(10, loss=9.0, worker="w3")
    assert workers.left_out == ["w3"]
    for step in range(11, 20):
        monitor.observe(step, loss=1.0, worker="w1")
    assert workers.left_out == []


def lockstep(monitor, steps, losses):
    for step in steps:
        for name, loss in losses.items():
            monitor.observe(step, loss=loss, worker=name)


def test_a_second_worker_that_goes_astray_is_left_out_too_and_each_takes_part_again():
    workers = Workers()
    monitor = warmed(remediation_strategy="quarantine", acts_on=workers, quiet_steps=4)
    fine = dict.fromkeys("abcdef", 1.0)
    lockstep(monitor, range(10, 12), fine)
    lockstep(monitor, range(12, 14), fine | {"a": 9.0})
    assert workers.left_out == ["a"]
    lockstep(monitor, range(14, 16), fine | {"a": 9.0, "b": 9.0})
    assert workers.left_out == ["a", "b"]
    lockstep(monitor, range(16, 26), fine)
    assert workers.left_out == []


def test_a_run_that_goes_astray_in_all_workers_leaves_out_fewer_than_half_and_goes_on_up_the_ladder():
    workers, keeper = Workers(), Keeps()
    monitor = warmed(remediation_strategy=["quarantine", "rollback"], acts_on=[workers, keeper], patience=3)
    lockstep(monitor, range(10, 12), dict.fromkeys("abcdef", 1.0))
    lockstep(monitor, range(12, 15), dict.fromkeys("abcdef", 9.0))
    assert workers.left_out == ["a", "b"]
    assert keeper.calls == [None]


def test_a_worker_that_is_left_out_climbs_no_further():
    workers, keeper = Workers(), Keeps()
    monitor = warmed(
        remediation_strategy=["quarantine", "rollback"], acts_on=[workers, keeper], quiet_steps=5
    )
    lockstep(monitor, range(10, 40), {"a": 9.0, "b": 1.0, "c": 1.0})
    assert (workers.left_out, keeper.calls) == (["a"], [])
    assert monitor.report().alerts[-1].action == "quarantine"
    assert monitor.report().alerts[-1].result == "in effect since step 10"


def test_several_workers_steps_are_not_added_up():
    workers = Workers()
    monitor = warmed(remediation_strategy="quarantine", acts_on=workers, quiet_steps=10)
    everybody = {f"w{i}": 1.0 for i in range(50)}
    lockstep(monitor, [10], everybody | {"w0": 9.0})
    lockstep(monitor, range(11, 20), everybody)
    assert workers.left_out == ["w0"]
    lockstep(monitor, range(20, 23), everybody)
    assert workers.left_out == []
    averager = Averages(averaging_frequency=1024)
    monitor = warmed(remediation_strategy="increase_sync_frequency", acts_on=averager, patience=3)
    lockstep(monitor, [10, 11], dict.fromkeys(everybody, 9.0))
    assert averager.averaging_frequency == 512


class Refuses:
    """Has a bound that cannot be set to less."""

    def __init__(self, error):
        self._error = error

    @property
    def max_staleness(self):
        return 8

    @max_staleness.setter
    def max_staleness(self, bound):
        raise self._error


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("8 at least"), "ValueError: 8 at least"), (StateError("no"), "no")]
)
def test_whatever_a_remedy_raises_the_run_goes_on_and_nothing_stays_half_done(error, said):
    other = Averages(max_staleness=16)
    monitor = warmed(
        remediation_strategy="tighten_staleness", acts_on=[other, Refuses(error)], patience=1, quiet_steps=2
    )
    assert monitor.observe(10, loss=9.0)[0].result == f"could not be done: {said}"
    assert other.max_staleness == 16
    assert len(monitor.observe(11, loss=9.0)) == 1
    for step in range(12, 20):
        monitor.observe(step, loss=1.0)
    assert monitor.in_effect == ()


def test_a_remedy_that_could_not_be_done_is_never_said_to_be_in_effect():
    monitor = warmed(remediation_strategy="tighten_staleness", acts_on=Refuses(ValueError("8 at least")))
    monitor.observe(10, loss=9.0)
    said = monitor.observe(11, loss=9.0)[0].result
    assert said == "at step 10 it could not be done: ValueError: 8 at least"
    assert monitor.in_effect == monitor.report().in_effect == monitor.report().effects == ()


def test_a_remedy_that_could_not_be_done_keeps_nothing_out():
    class Lost:
        def rollback(self, version=None):
            raise OSError("the disk is gone")

    monitor = warmed(remediation_strategy=["rollback", "pause"], acts_on=Lost(), pause_timeout_s=0.001)
    found = [monitor.observe(step, loss=math.nan)[0].action for step in (10, 11)]
    assert found == ["rollback", "pause"]


def test_a_remedy_that_is_broken_off_is_one_that_was_taken():
    monitor = warmed(remediation_strategy="tighten_staleness", acts_on=Refuses(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        monitor.observe(10, loss=9.0)
    assert monitor.in_effect == ("tighten_staleness",)
    assert monitor.observe(11, loss=9.0)[0].result == "in effect since step 10"
    monitor.reset()


class Holds(Workers):
    def release(self, worker_id):
        raise RuntimeError("it does not answer")


def test_a_remedy_that_cannot_be_taken_back_is_warned_of(caplog):
    monitor = warmed(remediation_strategy="quarantine", acts_on=Holds())
    monitor.observe(10, loss=9.0, worker="w3")
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        monitor.close()
    assert "could not be taken back, and stays: RuntimeError: it does not answer" in caplog.text
    assert "could not be taken back" in monitor.report().releases[0].result


class Serves:
    """A server, of which a monitor knows no more than this."""

    def __init__(self, rates, *, num_settable=None):
        self.rates = list(rates)
        self._num_settable = len(self.rates) if num_settable is None else num_settable

    def status(self):
        return {"optimizer": {"spec": {"groups": [{"lr": rate} for rate in self.rates]}}}

    def set_lr(self, lr, group=None):
        if group >= self._num_settable:
            raise StateError("no such group")
        self.rates[group] = lr


def test_a_servers_rate_is_whole_again_to_the_bit_and_one_that_was_set_since_stays():
    server = Serves([0.1, 0.3])
    monitor = warmed(remediation_strategy="reduce_lr", acts_on=server, lr_factor=0.3)
    monitor.observe(10, loss=9.0)
    assert server.rates == pytest.approx([0.03, 0.09])
    server.rates[0] = 0.01
    monitor.close()
    assert server.rates == [0.01, 0.3]
    assert "that of group 0 was set to 0.01 since, and stays" in monitor.report().releases[0].result


class Bounds(Serves):
    """Bounds staleness as a server does, of whose pushes so many were late by 0, 1, 2 and so on."""

    max_staleness = None

    def __init__(self, *histograms):
        super().__init__([0.1])
        self._histograms = histograms

    def status(self):
        return {**super().status(), "workers": [{"staleness_histogram": found} for found in self._histograms]}


@pytest.mark.parametrize(
    ("histograms", "bounds"),
    [
        ([], [8, 4, 2, 1, 1]),
        ([[0, 90, 0, 0, 10], [0, 0, 30, 20, 0]], [8, 4, 2, 2]),
        ([[0] * 31 + [100] + [0] * 31 + [20]], [62, 62]),
        # Of four that are there for long most pushes were early, until so many came that all are as late.
        ([[0, 0, 0, 10_000]] * 4 + [[0] * 31 + [20]] * 28 + [[0, 0]], [62, 62]),
    ],
)
def test_a_server_s_bound_is_never_below_what_is_usual_there(histograms, bounds):
    server = Bounds(*histograms)
    monitor = warmed(remediation_strategy="tighten_staleness", acts_on=server, patience=1)
    for step, bound in enumerate(bounds):
        monitor.observe(10 + step, loss=9.0)
        assert server.max_staleness == bound
    monitor.close()
    assert server.max_staleness is None


def test_of_what_tells_of_no_workers_the_bound_is_halved_as_of_anything():
    class Bounded(Serves):
        max_staleness = 6

    server = Bounded([0.1])
    monitor = warmed(remediation_strategy="tighten_staleness", acts_on=server, patience=1)
    for step, bound in enumerate([3, 1, 1]):
        monitor.observe(10 + step, loss=9.0)
        assert server.max_staleness == bound


def test_where_somebody_has_ended_all_that_was_in_effect_the_next_alert_begins_anew_whose_ever_it_is():
    model, thing = net(), Averages(averaging_frequency=16)
    monitor = warmed(model, ["loss"], remediation_strategy="increase_sync_frequency", acts_on=thing)
    for step in (10, 11, 12):
        monitor.observe(step, worker="a", loss=9.0)
    thing.averaging_frequency = 12
    trained_by.was_set(model, thing, "averaging_frequency")
    assert monitor.in_effect == ()
    (alert,) = monitor.observe(13, worker="b", loss=9.0)
    assert (alert.result, alert.is_taken) == ("averaging_frequency is 6 instead of 12", True)
    assert monitor.observe(14, worker="a", loss=9.0)[0].result == "in effect since step 13"


@pytest.mark.parametrize("how", ["ended", "let go of"])
def test_where_nothing_is_in_effect_any_more_a_step_s_second_alert_begins_anew(how):
    model, thing = net(), Averages(averaging_frequency=16)
    monitor = AsyncTrainingMonitor(
        model,
        ["loss", "staleness"],
        remediation_strategy="increase_sync_frequency",
        acts_on=thing,
        warm_up=5,
        quiet_steps=3,
    )
    for step in range(10):
        monitor.observe(step, worker="a", loss=1.0, staleness=9.0 if step >= 8 else 1.0)  # two are no alert
    monitor.observe(10, worker="a", loss=9.0)
    if how == "ended":
        trained_by.was_set(model, thing, "averaging_frequency")
    for step in range(10, 15):  # of one that is faster
        monitor.observe(step, worker="b", loss=1.0, staleness=1.0)
    assert monitor.in_effect == ()
    (alert,) = monitor.observe(10, worker="a", staleness=9.0)
    assert (alert.action, alert.is_taken) == ("increase_sync_frequency", True)


@pytest.mark.parametrize("is_live", [True, False])
def test_a_reduced_rate_is_told_with_all_that_it_is_multiplied_by_and_what_it_is_then(is_live):
    groups = [{"params": [p], "lr": lr} for p, lr in zip(net().parameters(), (0.1, 0.4), strict=False)]
    thing = torch.optim.SGD(groups) if is_live else Serves([0.1, 0.4])
    monitor = warmed(remediation_strategy="reduce_lr", acts_on=thing, patience=2, quiet_steps=5)
    said = [monitor.observe(step, loss=9.0)[0].result for step in (10, 11, 12)]
    assert said == [
        "learning rates are multiplied by 0.5: 0.05, 0.2 now",
        "in effect since step 10",
        "learning rates are multiplied by 0.5, by 0.25 in all: 0.025, 0.1 now",
    ]
    assert monitor.report().effects == (said[0], said[2])
    assert monitor.report().in_effect == ("reduce_lr", "reduce_lr")
    for step in range(20, 200):
        monitor.observe(step, loss=1.0)
    assert [release.result for release in monitor.report().releases] == [
        "learning rates are divided by 0.5 again: 0.05, 0.2 now",
        "learning rates are divided by 0.5 again: 0.1, 0.4 now",
    ]
    assert monitor.observe(200, loss=9.0)[0].result == "learning rates are multiplied by 0.5: 0.05, 0.2 now"


def test_of_many_rates_some_are_told():
    thing = Serves([0.2 * number for number in (1, 2, 3, 4, 5, 5)])
    monitor = warmed(remediation_strategy="reduce_lr", acts_on=thing)
    assert monitor.observe(10, loss=9.0)[0].result.endswith(": 0.1, 0.2, 0.3, 0.4 and 1 more now")


@pytest.mark.parametrize("others", [(), ("rollback",)])
def test_where_parameters_are_not_finite_no_rate_is_cut_once_more_and_that_is_said_once(others):
    model = net()
    live, told = torch.optim.SGD(model.parameters(), lr=1.0), []
    ladder = ["alert", *others, "reduce_lr"]
    acts_on = [live, *(RollsBack() for _ in others)]
    settings = {"remediation_strategy": ladder, "acts_on": acts_on, "patience": 1, "callbacks": told.append}
    with AsyncTrainingMonitor(model, warm_up=10, **settings) as monitor:
        for step in range(10):
            monitor.observe(step, loss=1.0)
        for step in range(10, 15):
            monitor.observe(step, loss=math.nan)  # of a batch, with parameters that are sound
        assert factor_of(live) < 1.0
        sound = model[0].weight.detach().clone()
        factor = factor_of(live)
        model[0].weight.data.fill_(math.nan)
        for step in range(15, 60):
            monitor.observe(step, loss=math.nan)
        assert factor_of(live) == factor
        said = [alert.result for alert in told if "parameters are not finite" in alert.result]
        assert len(said) == 1
        wanted = 'no remedy but "rollback" helps' if others else "FaultTolerantTrainer(recovery_strategy='la"
        assert wanted in said[0]
        model[0].weight.data.copy_(sound)
        for step in range(60, 70):
            monitor.observe(step, loss=9.0)  # mended by somebody
        assert factor_of(live) < factor


class RollsBack:
    def rollback(self, version=None):
        return "somewhere"


def test_of_several_rates_all_are_reduced_or_none():
    server, live = Serves([0.1, 0.3], num_settable=1), torch.optim.SGD(net().parameters(), lr=0.5)
    monitor = warmed(remediation_strategy="reduce_lr", acts_on=[live, server])
    assert "could not be done: no such group" in monitor.observe(10, loss=9.0)[0].result
    assert server.rates == [0.1, 0.3]
    assert factor_of(live) == 1.0


@pytest.mark.parametrize("newest_first", [True, False])
def test_two_monitors_of_one_thing_let_go_of_it_in_any_order(newest_first):
    thing, server = Averages(averaging_frequency=16), Serves([0.1])
    pairs = [("increase_sync_frequency", thing), ("reduce_lr", server)]
    for strategy, acts_on in pairs:
        monitors = [warmed(remediation_strategy=strategy, acts_on=acts_on, patience=1) for _ in range(2)]
        for monitor in monitors:
            monitor.observe(10, loss=9.0)
        monitors[0].observe(11, loss=9.0)
        states = [monitor.state_dict() for monitor in monitors]
        before = str(states)
        for monitor in reversed(monitors) if newest_first else monitors:
            monitor.close()
        assert str(states) == before  # they do not follow what comes after them
    assert (thing.averaging_frequency, server.rates) == (16, [0.1])


def test_what_the_user_set_between_two_monitors_stays():
    thing = Averages(averaging_frequency=16)
    first, second = (warmed(remediation_strategy="increase_sync_frequency", acts_on=thing) for _ in range(2))
    first.observe(10, loss=9.0)
    thing.averaging_frequency = 12
    second.observe(10, loss=9.0)
    assert thing.averaging_frequency == 6
    first.close()
    second.close()
    assert thing.averaging_frequency == 12


class Leaves(Averages):
    """One that ends, and takes no setting any more."""

    has_ended = False

    def __setattr__(self, name, value):
        if self.has_ended:
            raise ClosedError("it has ended")
        super().__setattr__(name, value)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_has_ended_keeps_no_other_from_being_set_back(place):
    things = [Averages(max_staleness=8) for _ in range(2)]
    gone = Leaves(max_staleness=8)
    things.insert(place, gone)
    monitor = warmed(remediation_strategy="tighten_staleness", acts_on=things)
    monitor.observe(10, loss=9.0)
    assert [thing.max_staleness for thing in things] == [4, 4, 4]
    gone.__dict__["has_ended"] = True
    monitor.close()
    assert [thing.max_staleness for thing in things if thing is not gone] == [8, 8]
    assert monitor.report().releases[0].result == "what it acted on has ended: it has ended"


def test_a_remedy_that_cannot_be_done_says_why_and_the_next_one_may_do():
    workers, averager = Workers(), Averages(averaging_frequency=4)
    monitor = warmed(
        remediation_strategy=["quarantine", "increase_sync_frequency"],
        acts_on=[workers, averager],
        patience=1,
    )
    assert "give observe(worker=...)" in monitor.observe(10, loss=9.0)[0].result
    assert monitor.observe(11, loss=9.0)[0].action == "increase_sync_frequency"
    assert (workers.left_out, averager.averaging_frequency) == ([], 2)


def test_what_trains_the_model_is_found_by_it():
    model, averager = net(), Averages(averaging_frequency=4)
    trained_by.register(model, averager)
    monitor = warmed(model, remediation_strategy="increase_sync_frequency")
    monitor.observe(10, loss=9.0)
    assert averager.averaging_frequency == 2


def test_neither_model_nor_trainer_is_kept_by_having_registered():
    model, averager = net(), Averages(averaging_frequency=4)
    trained_by.register(model, averager)
    trained_by.register(model, averager)
    assert trained_by.trainers_of(model) == [averager]
    del averager
    assert trained_by.trainers_of(model) == []
    assert trained_by.trainers_of(net()) == []


def test_a_pause_waits_for_resume_or_its_time():
    monitor = warmed(remediation_strategy="pause", callbacks=lambda _: asked.set())
    asked, done = threading.Event(), threading.Event()

    def train():
        monitor.observe(10, loss=9.0)
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert asked.wait(20)
    assert not done.wait(0.05)
    assert monitor.is_paused
    monitor.resume()
    assert done.wait(20)
    thread.join()
    monitor = warmed(remediation_strategy="pause", pause_timeout_s=0.01)
    monitor.observe(10, loss=9.0)
    assert not monitor.is_paused


@pytest.mark.parametrize(
    ("timeout_s", "at_most"),
    [(0.01, "0.01 s at most, pause_timeout_s"), (None, "for ever: pause_timeout_s is None")],
)
def test_a_pause_says_how_long_it_is_and_who_ends_it(timeout_s, at_most, caplog):
    class Resumes(logging.Handler):
        def emit(self, record):
            if "training is paused" in record.getMessage():
                monitor.resume()

    monitor = warmed(remediation_strategy="pause", pause_timeout_s=timeout_s)
    log, handler = logging.getLogger("offbeat"), Resumes()
    log.addHandler(handler)
    try:
        monitor.observe(10, loss=9.0)
    finally:
        log.removeHandler(handler)
    words = f"waits for resume(), from a callback or another thread ({at_most})"
    assert f"pause: training {words}" in caplog.text
    assert f"training is paused, and {words}" in caplog.text
    assert monitor.report().alerts[-1].result == f"training {words}"


def test_a_callback_may_resume_itself():
    monitor = warmed(remediation_strategy="pause", callbacks=lambda _: monitor.resume())
    assert monitor.observe(10, loss=9.0)[0].action == "pause"


def test_reset_ends_a_pause():
    asked = threading.Event()
    monitor = warmed(remediation_strategy="pause", callbacks=lambda _: asked.set())
    thread = threading.Thread(target=lambda: monitor.observe(10, loss=9.0))
    thread.start()
    assert asked.wait(20)
    monitor.reset()
    thread.join(20)
    assert not thread.is_alive()
    assert not monitor.is_paused


def test_reset_lets_go_and_learns_anew():
    thing = Averages(sync_frequency=8)
    monitor = warmed(remediation_strategy="increase_sync_frequency", acts_on=thing)
    monitor.observe(10, loss=9.0)
    monitor.reset()
    assert (thing.sync_frequency, monitor.in_effect) == (8, ())
    for step in range(11, 20):
        assert monitor.observe(step, loss=9.0) == ()


# ------------------------------------------------------------------------------------------- refusals


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        AsyncTrainingMonitor(
            model="mlp",
            divergence_metrics=["los", "loss"],
            alert_threshold=-1,
            remediation_strategy=["reduce_ls"],
            callbacks=[3],
            warm_up=0,
            patience=1.5,
            quiet_steps=None,
            lr_factor=1.0,
            grad_scaler=7,
            pause_timeout_s=-1,
        )
    text = str(error.value)
    for name in (
        "model is of type str",
        "did you mean 'loss'",
        "alert_threshold is -1",
        "did you mean 'reduce_lr'",
        "callbacks is [3]",
        "warm_up is 0",
        "patience is 1.5",
        "quiet_steps is None",
        "lr_factor is 1.0",
        "grad_scaler is 7",
        "pause_timeout_s is -1",
    ):
        assert name in text


@pytest.mark.parametrize(
    ("strategy", "needs"),
    [
        ("clip", "model="),
        ("reject", "model="),
        ("increase_sync_frequency", "averaging_frequency"),
        ("tighten_staleness", "something with a max_staleness that can be set"),
        ("reduce_lr", "optimizer"),
        ("quarantine", "AsyncWorker"),
        ("rollback", "ParameterServer"),
    ],
)
def test_a_remedy_with_nothing_to_act_on_is_refused_and_what_would_do_is_named(strategy, needs):
    with pytest.raises(ConfigError, match=needs) as error:
        AsyncTrainingMonitor(remediation_strategy=["alert", strategy])
    assert repr(strategy) in str(error.value)
    if strategy not in ("clip", "reject"):
        assert "give it as acts_on=, or the model=" in str(error.value)
        with pytest.raises(ConfigError, match=rf"{needs}.*before the monitor, or give .* as acts_on="):
            AsyncTrainingMonitor(net(), remediation_strategy=strategy)


def test_every_remedy_without_anything_to_act_on_is_named_and_what_is_there():
    model = net()
    accumulator = AsyncGradientAccumulator(model, accumulation_steps=2)
    with pytest.raises(ConfigError) as error:
        AsyncTrainingMonitor(model, remediation_strategy=["rollback", "reduce_lr", "quarantine"])
    assert accumulator.model is model
    for text in ("'rollback'", "'quarantine'", "AsyncGradientAccumulator will not do"):
        assert text in str(error.value)
    assert "'reduce_lr', which" not in str(error.value)


def test_what_no_remedy_acts_on_is_refused():
    with pytest.raises(ConfigError, match=r"acts_on has one of type Linear.*leave it out"):
        AsyncTrainingMonitor(remediation_strategy="pause", acts_on=nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lr_factor": 0.1}, "lr_factor=0.1 has no effect: no remedy is 'reduce_lr'"),
        ({"pause_timeout_s": 3}, "pause_timeout_s=3 has no effect: no remedy is 'pause'"),
    ],
)
def test_a_keyword_of_a_remedy_that_is_not_taken_is_warned_of(caplog, given, told):
    with caplog.at_level("WARNING", logger="offbeat"):
        AsyncTrainingMonitor(net(), remediation_strategy=["alert", "reject"], **given)
    assert caplog.messages == [told]


def test_optimizers_that_all_are_of_another_model_are_warned_of(caplog):
    model, other = net(), net()
    own, others = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    with caplog.at_level("WARNING", logger="offbeat"):
        AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", acts_on=own, lr_factor=0.1)
        AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", acts_on=[others, own])
        AsyncTrainingMonitor(remediation_strategy=["reduce_lr", "pause"], acts_on=others, pause_timeout_s=3)
        assert not caplog.messages
        AsyncTrainingMonitor(model, remediation_strategy="reduce_lr", acts_on=others)
    (told,) = caplog.messages
    assert "acts_on has the optimizer SGD with none of this model's parameters" in told


def test_members_of_a_group_drop_nothing_by_what_is_each_ones_own():
    model, group = net(), Averages(shares_updates=True)
    trained_by.register(model, group)
    with pytest.raises(ConfigError, match=r"divergence_metrics has loss, .* member"):
        AsyncTrainingMonitor(model, ["loss", "gradient_norm"], remediation_strategy=["alert", "reject"])
    with pytest.raises(ConfigError, match=r"each member .*, and reduce_lr would change one member's update"):
        AsyncTrainingMonitor(
            model, remediation_strategy="reduce_lr", acts_on=torch.optim.SGD(model.parameters(), lr=0.1)
        )
    AsyncTrainingMonitor(model, ["gradient_norm"], remediation_strategy="reject")
    AsyncTrainingMonitor(model, ["loss"])


class Fixed:
    @property
    def max_staleness(self):
        return 3


def test_what_cannot_be_set_is_nothing_to_act_on():
    with pytest.raises(ConfigError, match="Fixed will not do"):
        AsyncTrainingMonitor(remediation_strategy="tighten_staleness", acts_on=Fixed())


@pytest.mark.parametrize("strategy", [[], (), 3, None])
def test_no_remedy_at_all_is_refused(strategy):
    with pytest.raises(ConfigError, match="remediation_strategy is"):
        AsyncTrainingMonitor(remediation_strategy=strategy)


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(ConfigError, match="alert_threshold"):
        AsyncTrainingMonitor(alert_treshold=0.5)


@pytest.mark.parametrize("value", ["3", b"3", 10**400, 1 + 2j, [1.0], torch.ones(2)], ids=type)
def test_what_is_no_number_is_refused_as_such(value):
    with pytest.raises(ConfigError, match=r"loss is .*: give a number"):
        AsyncTrainingMonitor().observe(0, loss=value)


@pytest.mark.parametrize("value", [True, False, torch.tensor(True), np.bool_(True)], ids=type)
def test_what_is_true_or_false_is_no_number(value):
    with pytest.raises(ConfigError, match=r"loss is .*: give a number"):
        AsyncTrainingMonitor().observe(0, loss=value)


@pytest.mark.parametrize("metric", [metric for metric in METRICS if metric != "loss"])
def test_what_cannot_be_below_0_is_refused_there_and_a_loss_may_be(metric):
    monitor = AsyncTrainingMonitor(divergence_metrics=["loss", metric])
    with pytest.raises(ConfigError, match=rf"{metric} is -1, and never below 0: give"):
        monitor.observe(0, **{metric: -1})
    assert monitor.observe(0, loss=-1.0, **{metric: 0}) == ()


def test_a_scaler_s_class_and_a_remedy_that_is_named_twice_are_refused():
    with pytest.raises(ConfigError) as error:
        AsyncTrainingMonitor(remediation_strategy=["alert", "alert"], grad_scaler=torch.amp.GradScaler)
    assert "grad_scaler is the class GradScaler: give the one" in str(error.value)
    assert "remediation_strategy is ['alert', 'alert']: name each remedy once" in str(error.value)


def test_what_cannot_be_observed_is_told_all_at_once_and_counts_for_nothing():
    monitor = warmed()
    with pytest.raises(ConfigError) as error:
        monitor.observe(-1, worker=["amy"], loss="high", gradient_norm=1.0)
    for text in ("step is -1", "worker is ['amy']", "loss is 'high'", "gradient_norm is observed"):
        assert text in str(error.value)
    assert monitor.report().series["loss"].num_seen == 10


def test_a_loss_may_be_observed_for_its_variance_alone():
    monitor = AsyncTrainingMonitor(divergence_metrics=["loss_variance"])
    for step in range(10):
        monitor.observe(step, loss=float(step % 2))
    assert monitor.report().series["loss_variance"].values == pytest.approx([0.24, 0.24])


@pytest.mark.parametrize("unusable", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_alert_where_only_its_variance_is_judged(unusable):
    monitor = AsyncTrainingMonitor(divergence_metrics=["loss_variance"])
    alerts = [monitor.observe(step, loss=unusable) for step in range(3)]
    assert [[alert.metric for alert in found] for found in alerts] == [["loss_variance"]] * 3
    monitor = AsyncTrainingMonitor(divergence_metrics=["loss", "loss_variance"])
    assert [alert.metric for alert in monitor.observe(0, loss=unusable)] == ["loss"]


def test_a_closed_monitor_observes_no_more():
    with AsyncTrainingMonitor() as monitor:
        monitor.observe(0, loss=1.0)
    with pytest.raises(ClosedError):
        monitor.observe(1, loss=1.0)


def test_it_watches_without_torch(run_python):
    run_python(
        "import sys; sys.modules['torch'] = None\n"
        "import offbeat\n"
        "monitor = offbeat.AsyncTrainingMonitor(warm_up=2)\n"
        "found = [len(monitor.observe(step, loss=loss)) for step, loss in enumerate([1, 1, 1, 2])]\n"
        "assert found == [0, 0, 0, 1], found\n"
    )


def test_an_observation_of_what_is_no_metric_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        AsyncTrainingMonitor().observe(0, lss=1.0)
