"""One frame of `offbeat top`: made of two statuses, and of nothing else."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offbeat.cli.fit import GAP, Heading, fit
from offbeat.cli.rates import Rates, percentile, rates
from offbeat.cli.wording import (
    PRESENT,
    Told,
    by_reason,
    checkpoints,
    duration,
    first_to_see,
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


WORKERS = (
    Heading("worker", least=10),
    Heading("state"),
    Heading("host", rank=7, least=8),
    Heading("samples/s", rank=1, is_number=True),
    Heading("pushes/s", rank=6, is_number=True),
    Heading("staleness", rank=5, is_number=True),
    Heading("max", rank=10, is_number=True),
    Heading("pushes", rank=8, is_number=True),
    Heading("damped", rank=9, is_number=True),
    Heading("rejected", rank=4, least=8, is_number=True),
    Heading("last push", rank=2, is_number=True),
    Heading("cause", rank=3, least=12),
)
DEPARTURES = (
    Heading("departure", least=10),
    Heading("state", rank=1),
    Heading("when", rank=3),
    Heading("cause", rank=2, least=12),
)

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
    shown = first_to_see(workers)[:max_workers]
    rows = [_row(worker, now) for worker in shown]
    parts: list[RenderableType] = [
        Text(f"{there} of {len(workers)} workers are there", style="bold", overflow="ellipsis", no_wrap=True),
        _Fitted(WORKERS, rows),
    ]
    if len(shown) < len(workers):
        left_out = f"and {len(workers) - len(shown):,} more; offbeat status --all lists them"
        parts.append(Text(left_out, style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _row(worker: Told, now: Rates | None) -> list[Text]:
    mine = None if now is None else now.workers.get(worker["incarnation"])
    late = worker["mean_staleness"] if mine is None or mine.staleness is None else mine.staleness
    age = worker["last_push_age_s"]
    return [
        _cell(worker["id"]),
        Text(worker["state"], style=STYLES[worker["state"]]),
        _cell(worker["host"]),
        Text(f"{worker['samples_per_s']:,.0f}"),
        Text(UNKNOWN if mine is None else f"{mine.pushes_per_s:,.1f}"),
        Text(f"{late:.1f}"),
        Text(f"{worker['max_staleness']:,}"),
        Text(f"{worker['pushes']:,}"),
        Text(f"{worker['damped']:,}"),
        _cell(by_reason(worker["rejected"])),
        Text(UNKNOWN if age is None else f"{duration(age)} ago"),
        _cell(worker["cause"] or ""),
    ]


def _departures(departures: Sequence[Told]) -> RenderableType:
    return _Fitted(
        DEPARTURES,
        [
            [
                _cell(one["worker"]),
                Text(one["state"], style=STYLES[one["state"]]),
                Text(f"{duration(one['age_s'])} ago"),
                _cell(one["cause"]),
            ]
            for one in reversed(departures)
        ],
    )


class _Fitted:
    """A table of those columns that there is room for, where it is drawn."""

    def __init__(self, headings: Sequence[Heading], rows: Sequence[Sequence[Text]]) -> None:
        self._headings = headings
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [
            heading.over([row[i].cell_len for row in self._rows]) for i, heading in enumerate(self._headings)
        ]
        widths = fit(columns, options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, GAP // 2))
        kept = [(i, heading) for i, heading in enumerate(self._headings) if heading.name in widths]
        for _, heading in kept:
            table.add_column(
                heading.name,
                width=widths[heading.name],
                justify="right" if heading.is_number else "left",
                overflow="ellipsis",
                no_wrap=True,
            )
        for row in self._rows:
            table.add_row(*(row[i] for i, _ in kept))
        yield table


def _cell(words: str) -> Text:
    """Set words of others: no markup of rich's is read in them, and no cursor moved by them."""
    return Text(plain(words), overflow="ellipsis", no_wrap=True)
