"""A run as its server told it over time, and a picture of that: throughput, staleness, membership.

A status tells who is there and who has gone, and not when anybody came. So a worker's time begins when it was
first seen, which is up to the time between two looks after it had joined; the moment it went is the server's
own. Who was lost and came back between two looks was there all the time, as far as can be told.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offbeat.checks import refuse
from offbeat.history import History
from offbeat.naming import a_class, unknown
from offbeat.plots import Span, draw_curves, draw_membership, draw_metrics_by_version, picture
from offbeat.tracking.registry import PRESENT, Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Moment", "Run"]

MAX_MOMENTS = 4096
"""That are kept; where there would be more, every second one goes."""

ROWS_IN_A_PANEL = 12
"""Workers in the height of an ordinary panel."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at a run.

    Attributes:
        seconds: Since the first look.
        term: Of the model's values.
        version: Of the model.
        samples: Admitted so far.
        num_workers: That are there.
        applied: Pushes applied so far, of all workers together.
        staleness_sum: Of those, in updates.
    """

    seconds: float
    term: int
    version: int
    samples: int
    num_workers: int
    applied: int
    staleness_sum: int


@dataclass(slots=True)
class Run:
    """What was seen of a run.

    Attributes:
        run_id: The run's name; empty until it was looked at.
        moments: The looks, oldest first, each further from the next the longer the run is.
    """

    run_id: str = ""
    moments: list[Moment] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)  # the latest span of each incarnation
    _begin_s: float = 0.0
    _skip: int = 1
    _looks: int = 0

    def observe(self, status: Status, at_s: float) -> None:
        """Take a status down.

        Args:
            status: As `server.status()` gives it.
            at_s: When it was told, by a clock that does not go back, in seconds.
        """
        if not self._looks:
            self._begin_s = at_s
        self.run_id = status["run_id"]
        now = at_s - self._begin_s
        if self._looks % self._skip == 0:
            self.moments.append(_moment(status, now))
        self._looks += 1
        if len(self.moments) > MAX_MOMENTS:
            self._skip *= 2
            del self.moments[1::2]
        self._see(status, now)

    def spans(self) -> list[Span]:
        """Tell which workers' processes were there, and from when to when, in the order of their coming."""
        return list(self._spans)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        histories: Mapping[str, History] | None = None,
        metric: str = "loss",
    ) -> "Figure":
        """Draw throughput, staleness and membership over time; and a metric over the model's version.

        Args:
            path: Where to write the picture, in the format that its name says, in a folder that is made where
                it is not there; None: nowhere.
            histories: What workers' `train` returned, by their names: the server does not see a loss.
            metric: Which of theirs to draw.

        Returns:
            The picture, a `matplotlib.figure.Figure`.

        Raises:
            ConfigError: If `histories` are not by names of workers that were seen, or none of them has the
                metric; or if matplotlib is not installed, or has no such format.
            OSError: If the picture cannot be written.
        """
        spans = self.spans()
        refuse(_faults_of(histories, metric, {span.worker: None for span in spans}))
        rows = len({span.worker for span in spans})
        heights = [*([1.5] if histories else []), 1, 1, max(0.6, min(6.0, rows / ROWS_IN_A_PANEL))]
        with picture(heights, title=f"run {self.run_id}", path=path, what="Run.plot") as drawn:
            panels = list(drawn.panels)
            if histories:
                draw_metrics_by_version(panels.pop(0), histories, metric)
            throughput, late, members = panels
            pairs = list(zip(self.moments, self.moments[1:], strict=False))
            times = [new.seconds for _, new in pairs]
            draw_curves(throughput, times, [_samples_per_s(*pair) for pair in pairs], "samples/s")
            draw_curves(late, times, [_staleness(*pair) for pair in pairs], "mean staleness, updates")
            draw_membership(members, spans)
            for axes in panels:
                axes.set_xlim(0, max(1e-9, self.moments[-1].seconds if self.moments else 1.0))
        return drawn.figure

    def _see(self, status: Status, now: float) -> None:
        """Note who is there and who has gone."""
        present = {w["incarnation"]: w for w in status["workers"] if w["state"] in PRESENT}
        for incarnation, worker in present.items():
            known = self._span(incarnation)
            begin = now if known is None or known.end not in PRESENT else known.begin_s
            self._note(incarnation, Span(worker["id"], begin, now, worker["state"]))
        for incarnation, departure in {d["incarnation"]: d for d in status["departures"]}.items():
            known = self._span(incarnation)
            if incarnation in present or (known is not None and known.end not in PRESENT):
                continue
            gone = max(0.0, now - departure["age_s"])
            begin = gone if known is None else known.begin_s  # it came and went between two looks
            self._note(incarnation, Span(departure["worker"], begin, max(begin, gone), departure["state"]))

    def _span(self, incarnation: int) -> Span | None:
        return self._spans[self._last[incarnation]] if incarnation in self._last else None

    def _note(self, incarnation: int, span: Span) -> None:
        """Take a span down: as a new one, or as what has become of the latest."""
        known = self._span(incarnation)
        if known is not None and known.end in PRESENT:
            self._spans[self._last[incarnation]] = span
        else:
            self._last[incarnation] = len(self._spans)
            self._spans.append(span)


def _faults_of(histories: object, metric: object, workers: Collection[str]) -> list[str]:
    """Tell why histories cannot be drawn. One may be empty, and where no worker was seen, any may be."""
    if histories is None:
        return []
    if not isinstance(histories, Mapping):
        return [f"histories is {a_class(histories)}: give {{worker.id: history}}"]
    faults = [
        f"histories[{name!r}] is {a_class(history)}: give what that worker's train() returned"
        for name, history in histories.items()
        if not isinstance(history, History)
    ]
    faults += [
        unknown("worker in histories", name, workers) for name in histories if workers and name not in workers
    ]
    known = dict.fromkeys(
        name
        for history in histories.values()
        if isinstance(history, History)
        for record in history.records
        for name in record.metrics
    )
    if known and metric not in known:
        faults.append(unknown("metric", metric, known))
    return faults


def _moment(status: Status, seconds: float) -> Moment:
    workers = status["workers"]
    return Moment(
        seconds=seconds,
        term=status["term"],
        version=status["version"],
        samples=status["samples"],
        num_workers=sum(worker["state"] in PRESENT for worker in workers),
        applied=sum(worker["applied"] for worker in workers),
        staleness_sum=sum(round(worker["mean_staleness"] * worker["applied"]) for worker in workers),
    )


def _samples_per_s(old: Moment, new: Moment) -> float | None:
    """None where there is no telling: the server went on from a checkpoint in between."""
    if new.samples < old.samples or new.seconds <= old.seconds:
        return None
    return (new.samples - old.samples) / (new.seconds - old.seconds)


def _staleness(old: Moment, new: Moment) -> float | None:
    applied, late = new.applied - old.applied, new.staleness_sum - old.staleness_sum
    return late / applied if applied > 0 and late >= 0 else None
