"""The course of a run, decided: readings in, alerts and steps on the ladder out.

Holds what the pure parts (`Detector`, `Ladder`) have come to, and nothing else: no clock, no hooks, no log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.monitor.band import Band, is_usable
from offbeat.monitor.detector import Detector, Metric
from offbeat.monitor.ladder import Ladder, Standing, after_alert, after_quiet

__all__ = ["Excess", "Judge"]

LOSSES_PER_VARIANCE = 5
"""Of as many losses one after the other a variance is taken; windows that overlap would be so alike that a
band could not tell how far variances stray."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A value that is out of its range.

    Attributes:
        metric: Whose.
        value: It.
        expected: The range.
        is_first: Whether this step had none before, so that it is to climb the ladder.
    """

    metric: Metric
    value: float
    expected: tuple[float, float]
    is_first: bool


class Judge:
    """Judges one reading after the other.

    A step is quiet where no reading of it is above its range, and counts for letting go; one that had an
    alert climbs the ladder once, whatever else was out of range in it.
    """

    def __init__(self, metrics: Sequence[Metric], ladder: Ladder, *, threshold: float, warm_up: int) -> None:
        self.detectors = {metric: Detector(metric, threshold, Band(warm_up)) for metric in metrics}
        self.standing = Standing()
        self._ladder = ladder
        self._step: object = None
        self._had_alert = False
        self._had_excess = False  # an alert, or a value above the range that gave none
        self._had_value_in_range = False
        self._losses: list[float] = []

    def begin(self, step: object) -> int | None:
        """Note to which step the next readings belong; give the rung to let go of, if it is time."""
        if step == self._step:
            return None
        released = None
        if self._had_value_in_range and not self._had_excess:
            self.standing, released = after_quiet(self.standing, self._ladder)
        self._step = step
        self._had_alert = self._had_excess = self._had_value_in_range = False
        return released

    def see(self, metric: Metric, value: float) -> Excess | None:
        """Judge a reading of this step; give it if it is out of range."""
        detector = self.detectors[metric]
        expected = detector.expected
        self.detectors[metric], verdict = detector.see(value)
        self._had_excess |= verdict in ("alert", "raised")
        self._had_value_in_range |= verdict == "quiet"
        if verdict != "alert":
            return None
        is_first, self._had_alert = not self._had_alert, True
        return Excess(metric, value, expected, is_first)

    def climb(self) -> int | None:
        """Take the step's alert into account; give the rung to take, if it is time."""
        self.standing, rung = after_alert(self.standing, self._ladder)
        return rung

    def variance_with(self, readings: Mapping[str, float]) -> float | None:
        """Gather losses; give the variance of the last few when there are enough."""
        if "loss" not in readings or not is_usable(readings["loss"]):
            return None
        self._losses.append(readings["loss"])
        if len(self._losses) < LOSSES_PER_VARIANCE:
            return None
        losses, self._losses = self._losses, []
        mean = sum(losses) / len(losses)
        return sum((loss - mean) ** 2 for loss in losses) / len(losses)
