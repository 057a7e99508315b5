"""How far a member is: what is saved while a round is under way is as if that had not begun."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.averaging.course import Course

ITERATIONS = st.lists(st.tuples(st.integers(1, 9), st.floats(0, 9)), max_size=6)


def state_of(course):
    return {name: value for name, value in course.state_dict().items() if name != "seconds"}


@given(ITERATIONS, ITERATIONS, ITERATIONS)
def test_a_state_in_mid_round_is_as_if_the_round_had_not_begun(first, before, during):
    meets, goes_on = Course(), Course()
    for course in (meets, goes_on):
        for samples, loss in first:
            course.advance(samples, loss)
        course.begin_round()
        course.count_round(0.5)
        course.end_round()
        for samples, loss in before:
            course.advance(samples, loss)
    meets.begin_round()
    for course in (meets, goes_on):
        for samples, loss in during:
            course.advance(samples, loss)
    assert state_of(meets) == state_of(goes_on)
    again = Course()
    again.load_state_dict(meets.state_dict())
    assert again.since_begin == len(before) + len(during)
    assert again.losses == [loss for _, loss in (*before, *during)]
    meets.end_round()
    assert state_of(meets)["since_begin"] == len(during)
    assert state_of(meets)["losses"] == [loss for _, loss in during]
