"""When members average: in the right direction, and within the bounds."""

import itertools
import math
import statistics
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st

from offbeat.averaging.pace import Adaptive, Iterations, Seconds, relative_variance
from offbeat.averaging.timing import Timing

ADAPTIVE = Adaptive(every=100, start=100, least=20, most=500)


def follow(pace, metrics):
    found = []
    for metric in metrics:
        pace = pace.after(metric)
        found.append(pace.every)
    return found


def test_a_metric_that_stays_leaves_the_frequency():
    for is_of_drift in (False, True):
        pace = Adaptive(every=100, start=100, least=20, most=500, is_of_drift=is_of_drift)
        assert set(follow(pace, [3.0] * 30)) == {100}


@pytest.mark.parametrize("is_of_drift", [False, True])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_metric_that_falls_means_seldom_and_one_that_rises_often(is_of_drift, power):
    pace = Adaptive(every=100, start=100, least=20, most=500, is_of_drift=is_of_drift, power=power)
    down = follow(pace, [1.0] * 3 + [0.9**n for n in range(40)])
    up = follow(pace, [1.0] * 3 + [1.1**n for n in range(40)])
    assert down == sorted(down)
    assert down[-1] == 500
    assert up == sorted(up, reverse=True)
    assert up[-1] == 20


def test_a_quarter_of_a_variance_is_twice_as_long_and_half_of_a_norm_too():
    quarter = follow(ADAPTIVE, [4.0] * 3 + [1.0] * 40)
    assert quarter[-1] == 200
    norm = Adaptive(every=100, start=100, least=20, most=500, power=1.0)
    assert follow(norm, [4.0] * 3 + [2.0] * 40)[-1] == 200


@pytest.mark.parametrize("growth", [1, 2])
def test_drift_that_grows_with_the_iterations_comes_to_rest_at_what_it_was_at_first(growth):
    """As of a walk, or a way: so much for each iteration or its square, a fourth from the tenth round on.

    What a round has measured is known in the next one.
    """
    pace = Adaptive(every=100, start=100, least=20, most=2000, is_of_drift=True, power=0.25)
    measured, seen = None, []
    for number in range(60):
        pace, measured = pace.after(measured), float(pace.every**growth) * (1.0 if number < 10 else 0.25)
        seen.append(pace.every)
    rest = 100 * 4 ** (1 / growth)
    assert seen[-20:] == [pytest.approx(rest, rel=0.03)] * 20


@hypothesis.given(
    metrics=st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=40),
    is_of_drift=st.booleans(),
    start=st.integers(1, 10_000),
    spread=st.integers(1, 50),
)
def test_whatever_comes_the_bounds_hold(metrics, is_of_drift, start, spread):
    least, most = max(1, start // spread), start * spread
    pace = Adaptive(every=start, start=start, least=least, most=most, is_of_drift=is_of_drift)
    assert all(least <= every <= most for every in follow(pace, metrics))


def test_what_is_no_metric_changes_nothing():
    for metric in (None, math.nan, math.inf, -1.0):
        assert ADAPTIVE.after(metric) == ADAPTIVE
    zeros = follow(ADAPTIVE, [0.0] * 10)
    assert set(zeros) == {100}


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 7])
def test_fragments_in_turn_are_averaged_once_each_in_a_frequency(num_fragments):
    pace, begun, iterations_of = Iterations(every=10), 0, []
    since = 0
    for iteration in range(1, 101):
        since += 1
        if pace.is_due(iterations=since, seconds=0.0, num_fragments=num_fragments, number=begun):
            iterations_of.append(iteration)
            begun, since = begun + 1, 0
    assert begun == 10 * num_fragments
    for first in range(num_fragments):
        own = iterations_of[first::num_fragments]
        assert {b - a for a, b in itertools.pairwise(own)} == {10}


def test_a_time_is_shared_among_fragments_and_asks_for_an_iteration():
    pace = Seconds(every=10.0)
    assert not pace.is_due(iterations=0, seconds=99.0, num_fragments=1, number=0)
    assert pace.is_due(iterations=1, seconds=10.0, num_fragments=1, number=0)
    assert not pace.is_due(iterations=1, seconds=4.9, num_fragments=2, number=0)
    assert pace.is_due(iterations=1, seconds=5.0, num_fragments=2, number=0)


def test_a_pace_of_which_it_is_said_twice_that_all_want_it_is_not_taken_back_to_where_it_began():
    timing = Timing(ADAPTIVE, overlap=True)
    timing.ask(pace=replace(ADAPTIVE, every=50, start=50), overlap=3)
    asked = timing.asked()
    timing.agree(asked)
    assert (timing.pace.every, timing.overlap) == (50, 3)
    assert timing.asked() == (None, None)
    for metric in (1.0, 1.0, 1.0, 0.1):
        timing.pace = timing.pace.after(metric)
    moved = timing.pace
    assert moved.every > 50
    timing.agree(asked)  # in the round after that in which it was agreed upon, and is known as late
    assert timing.pace is moved
    timing.ask(pace=replace(ADAPTIVE, every=70, start=70))
    timing.agree(asked)
    assert timing.wished_pace.every == 70, "what is wanted since stays wanted"


def test_variance_is_over_the_mean_of_two_or_more():
    assert relative_variance([]) is None
    assert relative_variance([3.0]) is None
    assert relative_variance([1.0, -1.0]) is None
    assert relative_variance([1.0, 3.0]) == pytest.approx(2.0 / 2.0)
    assert relative_variance([-1.0, -3.0]) == pytest.approx(2.0 / 2.0)


@pytest.mark.parametrize("num", [2, 3, 8])
def test_the_variance_of_a_short_round_is_on_average_that_of_a_long_one(num):
    """Over all samples of so many out of three losses, which are as likely, it is the losses' own."""
    losses = (3.0, 5.0, 7.0)
    own = statistics.pvariance(losses)
    samples = list(itertools.product(losses, repeat=num))
    variances = [relative_variance(sample) * statistics.fmean(sample) for sample in samples]
    assert statistics.fmean(variances) == pytest.approx(own)


def test_the_period_follows_the_root_of_the_loss_over_its_variance_as_adacomm_has_it():
    """Wang and Joshi's rule: sqrt(F / F0) times the first period where the variance is constant."""

    def every(loss, noise):
        first, later = ([mean - n, mean + n] for mean, n in ((1.0, 0.01), (loss, noise)))
        metrics = [relative_variance(first)] * 3 + [relative_variance(later)] * 40
        return follow(ADAPTIVE, metrics)[-1]

    assert every(0.5, 0.01) == round(100 * math.sqrt(0.5))
    assert every(0.25, 0.01) == 50
    assert every(1.0, 0.005) == 200
    assert every(0.25, 0.005) == 100
