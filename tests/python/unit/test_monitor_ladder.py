"""Which remedy is next, and when one is let go of."""

import dataclasses
import math
from itertools import pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from offbeat.monitor.band import Band
from offbeat.monitor.judge import Judge
from offbeat.monitor.ladder import (
    Growth,
    Ladder,
    Standing,
    after_alert,
    after_quiet,
    has_gone_back,
    may_go_back,
)

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


def lost(ladder, length, **keywords):
    """Give when the rung that goes back was taken again beside later ones, and which were taken when."""
    standing, went, taken = Standing(), [], []
    for step in range(length):
        before = standing
        standing, rung = after_alert(standing, ladder, is_lost=True, **keywords)
        went += [step] if standing.num_back > before.num_back else []
        taken += [] if rung is None else [(step, rung)]
    return went, taken, standing


def test_what_is_lost_goes_back_with_the_next_rung_and_then_without_one():
    ladder = Ladder(num_rungs=2, patience=4, quiet_steps=10, back=0, most_back=3)
    went, taken, standing = lost(ladder, 60)
    assert (went, taken) == ([4, 8], [(0, 0), (4, 1)])
    assert has_gone_back(standing, ladder)
    assert not may_go_back(standing, ladder)


def test_what_was_gone_back_to_has_the_whole_patience_before_a_rung_that_waits_for_longer():
    ladder = Ladder(num_rungs=2, patience=4, quiet_steps=10, repeats=9, growth=Growth(), back=0, most_back=3)
    went, taken, _ = lost(ladder, 40)
    assert (went, taken) == ([4, 8], [(0, 0), (4, 1), (16, 1), (32, 1)])


def test_a_last_rung_that_would_be_for_nothing_is_not_taken_with_it():
    ladder = Ladder(num_rungs=2, patience=4, quiet_steps=10, repeats=9, back=0, most_back=3)
    assert lost(ladder, 10)[:2] == ([4, 8], [(0, 0), (4, 1), (8, 1)])
    assert lost(ladder, 10, is_in_vain=True)[:2] == ([4, 8], [(0, 0), (4, 1)])


def test_who_goes_back_by_the_last_rung_or_is_not_lost_goes_by_the_ladder_alone():
    last = Ladder(num_rungs=2, patience=3, quiet_steps=10, repeats=3, back=1, most_back=3)
    assert lost(last, 40)[:2] == ([], [(0, 0), (3, 1), (6, 1), (9, 1)])
    assert has_gone_back(lost(last, 40)[2], last)
    first = Ladder(num_rungs=2, patience=3, quiet_steps=10, back=0, most_back=3)
    assert walk(first, [True] * 40)[1][-1].num_back == 0


def test_what_is_let_go_of_lets_it_go_back_as_often_again():
    ladder = Ladder(num_rungs=2, patience=2, quiet_steps=5, back=0, most_back=3)
    standing = lost(ladder, 20)[2]
    for _ in range(5):
        standing, _ = after_quiet(standing, ladder)
    assert standing.taken == (0,)
    assert may_go_back(standing, ladder)


def test_what_was_taken_often_is_given_twice_the_time_and_more_while_values_fall():
    def when(is_falling=lambda step: False, num_steps=400, *, is_renewed=True):
        growth = Growth(after=3, most=8, is_renewed=is_renewed)
        ladder = Ladder(num_rungs=1, patience=3, quiet_steps=100, repeats=9, growth=growth)
        standing, taken = Standing(), []
        for step in range(num_steps):
            standing, rung = after_alert(standing, ladder, is_falling=is_falling(step))
            taken += [step] if rung is not None else []
        return taken

    assert [after - before for before, after in pairwise(when())] == [3, 3, 3, 6, 12, 24, 24, 24]
    # Until it was taken three times nobody asks; then it is given as much again until it falls no more.
    assert when(lambda step: True) == [0, 3, 6]
    assert when(lambda step: step < 30)[:5] == [0, 3, 6, 30, 36]
    assert when(lambda step: True, is_renewed=False) == when()


