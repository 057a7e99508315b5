"""What is expected of a metric as long as it has no range."""

import math
import statistics

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from offbeat import AsyncTrainingMonitor
from offbeat.monitor.band import Band
from offbeat.monitor.detector import METRICS, Detector
from offbeat.monitor.onset import IN_A_ROW, LEAST_SEEN, MANY_TIMES, Onset
from support.small_net import net

FIRST = [2.3, 2.2, 2.4, 2.3, 2.1, 2.2, 2.0]


def verdicts_of(values, metric="loss"):
    detector, verdicts = Detector(metric, 0.5, Band(25)), []
    for value in values:
        detector, verdict = detector.see(value)
        verdicts.append(verdict)
    return detector, verdicts


@pytest.mark.parametrize("metric", [m for m in METRICS if m != "non_finite"])
@pytest.mark.parametrize("value", [1e8, 1e30, 1e80, -1e30])
def test_a_value_of_another_world_is_an_alert_in_the_warm_up_too_and_moves_nothing(metric, value):
    value = value**2 if "variance" in metric and value > 0 else value
    before, _ = verdicts_of(FIRST, metric)
    after, verdict = before.see(value)
    assert verdict == ("alert" if value > 0 else "warm_up")  # only what is more is out of range
    if value > 0:
        assert after.band == before.band


def test_a_loss_that_grows_many_times_from_step_to_step_is_an_alert_before_the_warm_up_ends():
    _, verdicts = verdicts_of([*FIRST, *(2.0 * 10.0**i for i in range(1, 10))])
    assert verdicts.index("alert") < 15
    assert "alert" not in verdicts[: len(FIRST)]


def test_one_hard_batch_of_a_model_that_is_good_already_is_none():
    values = [1e-5, 3e-6, 2e-5, 4e-6, 8e-5, 0.3, 1e-5, 2e-6, 0.5, 0.2, *[1e-5] * 20]
    _, verdicts = verdicts_of(values)
    assert set(verdicts) == {"warm_up", "raised", "quiet"}


def test_it_takes_some_values_to_say_what_is_expected_and_none_of_0():
    assert verdicts_of([1.0] * (LEAST_SEEN - 1) + [1e30])[1][-1] == "warm_up"
    assert verdicts_of([0.0] * 10 + [1e-3])[1][-1] == "warm_up"  # a rate that begins at 0
    assert verdicts_of([0.0] * 10 + [1e-3] + [1e30])[1][-1] == "alert"
    assert verdicts_of([0.0] * 10 + [100.0], "staleness")[1][-1] == "warm_up"


@hypothesis.given(st.lists(st.floats(-1e6, 1e6), min_size=LEAST_SEEN, max_size=25), st.floats(0, 1e140))
def test_what_is_beyond_is_many_times_the_median_and_takes_others_beside_it(values, value):
    onset = Onset(0.0, tuple(abs(v) for v in values))
    hypothesis.assume(statistics.median(onset.sizes) > 0)
    assert onset.is_beyond(value) == (value > MANY_TIMES * statistics.median(onset.sizes))
    for _ in range(IN_A_ROW - 1):
        onset = onset.after(value)
    assert onset.is_alert(value) == onset.is_beyond(value)


def test_an_alert_in_the_warm_up_says_what_was_expected():
    monitor = AsyncTrainingMonitor()
    for step, loss in enumerate(FIRST):
        assert monitor.observe(step, loss=loss) == ()
    (alert,) = monitor.observe(7, loss=1e30)
    assert alert.expected == (-math.inf, pytest.approx(2200.0))
    assert str(alert) == "step 7: loss is 1e+30, expected 2200 at most; alert: told"
    assert monitor.observe(8, loss=2.0) == ()
    assert set(monitor.report().series["loss"].high) == {math.inf}  # what is drawn is the range alone


def test_a_gradient_that_blows_up_in_the_warm_up_is_clipped_to_what_there_was():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = AsyncTrainingMonitor(model, ["gradient_norm"], remediation_strategy="clip")
    norms = []
    for step in range(12):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * (1 + step % 3)).sum().backward()
        if step == 8:
            for parameter in model.parameters():
                parameter.grad.mul_(1e12)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        pairs = zip(model.parameters(), before, strict=True)
        norms.append(math.sqrt(sum(float((p.detach() - b).square().sum()) for p, b in pairs)) / 0.1)
    assert [alert.step for alert in monitor.report().alerts] == [9]  # the first step is 1
    assert monitor.report().num_clipped == 1
    assert norms[8] == pytest.approx(max(monitor.report().series["gradient_norm"].values[:8]), rel=1e-4)
