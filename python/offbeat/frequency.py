"""How often something is done, as users say it: every so many of something, or a time such as "30s"."""

import re
from dataclasses import dataclass
from math import inf

from offbeat.checks import is_count
from offbeat.errors import ConfigError

__all__ = ["Every", "frequency"]

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
TIME = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(UNITS_S)})")


@dataclass(frozen=True, slots=True)
class Every:
    """What is between two: a count or a time, one of the two.

    Attributes:
        count: Of whatever is counted, 1 or more.
        seconds: Above 0.
    """

    count: int | None = None
    seconds: float | None = None


def frequency(given: object, *, name: str, counted: str) -> Every:
    """Read a frequency as a user gives it.

    Args:
        given: A whole number, or a time with its unit, such as "500ms" or "1.5h"; "30" might be either.
        name: The keyword, for the refusal.
        counted: What a number counts, in the plural.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(given, int) and is_count(given, least=1):
        return Every(count=given)
    if isinstance(given, str) and (time := TIME.fullmatch(given)):
        time_s = float(time[1]) * UNITS_S[time[2]]
        if 0 < time_s < inf:
            return Every(seconds=time_s)
    raise ConfigError(
        f"{name} is {given!r}: give a number of {counted}, 1 or more, or a time above 0 with its unit (ms, "
        f"s, m or h), such as '30s' or '1.5h'"
    )
