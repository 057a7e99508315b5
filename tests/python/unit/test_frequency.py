"""How often something is done: a count, or a time with its unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.frequency import Every, frequency


def read(value):
    return frequency(value, name="how_often", counted="steps")


@given(st.integers(1, 2**63 - 1))
def test_a_count_is_itself_and_refused_as_a_string_which_may_be_meant_as_a_time(count):
    assert read(count) == Every(count=count)
    with pytest.raises(
        ConfigError, match=rf"how_often is '{count}': give a number of steps, .* with its unit"
    ):
        read(str(count))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("500ms", 0.5), ("1.5m", 90.0), ("2 h", 7200.0), ("0.25s", 0.25)],
)
def test_a_time_is_in_seconds(text, seconds):
    assert read(text) == Every(seconds=pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", [0, -1, 2**63, 1.5, True, None, "", "0", "0s", "30S", "5d", "s", "-5s", b"3"]
)
def test_what_is_neither_is_refused_by_name_with_the_remedy(value):
    with pytest.raises(ConfigError, match=r"how_often is .*: give a number of steps, 1 or more, or a time"):
        read(value)
