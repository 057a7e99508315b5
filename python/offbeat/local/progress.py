"""What a person sees while `train` runs: one bar per terminal, or a line now and then."""

import fcntl
import os
import sys
from types import TracebackType
from typing import Any, Protocol, Self

from offbeat import log
from offbeat.history import Record
from offbeat.terminal import on_terminal

__all__ = ["Progress", "progress_for"]


class Progress(Protocol):
    """Shows how training goes; a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def advance(self) -> None:
        """One batch is done."""

    def log(self, text: str, record: Record, fates: str) -> None:
        """Show a log line; `fates` says what became of the pushes since the last, if any was rejected."""

    def tell(self, text: str, shown: str) -> None:
        """Show what is no log line, such as a validation; `shown` says it in few words."""


def progress_for(*, asked: bool | None, total: int | None, name: str, source: str | None = None) -> Progress:
    """Choose: a bar on a terminal that has none yet, lines without a terminal, nothing where not asked for.

    Args:
        asked: True for a bar in any case, False for nothing, None to choose.
        total: Batches to come, where known.
        name: Of what trains.
        source: Who a line is from; None: the worker of that name.
    """
    if asked is False:
        return _Silent()
    if asked:
        return _Bar(total, name, None)
    if _in_notebook():
        return _Bar(total, name, None)
    if not on_terminal():
        return _Lines(f"worker {name}" if source is None else source)
    if (os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or "0") != "0":
        return _Silent()
    lock = _terminal_lock()
    return _Silent() if lock is None else _Bar(total, name, lock)


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self) -> None:
        pass

    def log(self, text: str, record: Record, fates: str) -> None:  # noqa: ARG002  of Progress
        log.info("%s", text)

    def tell(self, text: str, shown: str) -> None:  # noqa: ARG002  of Progress
        log.info("%s", text)


class _Lines(_Silent):
    """For a file or a pipe. Goes to the log where one is configured, else to stderr."""

    def __init__(self, source: str) -> None:
        self._source = source

    def log(self, text: str, record: Record, fates: str) -> None:  # noqa: ARG002  of Progress
        log.announce(f"{self._source}: {text}")

    def tell(self, text: str, shown: str) -> None:  # noqa: ARG002  of Progress
        log.announce(f"{self._source}: {text}")


class _Bar(_Silent):
    def __init__(self, total: int | None, name: str, lock: int | None) -> None:
        self._total = total
        self._name = name
        self._lock = lock

    def __enter__(self) -> Self:
        from tqdm.auto import tqdm

        class Quiet(tqdm):  # type: ignore[type-arg]
            monitor_interval = 0  # no thread of its own beside the training

        self._bar: Any = Quiet(total=self._total, desc=self._name, unit="batch", dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._lock is not None:
            os.close(self._lock)

    def advance(self) -> None:
        self._bar.update()

    def log(self, text: str, record: Record, fates: str) -> None:
        shown = {name: f"{value:.4g}" for name, value in record.metrics.items()}
        shown["version"] = str(record.version)
        listed = [f"{name}={value}" for name, value in shown.items()]
        self._bar.set_postfix_str(", ".join([*listed, fates] if fates else listed), refresh=False)
        log.info("%s", text)

    def tell(self, text: str, shown: str) -> None:
        self._bar.set_postfix_str(shown)
        log.info("%s", text)


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


def _terminal_lock() -> int | None:
    """Take this terminal for our bar: a descriptor to hold, or None if another process has it."""
    try:
        terminal = os.open(os.ttyname(sys.stderr.fileno()), os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(terminal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # someone else's
        os.close(terminal)
        return None
    return terminal
