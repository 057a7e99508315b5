"""The range in which a metric is expected, and what is out of it."""

import math
import statistics

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from offbeat.monitor.band import DECAY, Z_STAR, Band
from offbeat.monitor.detector import FAR, METRICS, Detector

WARM_UP = 25
FINITE = st.floats(-1e6, 1e6)
HISTORIES = st.lists(FINITE, min_size=WARM_UP, max_size=80)


def band_after(values, band=None):
    band = Band(WARM_UP) if band is None else band
    for value in values:
        band = band.after(value)
    return band


def detector_after(values, metric="loss"):
    detector = Detector(metric, 0.5, Band(WARM_UP))
    verdicts = []
    for value in values:
        detector, verdict = detector.see(value)
        verdicts.append(verdict)
    return detector, verdicts


# ------------------------------------------------------------------------------------------- the band


@hypothesis.given(st.lists(FINITE, min_size=WARM_UP, max_size=WARM_UP))
def test_after_the_warm_up_the_range_is_that_of_all_values(values):
    band = band_after(values)
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    assert math.isclose(band.mean, mean, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(band.deviation, deviation, rel_tol=1e-6, abs_tol=1e-4)
    assert band.high >= mean + Z_STAR * deviation - 1e-3
    assert math.isclose(band.low, mean - Z_STAR * deviation, rel_tol=1e-6, abs_tol=1e-3)


@pytest.mark.parametrize("num_seen", [0, WARM_UP - 1])
def test_in_the_warm_up_everything_is_expected(num_seen):
    band = band_after([1.0] * num_seen)
    assert not band.is_ready
    assert (band.low, band.high) == (-math.inf, math.inf)


@hypothesis.given(HISTORIES, st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_values_within_the_range_move_it_as_the_formula_says(history, more):
    band = band_after(history)
    mean, variance = band.mean, band.variance
    for value in more:
        z = (value - mean) / math.sqrt(variance) if variance else 0.0
        counted = mean + Z_STAR * math.sqrt(variance) * Z_STAR / z if z > Z_STAR else value
        if not variance:
            counted = min(value, mean)
        mean = DECAY * mean + (1 - DECAY) * counted
        variance = DECAY * variance + (1 - DECAY) * (counted - mean) ** 2
        band = band.after(value)
    assert math.isclose(band.mean, mean, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(band.variance, variance, rel_tol=1e-6, abs_tol=1e-6)


@hypothesis.given(HISTORIES, st.floats(allow_nan=True, allow_infinity=True))
def test_no_value_pulls_the_range_up_further_than_its_own_edge_would(history, value):
    band = band_after(history)
    at_edge = band.mean + Z_STAR * band.deviation
    hypothesis.assume(not value < band.mean)
    assert band.after(value).high <= band.after(at_edge).high * (1 + 1e-9) + 1e-6


@hypothesis.given(HISTORIES, st.floats(1e9, 1e140))
def test_a_value_very_far_out_pulls_the_range_up_not_at_all(history, value):
    band = band_after(history)
    hypothesis.assume(band.deviation > 0 and band.z(value) > 100)
    assert band.after(value).high <= band.high


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200, -1e200])
@pytest.mark.parametrize("num_seen", [3, WARM_UP + 3])
def test_what_is_not_finite_never_enters(value, num_seen):
    band = band_after([float(i % 4) for i in range(num_seen)])
    assert band.after(value) is band


def test_the_upper_edge_stays_above_a_quarter_of_the_warm_ups_mean():
    band = band_after([2.0] * WARM_UP + [0.01] * 400)
    assert band.mean < 0.02
    assert band.high == 0.5


# ------------------------------------------------------------------------------------------- the detector


@hypothesis.given(st.floats(1e-3, 1e6), st.integers(30, 200))
def test_a_constant_gives_no_alert_and_half_as_much_again_is_just_allowed(value, length):
    detector, verdicts = detector_after([value] * length)
    assert set(verdicts[WARM_UP:]) == {"quiet"}
    edge = detector.band.high
    assert detector.see(edge * 1.4999)[1] == "raised"
    assert detector.see(edge * 1.5001)[1] == "alert"


@hypothesis.given(st.integers(0, 10**6), st.floats(0.0, 10.0))
def test_stationary_gaussian_values_give_no_more_alerts_than_their_tail_allows(seed, mean):
    """Of those beyond the edge itself, z = 2.5, there are 0.6 %; and of a mean at 0 the edge is just that."""
    values = np.random.default_rng(seed).normal(mean, 1.0, 1000)
    _, verdicts = detector_after(values.tolist())
    beyond = sum(verdict in ("raised", "alert") for verdict in verdicts)
    assert verdicts.count("alert") <= 2
    assert beyond <= 40  # of 975, 6 are expected of the true range; this one is estimated from few values


@hypothesis.given(HISTORIES, FINITE, FINITE)
def test_more_is_never_judged_milder(history, one, other):
    order = ["warm_up", "quiet", "raised", "alert"]
    detector, _ = detector_after(history)
    (less, more) = (detector.see(value)[1] for value in sorted((one, other)))
    assert order.index(less) <= order.index(more)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("num_seen", [0, 40])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_an_alert_at_once_and_leaves_no_trace(metric, num_seen, value):
    before, _ = detector_after(
        [0.0 if metric == "non_finite" else 1.0 + i % 3 for i in range(num_seen)], metric
    )
    after, verdict = before.see(value)
    assert verdict == "alert"
    assert after == before


@hypothesis.given(st.lists(st.floats(0.5, 1.5), min_size=WARM_UP, max_size=80), st.floats(20, 1e9))
def test_a_value_that_raised_an_alert_does_not_move_the_range(history, value):
    before, _ = detector_after(history)
    after, verdict = before.see(value)
    hypothesis.assume(verdict == "alert")
    assert after.band == before.band


def noisy(length, seed=0):
    return np.random.default_rng(seed).normal(1.0, 0.3, length).clip(0.1).tolist()


def test_one_value_that_is_not_far_out_needs_others_beside_it():
    detector, verdicts = detector_after(noisy(300))
    assert "alert" not in verdicts
    value = detector.limit * 1.01
    assert detector.band.z(value) < FAR
    detector, verdict = detector.see(value)
    assert verdict == "raised"
    _, verdicts = detector_after([], "loss")
    for _ in range(4):
        detector, verdict = detector.see(value)
    assert verdict == "alert"


def test_one_value_that_is_far_out_needs_none():
    detector, _ = detector_after(noisy(300))
    assert detector.see(detector.band.mean + 1.01 * FAR * detector.band.deviation)[1] == "alert"


def test_an_alert_ends_with_the_first_value_in_the_range_however_large_those_before():
    detector, _ = detector_after(noisy(300))
    for _ in range(5):
        detector, verdict = detector.see(1e6)
        assert verdict == "alert"
    assert detector.see(1.0)[1] == "quiet"


@pytest.mark.parametrize("seed", range(5))
def test_a_rise_without_any_jump_is_an_alert_within_thirty_values(seed):
    rise = [1.07**i * value for i, value in enumerate(noisy(30, seed))]
    verdicts = detector_after(noisy(100, seed) + rise)[1]
    assert "alert" not in verdicts[:100]
    assert "alert" in verdicts


@pytest.mark.parametrize("metric", ["loss_variance", "parameter_variance"])
def test_variances_are_judged_by_their_roots_and_shown_as_they_are(metric):
    detector, _ = detector_after([4.0] * 40, metric)
    assert detector.band.mean == 2.0
    assert detector.expected == (4.0, 4.0)
    assert detector.see(8.9)[1] == "raised"
    assert detector.see(9.1)[1] == "alert"


def test_a_worker_that_joins_one_alone_is_no_alert_by_its_staleness():
    detector, verdicts = detector_after([0.0] * 50 + [1.0, 3.0, 2.0] * 20, "staleness")
    assert "alert" not in verdicts
    assert detector.see(40.0)[1] == "alert"


def test_of_elements_that_are_not_finite_none_is_expected():
    detector = Detector("non_finite")
    assert detector.expected == (0.0, 0.0)
    assert [detector.see(value)[1] for value in (0.0, 1.0)] == ["quiet", "alert"]
