"""Learning-rate schedules on the server: a factor on every group's `lr`, by updates or by samples.

The server counts, so workers of different speed need no schedule of their own: a push gets the rate of its
place in the run. `server.set_lr` changes the base that the factor multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from offbeat.checks import is_count, is_number
from offbeat.errors import ConfigError
from offbeat.naming import strict_keywords, unknown

__all__ = ["Constant", "Cosine", "Linear", "Schedule", "Step", "resolve"]

Unit = Literal["version", "samples"]


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the schedules share: a warm-up before the shape, and what is counted.

    Attributes:
        warmup: Length of the warm-up, in `unit`; the shape begins after it, at its own 0.
        warmup_start_factor: Factor at the very start, in 0..1, rising straight to 1.
        unit: "version" counts updates, "samples" the samples in them.
    """

    name: ClassVar[str]
    warmup: int = 0
    warmup_start_factor: float = 0.0
    unit: Unit = "version"

    def __post_init__(self) -> None:
        faults = [*self._faults(), *_whole("warmup", self.warmup, least=0)]
        if not (is_number(self.warmup_start_factor) and 0 <= self.warmup_start_factor <= 1):
            faults.append(f"warmup_start_factor is {self.warmup_start_factor!r}: it is a number from 0 to 1")
        if self.unit not in ("version", "samples"):
            faults.append(unknown("unit", self.unit, ["version", "samples"]))
        if faults:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(faults))

    def spec(self) -> dict[str, Any]:
        """Write the schedule as the Rust core's `Schedule`, as JSON carries it."""
        return {
            "unit": self.unit,
            "shape": {"name": self.name, **self._shape()},
            "warmup": self.warmup,
            "warmup_start_factor": float(self.warmup_start_factor),
        }

    def _faults(self) -> list[str]:
        return []

    def _shape(self) -> dict[str, Any]:
        return {}


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Factor 1 after the warm-up."""

    name = "constant"


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """Factor gamma^⌊x / step_size⌋.

    Attributes:
        step_size: Units between two cuts, 1 or more.
        gamma: What each cut multiplies by, above 0 and at most 1.
    """

    step_size: int
    gamma: float = 0.1
    name = "step"

    def _faults(self) -> list[str]:
        good = is_number(self.gamma) and 0 < self.gamma <= 1
        wrong = [] if good else [f"gamma is {self.gamma!r}: it is a number above 0 and at most 1"]
        return _whole("step_size", self.step_size, least=1) + wrong

    def _shape(self) -> dict[str, Any]:
        return {"step_size": self.step_size, "gamma": float(self.gamma)}


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class _Decay(Schedule):
    """From 1 to `end_factor` over `total` units; `end_factor` from there on.

    Attributes:
        total: Length of the decay, 1 or more, the warm-up not counted.
        end_factor: Factor at its end, 0 or more.
    """

    total: int
    end_factor: float = 0.0

    def _faults(self) -> list[str]:
        good = is_number(self.end_factor) and self.end_factor >= 0
        wrong = [] if good else [f"end_factor is {self.end_factor!r}: it is a number, 0 or more"]
        return _whole("total", self.total, least=1) + wrong

    def _shape(self) -> dict[str, Any]:
        return {"total": self.total, "end_factor": float(self.end_factor)}


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class Cosine(_Decay):
    """Half a cosine from 1 to `end_factor` over `total` units; `end_factor` from there on."""

    name = "cosine"


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class Linear(_Decay):
    """A straight line from 1 to `end_factor` over `total` units; `end_factor` from there on."""

    name = "linear"


_SCHEDULES: Mapping[str, type[Schedule]] = {cls.name: cls for cls in (Constant, Step, Cosine, Linear)}


def resolve(schedule: Schedule | str | None, *, max_samples: int | None = None) -> Schedule:
    """Turn what a user may give for a schedule into one.

    Args:
        schedule: An object of this module; None or "constant" for factor 1; or "linear" or "cosine", which
            then fall to 0 over the run's `max_samples`.
        max_samples: Samples after which the run ends, if it has such an end.

    Raises:
        ConfigError: If the name is unknown, or says too little by itself.
    """
    if schedule is None:
        return Constant()
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise ConfigError(
            f"lr_schedule is {schedule!r}: give an object, such as offbeat.schedule.Linear(total=1000)"
        )
    if schedule == "constant":
        return Constant()
    if schedule in ("linear", "cosine"):
        if max_samples is None:
            raise ConfigError(
                f"lr_schedule={schedule!r} needs the length of the run: give max_samples=, or "
                f"offbeat.schedule.{_SCHEDULES[schedule].__name__}(total=…)"
            )
        decay = Linear if schedule == "linear" else Cosine
        return decay(total=max_samples, unit="samples")
    if schedule == "step":
        raise ConfigError(
            "lr_schedule='step' does not say when: give offbeat.schedule.Step(step_size=…, gamma=0.1)"
        )
    raise ConfigError(unknown("lr_schedule", schedule, list(_SCHEDULES)))


def _whole(name: str, value: object, *, least: int) -> list[str]:
    return (
        []
        if is_count(value, least=least)
        else [f"{name} is {value!r}: it is a whole number, {least} or more"]
    )
