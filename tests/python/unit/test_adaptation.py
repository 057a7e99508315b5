"""Micro-batches per update and gains: closed forms, the right direction, and bounds."""

import dataclasses
import json
import math
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from offbeat.accumulator.adaptation import Adaptation, Measurement, pair

START = Adaptation(most=16, num_members=1, overlaps=False, decided=16)
POSITIVE = st.floats(1e-6, 1e6)


def exact(adaptation, square, trace, size=32.0, **times):
    """Measure an update without noise in what is measured."""
    batches = adaptation.steps * adaptation.num_members
    counts = batches * size
    return Measurement(
        batches=batches,
        counts=counts,
        small=square + trace / size,
        big=square + trace / counts,
        **{"compute_s": 1.0} | times,
    )


def follow(adaptation, trace, num, **keywords):
    found = []
    for number in range(num):
        adaptation = adaptation.after(exact(adaptation, 1.0, trace(number), **keywords))
        found.append(adaptation.decided)
    return found, adaptation


@hypothesis.given(square=POSITIVE, trace=POSITIVE, batches=st.integers(2, 64), size=st.integers(1, 512))
def test_the_pair_is_solved_exactly(square, trace, batches, size):
    counts = batches * size
    measured = Measurement(
        batches=batches,
        counts=counts,
        small=square + trace / size,
        big=square + trace / counts,
        compute_s=0.0,
    )
    within = 1e-9 * (square + trace / size)
    found_square, found_trace = pair(measured)
    assert found_square == pytest.approx(square, abs=within)
    assert found_trace == pytest.approx(trace, abs=within * size * 2)


@hypothesis.given(
    seed=st.integers(0, 2**31),
    ratio=st.floats(0.3, 3.0),
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=6),
)
@hypothesis.settings(max_examples=10)
def test_of_gaussian_gradients_of_known_covariance_the_estimates_have_no_bias(seed, ratio, sizes):
    random = np.random.default_rng(seed)
    mean, deviations, num = random.normal(size=20), random.uniform(0.5, 2.0, size=20), 3000
    deviations *= math.sqrt(ratio * mean @ mean / (deviations @ deviations))
    counts = np.array(sizes, float)
    found = np.empty((num, 2))
    for trial in range(num):
        micro = mean + deviations * random.normal(size=(len(sizes), 20)) / np.sqrt(counts)[:, None]
        whole = counts @ micro / counts.sum()
        measured = Measurement(
            batches=len(sizes),
            counts=counts.sum(),
            small=counts @ (micro**2).sum(1) / counts.sum(),
            big=whole @ whole,
            compute_s=0.0,
        )
        found[trial] = pair(measured)
    errors = 5 * found.std(0) / math.sqrt(num)
    assert abs(found[:, 0].mean() - mean @ mean) < errors[0]
    assert abs(found[:, 1].mean() - deviations @ deviations) < errors[1]
    assert errors[1] < 0.3 * deviations @ deviations, "the test can tell"


@hypothesis.given(
    square=st.floats(0, 1e9), trace=st.floats(0, 1e9), batches=st.floats(1, 1000), size=POSITIVE
)
def test_a_gain_is_adascales_and_between_one_and_the_micro_batches(square, trace, batches, size):
    _, now = follow(START, lambda _: 1.0, 10)
    seen = {name: replace(now.square, total=v * now.square.weight) for name, v in
            (("square", square), ("trace", trace), ("size", size))}  # fmt: skip
    now = replace(now, **seen)
    gain = now.gain(batches)
    assert 1.0 <= gain <= batches
    variance = now.trace.value / now.size.value
    if variance / batches + now.square.value > 0:
        formula = (variance + now.square.value) / (variance / batches + now.square.value)
        assert gain == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize(
    ("trace", "batches", "gain"),
    [(1e-12, 16, 1.0), (1e12, 16, 16.0), (32.0, 1, 1.0), (32.0, 16, 32 / 17)]
)  # fmt: skip
def test_a_gain_goes_from_one_where_nothing_is_noise_to_all_where_all_is(trace, batches, gain):
    _, now = follow(START, lambda _: trace, 10)
    assert now.gain(batches) == pytest.approx(gain, rel=1e-6)


