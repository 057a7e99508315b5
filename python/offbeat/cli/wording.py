"""How a run is worded for people, be it told by its server or by a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.address import EVERY_INTERFACE, is_local, reachable

__all__ = [
    "ORDER",
    "PRESENT",
    "Told",
    "by_reason",
    "checkpoints",
    "columns",
    "duration",
    "first_to_see",
    "gone",
    "learning_rate",
    "model",
    "optimizer",
    "plain",
    "pushes",
    "run_at",
    "staleness",
]

Told = Mapping[str, Any]

PRESENT = ("joined", "stalled")
"""The states of a worker that is there."""

ORDER = ("stalled", "lost", "joined", "left", "finished")
"""Of the workers: what may want a hand comes first."""


def run_at(run: Told, asked: str) -> str:
    """Word which run it is, where, and how it is; `asked` is the address where it was asked."""
    state = run["state"].replace("_", " ")
    return f"{run['run_id']} on {_address(run['address'], asked)}, {state}, up {duration(run['uptime_s'])}"


def _address(told: str, asked: str) -> str:
    """Give an address to join with, where a server listens on every interface."""
    if told.rpartition(":")[0] not in EVERY_INTERFACE:
        return told
    return f"{reachable(told) if is_local(asked) else asked} (every interface)"


def model(run: Told) -> str:
    """Word where a run's model is."""
    of = f" of {run['max_samples']:,}" if run["max_samples"] is not None else ""
    return f"version {run['version']:,}, {run['samples']:,}{of} samples, term {run['term']}"


def optimizer(run: Told) -> str:
    """Word which optimizer a run has, and where it runs."""
    told = run["optimizer"]
    if told is None:
        return "none yet"
    if told["runs_on"] == "worker":  # the server adds what they push
        return "live ones, on the workers"
    return f"{told['summary']}, on the server" + (
        ", momentum in the workers" if run["momentum_correction"] else ""
    )


def learning_rate(run: Told) -> str:
    """Word the learning rates of its groups."""
    told, schedule = run["optimizer"], run["schedule"]
    if told is not None and told["runs_on"] == "worker":
        return "-, the workers' optimizers decide"
    rates = ", ".join(f"{lr:g}" for lr in schedule["lr"]) or "-"
    return f"{rates} (schedule's factor {schedule['factor']:g})"


def staleness(spec: Told) -> str:
    """Word what late pushes are worth, and which are rejected."""
    weights = [
        f"{w['name']}({', '.join(f'{k}={v:g}' for k, v in w.items() if k != 'name')})".replace("()", "")
        for w in spec["weights"]
    ]
    bounds = [
        f"{name} {spec[name]:g}" for name in ("max_staleness", "max_norm") if spec.get(name) is not None
    ]
    return ", ".join([*(weights or ["constant"]), *bounds])


def pushes(run: Told) -> str:
    """Word what became of a run's pushes."""
    tickets = run["tickets"]
    fates = ", ".join(f"{tickets[fate]:,} {fate}" for fate in ("applied", "partial", "dropped"))
    return f"{fates}, {by_reason(run['rejected'])} rejected"


def checkpoints(told: Told) -> str:
    """Word where a server's checkpoints are, and how old the newest is."""
    newest = "none written yet"  # by this server: the one that it went on from does not count
    if told["version"] is not None:
        newest = f"the newest of version {told['version']:,}, {duration(told['age_s'])} ago"
    failed = "" if told["failed"] is None else f"; the last one failed: {told['failed']}"
    return f"in {told['directory']}, {newest}{failed}"


def gone(departures: Sequence[Told], workers: Sequence[Told]) -> list[Told]:
    """Tell who has gone, oldest first; a worker that was lost and is back has not."""
    present = {worker["incarnation"] for worker in workers if worker["state"] in PRESENT}
    return [d for d in departures if d["state"] != "lost" or d["incarnation"] not in present]


def first_to_see(workers: Sequence[Told]) -> list[Told]:
    """Put first what may want a hand; of those in one state it is as they came."""
    return sorted(workers, key=lambda worker: ORDER.index(worker["state"]))


def by_reason(rejected: Mapping[str, int]) -> str:
    """Word how many pushes were rejected, and why."""
    total = sum(rejected.values())
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(rejected.items()) if n)
    return f"{total:,} ({reasons})" if total else "0"


def duration(seconds: float) -> str:
    """Word a time that has passed."""
    minutes, hours = divmod(int(seconds), 60)[0], int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.1f} s"


def plain(text: str) -> str:
    """Show what moves a cursor, or makes a line of its own, as its code: names come from others."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Set rows in columns; the first `left` are set left, the others right."""
    if not rows:
        return ""
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
