"""When the loss's limit is held where it is, and for how long: decided from steps and alerts.

From an alert of a loss that is finite on its limit goes no higher, until all remedies are let go of and the
loss has been as low as before for as many steps as that takes, or in its range for `LONG_CALM` times as many,
or it has made so many alerts that were none without it (`MOST_BY_CEILING`): a loss that rises slowly in spite
of a remedy, or once it is let go of, would take its range along, and be what is usual.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from offbeat.monitor.ladder import Ladder

__all__ = ["Hold"]

MOST_BY_CEILING = 3
"""Times the patience, or as many times as there are remedies where those are more: alerts that the loss's
ceiling alone makes of one worker, without the quiet steps in between in which the loss is low again, until it
is let go of. A rate that is too high is cut three times by then; a sound run whose loss stays at another
level loses no more than that by it."""

LONG_CALM = 10
"""Times the quiet steps, without an alert and with nothing in effect, until a ceiling is let go of under
which the loss has stayed, and has not come back. What takes longer to reach it is no divergence."""


class Hold:
    """What was seen of each worker since the limit is held."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._alerts: Counter[str | None] = Counter()  # that were none without the ceiling
        self._low: Counter[str | None] = Counter()  # steps whose loss was no higher than the ceiling
        self._calm: Counter[str | None] = Counter()  # steps in the range since, with nothing in effect

    def see_step(self, worker: str | None, *, was_low: bool) -> None:
        """Take a worker's step into account, and whether its loss was no higher than the ceiling."""
        self._low[worker] += was_low
        if self._low[worker] >= self._ladder.quiet_steps:
            self._alerts.clear()  # the loss has come back: the ceiling was right

    def see_calm_step(self, worker: str | None) -> None:
        """Take a worker's step into account that was in the range, with nothing in effect."""
        self._calm[worker] += 1

    def is_over(self, worker: str | None) -> bool:
        """Tell whether the limit may go by the range again, by what was seen of a worker."""
        has_come_back = self._low[worker] >= self._ladder.quiet_steps
        return has_come_back or self._calm[worker] >= LONG_CALM * self._ladder.quiet_steps

    def lasts_after_alert(self, worker: str | None, *, is_by_ceiling: bool) -> bool:
        """Take a worker's alert into account; tell whether to hold the limit: else the loss is what it is."""
        self._low.clear()
        self._calm.clear()
        self._alerts[worker] += is_by_ceiling
        most = max(MOST_BY_CEILING, self._ladder.num_rungs) * self._ladder.patience
        return self._alerts[worker] < most

    def await_return(self) -> None:
        """Begin anew to count low steps: a remedy is let go of, and it may have kept the loss so low."""
        self._low.clear()

    def forget_alerts(self) -> None:
        """Begin anew to count alerts: the range is another."""
        self._alerts.clear()

    def end(self) -> None:
        """Begin anew, but for how low the loss is: the limit goes by the range again."""
        self._alerts.clear()
        self._calm.clear()

    def state(self) -> dict[str, Any]:
        """Give all of it as plain data."""
        counters = {"alerts": self._alerts, "low": self._low, "calm": self._calm}
        return {name: list(counter.items()) for name, counter in counters.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._alerts, self._low, self._calm = (
            Counter(dict(state.get(name, ()))) for name in ("alerts", "low", "calm")
        )
