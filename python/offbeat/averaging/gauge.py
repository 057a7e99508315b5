"""What an adaptive pace goes by, measured in one member: losses, drift, gradients, or a user's own rule."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from offbeat import log
from offbeat.averaging.course import Course
from offbeat.averaging.pace import AdaptationMetric, relative_variance
from offbeat.errors import ConfigError
from offbeat.local.norm import square_norm

__all__ = ["Gauge"]


class Gauge:
    """Measures `adaptation_metric`, or nothing, where the pace goes by none.

    Attributes:
        name: Of the metric; None where there is none.
    """

    def __init__(self, metric: AdaptationMetric | None) -> None:
        self._metric = metric
        self.name = None if metric is None else _name_of(metric)
        self._has_seen_gradients = self._has_warned = False

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

        What is not finite tells nothing. That there are no gradients to measure is warned of once.

        Args:
            averager: What a function of the user's is given.
            course: Has the losses, and the drift.
            parameters: Have the gradients.

        Raises:
            ConfigError: If a function of the user's gave what is no number, or below 0.
        """
        found = self._found(averager, course, parameters)
        # Of a number that is not finite the mean over members would not be either.
        return found if found is not None and math.isfinite(found) else None

    def _found(self, averager: object, course: Course, parameters: Iterable[nn.Parameter]) -> float | None:
        if self._metric == "loss_variance":
            return relative_variance(course.losses) if all(map(math.isfinite, course.losses)) else None
        if self._metric == "parameter_variance":
            return course.drift
        if self._metric == "gradient_norm":
            return self._norm(course, [p.grad for p in parameters])
        return None if self._metric is None else self._number(self._metric(averager))

    def _norm(self, course: Course, gradients: Sequence[torch.Tensor | None]) -> float | None:
        norm = math.sqrt(square_norm(gradients))
        self._has_seen_gradients |= norm != 0.0  # NaN is one, too
        if course.since_begin and not self._has_seen_gradients and not self._has_warned:
            self._has_warned = True
            log.warn(
                'adaptation_metric is "gradient_norm", and no parameter has a gradient when it is measured, '
                "so that the averaging frequency stays what it is: zero the gradients before backward(), and "
                "not between optimizer.step() and averager.step()"
            )
        return norm if any(gradient is not None for gradient in gradients) else None

    def _number(self, found: float) -> float:
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = -1.0
        if number < 0.0:
            raise ConfigError(
                f"adaptation_metric {self.name} gave {found!r}: it gives a number, 0 or more, which rises "
                f"where members are to average more often"
            )
        return number


def _name_of(metric: AdaptationMetric) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "__qualname__", type(metric).__name__)
