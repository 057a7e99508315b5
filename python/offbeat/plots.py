"""Pictures of what was measured, by matplotlib where it is installed; drawn without a screen."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import ConfigError
from offbeat.extras import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from offbeat.history import History

__all__ = [
    "Picture",
    "Span",
    "draw_curves",
    "draw_membership",
    "draw_metrics",
    "draw_metrics_by_version",
    "picture",
    "save",
]

WIDTH_IN = 8.0
PANEL_IN = 2.2
"""Inches; so wide and, for each panel, so high is a picture."""

DPI = 110
COLOURS = {
    "joined": "tab:green",
    "stalled": "tab:olive",
    "lost": "tab:red",
    "left": "tab:orange",
    "finished": "tab:blue",
}
MAX_NAMED = 40
"""More workers than that have lines and no names."""


@dataclass(frozen=True, slots=True)
class Span:
    """How long a process of a worker's was there.

    Attributes:
        worker: The worker's name.
        begin_s: When it was first seen there.
        end_s: When it was gone, or last looked.
        end: How it is, or how it ended: "joined", "stalled", "lost", "left" or "finished".
    """

    worker: str
    begin_s: float
    end_s: float
    end: str


@dataclass(slots=True)
class Picture:
    """A picture under way: its panels, to be drawn in from the top."""

    figure: "Figure"
    panels: "Sequence[Axes]"


@contextmanager
def picture(
    heights: Sequence[float], *, title: str, path: str | os.PathLike[str] | None, what: str
) -> Iterator[Picture]:
    """Make a picture of panels below each other, and write it when it is drawn.

    Args:
        heights: Of the panels, 1 for an ordinary one.
        title: Of all.
        path: Where it is written, in the format that its name says; None: nowhere.
        what: Who asks, for the error.

    Raises:
        ConfigError: If matplotlib is not installed, or has no such format.
    """
    mpl = load("matplotlib", what)
    figures: Any = load("matplotlib.figure", what)
    agg: Any = load("matplotlib.backends.backend_agg", what)
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = figures.Figure(figsize=(WIDTH_IN, 0.6 + PANEL_IN * sum(heights)), layout="constrained")
        agg.FigureCanvasAgg(figure)  # draws without a screen, and leaves pyplot's own state alone
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
        figure.suptitle(_as_it_is(title))
        yield Picture(figure, list(axes[:, 0]))
        if path is not None:
            save(figure, path, dpi=DPI)


def save(figure: "Figure", path: str | os.PathLike[str], *, dpi: float | None = None) -> None:
    """Write a picture into a file, whose name says its format; a folder that is not there is made.

    Raises:
        ConfigError: If there is no such format.
        OSError: If it cannot be written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=dpi or "figure")
    except ValueError as error:  # a format that there is not
        raise ConfigError(f"{os.fspath(path)!r} cannot be drawn to: {error}") from error


def draw_metrics(panels: "Sequence[Axes]", history: "History", names: Sequence[str]) -> None:
    """Draw metrics, each in a panel, over the steps of one `train`; then staleness, where it was told.

    What was measured after epochs is drawn beside that of training.
    """
    steps = [record.step for record in history.records]
    for axes, name in zip(panels, names, strict=False):
        values = [
            record.metrics.get(name, math.nan) for record in history.records
        ]  # of lives that measured it
        axes.plot(steps, values, linewidth=1.2, label="training")
        measured = [(one.step, one.metrics[name]) for one in history.validation if name in one.metrics]
        if measured:
            axes.plot(*zip(*measured, strict=True), linewidth=1.2, marker=".", label="validation")
            axes.legend(fontsize="small")
        axes.set(ylabel=_as_it_is(name), xlabel="steps of this worker")
    late = [(record.step, record.staleness) for record in history.records if record.staleness is not None]
    if late:
        axes = panels[len(names)]
        axes.plot(*zip(*late, strict=True), linewidth=1.2, color="tab:orange")
        axes.set(ylabel="mean staleness, updates", xlabel="steps of this worker", ylim=(0, None))


def draw_metrics_by_version(axes: "Axes", histories: "Mapping[str, History]", name: str) -> None:
    """Draw one metric of several workers over the model's version, which is the same clock to all."""
    for worker, history in histories.items():
        points = [(r.version, r.metrics[name]) for r in history.records if name in r.metrics]
        if points:
            axes.plot(*zip(*points, strict=True), label=_as_it_is(worker), linewidth=1.2)
    axes.set(ylabel=_as_it_is(name), xlabel="version of the model")
    if axes.lines and len(histories) <= MAX_NAMED:
        axes.legend(fontsize="small")


def draw_curves(axes: "Axes", times_s: Sequence[float], values: Sequence[float | None], ylabel: str) -> None:
    """Draw a value over time; where it is None, there is a gap."""
    axes.plot(times_s, [float("nan") if v is None else v for v in values], linewidth=1.2)
    axes.set(ylabel=ylabel, xlabel="seconds", ylim=(0, None))


def draw_membership(axes: "Axes", spans: Sequence[Span]) -> None:
    """Draw a row for each worker, and in it when its processes were there, and how each ended."""
    names = list(dict.fromkeys(span.worker for span in spans))
    rows = {name: row for row, name in enumerate(names)}
    for span in spans:
        row = rows[span.worker]
        colour = COLOURS[span.end]
        axes.hlines(row, span.begin_s, span.end_s, color=colour, linewidth=4)
        if span.end not in ("joined", "stalled"):
            axes.plot([span.end_s], [row], marker="|", color=colour, markersize=10)
    seen = [end for end in COLOURS if any(span.end == end for span in spans)]
    for end in seen:
        axes.plot([], [], color=COLOURS[end], linewidth=4, label=end)
    if seen:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    axes.set(xlabel="seconds", ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), map(_as_it_is, names) if len(names) <= MAX_NAMED else [])


def _as_it_is(name: str) -> str:
    """Write a name as matplotlib draws it: of two dollars it makes a formula, and a legend has no "_…"."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
