"""The demo's findings, for people and for programs: a table, a picture, and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.demo.result import DemoResult, Run, TaskResult, WorkerResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["table", "write_json", "write_png"]


def table(result: DemoResult) -> str:
    """Word the result for people."""
    heads = [f"{result.data}, seed {result.seed}, {result.machine.get('cores', '?')} cores"]
    if result.quick:
        heads.append("cut short by --quick: the accuracies say nothing")
    parts = ["\n".join(heads), *map(_task, result.tasks)]
    parts.append(f"{result.seconds:.0f} s in all")
    return "\n\n".join(parts)


def _task(task: TaskResult) -> str:
    alone, together = task.single, task.asynchronous
    speed = alone.seconds / together.seconds
    side = "below" if task.points_below > 0 else "above"
    lines = [
        f"{task.title}: SGD, lr {task.lr:g} falling to 0, momentum {task.momentum:g}, {_amount(task)}",
        _row("", "samples", "samples/s", "pushes", "staleness", "largest", "rejected"),
        *(_worker(worker) for worker in together.workers),
        _run("single process", alone, "one thread"),
        _run(f"{len(together.workers)} workers", together, f"{speed:.2f} times as fast"),
        f"  the workers are {abs(task.points_below):.2f} points {side} the single process",
    ]
    return "\n".join(lines)


def _worker(worker: WorkerResult) -> str:
    name = worker.id + (f", {worker.slowed:g}x slower" if worker.slowed != 1 else "")
    total = sum(worker.rejected.values())
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(worker.rejected.items()))
    return _row(
        name,
        f"{worker.samples:,}",
        f"{worker.samples_per_s:,.0f}",
        f"{worker.pushes:,}",
        f"{worker.mean_staleness:.1f}",
        str(worker.max_staleness),
        f"{total} ({reasons})" if total else "0",
    )


def _row(name: str, *cells: str) -> str:
    return f"  {name:22}" + "".join(f"{cell:>11}" for cell in cells[:-1]) + f"  {cells[-1]}"


def _run(name: str, run: Run, remark: str) -> str:
    rate = f"{run.samples / run.seconds:,.0f} samples/s"
    return f"  {name:15} {run.accuracy:7.2%} in {run.seconds:5.1f} s   ({rate}, {remark})"


def _amount(task: TaskResult) -> str:
    return f"batches of {task.batch_size}, {task.single.samples:,} samples"


def write_json(result: DemoResult, path: Path) -> None:
    """Write everything as JSON: `DemoResult`'s fields."""
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def write_png(result: DemoResult, path: Path) -> None:
    """Draw loss over wall time, and the workers' staleness, for each model."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(5.5 * len(result.tasks), 7.5), layout="constrained")
        FigureCanvasAgg(figure)  # draws without a screen, and leaves pyplot's own state alone
        axes = figure.subplots(2, len(result.tasks), squeeze=False)
        for column, task in enumerate(result.tasks):
            _draw_loss(axes[0][column], task)
            _draw_staleness(axes[1][column], task.asynchronous.workers)
        figure.suptitle(f"{result.data}, seed {result.seed}")
        figure.savefig(path, dpi=110, format="png")


def _draw_loss(axes: "Axes", task: TaskResult) -> None:
    runs: list[tuple[str, Run]] = [
        ("single process", task.single),
        (f"{len(task.asynchronous.workers)} workers", task.asynchronous),
    ]
    for label, run in runs:
        seconds, losses = zip(*((p.seconds, p.loss) for p in run.curve), strict=True)
        axes.plot(seconds, losses, label=f"{label}: {run.accuracy:.1%} on the test part", linewidth=1.2)
    axes.set(title=task.title, xlabel="wall time, s", ylabel="training loss", ylim=(0, None))
    axes.legend()


def _draw_staleness(axes: "Axes", workers: Sequence[WorkerResult]) -> None:
    longest = max(len(worker.staleness_histogram) for worker in workers)
    top = max((i for w in workers for i, n in enumerate(w.staleness_histogram) if n), default=0)
    below: list[int] = [0] * longest
    for worker in workers:
        counts = worker.staleness_histogram + [0] * (longest - len(worker.staleness_histogram))
        label = worker.id + (f", {worker.slowed:g}x slower" if worker.slowed != 1 else "")
        shown: dict[str, Any] = {"width": 0.9, "label": label}
        axes.bar(range(top + 1), counts[: top + 1], bottom=below[: top + 1], **shown)
        below = [a + b for a, b in zip(below, counts, strict=True)]
    beyond = " (the last bar: that and above)" if top == longest - 1 else ""
    axes.set(xlabel=f"staleness, updates{beyond}", ylabel="pushes")
    axes.legend()
