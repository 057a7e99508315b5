"""What a monitor saw and did, as plain data and as a picture."""

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from offbeat import plain_json
from offbeat.errors import ConfigError, StateError
from offbeat.monitor.alert import Alert, Recovery, Release
from offbeat.plots import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MonitorReport", "Series"]

MOST_POINTS = 4000
"""Of a series; beyond it every second one goes."""


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
            f"{', '.join(self.in_effect) or 'nothing'}; gradients dropped: {self.num_dropped}, "
            f"clipped: {self.num_clipped}; values: {seen}>"
        )

    def to_json(self, *, indent: int | None = None) -> str:
        """Give it all as JSON text. JSON knows finite numbers only: what is NaN or infinite is null."""
        return plain_json.dumps(asdict(self), indent=indent)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each metric with its range, alerts and remedies into a file, whose name says its format.

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
        save(figure, path)

    def _draw(self, axes: "Axes", metric: str, series: Series) -> None:
        is_ranged = [high != float("inf") for high in series.high]
        axes.fill_between(series.steps, series.low, series.high, where=is_ranged, alpha=0.2, label="expected")
        axes.plot(series.steps, series.values, linewidth=0.8, label=metric)
        ours = [alert for alert in self.alerts if alert.metric == metric]
        if ours:
            steps, values = [alert.step for alert in ours], [alert.value for alert in ours]
            axes.plot(steps, values, "x", color="tab:red", label=f"{self.num_alerts[metric]} alerts")
        for release in self.releases:
            axes.axvline(release.step, linestyle=":", color="tab:green", linewidth=0.8)
        axes.set_xlabel("step")
        axes.set_ylabel(metric)
        axes.legend(loc="upper right", fontsize="small")
