"""When members average: after so many iterations, after so much time, or as often as they drift apart.

Pure: numbers and a clock's time come in, and whether it is time goes out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

__all__ = [
    "METRICS",
    "POLICIES",
    "POWERS",
    "AdaptationMetric",
    "Adaptive",
    "Iterations",
    "Pace",
    "Seconds",
    "of_setting",
    "relative_variance",
]

AdaptationMetric: TypeAlias = (
    Literal["loss_variance", "parameter_variance", "gradient_norm"] | Callable[[Any], float]
)

POLICIES = ("iteration", "time", "adaptive")
METRICS = ("loss_variance", "parameter_variance", "gradient_norm")

ROUNDS_OF_REFERENCE = 3
"""Rounds at the starting frequency whose mean metric is what later ones are compared with."""
SMOOTHING = 0.5
"""Of the newest metric in the mean that decides."""
POWERS = {"gradient_norm": 1.0, "parameter_variance": 0.25}
"""Of the metric, where it is not 1/2: a norm is no square, and drift answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Iterations:
    """Every so many iterations.

    Attributes:
        every: Iterations from average to average of the same parameters.
    """

    every: int

    def is_due(self, *, iterations: int, seconds: float, num_fragments: int, number: int) -> bool:
        """Tell whether a round is to begin.

        Args:
            iterations: Since the last round began, or since the start.
            seconds: Since it ended, or since the start; 0 while one is under way.
            num_fragments: Rounds that average the whole model once.
            number: How many rounds have begun.
        """
        del seconds
        return iterations >= _part(self.every, num_fragments, number)

    def setting(self) -> list[object]:
        """Give what has to be the same for all members, as JSON can have it."""
        return ["iteration", self.every]

    def after(self, metric: float | None) -> "Iterations":
        """Give the pace after a round: the same."""
        del metric
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """So many seconds after the end of the last round, by this member's clock, at the end of an iteration.

    Were it after the beginning, which each member reaches when its own clock says so, members of unlike speed
    would drift out of phase, and each round would wait for whoever is furthest from beginning it. All see
    its end at about the same time.

    Attributes:
        every: Seconds without a round, from average to average of the same parameters.
    """

    every: float

    def is_due(self, *, iterations: int, seconds: float, num_fragments: int, number: int) -> bool:
        """Tell whether a round is to begin; see `Iterations.is_due`."""
        del number
        return iterations > 0 and seconds >= self.every / num_fragments

    def setting(self) -> list[object]:
        """Give what has to be the same for all members, as JSON can have it."""
        return ["time", self.every]

    def after(self, metric: float | None) -> "Seconds":
        """Give the pace after a round: the same."""
        del metric
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive:
    """As often as it takes for members to stay as near to one another as they were at the start.

    Between two averages members drift apart: by about the square root of the iterations times the gradient's
    noise, or by the iterations times the gradient. So where the metric, a variance, falls to a quarter, twice
    as many iterations lead as far: the frequency is ``start * (reference / metric) ** power``, within its
    bounds, with power 1/2 for a variance and 1 for a norm. The reference is the mean of the metric over the
    first three rounds, at the starting frequency.

    What members' drift itself measures (`is_of_drift`) answers to the frequency, so there the present
    frequency is what is multiplied, by at most two in a round: FDA's threshold on the variance
    (Theodoropoulos et al., 2024), kept by the period in place of a message in each iteration. What is
    measured of a round is known one round later, and a variance may grow with the square of the iterations:
    the power is 1/4 there, with which such a loop comes to rest (its poles are at .71 in size, for the
    square; with 1/2 they are at 1), and the newest metric counts alone.

    Attributes:
        every: Iterations from average to average at present.
        start: At the start.
        least: Bound.
        most: Bound.
        power: Of the metric.
        is_of_drift: The metric grows with the iterations between averages.
        seen: The metrics that the reference is the mean of, so far.
        smooth: Mean metric of the newest rounds; None before the reference is whole.
    """

    every: int
    start: int
    least: int
    most: int
    power: float = 0.5
    is_of_drift: bool = False
    seen: tuple[float, ...] = ()
    smooth: float | None = None

    def is_due(self, *, iterations: int, seconds: float, num_fragments: int, number: int) -> bool:
        """Tell whether a round is to begin; see `Iterations.is_due`."""
        del seconds
        return iterations >= _part(self.every, num_fragments, number)

    def after(self, metric: float | None) -> "Adaptive":
        """Give the pace after a round.

        Args:
            metric: Mean over members; None, or what is not finite or negative, changes nothing.
        """
        if metric is None or not math.isfinite(metric) or metric < 0.0:
            return self
        if len(self.seen) < ROUNDS_OF_REFERENCE:
            return replace(self, seen=(*self.seen, metric))
        smooth = metric
        if self.smooth is not None and not self.is_of_drift:
            smooth = SMOOTHING * metric + (1.0 - SMOOTHING) * self.smooth
        reference = math.fsum(self.seen) / len(self.seen)
        if reference == smooth == 0.0:
            return replace(self, smooth=smooth)
        factor = (reference / smooth) ** self.power if smooth else math.inf
        wanted = self.every * min(max(factor, 0.5), 2.0) if self.is_of_drift else self.start * factor
        every = round(min(max(wanted, float(self.least)), float(self.most)))
        return replace(self, every=every, smooth=smooth)

    def setting(self) -> list[object]:
        """Give what has to be the same for all members, as JSON can have it."""
        return ["adaptive", self.start, self.least, self.most]

    def resumed(self, *, every: int, seen: tuple[float, ...], smooth: float | None) -> "Adaptive":
        """Give the pace as it was in another life, within today's bounds."""
        return replace(self, every=min(max(every, self.least), self.most), seen=seen, smooth=smooth)


Pace: TypeAlias = Iterations | Seconds | Adaptive


def of_setting(pace: Pace, setting: Sequence[Any], *, longest: float) -> Pace:
    """Give the pace that was in force in another life, within what this one's allows.

    Args:
        pace: As it was made here.
        setting: What that one's `setting` gave, of the same policy.
        longest: Seconds that a round can be waited for, where the pace is of time.
    """
    every = setting[1]
    if isinstance(pace, Seconds):
        return Seconds(every=min(float(every), longest))
    if isinstance(pace, Iterations):
        return Iterations(every=int(every))
    return replace(pace, start=min(max(int(every), pace.least), pace.most))


def _part(every: int, num_fragments: int, number: int) -> int:
    """Give the iterations before a round where so many make one average, as equal as whole numbers can be."""
    place = number % num_fragments
    return every * (place + 1) // num_fragments - every * place // num_fragments


def relative_variance(values: Sequence[float]) -> float | None:
    """Compute the variance of losses, over the size of their mean.

    It is the unbiased estimate, over n - 1: with n, shorter rounds would read less of the same noise, by half
    where they have two losses, and so draw out their own frequency.

    With power 1/2 this is AdaComm's rule (Wang and Joshi, 2019): the period between averages for which the
    error after a given time is least grows with the root of the loss over the gradient's variance. There
    the variance is taken for constant; here it is measured, as that of the batches' losses.

    Returns:
        None of fewer than two losses, and where their mean is 0.
    """
    if len(values) < 2:  # noqa: PLR2004  as the docstring says
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return variance / abs(mean) if mean else None
