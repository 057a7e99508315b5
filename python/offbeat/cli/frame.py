"""One frame of `offbeat top`: made of two statuses, and of nothing else."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offbeat.cli.rates import Rates, percentile, rates
from offbeat.cli.wording import (
    PRESENT,
    Told,
    by_reason,
    checkpoints,
    duration,
    gone,
    learning_rate,
    model,
    optimizer,
    plain,
    pushes,
    run_at,
)

__all__ = ["AROUND_THE_WORKERS", "frame"]

AROUND_THE_WORKERS = 22
"""Lines of a frame that are not workers', at most."""

MAX_DEPARTURES = 5
"""The latest."""

ORDER = ("stalled", "lost", "joined", "left", "finished")
"""Of the workers: what may want a hand comes first."""

STYLES = {"joined": "green", "stalled": "yellow", "lost": "red", "left": "yellow", "finished": "dim"}
UNKNOWN = "-"


def frame(
    after: Told, before: Told | None, *, asked: str, notice: str | None = None, max_workers: int | None = None
) -> RenderableType:
    """Draw a frame.

    Args:
        after: The newest status.
        before: An earlier one, for what happened in between; None where there is none.
        asked: The address where it was asked.
        notice: What is wrong with getting a newer one.
        max_workers: So many rows of workers at most; None for all.
    """
    now = rates(before, after)
    parts: list[RenderableType] = [_head(after, now, asked)]
    if notice is not None:
        parts.insert(0, Text(plain(notice), style="bold red", overflow="ellipsis", no_wrap=True))
    parts.append(_workers(after["workers"], now, max_workers))
    if departures := gone(after["departures"], after["workers"]):
        parts.append(_departures(departures[-MAX_DEPARTURES:]))
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _head(status: Told, now: Rates | None, asked: str) -> Table:
    lines = {
        "run": run_at(status, asked),
        "model": model(status),
        "speed": _speed(now),
        "optimizer": optimizer(status),
        "learning rate": learning_rate(status),
        "pushes": pushes(status),
        "staleness": _staleness(status, now),
        "traffic": _traffic(status),
        "memory": _memory(status),
    }
    if status["lost_updates"]:
        lines["lost updates"] = f"{status['lost_updates']:,}"
    if status["checkpoints"] is not None:
        lines["checkpoints"] = checkpoints(status["checkpoints"])
    table = Table.grid(padding=(0, 2))
    for name, words in lines.items():
        table.add_row(Text(name, style="bold"), _cell(words))
    return table


def _speed(now: Rates | None) -> str:
    if now is None:
        return UNKNOWN
    return f"{now.updates_per_s:,.1f} updates/s, {now.samples_per_s:,.0f} samples/s"


def _staleness(status: Told, now: Rates | None) -> str:
    workers = status["workers"]
    counts = [sum(of_all) for of_all in zip(*(w["staleness_histogram"] for w in workers), strict=True)]
    median, late = percentile(counts, 0.5), percentile(counts, 0.95)
    if median is None or late is None:
        return UNKNOWN
    lately = "" if now is None or now.staleness is None else f"mean {now.staleness:.1f} now; "
    above = "+" if late == len(counts) - 1 else ""
    largest = max(worker["max_staleness"] for worker in workers)
    return f"{lately}in all half are at most {median}, 95 % at most {late}{above}, the largest {largest:,}"


def _traffic(status: Told) -> str:
    received, sent = (sum(w[key] for w in status["workers"]) for key in ("bytes_received", "bytes_sent"))
    return f"{_mib(received)} received, {_mib(sent)} sent, {status['connections']:,} connections"


def _memory(status: Told) -> str:
    memory = status["memory"]
    return f"{_mib(memory['total_bytes'])}, {memory['live_versions']} live versions"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _workers(workers: Sequence[Told], now: Rates | None, max_workers: int | None) -> RenderableType:
    if not workers:
        return Text("no worker has joined yet")
    there = sum(worker["state"] in PRESENT for worker in workers)
    shown = sorted(workers, key=lambda worker: ORDER.index(worker["state"]))[:max_workers]
    table = Table(
        box=None, pad_edge=False, padding=(0, 1), title=f"{there} of {len(workers)} workers are there"
    )
    table.title_justify, table.title_style = "left", "bold"
    for name in ("worker", "state", "host"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in ("samples/s", "pushes/s", "staleness", "max", "pushes", "damped", "rejected", "last push"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("cause", overflow="ellipsis", no_wrap=True)
    for worker in shown:
        mine = None if now is None else now.workers.get(worker["incarnation"])
        late = worker["mean_staleness"] if mine is None or mine.staleness is None else mine.staleness
        age = worker["last_push_age_s"]
        table.add_row(
            _cell(worker["id"]),
            Text(worker["state"], style=STYLES[worker["state"]]),
            _cell(worker["host"]),
            f"{worker['samples_per_s']:,.0f}",
            UNKNOWN if mine is None else f"{mine.pushes_per_s:,.1f}",
            f"{late:.1f}",
            f"{worker['max_staleness']:,}",
            f"{worker['pushes']:,}",
            f"{worker['damped']:,}",
            _cell(by_reason(worker["rejected"])),
            UNKNOWN if age is None else f"{duration(age)} ago",
            _cell(worker["cause"] or ""),
        )
    if len(shown) == len(workers):
        return table
    return Group(
        table, Text(f"and {len(workers) - len(shown):,} more; offbeat status lists all", style="dim")
    )


def _departures(departures: Sequence[Told]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("departure", "state", "when", "cause"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for one in reversed(departures):
        table.add_row(
            _cell(one["worker"]),
            Text(one["state"], style=STYLES[one["state"]]),
            f"{duration(one['age_s'])} ago",
            _cell(one["cause"]),
        )
    return table


def _cell(words: str) -> Text:
    """Set words of others: no markup of rich's is read in them, and no cursor moved by them."""
    return Text(plain(words), overflow="ellipsis", no_wrap=True)
