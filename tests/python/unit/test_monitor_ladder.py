"""Which remedy is next, and when one is let go of."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from offbeat.monitor.band import Band
from offbeat.monitor.judge import Judge
from offbeat.monitor.ladder import Ladder, Standing, after_alert, after_quiet

LADDERS = st.builds(
    Ladder,
    num_rungs=st.integers(1, 5),
    patience=st.integers(1, 6),
    quiet_steps=st.integers(1, 8),
    repeats=st.integers(1, 4),
)
COURSES = st.lists(st.booleans(), max_size=300)  # steps with an alert, and without


def walk(ladder, course):
    """Give each rung as it is taken (+) and let go of (-), with the standing after each step."""
    standing, events, standings = Standing(), [], []
    for has_alert in course:
        standing, rung = (after_alert if has_alert else after_quiet)(standing, ladder)
        if rung is not None:
            events.append(("+" if has_alert else "-", rung))
        standings.append(standing)
    return events, standings


def test_the_first_alert_takes_the_first_rung_and_one_that_persists_the_next():
    ladder = Ladder(num_rungs=3, patience=4, quiet_steps=10)
    standing, taken = Standing(), []
    for step in range(20):
        standing, rung = after_alert(standing, ladder)
        if rung is not None:
            taken.append((step, rung))
    assert taken == [(0, 0), (4, 1), (8, 2)]


def test_the_last_rung_is_taken_again_where_that_does_more():
    ladder = Ladder(num_rungs=2, patience=3, quiet_steps=10, repeats=3)
    events, _ = walk(ladder, [True] * 40)
    assert events == [("+", 0), ("+", 1), ("+", 1), ("+", 1)]


def test_rungs_are_let_go_of_one_by_one_in_reverse():
    ladder = Ladder(num_rungs=2, patience=1, quiet_steps=5, repeats=2)
    events, standings = walk(ladder, [True] * 3 + [False] * 15)
    assert events == [("+", 0), ("+", 1), ("+", 1), ("-", 1), ("-", 1), ("-", 0)]
    assert standings[2 + 5].taken == (0, 1)
    assert standings[-1].taken == ()


def test_what_comes_back_is_let_go_of_after_twice_the_time():
    ladder = Ladder(num_rungs=1, patience=1, quiet_steps=4)
    course, lengths = [], []
    for _ in range(4):
        course.append(True)
        num_quiet = 0
        while walk(ladder, course)[1][-1].taken:
            course.append(False)
            num_quiet += 1
        lengths.append(num_quiet)
    assert lengths == [4, 8, 16, 32]


def test_after_quiet_without_any_remedy_the_next_alert_is_a_new_matter():
    ladder = Ladder(num_rungs=1, patience=1, quiet_steps=4)
    relapsed = [True, *[False] * 4, True, *[False] * 8]
    assert walk(ladder, relapsed)[1][-1].relapses == 1
    assert walk(ladder, [*relapsed, *[False] * 8])[1][-1] == Standing()


@hypothesis.given(LADDERS, COURSES)
def test_rungs_are_taken_in_order_and_let_go_of_in_reverse(ladder, course):
    events, standings = walk(ladder, course)
    stack = []
    for sign, rung in events:
        if sign == "+":
            expected = {0} if not stack else {stack[-1] + 1, stack[-1]}
            assert rung in expected
            stack.append(rung)
        else:
            assert stack.pop() == rung
    if standings:
        assert list(standings[-1].taken) == stack
    assert all(0 <= rung < ladder.num_rungs for _, rung in events)


@hypothesis.given(LADDERS, COURSES)
def test_whatever_has_come_it_lets_go_in_the_end(ladder, course):
    _, standings = walk(ladder, course)
    taken = len(standings[-1].taken) if standings else 0
    enough = (taken + 1) * ladder.quiet_steps * 2**6
    assert walk(ladder, [*course, *[False] * enough])[1][-1].taken == ()


@hypothesis.given(LADDERS, st.integers(0, 200))
def test_more_alerts_in_a_row_never_mean_fewer_rungs(ladder, length):
    fewer, more = (walk(ladder, [True] * n)[0] for n in (length, length + 1))
    assert more[: len(fewer)] == fewer


# ------------------------------------------------------------------------------------------- steps


def judge(**keywords):
    ladder = Ladder(num_rungs=2, patience=2, quiet_steps=3)
    made = Judge(["loss", "gradient_norm"], ladder, threshold=0.5, warm_up=5, **keywords)
    for step in range(20):
        made.begin(step)
        for metric in ("loss", "gradient_norm"):
            assert made.see(metric, 1.0) is None
    return made


def test_of_several_metrics_out_of_range_one_climbs():
    made = judge()
    made.begin(20)
    found = [made.see(metric, 100.0) for metric in ("loss", "gradient_norm")]
    assert [excess.is_first for excess in found] == [True, False]
    assert found[0].expected == (1.0, 1.0)
    assert made.climb() == 0


def test_a_step_is_quiet_where_nothing_in_it_is_above_its_range():
    made = judge()
    made.begin(20)
    assert made.see("loss", 100.0) is not None
    made.climb()
    for step in range(21, 40):  # within the allowed share, and not within the range
        assert made.begin(step) is None
        made.see("loss", 1.0)
        made.see("gradient_norm", 1.3)
    assert made.standing.taken == (0,)
    released = []
    for step in range(40, 60):
        released.append(made.begin(step))
        for metric in ("loss", "gradient_norm"):
            made.see(metric, 1.0)
    assert [r for r in released if r is not None] == [0]


def test_readings_of_one_step_may_come_one_after_the_other():
    made = judge()
    before = made.standing
    for _ in range(10):
        assert made.begin(19) is None
        made.see("loss", 1.0)
    assert made.standing == before


@pytest.mark.parametrize("unusable", [float("nan"), float("inf")])
def test_the_variance_of_losses_is_that_of_five_in_a_row(unusable):
    made = Judge(["loss_variance"], Ladder(1, 1, 1), threshold=0.5, warm_up=5)
    found = [made.variance_with({"loss": value}) for value in (1.0, 2.0, unusable, 3.0, 4.0, 5.0, 9.0)]
    assert [found[i] for i in (0, 1, 3, 4, 5, 6)] == [None, None, None, None, 2.0, None]
    assert math.isnan(found[2])
    assert made.variance_with({"gradient_norm": 1.0}) is None


def test_a_judge_begins_with_the_warm_up_it_was_given():
    made = Judge(["loss"], Ladder(1, 1, 1), threshold=0.5, warm_up=7)
    assert made.detectors["loss"].band == Band(7)
