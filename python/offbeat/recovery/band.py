"""Whether a loss is still what it was: the band around the best stretch of the run so far.

The number of standard deviations and of steps are those of ZClip (Kumar et al., 2025: z* = 2.5, a warm-up of
25 steps). Changed: ZClip's moving average follows what it judges within tens of steps, and saves are further
apart than that, so that a run that diverged between two would be within its own band. Here the band stays
where the lowest mean of 25 steps has put it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NUM_RECENT", "Band", "judged"]

NUM_RECENT = 25
"""Steps whose losses are looked at together."""
Z = 2.5
"""Standard deviations of one step's loss above the mean that the band ends."""


@dataclass(frozen=True, slots=True)
class Band:
    """The lowest stretch of losses so far.

    Attributes:
        mean: Of its losses.
        deviation: Their standard deviation.
    """

    mean: float
    deviation: float

    @property
    def upper(self) -> float:
        """What the mean of a stretch may be at most."""
        return self.mean + Z * self.deviation


def judged(recent: Sequence[float], band: Band | None) -> tuple[bool, Band | None]:
    """Judge the newest losses.

    Args:
        recent: The last `NUM_RECENT`, or all if there are fewer.
        band: As it is so far.

    Returns:
        Whether they are finite and their mean is within the band, and the band with them in it. Fewer than
        `NUM_RECENT` make no band.
    """
    if not all(map(math.isfinite, recent)):
        return False, band
    if not recent:
        return True, band
    mean = statistics.fmean(recent)
    is_within = band is None or mean <= band.upper
    if len(recent) == NUM_RECENT and (band is None or mean < band.mean):
        band = Band(mean, statistics.pstdev(recent))
    return is_within, band
