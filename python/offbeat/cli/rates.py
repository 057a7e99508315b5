"""What happened between two statuses of a server: pure, by the server's own clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Rates", "WorkerRates", "percentile", "rates"]

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What one worker did.

    Attributes:
        pushes_per_s: Pushes that were answered.
        staleness: Mean of the pushes applied, in updates; None where there was none.
    """

    pushes_per_s: float
    staleness: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened in a while.

    Attributes:
        seconds: How long it was.
        updates_per_s: Of the model.
        samples_per_s: Admitted.
        staleness: Mean of the pushes applied, in updates; None where there was none.
        workers: By incarnation, of those that were in the run all the time.
    """

    seconds: float
    updates_per_s: float
    samples_per_s: float
    staleness: float | None
    workers: Mapping[int, WorkerRates] = field(default_factory=dict)


def rates(before: Status | None, after: Status) -> Rates | None:
    """Compare two statuses; None where they are not of one life of a server, the second the later one."""
    if before is None or before["run_id"] != after["run_id"]:
        return None
    seconds = after["uptime_s"] - before["uptime_s"]
    updates, samples = (after[key] - before[key] for key in ("version", "samples"))
    if seconds <= 0 or updates < 0 or samples < 0:
        return None
    earlier = {worker["incarnation"]: worker for worker in before["workers"]}
    pairs = [(earlier[w["incarnation"]], w) for w in after["workers"] if w["incarnation"] in earlier]
    return Rates(
        seconds=seconds,
        updates_per_s=updates / seconds,
        samples_per_s=samples / seconds,
        staleness=_mean_staleness(pairs),
        workers={
            new["incarnation"]: WorkerRates(
                pushes_per_s=max(0, new["pushes"] - old["pushes"]) / seconds,
                staleness=_mean_staleness([(old, new)]),
            )
            for old, new in pairs
        },
    )


def percentile(histogram: Sequence[int], share: float) -> int | None:
    """Find the least staleness that so large a share of the pushes did not exceed; None where there is none.

    Args:
        histogram: Pushes by staleness; the last entry holds all above, too.
        share: Above 0, to 1.
    """
    needed, so_far = share * sum(histogram), 0
    for value, number in enumerate(histogram):
        so_far += number
        if number and so_far >= needed:
            return value
    return None


def _mean_staleness(pairs: Sequence[tuple[Status, Status]]) -> float | None:
    """Give the mean of what was applied between the two statuses of each worker."""
    applied = sum(new["applied"] - old["applied"] for old, new in pairs)
    late = sum(_summed(new) - _summed(old) for old, new in pairs)
    return late / applied if applied > 0 else None


def _summed(worker: Status) -> int:
    mean: float = worker["mean_staleness"]
    applied: int = worker["applied"]
    return round(mean * applied)
