"""`offbeat status`: how a run goes, asked from its server without joining."""

import json
import shutil
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.cli.asking import add_server_arguments, ask, server_of, telling_that_nobody_answers
from offbeat.cli.exit_codes import ExitCode
from offbeat.cli.fit import Heading, fit
from offbeat.cli.parser import Parser
from offbeat.cli.say import output
from offbeat.cli.wording import (
    ORDER,
    by_reason,
    checkpoints,
    columns,
    duration,
    first_to_see,
    gone,
    learning_rate,
    model,
    optimizer,
    plain,
    pushes,
    run_at,
    staleness,
)

__all__ = ["add_arguments", "report", "run"]

MAX_WORKERS = 50
"""Rows, where not all are asked for: what does not fit on a screen or two is read by nobody."""

MAX_DEPARTURES = 10
"""The latest, likewise."""

WORKERS = (
    Heading("worker", least=24),
    Heading("state"),
    Heading("host", rank=7, least=8),
    Heading("samples", rank=6, is_number=True),
    Heading("samples/s", rank=1, is_number=True),
    Heading("pushes", rank=8, is_number=True),
    Heading("damped", rank=9, is_number=True),
    Heading("rejected", rank=4, least=8, is_number=True),
    Heading("staleness", rank=5, is_number=True),
    Heading("max", rank=10, is_number=True),
    Heading("last push", rank=2, is_number=True),
)
DEPARTURES = (
    Heading("departure", least=24),
    Heading("state", rank=1),
    Heading("when", rank=3),
    Heading("cause", rank=2, least=12),
)

GLOSSARY = (
    "In the tables: damped, pushes that were worth less because they were late. Pushes applied, to the whole "
    "model; partial, to some pieces of it only; dropped, admitted and yet applied to none. Staleness, "
    "in updates since the worker's last pull. Longest poll, the longest time that a thread of the server was "
    "busy at a stretch. Lost updates, those of which workers had been told and which the checkpoint that the "
    "server went on from does not have. Memory, of the model: roots, the newest values; pinned, older ones "
    "that somebody still reads; idle, kept for the next update; staging, pushes that are on their way in."
)
"""What the tables' words mean, for `--help`."""

Status = Mapping[str, Any]


def add_arguments(parser: Parser) -> None:
    """Say what the command takes."""
    parser.epilog = GLOSSARY
    add_server_arguments(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"a row for every worker and departure; without it, for {MAX_WORKERS} workers at most, those "
        f"first that may want a hand, and the latest {MAX_DEPARTURES} departures, and on a terminal no wider "
        "than that; JSON has all in any case",
    )
    parser.add_format()


def run(arguments: Namespace) -> int:
    """Ask, and print the answer."""
    address, token = server_of(arguments)
    with telling_that_nobody_answers(address, arguments.timeout_s):
        text = ask(address, token, arguments.timeout_s)
    if arguments.format == "json":
        output(text)
    else:
        on_terminal = sys.stdout.isatty() and not arguments.all
        room = shutil.get_terminal_size().columns if on_terminal else None
        output(report(json.loads(text), asked=address, is_whole=arguments.all, room=room))
    return ExitCode.OK


def report(status: Status, *, asked: str, is_whole: bool = False, room: int | None = None) -> str:
    """Word a server's status for people.

    Args:
        status: What it told.
        asked: The address where it was asked.
        is_whole: Whether all workers and departures have rows, however many there are.
        room: What a table may take, in columns of a terminal; None for all that it needs.
    """
    parts = [
        _run(status, asked),
        _workers(status["workers"], None if is_whole else MAX_WORKERS, room),
        _departures(status["departures"], status["workers"], None if is_whole else MAX_DEPARTURES, room),
        _memory(status["memory"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _run(status: Status, asked: str) -> str:
    lines = {
        "run": run_at(status, asked),
        "model": model(status),
        "optimizer": optimizer(status),
        "learning rate": learning_rate(status),
        "staleness": staleness(status["staleness"]),
        "transaction": status["transaction"],
        "pushes": pushes(status),
        "longest poll": f"{status['longest_poll_ms']:.1f} ms",
    }
    if status["lost_updates"]:
        lines["lost updates"] = f"{status['lost_updates']:,}"
    if status["checkpoints"] is not None:
        lines["checkpoints"] = checkpoints(status["checkpoints"])
    return columns([[name, value] for name, value in lines.items()], left=2)


def _workers(workers: Sequence[Status], most: int | None, room: int | None) -> str:
    """Make a row for each; where they are more than the most, for those first that may want a hand."""
    if not workers:
        return "no worker has joined yet"
    is_cut = most is not None and len(workers) > most
    shown = first_to_see(sorted(workers, key=_silence))[:most] if is_cut else workers
    rows = [
        [
            worker["id"],
            worker["state"],
            worker["host"],
            f"{worker['samples']:,}",
            f"{worker['samples_per_s']:,.0f}",
            f"{worker['pushes']:,}",
            f"{worker['damped']:,}",
            by_reason(worker["rejected"]),
            f"{worker['mean_staleness']:.1f}",
            str(worker["max_staleness"]),
            "-" if worker["last_push_age_s"] is None else f"{duration(worker['last_push_age_s'])} ago",
        ]
        for worker in shown
    ]
    table = _table(WORKERS, rows, room)
    return f"{table}\n{_left_out(shown, workers)}" if is_cut else table


def _silence(worker: Status) -> float:
    """Give a key by which who pushed last is last, but for who never has."""
    age: float | None = worker["last_push_age_s"]
    return 0.0 if age is None else -age


def _left_out(shown: Sequence[Status], workers: Sequence[Status]) -> str:
    """Say who is in none of the rows."""
    states = Counter(worker["state"] for worker in workers)
    states.subtract(worker["state"] for worker in shown)
    listed = ", ".join(f"{states[state]:,} {state}" for state in ORDER if states[state])
    return f"and {len(workers) - len(shown):,} more ({listed}); --all lists them"


def _departures(
    departures: Sequence[Status], workers: Sequence[Status], most: int | None, room: int | None
) -> str:
    if not (told := gone(departures, workers)):
        return ""
    rows = [[d["worker"], d["state"], f"{duration(d['age_s'])} ago", d["cause"]] for d in told]
    if most is None or len(rows) <= most:
        return _table(DEPARTURES, rows, room)
    table = _table(DEPARTURES, rows[-most:], room)
    return f"{table}\nand {len(rows) - most:,} before them; --all lists them"


def _table(headings: Sequence[Heading], rows: Sequence[Sequence[str]], room: int | None) -> str:
    """Set rows below their headings, those columns that there is room for."""
    lines = [[heading.name for heading in headings], *([plain(cell) for cell in row] for row in rows)]
    kept = list(headings)
    if room is not None:
        widths = fit([h.over([len(line[i]) for line in lines]) for i, h in enumerate(headings)], room)
        kept = [heading for heading in headings if heading.name in widths]
        lines = [
            [_cut(cell, widths[h.name]) for h, cell in zip(headings, line, strict=True) if h in kept]
            for line in lines
        ]
    return columns(lines, left=sum(not heading.is_number for heading in kept))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _memory(memory: Status) -> str:
    names = ("roots", "ledgers", "pinned", "idle", "staging")
    terms = {name: memory[f"{name}_bytes"] / 2**20 for name in ("total", *names)}
    listed = " + ".join(f"{terms[name]:.1f}" for name in names)
    return f"memory {terms['total']:.1f} MiB = {memory['formula'] or 'no model yet'} = {listed}"