def test_what_changes_how_training_goes_on_is_taken_with_going_back_once_more_where_all_is_finite():
    mending = Ladder(num_rungs=2, patience=3, quiet_steps=10, repeats=4, back=0, most_back=3, mending={0, 1})
    standing, went = Standing(), []
    for step in range(30):
        before, (standing, rung) = standing, after_alert(standing, mending, is_astray=True)
        went += [(step, rung)] if standing.num_again > before.num_again else []
    assert went == [(3, 1), (6, 1), (9, 1), (12, 1)]
    assert may_go_back(standing, mending), "as often as before, for what is lost"
    told = dataclasses.replace(mending, mending={0})  # as "alert" and "pause" change nothing
    last = dataclasses.replace(mending, back=1)
    for ladder, is_astray in ((told, True), (last, True), (mending, False)):
        standing = Standing()
        for _ in range(40):
            standing, _ = after_alert(standing, ladder, is_astray=is_astray)
        assert (len(standing.taken), standing.num_back, standing.num_again) == (5, 0, 0)


def test_what_is_taken_again_for_another_worker_goes_back_for_nobody():
    ladder = Ladder(num_rungs=2, patience=3, quiet_steps=10, repeats=4, back=0, most_back=3, mending={0, 1})
    standing = Standing()
    for _ in range(4):
        standing, _ = after_alert(standing, ladder, is_astray=True)
    assert (standing.taken, standing.num_again) == ((0, 1), 1)
    standing, rung = after_alert(standing, ladder, is_elsewhere=True, is_astray=True)
    assert (rung, standing.num_again) == (1, 1)


@hypothesis.given(LADDERS, st.integers(0, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=200))
def test_it_goes_back_no_more_often_than_it_may_and_no_sooner_than_patience_says(ladder, back, most, course):
    ladder = dataclasses.replace(ladder, back=back % ladder.num_rungs, most_back=most)
    standing, since = Standing(), 0
    for is_lost in course:
        before = standing
        standing, rung = after_alert(standing, ladder, is_lost=is_lost)
        since += 1
        if standing.num_back > before.num_back:
            assert is_lost
            assert since >= ladder.patience
            assert standing.taken.count(ladder.back) + standing.num_back <= most
        if rung is not None or standing.num_back > before.num_back:
            since = 0


# ------------------------------------------------------------------------------------------- steps


def judge(**keywords):
    ladder = Ladder(num_rungs=2, patience=2, quiet_steps=3)
    made = Judge(["loss", "gradient_norm"], ladder, threshold=0.5, warm_up=5, **keywords)
    for step in range(20):
        made.begin(step)
        for metric in ("loss", "gradient_norm"):
            assert made.see(metric, 1.0) is None
    return made


def feed(made, step, value, metric="loss"):
    """Give what a step with one value was, and what was let go of before it."""
    released = made.begin(step)
    excess = made.see(metric, value)
    if excess is not None and excess.is_first:
        made.climb()
    return excess, released


def warmed(quiet_steps=50, metrics=("loss",)):
    made = Judge(metrics, Ladder(num_rungs=1, patience=5, quiet_steps=quiet_steps), threshold=0.5, warm_up=5)
    for step in range(200):
        for metric in metrics:
            feed(made, step, 0.8 + step % 2 * 0.4, metric)
    return made


def test_a_loss_that_rises_slowly_in_spite_of_a_remedy_or_after_it_is_an_alert_and_not_what_is_usual():
    """By as little as a range follows that is not held."""
    followed, held = warmed(), warmed()
    limit, edge = held.detectors["loss"].bound, held.detectors["loss"].high
    assert feed(held, 200, 5.0)[0] is not None
    for begin, is_first in ((201, True), (401, False)):
        found = []
        for step in range(150):
            if len(found) == 4:
                break  # and so it has not come to be let go of
            loss = 1 + step / 75
            found += [loss] if feed(held, begin + step, loss)[0] else []
            assert held.detectors["loss"].bound <= limit
            if is_first:
                assert feed(followed, begin + step, loss)[0] is None
        assert 0.9 * limit < found[0] < limit + 0.3
        assert held.standing.taken == (0,)
        num_quiet = 0
        while held.standing.taken:
            feed(held, 1000 * begin + num_quiet, 0.9)
            num_quiet += 1
        assert num_quiet >= 50
        assert held.detectors["loss"].ceiling == edge, "let go of, and it may come back at once"
    for step in range(60):
        feed(held, 10**7 + step, 0.9)
    assert held.detectors["loss"].ceiling is None


