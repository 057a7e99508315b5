"""What a monitor saw and did, as plain data and as a picture."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from offbeat import plain_json
from offbeat.errors import ConfigError, StateError
from offbeat.monitor.alert import Alert, Recovery, Release
from offbeat.plots import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MonitorReport", "Series", "bulk", "counted"]

MOST_POINTS = 4000
"""Of a series; beyond it every second one goes."""


BULK = 0.98
"""Of values: an axis shows these, and as much again to both sides. One that is a thousand times as large as
the others would let them look like a line at 0."""

MOST_NAMED = 20
"""Remedies; where more were taken, or let go of, lines without names say when."""


def bulk(values: Sequence[float]) -> tuple[float, float] | None:
    """Choose what an axis shows of values: most of them, and as much again to both sides; no more than all.

    Returns:
        The least and the most; None where no value is finite, or nearly all are the same: all is shown then.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return None
    out = max(int(len(finite) * (1 - BULK) / 2), 1)  # also of a few values one may be far out
    low, high = finite[min(out, len(finite) - 1)], finite[max(-1 - out, -len(finite))]
    size = high - low
    return (max(low - size, finite[0]), min(high + size, finite[-1])) if size > 0 else None


def counted(names: Sequence[str]) -> str:
    """Give names as a text, each once, with how often it is there: a remedy may be in effect ten times."""
    return ", ".join(name if num == 1 else f"{name} x{num}" for name, num in Counter(names).items())


