"""Whether a remedy holds with which a model was gone back to, by the losses that it has since. A pure value.

The limit is too mild a measure of that: it is half as high again as the range's edge, and a rate that is too
high still may keep a loss that strays much in between.
"""

import math
from dataclasses import dataclass, replace

from offbeat.monitor.detector import RECENT, Detector

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
        least: What the mean of the last few is no higher than in a sound run.
        mean: Of losses before.
        deviation: How far single ones had strayed from it.
        num: Losses of the model that was gone back to, but for those above the limit.
        first: The first of them: what that model has before it is trained on, or soon after.
    """

    least: float
    mean: float
    deviation: float
    num: int = 0
    first: float = -math.inf

    @classmethod
    def of(cls, detector: Detector) -> "Trial | None":
        """Begin it, of a loss as it was before; None: that is not known.

        The mean of a few is above the edge hardly ever, and where single ones stray little it is not astray
        for that, as with data that is a little harder: it is to be above the mean by the share, too, by which
        a single one is above the edge for an alert.
        """
        if detector.ceiling is None:
            return None
        mean = detector.band.mean
        return cls(max(detector.ceiling, detector.limit_of(mean)), mean, detector.band.deviation)

    def after(self, loss: float) -> "Trial":
        """Give it with one more."""
        return replace(self, num=self.num + 1, first=loss if self.num == 0 else self.first)

    def edge(self, most: int) -> float:
        """Give what a loss and the mean of the last few are to be no higher than; infinity: they may be.

        Of an older model the loss may be above the range of before the alert, and falls as it did then; and
        higher ones stray by as large a share of them.

        Args:
            most: After how many losses it has held.
        """
        if not RECENT <= self.num <= most:
            return math.inf
        share = self.deviation / max(self.mean, self.deviation) if self.mean > 0 else 0.0  # 1 at most
        return max(self.least, self.first + STRAY * max(self.deviation, share * self.first))