def test_a_remedy_is_let_go_of_where_the_loss_stays_a_little_above_what_it_was():
    made = warmed()
    edge, limit = made.detectors["loss"].high, made.detectors["loss"].bound
    feed(made, 200, 5.0)
    level = 1.2 * edge
    released = [step for step in range(201, 600) if feed(made, step, level)[1] is not None]
    assert len(released) == 1
    assert made.standing.taken == ()
    assert made.detectors["loss"].bound == limit, "higher than that is an alert still"


def test_a_ceiling_under_which_the_loss_stays_is_let_go_of_where_nothing_was_in_effect_for_long():
    made = warmed()
    edge = made.detectors["loss"].high
    feed(made, 200, 5.0)
    over = [step for step in range(201, 2000) if feed(made, step, 1.2 * edge)[1] is not None]
    assert made.detectors["loss"].ceiling is None
    begin = over[0] + 1
    again = warmed()
    feed(again, 200, 5.0)
    for step in range(201, begin + 10 * 50):
        assert feed(again, step, 1.2 * edge)[0] is None
        assert again.detectors["loss"].ceiling == edge
    feed(again, 3000, 1.2 * edge)
    feed(again, 3001, 1.2 * edge)
    assert again.detectors["loss"].ceiling is None


def test_a_ceiling_is_let_go_of_by_losses_and_not_by_steps_without_one():
    made = warmed(metrics=("loss", "gradient_norm"))
    edge = made.detectors["loss"].high
    feed(made, 200, 5.0)
    num_losses = 0
    for step in range(201, 10**6):
        if made.detectors["loss"].ceiling is None:
            break
        made.begin(step)
        made.see("gradient_norm", 1.0)
        if step % 20 == 0 and made.see("loss", 1.2 * edge) is None:
            num_losses += not made.standing.taken
    assert 10 * 50 <= num_losses <= 10 * 50 + 20, "those that move the range are in it a little later"


def test_a_loss_that_is_not_finite_says_nothing_of_one_that_rises():
    made = warmed()
    assert feed(made, 200, math.nan)[0] is not None
    assert made.detectors["loss"].ceiling is None


def test_a_ceiling_is_of_the_range_and_another_threshold_counts_for_it_too():
    made = warmed()
    edge = made.detectors["loss"].high
    feed(made, 200, 5.0)
    again = Judge(["loss"], Ladder(num_rungs=1, patience=5, quiet_steps=50), threshold=3.0, warm_up=5)
    again.load(made.state())
    assert again.detectors["loss"].ceiling == edge
    assert again.detectors["loss"].bound == pytest.approx(4 * edge)
    assert feed(again, 201, 3.5 * edge)[0] is None


def after_how_many_alerts(*, num_workers=1, num_rungs=1):
    """Tell of each worker how many alerts a level makes until the limit goes by the range again."""
    ladder = Ladder(num_rungs=num_rungs, patience=5, quiet_steps=50)
    made = Judge(["loss"], ladder, threshold=0.5, warm_up=5)
    workers, num_alerts = [f"w{n}" for n in range(num_workers)], [0] * num_workers
    for step in range(10_000):
        for n, worker in enumerate(workers):
            made.begin(step, worker)
            rise = min(max(step - 200, 0) / 100, 1.6)  # is followed, but for the limit
            excess = made.see("loss", 0.8 + (step + n) % 2 * 0.4 + rise + 20 * (step == 200))
            if excess is not None:
                num_alerts[n] += 1
                made.climb()
        if step > 200 and made.detectors["loss"].ceiling is None:
            return num_alerts
    return None


