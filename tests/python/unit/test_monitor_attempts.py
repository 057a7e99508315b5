"""What going back has come to, against all that was heard since a loss was in its range last."""

from itertools import accumulate

import hypothesis
from hypothesis import strategies as st

from offbeat.monitor.attempts import Attempts

MOST = 3
HEARD = st.lists(
    st.one_of(st.none(), st.integers(min_value=0, max_value=9), st.sampled_from(["in range", "unusable"])),
    max_size=20,
)
"""Where it was gone back to, if that is known; or what was seen meanwhile."""


def after(heard):
    made = Attempts()
    for one in heard:
        if one == "in range":
            made = made.after_range()
        elif one == "unusable":
            made = made.after_unusable()
        else:
            made = made.after(one)
    return made


def gone_to(heard):
    """Where it was gone to since the first time after a loss was in its range."""
    gone, was_in_range = [], False
    for one in heard:
        if one == "in range":
            was_in_range = True
        elif one != "unusable":
            gone = [*([] if was_in_range else gone), one]
            was_in_range = False
    return gone


def places_of(heard):
    """Those of them that are known and older than all before, since something was unusable."""
    since = heard[max((n + 1 for n, one in enumerate(heard) if one == "unusable"), default=0) :]
    num = sum(one not in ("in range", "unusable") for one in since)
    known = [place for place in gone_to(heard)[-num:] if num and place is not None]
    return tuple(dict.fromkeys(accumulate(known, min)))


def is_in_range(heard):
    """Whether a loss was, since it was gone back last."""
    return next((one == "in range" for one in reversed(heard) if one != "unusable"), True)


@hypothesis.given(HEARD)
def test_they_are_counted_since_a_loss_was_in_its_range_and_their_places_each_older_than_the_one_before(
    heard,
):
    made = after(heard)
    assert (made.num, made.places) == (len(gone_to(heard)), places_of(heard))


@hypothesis.given(HEARD)
def test_the_next_goes_further_unless_the_last_has_led_into_the_range_or_it_was_often_enough(heard):
    assert after(heard).is_to_stay(MOST) == (is_in_range(heard) or len(gone_to(heard)) >= MOST)


@hypothesis.given(HEARD)
def test_they_were_in_vain_where_no_loss_was_in_its_range_on_as_many_two_of_which_were_other_places(heard):
    made = after(heard)
    is_tried = len(gone_to(heard)) >= MOST and len(places_of(heard)) >= 2
    assert made.were_in_vain(MOST) == (not is_in_range(heard) and is_tried)
    assert not made.were_in_vain(0), "nothing goes back there"