def test_before_the_noise_is_known_nothing_is_changed():
    decided, now = follow(START, lambda _: 1e-3, 4)
    assert decided == [16] * 4
    assert (now.gain(16), now.noise_scale) == (1.0, None)
    assert now.after(exact(now, 1.0, 1e-3)).decided == 8, "by half at most"


@pytest.mark.parametrize("num_members", [1, 4])
def test_an_update_is_as_large_as_the_noise_scale(num_members):
    start = replace(START, num_members=num_members)
    _, now = follow(start, lambda _: 32.0 * 6 * num_members, 200)
    assert now.noise_scale == pytest.approx(32.0 * 6 * num_members)
    assert now.decided == 6


def test_more_noise_means_more_micro_batches_and_less_fewer():
    down, now = follow(START, lambda n: 32.0 * 16 * 0.99**n, 900)
    assert down == sorted(down, reverse=True)
    assert down[-1] == 1
    up, now = follow(now, lambda n: 1.05**n, 1500)
    assert up == sorted(up)
    assert up[-1] == 16
    flat, _ = follow(now, lambda _: 1e9, 100)
    assert set(flat) == {16}


@pytest.mark.parametrize(
    ("overlaps", "communication_s", "expected"),
    [(True, 0.5, 1), (True, 4.4, 4), (True, 8.8, 8), (True, 100.0, 16), (False, 0.05, 1), (False, 0.8, 8)],
)
def test_what_communication_is_not_hidden_means_more_micro_batches(overlaps, communication_s, expected):
    start = replace(START, num_members=2, overlaps=overlaps)
    _, now = follow(start, lambda _: 1e-3, 100, communication_s=communication_s)
    assert now.decided == expected, "by the noise it would be one"


def test_communication_that_grows_means_more_and_that_falls_fewer():
    now = replace(START, num_members=2, overlaps=True)
    _, now = follow(now, lambda _: 1e-3, 50, communication_s=0.1)
    found = [now.decided]
    for seconds in [*np.linspace(0.1, 20, 60), *np.linspace(20, 0.1, 120)]:
        now = now.after(exact(now, 1.0, 1e-3, communication_s=float(seconds)))
        found.append(now.decided)
    top = found.index(16)
    assert found[:top] == sorted(found[:top])
    assert found[0] == 1
    assert found[-1] < 4


@hypothesis.given(
    seen=st.lists(
        st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 2, st.none() | st.floats(0, 1e9)),
        max_size=40,
    ),
    most=st.integers(1, 40),
    num_members=st.integers(1, 5),
)
def test_whatever_comes_the_bounds_hold(seen, most, num_members):
    now = Adaptation(most=most, num_members=num_members, overlaps=True, decided=most)
    for small, big, communication_s in seen:
        batches = now.steps * num_members
        now = now.after(
            Measurement(
                batches=batches, counts=32.0 * batches, small=small, big=big, compute_s=1e-3,
                communication_s=communication_s,
            )
        )  # fmt: skip
        assert 1 <= now.decided <= most
        assert 1 <= now.steps <= most
        assert 1.0 <= now.gain(now.steps * num_members) <= now.steps * num_members


def test_alone_with_one_micro_batch_some_updates_are_of_two_so_that_noise_can_be_seen():
    _, now = follow(START, lambda _: 1e-3, 30)
    assert now.decided == 1
    steps = []
    for _ in range(32):
        steps.append(now.steps)
        now = now.after(exact(now, 1.0, 32.0 * 12))
    assert sorted(set(steps[:8])) == [1, 2]
    assert steps[:8].count(2) == 1
    _, now = follow(now, lambda _: 32.0 * 12, 1500)
    assert now.decided in (11, 12), "and so there is a way back"
    assert set(follow(replace(START, most=1, decided=1), lambda _: 1.0, 20)[0]) == {1}


def test_it_goes_on_from_a_state_within_todays_bounds():
    _, now = follow(START, lambda _: 32.0 * 12, 50)
    state = json.loads(json.dumps(now.state()))
    assert START.resumed(state) == now
    assert dataclasses.replace(START, most=4, decided=4).resumed(state).decided == 4