@pytest.mark.parametrize("num_more", [1, 0])
def test_of_what_no_loss_is_in_the_range_it_is_gone_back_from_thrice_and_in_the_end_it_is_what_is_measured(
    num_more,
):
    given = {"repeats": 10 if num_more else 3, "back": 0, "most_back": 3, "mending": frozenset({num_more})}
    ladder = Ladder(1 + num_more, patience=1, quiet_steps=50, **given)
    made, stays = Judge(["loss"], ladder, threshold=0.5, warm_up=5), []
    for step in range(6):
        feed(made, step, 1.0)
    for step in range(6, 30):
        made.begin(step)
        assert made.see("loss", 99.0) is not None
        rung = made.climb(is_astray=step > 6, metric="loss")
        if rung is None:
            break
        made.went_back(40 - 10 * min(step - 6, 2))
        stays.append(made.is_to_stay)
    assert stays == [False, False] + [True] * (1 + 8 * num_more)
    assert made.is_exhausted
    assert made.is_of_data == (num_more > 0), "where nothing comes behind, going on being told harms nothing"
    if num_more:
        assert made.take_level() == ["loss"]
        made.end_all_soon()
        num_taken, released = len(made.standing.taken), []
        for step in range(30, 30 + 5 * num_taken + 1):
            released += [step] if made.begin(step) is not None else []
            made.see("loss", 99.0)
        assert released == [29 + 5 * n for n in range(1, num_taken + 1)], "be a step in the range or not"
        assert made.standing.taken == ()
        made.went_back()
        assert not made.is_to_stay, "it counts anew"
        for step in range(100, 110):
            assert feed(made, step, 99.0)[0] is None


@pytest.mark.parametrize("places", [[40, 40, 40], [40, 50, 60], [40, None, 50], [None, None, None]])
def test_what_was_gone_back_to_says_nothing_of_the_data_where_it_is_not_older_each_time(places):
    ladder = Ladder(2, patience=1, quiet_steps=50, repeats=3, back=0, most_back=3, mending=frozenset({1}))
    made = Judge(["loss"], ladder, threshold=0.5, warm_up=5)
    for step in range(6):
        feed(made, step, 1.0)
    for step in range(6, 30):
        made.begin(step)
        assert made.see("loss", 99.0) is not None
        if made.climb(is_astray=step > 6, metric="loss") is not None:
            made.went_back(places[min(step - 6, 2)])
        assert not made.is_of_data
    assert made.is_exhausted


def test_that_it_has_led_back_is_known_for_as_long_as_it_is_in_effect():
    ladder = Ladder(1, patience=1, quiet_steps=10, repeats=3, back=0, most_back=3)
    made = Judge(["loss"], ladder, threshold=0.5, warm_up=5)
    for step in range(6):
        feed(made, step, 1.0)
    feed(made, 6, 99.0)
    assert not made.has_led_back
    made.went_back(5)
    found = []
    for step in range(7, 60):
        feed(made, step, 99.0 if step < 9 else 1.0)
        assert made.has_led_back == (step >= 9 and made.standing.taken != ())
        found.append(made.has_led_back)
    assert any(found)
    assert not found[-1]


def test_a_level_that_was_learnt_has_as_many_alerts_by_its_ceiling_as_the_first():
    made, begin, level, found = warmed(), 200, 1.0, []
    for most in (10, 100):
        num_alerts = 0
        for step in range(begin, begin + 2000):
            noise = 0.8 + step % 2 * 0.4
            loss = level * (noise + min((step - begin) / 100, 1.6) + 20 * (step == begin))
            is_by_it = made.detectors["loss"].is_by_ceiling(loss)
            excess, _ = feed(made, step, loss)
            num_alerts += is_by_it and excess is not None
            if num_alerts == most or made.detectors["loss"].ceiling is None:
                break
        found.append(num_alerts)
        made.take_level(also=["loss"])
        begin, level = begin + 3000, 2.6 * level
        for step in range(begin - 500, begin):
            feed(made, step, level * (0.8 + step % 2 * 0.4))
    assert found == [10, 15]


@pytest.mark.parametrize("num_workers", [1, 2, 10])
@pytest.mark.parametrize(("num_rungs", "most"), [(1, 15), (3, 15), (6, 30)])
def test_of_workers_each_makes_as_many_alerts_as_one_alone_and_each_remedy_has_its_turn(
    num_workers, num_rungs, most
):
    found = after_how_many_alerts(num_workers=num_workers, num_rungs=num_rungs)
    assert most <= max(found) <= most + 1
    assert min(found) > most / 2


