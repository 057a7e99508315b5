"""What an adaptive pace goes by, measured in one member: losses, drift, gradients, or a user's own rule."""

import math
from collections.abc import Iterable

from torch import nn

from offbeat.averaging.course import Course
from offbeat.averaging.pace import AdaptationMetric, relative_variance
from offbeat.errors import ConfigError

__all__ = ["Gauge"]


class Gauge:
    """Measures `adaptation_metric`, or nothing, where the pace goes by none.

    Attributes:
        name: Of the metric; None where there is none.
    """

    def __init__(self, metric: AdaptationMetric | None) -> None:
        self._metric = metric
        self.name = None if metric is None else _name_of(metric)

    @property
    def needs_losses(self) -> bool:
        """Whether it measures the batches' losses."""
        return self._metric == "loss_variance"

    @property
    def needs_drift(self) -> bool:
        """Whether it measures how far a member was from the mean."""
        return self._metric == "parameter_variance"

    def measure(self, averager: object, course: Course, parameters: Iterable[nn.Parameter]) -> float | None:
        """Measure what was trained since the last round began; None: there is nothing to tell by.

        Args:
            averager: What a function of the user's is given.
            course: Has the losses, and the drift.
            parameters: Have the gradients.

        Raises:
            ConfigError: If a function of the user's gave what is no number, or below 0.
        """
        if self._metric == "loss_variance":
            return relative_variance(course.losses)
        if self._metric == "parameter_variance":
            return course.drift
        if self._metric == "gradient_norm":
            gradients = [p.grad for p in parameters if p.grad is not None]
            return float(nn.utils.get_total_norm(gradients)) if gradients else None
        return None if self._metric is None else self._number(self._metric(averager))

    def _number(self, found: float) -> float | None:
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = -1.0
        if number < 0.0:
            raise ConfigError(
                f"adaptation_metric {self.name} gave {found!r}: it gives a number, 0 or more, which rises "
                f"where members are to average more often"
            )
        return number if math.isfinite(number) else None  # of which no other member's mean is to be infinite


def _name_of(metric: AdaptationMetric) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "__qualname__", type(metric).__name__)
