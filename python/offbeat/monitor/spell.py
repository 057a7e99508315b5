"""A metric that is out of its range and stays there: told at its beginning, ever more seldom, and at its end.

A pure value: `after_alert` and `after_quiet` give another spell and change nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

__all__ = ["QUIET_VALUES", "Spell"]

NO_RANGE = (-math.inf, math.inf)

QUIET_VALUES = 5
"""In the range, one after the other, that end it: where each second batch is NaN, that is one matter."""


@dataclass(frozen=True, slots=True)
class Spell:
    """Alerts of one metric, of one worker's, that are one matter.

    Attributes:
        begin: The step of the first.
        expected: The range then; infinite where there was none.
        num_alerts: How many there were.
        num_quiet: Values in the range since the last.
    """

    begin: int
    expected: tuple[float, float] = NO_RANGE
    num_alerts: int = 1
    num_quiet: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Make one of what `asdict` gave; older states do not tell the range."""
        given = dict(state)
        low, high = given.pop("expected", NO_RANGE)
        return cls(expected=(low, high), **given)

    def after_alert(self) -> "Spell":
        """Give the spell with one more alert."""
        return replace(self, num_alerts=self.num_alerts + 1, num_quiet=0)

    def after_quiet(self) -> "Spell":
        """Give the spell with one more value in the range."""
        return replace(self, num_quiet=self.num_quiet + 1)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.num_quiet >= QUIET_VALUES

    @property
    def is_news(self) -> bool:
        """Whether the newest alert is to be told: the first, second, fourth, eighth, and so on."""
        return self.num_alerts & (self.num_alerts - 1) == 0
