"""The range in which a number that is measured again and again is expected: a mean, and how far it strays.

A pure value: `after` gives another band and changes nothing.
"""

import math
from dataclasses import dataclass, replace

__all__ = ["Band", "is_usable"]

DECAY = 0.97
"""Of mean and variance, per value: half of them is of the last 23 values."""

Z_STAR = 2.5
"""Standard deviations from the mean to the edge."""

LEAST_SHARE = 0.25
"""Of the mean at the end of the warm-up: the upper edge stays above it. A loss that comes near 0, or its
gradient, has now and then a batch that is many times the mean of the others, and no run diverges by that."""

LARGEST = 1e150
"""Beyond it a square is no float any more."""


def is_usable(value: float) -> bool:
    """Tell whether a value is finite, and its square, too."""
    return abs(value) <= LARGEST  # NaN is not


@dataclass(frozen=True, slots=True)
class Band:
    """The range of what was seen so far.

    In the warm-up mean and variance are those of all values; after it each new value moves them by a little.
    A value above the upper edge counts as less the farther out it is, so that none pulls the edge after it.

    Attributes:
        warm_up: Values before there is a range.
        seen: Values that were taken so far, up to `warm_up`.
        mean: Of them.
        variance: Of them.
        least_high: The upper edge is no lower: a quarter of the mean of the warm-up, where that is above 0.

    Source: Kumar, Owen, Chowdhury, Güra 2025, "ZClip: Adaptive Spike Mitigation for LLM Pre-Training",
    section 3. Differs in the upper edge's least value, and in that an edge below 0 is allowed.
    """

    warm_up: int = 25
    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0
    least_high: float = -math.inf

    @property
    def is_ready(self) -> bool:
        """Whether the warm-up is over, and there is a range."""
        return self.seen >= self.warm_up

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    @property
    def low(self) -> float:
        """The lower edge; minus infinity in the warm-up."""
        return self.mean - Z_STAR * self.deviation if self.is_ready else -math.inf

    @property
    def high(self) -> float:
        """The upper edge; infinity in the warm-up."""
        return max(self.mean + Z_STAR * self.deviation, self.least_high) if self.is_ready else math.inf

    def z(self, value: float) -> float:
        """Tell how many standard deviations above the mean a value is; infinity where there is no other."""
        above = value - self.mean
        if self.variance > 0:
            return above / self.deviation
        return math.copysign(math.inf, above) if above else 0.0

    def clipped(self, value: float) -> float:
        """Give what a value counts as: beyond the edge less, the farther out it is (ZClip's reciprocal)."""
        z = self.z(value)
        if not self.is_ready or z <= Z_STAR:
            return value
        return self.mean + Z_STAR * self.deviation * (Z_STAR / z)

    def after(self, value: float) -> "Band":
        """Give the band with one more value; one that is not usable changes nothing."""
        if not is_usable(value):
            return self
        if self.is_ready:
            counted = self.clipped(value)
            mean = self.mean + (1 - DECAY) * (counted - self.mean)  # in this form a constant stays what it is
            variance = DECAY * self.variance + (1 - DECAY) * (counted - mean) ** 2
            return replace(self, mean=mean, variance=variance)
        seen = self.seen + 1
        mean = self.mean + (value - self.mean) / seen
        variance = self.variance + ((value - self.mean) * (value - mean) - self.variance) / seen
        least = LEAST_SHARE * mean if seen == self.warm_up and mean > 0 else self.least_high
        return replace(self, seen=seen, mean=mean, variance=max(variance, 0.0), least_high=least)
