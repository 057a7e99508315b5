"""Whether one metric is out of its range: the decision, from the values that it had so far.

A pure value: `see` gives the verdict and another detector, and changes nothing.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from offbeat.monitor.band import Band, is_usable
from offbeat.monitor.onset import IN_A_ROW, Onset

__all__ = ["METRICS", "SQUARES", "Detector", "Metric", "Verdict"]

Metric = Literal[
    "loss",
    "loss_variance",
    "gradient_norm",
    "update_ratio",
    "staleness",
    "parameter_variance",
    "non_finite",
]
METRICS: tuple[Metric, ...] = (
    "loss",
    "loss_variance",
    "gradient_norm",
    "update_ratio",
    "staleness",
    "parameter_variance",
    "non_finite",
)

SQUARES = frozenset({"loss_variance", "parameter_variance"})
"""Judged by their roots: a square has too long a tail for a mean and a deviation to say what is expected."""

LEAST_SCALES = {"staleness": 8.0}
"""What the share is taken of at least. Staleness is a small whole number, and 0 as long as a worker is alone:
a share of that would make an alert of each worker that joins."""

FAR = 16.0
"""Standard deviations: a single value that is so far out needs no others beside it."""

RECENT = 5
"""Values whose mean has to be out of range, too, where none is that far out. Of 144 runs without a fault
(Fashion-MNIST and digits; SGD and Adam, batches of 16 to 64) of 1000 steps, those in which the loss or
the gradient's norm gave an alert were 125 without this, and six with it and `LEAST_SHARE`: all of digits that
were learnt by heart."""

Verdict = Literal["warm_up", "quiet", "raised", "alert"]
"""In the warm-up; within the range; above it, by less than gives an alert; and by more."""


@dataclass(frozen=True, slots=True)
class Detector:
    """What is known of one metric.

    A value raises an alert if it exceeds the upper edge by more than the share, and so does the mean of the
    last few, or it alone is very far out. What is not finite raises one at once, in the warm-up, too; what is
    finite raises one there if it is beyond all that the first values let expect. No value that exceeds the
    edge by so much is fed to the band. A rise by less than some 5 % from value to value is followed, and
    raises none.

    Attributes:
        metric: Which.
        threshold: The share of the upper edge by which a value may exceed it.
        band: The range.
        recent: The last values.
        onset: The first values, which say what is expected as long as the band does not; None: none yet.
        ceiling: The upper edge that the limit goes by at most, whatever comes; None: by the band's alone.
    """

    metric: Metric
    threshold: float = 0.5
    band: Band = field(default_factory=Band)
    recent: tuple[float, ...] = ()
    onset: Onset | None = None
    ceiling: float | None = None

    @property
    def expected(self) -> tuple[float, float]:
        """The range, in the metric's own unit; infinite in the warm-up."""
        if self.metric == "non_finite":
            return 0.0, 0.0
        low, high = self.band.low, self.high
        if self.metric != "loss" and self.band.is_ready:  # no other is ever below 0
            low, high = max(low, 0.0), max(high, 0.0)
        return (low**2, high**2) if self.metric in SQUARES and self.band.is_ready else (low, high)

    @property
    def allowed(self) -> tuple[float, float]:
        """The range; in the warm-up what the first values let expect, which is no range to draw."""
        if self.band.is_ready or self.metric == "non_finite":
            return self.expected
        return -math.inf, self.bound

    @property
    def bound(self) -> float:
        """What a value has to exceed for an alert, in the metric's own unit; infinite where nobody knows."""
        if self.metric == "non_finite":
            return 0.0
        limit = self.limit if self.band.is_ready else self._first().limit
        return max(limit, 0.0) ** 2 if self.metric in SQUARES else limit

    def see(self, value: float) -> "tuple[Detector, Verdict]":
        """Judge a value, and take it up."""
        if self.metric == "non_finite":
            return self, "quiet" if value == 0 else "alert"
        if self.metric in SQUARES and value >= 0:
            value = math.sqrt(value)
        if not is_usable(value):
            return self, "alert"
        recent = (*self.recent, value)[-RECENT:]
        if not self.band.is_ready:
            return self._see_first(value, recent)
        if value <= self.limit:
            verdict: Verdict = "quiet" if value <= self.high else "raised"
            return replace(self, band=self.band.after(value), recent=recent), verdict
        is_far = self.band.z(value) >= FAR
        is_alert = is_far or sum(recent) / len(recent) > self.limit
        return replace(self, recent=recent), "alert" if is_alert else "raised"

    def _see_first(self, value: float, recent: tuple[float, ...]) -> "tuple[Detector, Verdict]":
        """Judge a value of the warm-up, and take it up."""
        before = self._first()
        if before.is_beyond(value):
            return replace(self, onset=before.after(value)), "alert" if before.is_alert(value) else "raised"
        band = self.band.after(value)
        onset = None if band.is_ready else before.after(value)  # which nobody asks for any more
        return replace(self, band=band, recent=recent, onset=onset), "warm_up"

    @property
    def is_above(self) -> bool:
        """Whether the last values, of those that are finite, were above what gives an alert."""
        if not self.band.is_ready:
            return self._first().num_beyond >= IN_A_ROW
        return bool(self.recent) and sum(self.recent) / len(self.recent) > self.limit

    @property
    def level(self) -> float:
        """The mean of the last values that are finite, in the metric's own unit or its root; NaN: none."""
        return sum(self.recent) / len(self.recent) if self.recent else math.nan

    @property
    def high(self) -> float:
        """The upper edge, of a value or the root of one that is a square; infinite in the warm-up."""
        high = self.band.high
        return high if self.ceiling is None else min(high, self.limit_of(self.ceiling))

    def held(self) -> "Detector":
        """Give one whose limit goes no higher than it is."""
        if self.ceiling is not None or not self.band.is_ready:
            return self
        return replace(self, ceiling=self.band.high)

    def let_go(self) -> "Detector":
        """Give one whose limit goes by the band again."""
        return self if self.ceiling is None else replace(self, ceiling=None)

    def anew(self) -> "Detector":
        """Give one that has seen nothing yet."""
        return Detector(self.metric, self.threshold, Band(self.band.warm_up))

    def _first(self) -> Onset:
        return self.onset or Onset(LEAST_SCALES.get(self.metric, 0.0))

    @property
    def limit(self) -> float:
        """What a value, or the root of one that is a square, has to exceed."""
        limit = self.limit_of(self.band.high)
        return limit if self.ceiling is None else min(limit, self.limit_of(self.ceiling))

    def limit_of(self, high: float) -> float:
        """Give what is above a value by the share."""
        scale = max(abs(high), LEAST_SCALES.get(self.metric, 0.0)) if math.isfinite(high) else 0.0
        return high + self.threshold * scale

    def is_by_ceiling(self, value: float) -> bool:
        """Tell whether a value is above the limit by the ceiling alone."""
        return value > self.limit and not value > self.let_go().limit
