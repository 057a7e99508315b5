"""The demo's findings, for people and for programs: a table, a picture, and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat import plain_json
from offbeat.demo.result import AsyncRun, DemoResult, Run, TaskResult, WorkerResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["table", "write_json", "write_png"]

MEANINGS = {"constant": "a late push counts as much as any other"}


def table(result: DemoResult) -> str:
    """Word the result for people."""
    heads = [f"{result.data}, seed {result.seed}, {result.machine.get('cores', '?')} cores"]
    if result.quick:
        heads.append("cut short by --quick: the accuracies say nothing")
    parts = ["\n".join(heads), *map(_task, result.tasks)]
    num_workers = max(len(task.asynchronous.workers) for task in result.tasks)
    cores = result.machine.get("cores", "?")
    parts.append(
        f"The {num_workers} workers and the server shared this machine's {cores} cores, and the single "
        "process was timed\nalone on them, so the times say little about speed. What they show is that "
        "nobody waits for the slow one."
    )
    if any("budget" in worker.rejected for task in result.tasks for worker in task.asynchronous.workers):
        parts.append(
            'Rejected for "budget" are the pushes that came when the run\'s samples were used up: that is\n'
            "how each worker learns of the end, and no fault."
        )
    parts.append(f"{result.seconds:.0f} s in all")
    return "\n\n".join(parts)


def _task(task: TaskResult) -> str:
    alone, together = task.single, task.asynchronous
    speed = alone.seconds / together.seconds
    side = "below" if task.points_below > 0 else "above"
    lines = [
        f"{task.title}: SGD, lr {task.lr:g} falling to 0, momentum {task.momentum:g}, {_amount(task)}",
        f"  staleness policy: {together.staleness_policy}{_meaning(together.staleness_policy)}",
        f"  {'':55}{'staleness, updates':>22}  rejected",
        _row("worker", "samples", "samples/s", "pushes", "mean", "largest", "pushes"),
        *(_worker(worker) for worker in together.workers),
        _run("single process", alone, "one thread"),
        _run(f"{len(together.workers)} workers", together, f"{speed:.2f} times as fast"),
        f"  the workers are {abs(task.points_below):.2f} points {side} the single process",
        *_beside(together.workers),
    ]
    return "\n".join(lines)


def _meaning(policy: str) -> str:
    return f" ({MEANINGS[policy]})" if policy in MEANINGS else ""


def _beside(workers: Sequence[WorkerResult]) -> list[str]:
    fast = [worker.samples_per_s for worker in workers if worker.slowed == 1]
    slow = [worker for worker in workers if worker.slowed != 1]
    if not fast or not slow:
        return []
    mean = sum(fast) / len(fast)
    return [
        f"  {worker.id} did {worker.samples_per_s:,.0f} samples/s, and beside it the others {mean:,.0f} each"
        for worker in slow
    ]


def _name(worker: WorkerResult) -> str:
    return worker.id + (f", {worker.slowed:g}x slower" if worker.slowed != 1 else "")


def _worker(worker: WorkerResult) -> str:
    total = sum(worker.rejected.values())
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(worker.rejected.items()))
    return _row(
        _name(worker),
        f"{worker.samples:,}",
        f"{worker.samples_per_s:,.0f}",
        f"{worker.pushes:,}",
        f"{worker.mean_staleness:.1f}",
        f"{worker.max_staleness:,}",
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
    """Write everything as JSON: `DemoResult`'s fields. A loss that is NaN is null."""
    path.write_text(plain_json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def write_png(result: DemoResult, path: Path) -> None:
    """Draw loss over wall time, and the workers' staleness, for each model."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        num_workers = max(len(task.asynchronous.workers) for task in result.tasks)
        figure = Figure(figsize=(5.5 * len(result.tasks), 4 + 1.2 * num_workers), layout="constrained")
        FigureCanvasAgg(figure)  # draws without a screen, and leaves pyplot's own state alone
        heights = [3.2] + num_workers * [1]
        axes = figure.subplots(1 + num_workers, len(result.tasks), squeeze=False, height_ratios=heights)
        for column, task in enumerate(result.tasks):
            _draw_loss(axes[0][column], task)
            _draw_staleness(list(axes[1:, column]), task.asynchronous)
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


def _draw_staleness(axes: "Sequence[Axes]", run: AsyncRun) -> None:
    """Draw a row for each worker, with its own scale: a slow one has far fewer pushes than the others."""
    histograms = [worker.staleness_histogram for worker in run.workers]
    top = max((i for counts in histograms for i, n in enumerate(counts) if n), default=0)
    beyond = " (the last bar: that and above)" if top == max(map(len, histograms)) - 1 else ""
    for number, (row, worker) in enumerate(zip(axes, run.workers, strict=False)):
        counts = worker.staleness_histogram[: top + 1]
        row.bar(range(len(counts)), counts, width=0.9, color=f"C{number}")
        title = f"{_name(worker)}: {worker.pushes:,} pushes"
        row.set_title(title, loc="right", fontsize="small", y=0.8)
        room = 1.4 * max(1, *counts)  # for the title above the bars
        row.set(ylabel="pushes", xlim=(-1, top + 1), ylim=(0, room))
        row.locator_params(axis="y", nbins=4, integer=True)
        row.tick_params(labelbottom=worker is run.workers[-1])
    axes[len(run.workers) - 1].set_xlabel(f"staleness, updates{beyond}")
    axes[0].set_title(f"staleness policy: {run.staleness_policy}", loc="left", fontsize="small")