@pytest.mark.parametrize(("level", "deviation"), [(2.4, 0.2), (2.0, 0.3), (2.2, 0.4)])
@pytest.mark.parametrize("seed", range(3))
def test_a_level_that_is_right_from_now_on_is_learnt_after_some_more_alerts(level, deviation, seed):
    """Small batches of data that is harder: some values are above the limit, and some are low."""
    random = torch.Generator().manual_seed(seed)
    noise = (1 + deviation * torch.randn(9000, generator=random)).clamp(min=0.05).tolist()
    ladder = Ladder(num_rungs=1, patience=5, quiet_steps=100, repeats=10)
    made, alerts = Judge(["loss"], ladder, threshold=0.5, warm_up=25), []
    for step, factor in enumerate(noise):
        loss = (1.0 if step < 500 else level) * factor + 20 * (500 <= step < 503)
        alerts += [step] if feed(made, step, loss)[0] else []
    assert alerts[0] == 500
    assert 3 <= len(alerts) < 60
    assert alerts[-1] < 6000
    assert made.standing.taken == ()


def test_a_worker_that_leaves_in_the_middle_of_its_alerts_makes_no_later_one_an_old_matter():
    made = warmed()
    made.begin(200, "leaves")
    assert made.see("loss", 9.0).is_new
    made.climb()
    for step in range(200, 210):
        feed(made, step, 0.9)
    found = [feed(made, 210 + step, 9.0)[0].is_new for step in range(3)]
    assert found == [True, False, False]


@pytest.mark.parametrize("metric", ["gradient_norm", "update_ratio", "staleness", "loss_variance"])
def test_what_rises_in_sound_runs_too_is_followed_as_without_an_alert(metric):
    made = warmed(metrics=("loss", metric))
    before = made.detectors[metric]
    for step in (200, 201):  # of staleness two values are no alert yet
        feed(made, step, 1e4, metric)
    assert feed(made, 202, 1e4, metric)[0] is not None
    assert made.detectors[metric].ceiling is before.ceiling is None
    assert made.detectors["loss"].ceiling is None


@hypothesis.given(st.lists(st.floats(0, 10), max_size=150))
def test_from_an_alert_of_the_loss_on_its_limit_rises_only_once_it_was_low_for_long_or_was_alerted_often(
    losses,
):
    made, limit, low, num_low, num_alerts = warmed(quiet_steps=5), math.inf, math.inf, 0, 0
    num_calm = 0
    for step, loss in enumerate(losses, start=200):
        bound, edge, was_held = made.detectors["loss"].bound, made.detectors["loss"].high, limit < math.inf
        excess, _ = feed(made, step, loss)
        if excess is not None:
            assert loss > bound
            limit, low = (limit, low) if was_held else (bound, edge)
            num_low, num_calm, num_alerts = 0, 0, num_alerts + 1
        elif was_held:
            num_low += loss <= low
            num_calm += loss <= edge and not made.standing.taken
        if made.detectors["loss"].ceiling is None:
            is_over = (num_low >= 4 or num_calm >= 48) and made.standing.taken == ()
            assert limit == math.inf or is_over or num_alerts >= 15
            limit, num_alerts = math.inf, 0
        else:
            assert made.detectors["loss"].bound <= limit


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


def stuck(course):
    """Give whether a judge says so after each of these steps, by its readings."""
    made, found = judge(), []
    for step, readings in enumerate(course, 20):
        made.begin(step)
        for metric, value in readings.items():
            made.see(metric, value)
        found.append(made.is_stuck)
    return found


@pytest.mark.parametrize("metric", ["loss", "gradient_norm"])
@pytest.mark.parametrize("unusable", [math.nan, math.inf])
def test_nothing_passes_where_steps_one_after_the_other_have_something_that_is_not_finite(metric, unusable):
    sound = {"loss": 1.0, "gradient_norm": 1.0}
    broken = {**sound, metric: unusable}
    assert stuck([broken] * 4) == [False, False, True, True]
    assert stuck([dict.fromkeys(sound, unusable)] * 4) == [False, False, True, True]
    assert not any(stuck([broken, broken, sound] * 5))  # batches
    assert stuck([*[broken] * 3, sound]) == [False, False, True, False]  # mended by somebody
    assert stuck([*[broken] * 3, {}, broken]) == [False, False, True, True, True]  # a step without readings


def test_what_nobody_judges_and_is_not_finite_counts_once_a_step_and_what_was_gone_back_to_begins_anew():
    made = judge()
    for step in range(20, 23):
        made.begin(step)
        made.see("loss", math.inf)
        made.see_unusable()
        assert made.is_stuck == (step == 22)
    again = judge()
    again.load(made.state())
    assert again.is_stuck
    made.went_back()
    assert not made.is_stuck


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
