"""What a monitor tells: an alert with what was done about it, and that a remedy was let go of."""

import math
from dataclasses import dataclass

from offbeat.monitor.band import is_usable

__all__ = ["Alert", "Recovery", "Release", "is_finite"]


@dataclass(frozen=True, slots=True)
class Alert:
    """A metric was out of its range.

    Attributes:
        step: When: the caller's number, where `observe` is called; else that of the optimizer's step, counted
            while the monitor is there (and before, where it goes on from a state): 1 is the first, as in log
            lines, `history` and `on_step`; of batches, where several make one.
        metric: Which.
        value: What it was. Of "non_finite" the number of elements that are not finite.
        expected: The range, its lower and its upper edge; infinite as long as there is none. In the warm-up
            the upper one is a thousand times the median of what was, once there are five values. What is
            below it is no alert.
        action: The remedy that was taken, or that is in effect; "alert" where there is none.
        result: What came of it, in words.
        worker: Whose value it was, where that was said.
        num: Which it is of those of this metric, and this worker, with no five values in the range in
            between: 1 is the first.
        is_news: Whether callbacks, log and report hear of it: the first, the second, the fourth, the eighth
            and so on, and each at which a remedy was taken. `observe` gives them all, and all are counted.
        limit: What a value has to exceed for an alert, by `alert_threshold` above the range; in the warm-up
            its upper edge. Of what is on trial behind a rollback it is less, and the range ends there.
        is_taken: Whether the remedy was taken at this one, and is not in effect from before.
    """

    step: int
    metric: str
    value: float
    expected: tuple[float, float]
    action: str
    result: str
    worker: str | None = None
    num: int = 1
    is_news: bool = True
    limit: float = math.inf
    is_taken: bool = False

    def __str__(self) -> str:
        high = self.expected[1]
        if math.isinf(self.limit):  # NaN and infinity are alerts also as long as there is no range
            expected = "a finite number"
        else:
            expected = f"{self.limit:.4g} at most"
            expected += f" (its range ends at {high:.4g})" if high < self.limit else ""
        whose = f" of worker {self.worker}" if self.worker is not None else ""
        return (
            f"step {self.step}: {self.metric}{whose} is {self.value:.4g}, expected {expected}; "
            f"{self.action}: {self.result}" + (f" (alert number {self.num})" if self.num > 1 else "")
        )


def is_finite(alert: Alert) -> bool:
    """Tell whether what an alert is of, or what that counts, is finite."""
    return alert.metric != "non_finite" and is_usable(alert.value)


@dataclass(frozen=True, slots=True)
class Recovery:
    """A metric has been in its range again for five values, after one alert or many.

    Attributes:
        step: When.
        metric: Which.
        value: What it is now.
        since: The step of the first of the alerts.
        num_alerts: How many there were.
        worker: Whose value it was, where that was said.
        expected: The range; infinite in the warm-up.
        expected_then: The range when the alerts began; likewise.
    """

    step: int
    metric: str
    value: float
    since: int
    num_alerts: int
    worker: str | None = None
    expected: tuple[float, float] = (-math.inf, math.inf)
    expected_then: tuple[float, float] = (-math.inf, math.inf)

    def __str__(self) -> str:
        whose = f" of worker {self.worker}" if self.worker is not None else ""
        alerts = "1 alert" if self.num_alerts == 1 else f"{self.num_alerts} alerts"
        now, then = f"{self.expected[1]:.4g}", f"{self.expected_then[1]:.4g}"
        if self.value > self.expected_then[1] and now != then:  # the range has come to it
            known = "its range is still learnt" if now == "inf" else f"up to {now}"
            where = f"which is usual by now ({known}) and was not when that began (up to {then})"
        else:
            moved = f"; when that began up to {then}" if then not in (now, "inf") else ""
            where = (
                f"in its range again ({f'up to {now}{moved}' if now != 'inf' else 'which is still learnt'})"
            )
        return (
            f"step {self.step}: {self.metric}{whose} is {self.value:.4g}, {where}, after {alerts} since step "
            f"{self.since}"
        )


@dataclass(frozen=True, slots=True)
class Release:
    """A remedy was let go of, since all metrics had been in their ranges for long enough.

    Attributes:
        step: When.
        remedy: Which.
        result: What came of it, in words.
    """

    step: int
    remedy: str
    result: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.remedy} is let go of: {self.result}"
