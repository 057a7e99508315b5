"""What a rollback has left behind: no start takes it before what was gone back to; it is the first to go."""

import functools

from offbeat.frequency import Every
from offbeat.recovery.choice import (
    ends_again,
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
    assert numbers(chosen) == [7, 5, 2]


def test_a_deterministic_run_chooses_only_what_one_has_that_nobody_breaks_off():
    found = [manifest(5, step=93), again(4, 1, step=61), manifest(3, step=60), manifest(2, step=58)]
    every = Every(count=20, seconds=None)
    assert [m.step for m in found if planned(every, is_deterministic=True)(m)] == [61, 60]
    assert all(map(planned(every, is_deterministic=False), found))
    assert all(map(planned(Every(count=None, seconds=1.0), is_deterministic=True), found))
    by_plan = {"is_planned": planned(every, is_deterministic=True)}
    found = [manifest(5, step=93), *(manifest(n, step=20 * n) for n in (4, 3, 2, 1))]
    assert kept(found, monitor=None, mode="min", **by_plan) == {5, 4, 3, 2}


def test_an_end_that_came_of_what_a_rollback_has_written_once_more_is_come_to_again():
    end = manifest(9, gone_back_to=2, is_good=False)
    assert ends_again(end, again(5, 2))
    assert ends_again(end, manifest(2))
    assert not ends_again(end, again(5, 3))
    assert not ends_again(manifest(9), manifest(2))
