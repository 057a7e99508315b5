"""What a rollback has left behind: no start takes it before what was gone back to; it is the first to go."""

import functools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from offbeat.frequency import Every
from offbeat.recovery.choice import (
    ends_again,
    is_short,
    kept,
    left_behind,
    planned,
    preferred,
    ranked,
    to_go_back_to,
)
from offbeat.recovery.manifest import Manifest


def manifest(number, **fields):
    told = {
        "step": 10 * number,
        "loss": 0.5,
        "is_good": True,
        "optimizer": "SGD",
        "offbeat": "0",
        "torch": "2",
    }
    counts = dict.fromkeys(("epoch", "batch", "samples", "num_parameters"), 1)
    none = dict.fromkeys(("band", "monitored", "monitor"))
    rest = {"seconds": 1.0, "written_unix_s": 1.0, "is_finished": False, "files": ()}
    return Manifest(number=number, **told | counts | none | rest | fields)


def again(number, of, **fields):
    return manifest(number, again_number=of, again_step=10 * of, **fields)


def numbers(found):
    return [m.number for m in found]


def test_what_was_written_since_what_a_rollback_went_to_is_left_behind():
    found = [manifest(6), again(5, 2), manifest(4), manifest(3), manifest(2), manifest(1)]
    assert left_behind(found) == {3, 4}
    assert numbers(preferred(found)) == [6, 5, 2, 1, 4, 3]
    assert numbers(ranked("latest", found)) == [6, 5, 2, 1, 4, 3]
    assert numbers(ranked("last_good", found)) == [6, 5, 2, 1, 4, 3]


def test_a_rollback_that_went_further_back_leaves_the_one_before_it_behind():
    found = [again(5, 1), again(4, 2), manifest(3), manifest(2), manifest(1)]
    assert left_behind(found) == {2, 3, 4}


def test_a_rollback_that_was_undone_leaves_nothing_behind():
    found = [again(5, 3), again(4, 2), manifest(3), manifest(2)]
    assert left_behind(found) == {4}
    assert numbers(preferred(found)) == [5, 3, 2, 4]


def test_the_best_of_what_was_left_behind_is_the_best_of_nothing_else():
    values = {4: 0.1, 3: 0.2, 2: 0.5, 1: 0.4}
    of = {number: {"monitored": value, "monitor": "loss"} for number, value in values.items()}
    found = [again(5, 2, **of[2]), manifest(4, **of[4]), *(manifest(n, **of[n]) for n in (3, 2, 1))]
    assert numbers(ranked("best", found, monitor="loss")) == [1, 5, 2, 4, 3]
    assert 1 in kept(found, monitor="loss", mode="min")


def test_a_copy_pushes_nothing_out_and_what_was_left_behind_is_the_first_to_go():
    stay = functools.partial(kept, monitor=None, mode="min")
    found = [again(4, 3), manifest(3), manifest(2), manifest(1)]
    assert stay(found) == {4, 3, 2, 1}
    found = [again(5, 2), again(4, 3), manifest(3), manifest(2), manifest(1)]
    assert stay(found) == {5, 3, 2, 1}  # there is room for one of what was left behind
    found = [manifest(6), *(m for m in found if m.number in (5, 3, 2, 1))]
    assert stay(found) == {6, 2, 1}
    found = [manifest(4), again(3, 1), manifest(2), manifest(1)]
    assert stay(found) == {4, 3, 2, 1}  # else nobody knew any more that the second was left behind
    assert numbers(preferred(found)) == [4, 3, 1, 2]


def test_a_rollback_chooses_what_is_good_kept_and_not_left_behind():
    found = [manifest(7), manifest(6, is_good=False), again(5, 2), manifest(4), manifest(2), manifest(1)]
    chosen = to_go_back_to(found, stay={7, 6, 5, 4, 2}, is_planned=lambda _: True)
    assert numbers(chosen) == [7, 5], "of what has the values of one step the newest"


def test_a_deterministic_run_chooses_only_what_one_has_that_nobody_breaks_off():
    found = [manifest(5, step=93), again(4, 1, step=61), manifest(3, step=60), manifest(2, step=58)]
    every = Every(count=20, seconds=None)
    assert [m.step for m in found if planned(every, is_deterministic=True)(m)] == [61, 60]
    assert all(map(planned(every, is_deterministic=False), found))
    assert all(map(planned(Every(count=None, seconds=1.0), is_deterministic=True), found))
    by_plan = {"is_planned": planned(every, is_deterministic=True)}
    found = [manifest(5, step=93), *(manifest(n, step=20 * n) for n in (4, 3, 2, 1))]
    assert kept(found, monitor=None, mode="min", **by_plan) == {5, 4, 3, 2}


def test_of_a_run_that_is_broken_off_again_and_again_the_newest_three_are_kept_and_the_planned_ones_besides():
    by_plan = {"is_planned": planned(Every(count=20, seconds=None), is_deterministic=True)}
    stay = functools.partial(kept, monitor=None, mode="min", **by_plan)
    assert stay([manifest(n, step=20 * n + 1) for n in (5, 4, 3, 2, 1)]) == {5, 4, 3}
    steps = {8: 70, 7: 60, 6: 55, 5: 50, 4: 45, 3: 40, 2: 20, 1: 10}
    assert stay([manifest(n, step=step) for n, step in steps.items()]) == {8, 7, 6, 3, 2}


def test_what_is_saved_besides_takes_the_place_of_no_planned_one_that_is_good_or_the_best():
    is_planned = planned(Every(count=20, seconds=None), is_deterministic=True)
    found = [manifest(n, step=20 * n, is_good=False, monitored=9.0, monitor="loss") for n in (9, 8, 7)]
    found += [manifest(5, step=101, monitored=0.1, monitor="loss")]
    found += [manifest(4, step=80, monitored=0.3, monitor="loss")]
    found += [manifest(3, step=60, monitored=0.2, monitor="loss")]
    assert kept(found, monitor="loss", mode="min", is_planned=is_planned) == {9, 8, 7, 5, 4, 3}


def test_a_rollback_whose_checkpoint_could_not_be_written_is_known_by_the_next():
    told_later = manifest(6, again_number=2)
    found = [told_later, manifest(4), manifest(3), manifest(2)]
    assert left_behind(found) == {4, 3}
    assert told_later.values_step == 60
    assert kept(found, monitor=None, mode="min") == {6, 4, 2}


@given(st.lists(st.integers(1, 30)), st.integers(1, 30))
def test_a_mean_is_short_by_what_is_usual_and_without_that_by_whether_it_was_broken_off(before, samples):
    is_short_now = is_short(samples, before, is_broken_off=True)
    if before:
        assert is_short_now == (2 * samples < statistics.median_high(before))
        assert is_short(samples, before, is_broken_off=False) == is_short_now
    else:
        assert is_short_now
        assert not is_short(samples, before, is_broken_off=False)


def test_where_all_means_are_short_the_best_of_these_is_the_best():
    found = [manifest(n, monitored=0.1 * n, monitor="loss", is_short=True) for n in (3, 2, 1)]
    assert numbers(ranked("best", found, monitor="loss")) == [1, 2, 3]
    found.insert(0, manifest(4, monitored=0.9, monitor="loss"))
    assert numbers(ranked("best", found, monitor="loss")) == [4]


def test_an_end_that_came_of_what_a_rollback_has_written_once_more_is_come_to_again():
    end = manifest(9, gone_back_to=2, is_good=False)
    assert ends_again(end, again(5, 2))
    assert ends_again(end, manifest(2))
    assert not ends_again(end, again(5, 3))
    assert not ends_again(manifest(9), manifest(2))
