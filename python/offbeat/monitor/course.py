"""What a monitor does with readings: judge them, take remedies and let go of them, and write it all down."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

from offbeat import process
from offbeat.errors import OffbeatError
from offbeat.monitor.alert import Alert, Release
from offbeat.monitor.judge import Excess, Judge
from offbeat.monitor.ladder import Ladder
from offbeat.monitor.remedy import Taken
from offbeat.monitor.report import MonitorReport, Series
from offbeat.monitor.settings import Settings

__all__ = ["Course"]

MOST_KEPT = 1000
"""Alerts, and releases, for the report."""

T = TypeVar("T")

_log = logging.getLogger("offbeat")


class Course:
    """The course of one run. One thread at a time.

    Attributes:
        num_dropped: Gradients that were not used.
        num_clipped: Gradients that were scaled down.
        num_taken: How often each remedy was taken, by name.
    """

    def __init__(self, settings: Settings, ladder: Ladder, *, threshold: float, warm_up: int) -> None:
        """Begin.

        Args:
            settings: Metrics and remedies.
            ladder: How remedies follow one another.
            threshold: The share by which a value may exceed the upper edge.
            warm_up: Values before there is a range.
        """
        self.num_dropped = self.num_clipped = 0
        self.num_taken: Counter[str] = Counter()
        self._settings = settings
        self._make_judge = partial(Judge, settings.metrics, ladder, threshold=threshold, warm_up=warm_up)
        self._judge = self._make_judge()
        self._in_effect: list[_InEffect] = []
        self._alerts: deque[Alert] = deque(maxlen=MOST_KEPT)
        self._releases: deque[Release] = deque(maxlen=MOST_KEPT)
        self._num_alerts: Counter[str] = Counter()
        self._series = {metric: Series() for metric in settings.metrics}
        self._step = 0

    @property
    def in_effect(self) -> tuple[str, ...]:
        """The remedies in effect, in the order in which they were taken."""
        return tuple(effect.name for effect in self._in_effect)

    def take(self, step: int, readings: Mapping[str, float], worker: str | None) -> tuple[Alert, ...]:
        """Judge readings of one step, and act on what is out of range; give the alerts."""
        self._step = step
        if self._judge.begin((step, worker)) is not None:
            self._release()
        variance = None if "loss_variance" in readings else self._judge.variance_with(readings)
        judged = dict(readings) if variance is None else {**readings, "loss_variance": variance}
        alerts = []
        for metric, detector in self._judge.detectors.items():
            if metric in judged:
                self._series[metric].add(step, judged[metric], detector.expected)
                if (excess := self._judge.see(metric, judged[metric])) is not None:
                    alerts.append(self._alert(excess, worker))
        return tuple(alerts)

    def begin_anew(self) -> None:
        """Let go of all remedies, and forget the ranges."""
        self.let_go()
        self._judge = self._make_judge()

    def let_go(self) -> None:
        """Let go of all remedies, the newest first."""
        while self._in_effect:
            self._release()

    def report(self) -> MonitorReport:
        """Tell what was seen and done so far."""
        return MonitorReport(
            alerts=tuple(self._alerts),
            releases=tuple(self._releases),
            num_alerts=dict(self._num_alerts),
            num_dropped=self.num_dropped,
            num_clipped=self.num_clipped,
            in_effect=self.in_effect,
            series={metric: series.copy() for metric, series in self._series.items()},
        )

    def _alert(self, excess: Excess, worker: str | None) -> Alert:
        """Act on a value that is out of range, if it is time to, and make the alert."""
        if not self._in_effect:
            for remedy in self._settings.remedies:
                _tried(remedy.begin)
        rung = self._judge.climb() if excess.is_first else None
        if rung is None:
            newest = self._in_effect[-1]
            action, result = newest.name, f"in effect since step {newest.step}"
        else:
            action, result = self._act(rung, worker)
        alert = Alert(self._step, excess.metric, excess.value, excess.expected, action, result, worker)
        self._alerts.append(alert)
        self._num_alerts[alert.metric] += 1
        if rung is None:
            _log.debug("%s", alert)
        else:
            process.warn(str(alert))
        return alert

    def _act(self, rung: int, worker: str | None) -> tuple[str, str]:
        name, remedy = self._settings.names[rung], self._settings.remedies[rung]
        taken = _tried(lambda: remedy.take(worker))
        if isinstance(taken, OffbeatError):  # the run goes on, and the next rung may do
            taken = Taken(f"could not be done: {taken}", lambda: "nothing had been done")
        self._in_effect.append(_InEffect(name, self._step, taken))
        self.num_taken[name] += 1
        return name, taken.result

    def _release(self) -> None:
        effect = self._in_effect.pop()
        release = Release(self._step, effect.name, str(_tried(effect.taken.undo)))
        self._releases.append(release)
        _log.info("%s", release)


class _InEffect(NamedTuple):
    """A remedy that was taken and not let go of."""

    name: str
    step: int
    taken: Taken


def _tried(act: Callable[[], T]) -> T | OffbeatError:
    try:
        return act()
    except OffbeatError as error:
        return error
