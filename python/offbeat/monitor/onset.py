"""Before there is a range: which values are beyond all that the few so far let expect.

A pure value: `after` gives another onset and changes nothing.
"""

import math
import statistics
from dataclasses import dataclass, replace

__all__ = ["IN_A_ROW", "Onset"]

LEAST_SEEN = 5
"""Values that it takes to say anything."""

MOST_KEPT = 25
"""Values, the newest: a median of more says nothing else."""

MANY_TIMES = 1e3
"""The median of what was, in size. In the first 60 steps of 128 runs without a fault (Fashion-MNIST; SGD and
Adam, rates up to ten times the usual, with and without a warm-up of the rate; layers that begin at zero, nine
layers without norms) no value was more than 62 times of it, of any metric."""

IN_A_ROW = 3
"""Values so large that it takes for an alert: a run that begins where it is good has now and then a batch
that is many times the median."""

BY_ITSELF = 1e6
"""The largest so far: a single value that is more than so many times of it needs no others beside it."""


@dataclass(frozen=True, slots=True)
class Onset:
    """The first values of a metric.

    Attributes:
        least: What is taken for the size of what was at least; 0: only what was counts.
        sizes: Of the newest values, without their signs.
        num_beyond: Values beyond the limit since the last one that was not. None of them is in `sizes`.
    """

    least: float = 0.0
    sizes: tuple[float, ...] = ()
    num_beyond: int = 0

    @property
    def limit(self) -> float:
        """What a value is not expected to exceed; infinite as long as too few were seen, or all were 0."""
        if len(self.sizes) < LEAST_SEEN:
            return math.inf
        typical = statistics.median(self.sizes) or statistics.fmean(self.sizes)  # a rate may begin at 0
        return MANY_TIMES * max(typical, self.least) or math.inf

    @property
    def most(self) -> float:
        """The largest of them."""
        return max(self.sizes, default=0.0)

    def is_beyond(self, value: float) -> bool:
        """Tell whether a value is beyond the limit."""
        return value > self.limit

    def is_alert(self, value: float) -> bool:
        """Tell whether a value is an alert: beyond the limit, and far beyond, or not the first one there."""
        is_far = value > BY_ITSELF * max(self.most, self.least)
        return self.is_beyond(value) and (is_far or self.num_beyond + 1 >= IN_A_ROW)

    def after(self, value: float) -> "Onset":
        """Give the onset with one more value."""
        if self.is_beyond(value):
            return replace(self, num_beyond=min(self.num_beyond + 1, IN_A_ROW))
        return replace(self, sizes=(*self.sizes, abs(value))[-MOST_KEPT:], num_beyond=0)