@dataclass(slots=True)
class Series:
    """The values of a metric and their range, thinned out where they are many.

    Attributes:
        steps: When.
        values: Of the metric.
        low: The lower edge then; minus infinity in the warm-up.
        high: The upper edge then; infinity in the warm-up.
        stride: Every so many values are here.
        num_seen: Values there were.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    stride: int = 1
    num_seen: int = 0

    def copy(self) -> "Series":
        """Give one that does not change any more."""
        steps, values, low, high = list(self.steps), list(self.values), list(self.low), list(self.high)
        return Series(steps, values, low, high, self.stride, self.num_seen)

    def add(self, step: int, value: float, expected: tuple[float, float]) -> None:
        """Take a value and the range that it was judged by."""
        is_kept = self.num_seen % self.stride == 0
        self.num_seen += 1
        if not is_kept:
            return
        columns: tuple[list[float], ...] = (self.values, self.low, self.high)
        self.steps.append(step)
        for column, number in zip(columns, (value, *expected), strict=True):
            column.append(number)
        if len(self.steps) > MOST_POINTS:
            del self.steps[1::2]
            for column in columns:
                del column[1::2]
            self.stride *= 2


@dataclass(frozen=True, slots=True, repr=False)
class MonitorReport:
    """What a monitor saw and did so far.

    Attributes:
        alerts: Such as were news (`Alert.is_news`), the newest 1000.
        recoveries: How each metric came back into its range, the newest 1000.
        releases: The newest 1000.
        num_alerts: How many there were, by metric.
        num_dropped: Gradients that were not used.
        num_clipped: Gradients that were scaled down.
        in_effect: The remedies in effect, in the order in which they were taken.
        effects: What came of each of these, in words.
        series: What was measured, by metric.
    """

    alerts: tuple[Alert, ...]
    recoveries: tuple[Recovery, ...]
    releases: tuple[Release, ...]
    num_alerts: dict[str, int]
    num_dropped: int
    num_clipped: int
    in_effect: tuple[str, ...]
    effects: tuple[str, ...]
    series: dict[str, Series]

    def __repr__(self) -> str:
        """Count what there is: all of it, which `to_json` gives, is thousands of numbers."""
        counts = ", ".join(f"{metric} {count}" for metric, count in self.num_alerts.items())
        seen = ", ".join(f"{metric} {series.num_seen}" for metric, series in self.series.items())
        return (
            f"<MonitorReport: alerts: {counts or 'none'}; in effect: "
            f"{counted(self.in_effect) or 'nothing'}; gradients dropped: {self.num_dropped}, "
            f"clipped: {self.num_clipped}; values: {seen}>"
        )

    def to_json(self, *, indent: int | None = None) -> str:
        """Give it all as JSON text. JSON knows finite numbers only: what is NaN or infinite is null."""
        return plain_json.dumps(asdict(self), indent=indent)

    def plot(self, path: str | os.PathLike[str]) -> "Figure":
        """Draw each metric with its range, alerts and remedies into a file, whose name says its format.

        A few values that are far beyond all others are beyond the axis, whose label counts them; an alert of
        such a one, or of what is not finite, is at its edge.

        Returns:
            The picture, a `matplotlib.figure.Figure`.

        Raises:
            StateError: If no metric has had a value yet.
            ConfigError: If matplotlib is not installed, or has no such format.
            OSError: If the file cannot be written.
        """
        drawn = {metric: series for metric, series in self.series.items() if series.steps}
        if not drawn:
            raise StateError(
                "this report has nothing to draw: no metric has had a value yet; train its model, or "
                "call observe()"
            )
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(
                "plot() needs matplotlib, which is not installed here: pip install matplotlib, or take the "
                "numbers from to_json()"
            ) from error
        figure = Figure(figsize=(9, 2.6 * len(drawn)), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (metric, series) in zip(
            figure.subplots(len(drawn), squeeze=False)[:, 0], drawn.items(), strict=True
        ):
            self._draw(axes, metric, series)
        self._name_remedies(figure.axes[0])
        save(figure, path)
        return figure

    def _draw(self, axes: "Axes", metric: str, series: Series) -> None:
        is_ranged = [high != float("inf") for high in series.high]
        axes.fill_between(series.steps, series.low, series.high, where=is_ranged, alpha=0.2, label="expected")
        (line,) = axes.plot(series.steps, series.values, linewidth=0.8, label=metric)
        if (shown := bulk(series.values)) is not None:
            low, high = shown
            margin = 0.05 * (high - low)
            axes.set_ylim(low - margin, high + margin)
            if num := sum(not low <= value <= high for value in series.values):
                line.set_label(f"{metric} ({num} values beyond the axis, or not finite)")
        ours = [alert for alert in self.alerts if alert.metric == metric]
        if ours:
            least, most = axes.get_ylim()
            steps = [alert.step for alert in ours]
            values = [min(max(a.value, least), most) if math.isfinite(a.value) else most for a in ours]
            num, of = len(ours), self.num_alerts[metric]
            told = f"{of} alerts" if num == of else f"{num} of {of} alerts (those that were told)"
            axes.plot(steps, values, "x", color="tab:red", label=told, clip_on=False)
        for steps, colour, style, label in (
            ([alert.step for alert in self._taken()], "tab:red", "--", "remedy taken"),
            ([release.step for release in self.releases], "tab:green", ":", "let go of"),
        ):
            for step in steps:
                axes.axvline(step, linestyle=style, color=colour, linewidth=0.8, label=label)
                label = ""  # noqa: PLW2901  a legend has each once
        axes.set_xlabel("step")
        axes.set_ylabel(metric)
        axes.legend(loc="upper right", fontsize="small")

    def _taken(self) -> list[Alert]:
        """Give the alerts at which a remedy was taken that does something."""
        return [alert for alert in self.alerts if alert.is_taken and alert.action != "alert"]

    def _name_remedies(self, axes: "Axes") -> None:
        """Write names at the lines of what was taken and let go of."""
        named = [(alert.step, alert.action) for alert in self._taken()]
        named += [(release.step, release.remedy) for release in self.releases if release.remedy != "alert"]
        if len(named) <= MOST_NAMED:
            place = axes.get_xaxis_transform()  # a step, and a share of the height
            for step, name in named:
                axes.text(step, 0.02, name, transform=place, rotation=90, ha="right", fontsize="x-small")
