"""Whether a remedy holds with which a model was gone back to, by the losses that it has since. A pure value.

The limit is too mild a measure of that: it is half as high again as the range, and what is too high still may
keep the loss in between.
"""

import math
from dataclasses import dataclass, replace

from offbeat.monitor.detector import RECENT

__all__ = ["Trial"]

STRAY = 1.5
"""Standard deviations, by which the mean of the last few is above the first loss where that is above the
range already. The more, the more often a remedy that is too mild passes by a first loss that is high by
chance: of 32 runs whose rate stayed 40 or 100 times too high two ended more than two points below with 2.5,
none with 1.5 or 1."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen so far.

    Attributes:
        deviation: How far single losses had strayed.
        num: Losses of the model that was gone back to; -1 where one of before it is still to come.
        first: The first of them: what that model has before it is trained on.
    """

    deviation: float
    num: int = 0
    first: float = math.inf

    def after(self, loss: float) -> "Trial":
        """Give it with one more."""
        return replace(self, num=self.num + 1, first=loss if self.num == 0 else self.first)

    def edge(self, ceiling: float, *, most: int) -> float:
        """Give what a loss and the mean of the last few are to be no higher than; infinity: they may be.

        Of an older model the loss may be above the range of before the alert, and falls as it did then.

        Args:
            ceiling: The upper edge of that range.
            most: After how many losses it has held.
        """
        if not RECENT <= self.num <= most:
            return math.inf
        return max(ceiling, self.first + STRAY * self.deviation)
