"""What `offbeat checkpoint inspect` tells people: of one checkpoint, or of all in a directory."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from offbeat.cli.wording import (
    Told,
    by_reason,
    columns,
    learning_rate,
    model,
    optimizer,
    plain,
    pushes,
    staleness,
)

__all__ = ["report"]


def report(told: Told, path: Path) -> str:
    """Word what was found at a path."""
    return _directory(told, path) if told["kind"] == "directory" else _checkpoint(told)


def _directory(told: Told, path: Path) -> str:
    entries = told["checkpoints"]
    lines = [_heading(len(entries), path)]
    if entries:
        head = ["checkpoint", "file time", "run", "version", "term", "samples", "size"]
        lines += ["", columns([head, *map(_row, entries)], left=3), ""]
    lines += [entry["error"] for entry in entries if entry["error"] is not None]
    if told["set_aside"]:
        lines.append(f"set aside: {', '.join(told['set_aside'])}")
    if told["refusal"] is not None:
        lines.append(f"a server would not start here: {told['refusal']}")
    elif told["next"] is not None:
        lines.append(
            f"a server would go on from {told['next']}, if its files hold what was written: "
            f"`offbeat checkpoint verify` reads them"
        )
    return "\n".join(plain(line) for text in lines for line in text.split("\n"))


def _heading(num_checkpoints: int, path: Path) -> str:
    match num_checkpoints:
        case 0:
            return f"no checkpoint yet in {path}"
        case 1:
            return f"1 checkpoint in {path}"
        case _:
            return f"{num_checkpoints} checkpoints in {path}, newest first"


def _row(entry: Told) -> Sequence[str]:
    told = entry["checkpoint"]
    if told is None:
        return [entry["name"], "gone" if entry["is_gone"] else "cannot be used", *"-----"]
    return [
        entry["name"],
        _when(told["written_unix_s"]),
        told["run_id"],
        _version(told),
        f"{told['term']:,}",
        f"{told['samples']:,}",
        _size(told["bytes"]),
    ]


def _version(told: Told) -> str:
    again = told["gone_back_to"]
    return f"{told['version']:,}" + (f" ({again:,} again)" if again is not None else "")


def _checkpoint(told: Told) -> str:
    time = _when(told["written_unix_s"])
    files = ", ".join(f"{file['name']} {_size(file['bytes'])}" for file in told["files"])
    lines = {
        "checkpoint": f"{told['name']}, file time {time}, by Offbeat {told['offbeat']}",
        "run": f"{told['run_id']}, at port {told['port']}",
        "values": f"of version {told['gone_back_to']:,}, to which the run was brought back"
        if told["gone_back_to"] is not None
        else None,
        "model": model(told),
        "optimizer": optimizer(told),
        "learning rate": learning_rate(told) if told["schedule"] is not None else "-",
        "staleness": staleness(told["staleness"]) if told["staleness"] is not None else "-",
        "transaction": told["transaction"],
        "pushes carry": _contribution(told),
        "pushes": pushes(told),
        "tensors": f"{told['num_tensors']:,}, with {told['num_parameters']:,} parameters and "
        f"{told['num_buffer_elements']:,} numbers in buffers",
        "files": f"{files}; {_size(told['bytes'])} in all",
    }
    parts = [
        columns([[name, value] for name, value in lines.items() if value is not None], left=2),
        _workers(told["workers"]),
        _unfinished(told["workers"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _contribution(told: Told) -> str:
    if told["contribution"] is None:
        return "nothing yet"
    return f"{told['contribution']}s, as fixed by {told['contribution_of']}"


def _workers(workers: Sequence[Told]) -> str:
    if not workers:
        return "no worker had joined"
    head = ["worker", "state", "incarnation", "last push", "pushes", "applied", "samples", "rejected"]
    rows = [
        [
            worker["id"],
            "there" if worker["present"] else "departed",
            f"{worker['incarnation']}",
            f"{worker['last_push']:,}",
            f"{worker['pushes']:,}",
            f"{worker['applied']:,}",
            f"{worker['samples']:,}",
            by_reason(worker["rejected"]),
        ]
        for worker in workers
    ]
    return columns([head, *rows], left=2)


def _unfinished(workers: Sequence[Told]) -> str:
    """Name the pushes that were under way: their retries would be finished."""
    return "\n".join(
        plain(
            f"unfinished: push {push['push']} of {worker['id']}, ticket {push['ticket']}, "
            f"{push['samples']} samples; {push['num_applied']} of its fragments are applied"
        )
        for worker in workers
        for push in worker["unfinished"]
    )


def _when(unix_s: float | None) -> str:
    """Word the manifest's time, which is that of the writing only where nobody has copied it since."""
    try:
        told = datetime.fromtimestamp(unix_s, UTC) if unix_s is not None else None
    except (OSError, OverflowError, ValueError):  # a file may be given any time
        told = None
    return told.astimezone().strftime("%Y-%m-%d %H:%M:%S") if told is not None else "unknown"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
