"""The averager's keywords, checked together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from typing import Any, Literal, TypeAlias

from offbeat.averaging.members import PACE_NAMES
from offbeat.averaging.methods import DiLoCo, Method, shown
from offbeat.averaging.pace import (
    METRICS,
    POLICIES,
    POWERS,
    Adaptive,
    Iterations,
    Pace,
    Seconds,
)
from offbeat.checks import Faults, at_least_one, functions
from offbeat.errors import ConfigError
from offbeat.frequency import Every
from offbeat.frequency import frequency as read
from offbeat.naming import unknown

__all__ = [
    "BACKENDS",
    "DEFAULT_FREQUENCY",
    "AveragingPolicy",
    "Backend",
    "Pacing",
    "asynchronous_faults",
    "changed",
    "overlap_faults",
    "pacing",
    "server_faults",
    "settings_by_name",
]

AveragingPolicy: TypeAlias = Literal["iteration", "time", "adaptive"]
Backend: TypeAlias = Literal["tcp", "gloo", "nccl"]

BACKENDS = ("tcp", "gloo", "nccl")
DEFAULT_FREQUENCY = 100
"""Iterations, where nothing else is said."""
DEFAULT_METRIC = "loss_variance"
"""Which cannot be told from what was given."""
DEFAULT_TIME = "30s"
"""With averaging_policy="time"."""
BOUNDS = 4
"""By how much an adaptive frequency may leave the one it starts at, either way, where no bounds are given."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """When to average, as a user gives it."""

    frequency: object
    policy: object
    least: object
    most: object
    metric: object


def pacing(given: Pacing) -> tuple[Pace | None, list[str]]:
    """Make a pace of the keywords; else tell what is wrong with them."""
    faults = Faults(_of_policy(given) + _of_metric(given))
    asked = _usual(given) if given.frequency is None else given.frequency
    found = faults.catch(lambda: read(asked, name="averaging_frequency", counted="iterations"))
    if found is None or given.policy not in POLICIES:
        return None, faults
    pace: Pace | None = None
    if given.policy == "time":
        if found.seconds is None:
            faults.append(f"averaging_frequency is {asked!r} and averaging_policy 'time': give '30s', say")
        else:
            pace = Seconds(every=found.seconds)
    elif found.count is None:
        faults.append(
            f"averaging_frequency is {asked!r} and averaging_policy {given.policy!r}: give a number of "
            f"iterations, or take averaging_policy='time'"
        )
    elif given.policy == "iteration":
        pace = Iterations(every=found.count)
    elif not _are_crossed(given):
        pace, wrong = _adaptive(given, found.count)
        faults += wrong
    return None if faults else pace, faults


def changed(pace: Pace, given: object, *, longest: float) -> Pace:
    """Make the pace that follows from another frequency.

    Args:
        pace: At present.
        given: The frequency, as a user gives it.
        longest: Seconds that a round can be waited for, where the pace is of time.

    Raises:
        ConfigError: If a pace of this kind cannot have it.
    """
    if isinstance(pace, Seconds) and isinstance(given, float) and 0 < given < inf:
        found = Every(seconds=given)  # as it reads
    else:
        found = read(given, name="averaging_frequency", counted="iterations")
    if isinstance(pace, Seconds):
        if found.seconds is None or found.seconds > longest:
            raise ConfigError(
                f"averaging_frequency is {given!r}: with averaging_policy='time' give a time, up to "
                f"{longest:g} s as at first, for so long a round waits for others"
            )
        return Seconds(every=found.seconds)
    if found.count is None:
        raise ConfigError(
            f"averaging_frequency is {given!r}: give a number of iterations; a time is for an averager that "
            f"is made with averaging_policy='time'"
        )
    if isinstance(pace, Iterations):
        return Iterations(every=found.count)
    if not pace.least <= found.count <= pace.most:
        raise ConfigError(
            f"averaging_frequency is {found.count}: 'adaptive' keeps within {pace.least} and {pace.most}"
        )
    return replace(pace, every=found.count, start=found.count, seen=(), smooth=None)


def overlap_faults(overlap: object) -> list[str]:
    """Tell what is wrong with `overlap`."""
    if isinstance(overlap, bool) or (isinstance(overlap, int) and overlap >= 1):
        return []
    return [f"overlap is {overlap!r}: give True, False, or a number of iterations, 1 or more"]


def asynchronous_faults(asynchronous: object, method: Method | None) -> list[str]:
    """Tell what is wrong with `asynchronous`, and with a method that has, or lacks, what it asks for."""
    if not isinstance(asynchronous, bool):
        return [f"asynchronous is {asynchronous!r}: give True or False"]
    if not asynchronous:
        has_delay = isinstance(method, DiLoCo) and (method.delay is not None or method.activation)
        return [f"method is {method!r}: delay and activation are for asynchronous=True"] * bool(has_delay)
    if method is None:
        return []
    if not isinstance(method, DiLoCo):
        return [f"asynchronous is True and method {method!r}: take 'diloco', or asynchronous=False"]
    if not method.nesterov:
        return ["nesterov is False and asynchronous True, whose momentum is delayed Nesterov's: leave it out"]
    return []


def fitting_faults(
    method: Method | None, pace: Pace | None, overlap: object, num_parameters: int
) -> list[str]:
    """Tell what is wrong with settings that are each right by themselves."""
    if method is None or pace is None:
        return []
    num = method.num_fragments
    faults = []
    if num > num_parameters:
        faults.append(
            f"fragments is {num}, and the model has {num_parameters} parameters: give as many at most"
        )
    if isinstance(pace, Seconds):
        return faults
    least = pace.least if isinstance(pace, Adaptive) else pace.every
    if num > least:
        faults.append(
            f"fragments is {num}, and they are all averaged within {least} iterations, each in one of "
            f"its own: "
            f"give fewer, or average less often"
        )
    elif not isinstance(overlap, bool) and isinstance(overlap, int) and overlap >= least // num:
        faults.append(
            f"overlap is {overlap}, and a round begins every {least // num} iterations: give less "
            f"than that, or "
            f"True"
        )
    return faults


def settings_by_name(method: Method, setting: Sequence[Any]) -> dict[str, object]:
    """Give what has to be the same in all members by the keywords that say it.

    Args:
        method: Of averaging.
        setting: That of the pace, the overlap, and the metric's name, as JSON can have them.
    """
    pace, overlap, metric = setting
    return {
        "method": shown(method),
        **dict(zip_longest(PACE_NAMES, pace)),
        "overlap": overlap,
        "adaptation_metric": metric,
    }


def server_faults(method: Method) -> list[str]:
    """Tell what is wrong with a method where members meet at a server."""
    if method.num_fragments > 1:
        num = method.num_fragments
        return [f"fragments is {num}, and with 'tcp' a model is averaged whole: give fragments=1"]
    if method.is_pairwise:
        text = (
            f"method is {method.name!r}, whose members meet in twos, and at a server all meet: take "
            f"method='average', or communication_backend='gloo' (or 'nccl')"
        )
        return [text]
    return []


def _of_policy(given: Pacing) -> list[str]:
    bounds = {"min_averaging_frequency": given.least, "max_averaging_frequency": given.most}
    bounds = {name: value for name, value in bounds.items() if value is not None}
    faults = at_least_one(**bounds)
    if _are_crossed(given):
        faults.append(
            f"min_averaging_frequency is {given.least} and max_averaging_frequency {given.most}: give a "
            f"minimum that is not above the maximum"
        )
    if given.policy not in POLICIES:
        return [unknown("averaging_policy", given.policy, POLICIES), *faults]
    if bounds and given.policy != "adaptive":
        names = " and ".join(bounds)
        text = (
            f"{names} given, and averaging_policy is {given.policy!r}, which keeps to averaging_frequency: "
            f"leave out what is not meant, or take averaging_policy='adaptive'"
        )
        return [text, *faults]
    return faults


def _of_metric(given: Pacing) -> list[str]:
    metric = given.metric
    if isinstance(metric, str) and metric not in METRICS:
        return [unknown("adaptation_metric", metric, METRICS) + ", or a function of the averager"]
    if not isinstance(metric, str):
        names = ", ".join(map(repr, METRICS))
        faults = functions(f"one of {names}, or a function of the averager", adaptation_metric=metric)
        if faults:
            return faults
    if metric != DEFAULT_METRIC and given.policy in POLICIES and given.policy != "adaptive":
        text = (
            f"adaptation_metric is {metric!r}, and averaging_policy is {given.policy!r}, which goes by none: "
            f"leave it out, or take averaging_policy='adaptive'"
        )
        return [text]
    return []


def _usual(given: Pacing) -> int | str:
    """Give the frequency where none was given: the usual one, or what is nearest to it within the bounds."""
    if given.policy == "time":
        return DEFAULT_TIME
    least = _bound(given.least) or 1
    most = _bound(given.most) or max(DEFAULT_FREQUENCY, least)
    return min(max(DEFAULT_FREQUENCY, least), most)


def _bound(given: object) -> int | None:
    """Give a bound that was given and can be one; of another it is told elsewhere."""
    return given if isinstance(given, int) and not at_least_one(bound=given) else None


def _are_crossed(given: Pacing) -> bool:
    """Whether both bounds were given, and nothing is within them."""
    least, most = _bound(given.least), _bound(given.most)
    return least is not None and most is not None and least > most


def _adaptive(given: Pacing, start: int) -> tuple[Pace | None, list[str]]:
    least = _bound(given.least) or max(1, start // BOUNDS)
    most = _bound(given.most) or start * BOUNDS
    if not least <= start <= most:
        quarter = " (a quarter of it)" if given.least is None else ""
        fourfold = " (four times it)" if given.most is None else ""
        text = (
            f"averaging_frequency is {start}, min_averaging_frequency {least}{quarter} and "
            f"max_averaging_frequency {most}{fourfold}: 'adaptive' starts at averaging_frequency, within the "
            f"two others"
        )
        return None, [text]
    metric = given.metric
    power = POWERS.get(metric, 0.5) if isinstance(metric, str) else 0.5
    is_of_drift = metric == "parameter_variance"
    pace = Adaptive(every=start, start=start, least=least, most=most, power=power, is_of_drift=is_of_drift)
    return pace, []
