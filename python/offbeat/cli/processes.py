"""Processes side by side on one terminal: their output by rank, one bar among them, and one end for all."""

import contextlib
import fcntl
import itertools
import os
import queue
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from offbeat.cli.copying import READER_S, Copy, Output
from offbeat.cli.say import descriptor, write_all
from offbeat.cli.signals import Signals, Stopped

__all__ = ["Ended", "Processes"]

GRACE_S = 5.0
"""Time between asking a process to end, and asking less politely."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended.

    Attributes:
        rank: Which one.
        order: How many ended before it.
        code: Its exit code; -n if signal n ended it.
    """

    rank: int
    order: int
    code: int
    errors: Copy

    @property
    def last_line(self) -> str:
        """The last it wrote to stderr, which of an exception is what happened; if that is known yet."""
        return self.errors.last_line if self.errors.is_done.is_set() else ""


class Processes:
    """Runs one command several times; used as a context manager, at whose end none of them is left."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        signals: Signals,
        *,
        first_rank: int = 0,
    ) -> None:
        self._command = command
        self._environments = environments
        self._signals = signals
        self._first_rank = first_rank
        self._processes: list[subprocess.Popen[bytes]] = []
        self._followers: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        # Not by Python's own streams: a write that waits would hold the lock of whatever we say.
        self._copies: list[Copy] = []
        out, err = descriptor(sys.stdout), descriptor(sys.stderr)
        self._out = Output(partial(write_all, 1 if out is None else out))
        self._err = Output(partial(write_all, 2 if err is None else err))
        self._order = itertools.count()
        self._width = len(str(first_rank + len(environments) - 1))

    def __enter__(self) -> Self:
        """Start them all."""
        try:
            for index, environment in enumerate(self._environments):
                self._start(index, environment)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def lost_output(self) -> OSError | None:
        """Why some of the workers' output is lost, if it is."""
        lost = self._out.lost
        return lost and OSError(lost.errno, lost.strerror, "stdout")

    def finish_output(self) -> None:
        """Wait until all is copied that they wrote, however slowly somebody reads it, or until a signal."""
        self._signals.forget()  # one that came before this was for work that has ended
        with contextlib.suppress(Stopped), self._signals.raised():
            for copy in self._copies:
                copy.is_done.wait()
            self._err.drop_bar()

    def say(self, text: str) -> None:
        """Write a line of our own to stderr, above the bar if there is one."""
        self._err.write(b"offbeat: ", f"{text}\n".encode())

    def kill(self) -> None:
        """End all that still run at once."""
        self._signal(signal.SIGKILL)

    def as_they_end(self) -> Iterator[Ended]:
        """Give each as it ends, until all have."""
        for _ in self._processes:
            yield self._ended.get()

    def _start(self, index: int, environment: Mapping[str, str]) -> None:
        # Only the first gets a terminal, so that it alone shows a bar.
        has_terminal = index == 0 and os.isatty(2)
        errors, errors_to = _terminal(reserve=self._width + 3) if has_terminal else os.pipe()
        out, out_to = os.pipe()
        rank = self._first_rank + index
        prefix = f"[{rank:{self._width}}] ".encode()
        copies = Copy(out, self._out, prefix), Copy(errors, self._err, prefix)
        try:
            process = subprocess.Popen(  # noqa: S603  the user's own script
                self._command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out_to,
                stderr=errors_to,
                process_group=0,  # a process of its own and its data loaders: signals come from us, once
            )
        finally:
            os.close(out_to)
            os.close(errors_to)
        self._processes.append(process)
        self._copies += copies
        follower = threading.Thread(target=self._follow, args=(rank, process, *copies), daemon=True)
        follower.start()
        self._followers.append(follower)

    def _follow(self, rank: int, process: "subprocess.Popen[bytes]", out: "Copy", errors: "Copy") -> None:
        code = process.wait()
        order = next(self._order)
        for copy in (out, errors):
            copy.process_has_ended()
        deadline = time.monotonic() + READER_S
        for copy in (out, errors):  # whoever reads more slowly than that is waited for at the end
            copy.is_done.wait(max(0.0, deadline - time.monotonic()))
        self._ended.put(Ended(rank, order, code, errors))
        if rank == self._first_rank:
            self._err.drop_bar()

    def _end(self) -> None:
        """End what still runs: SIGINT, so that Python code cleans up; then SIGTERM; then SIGKILL."""
        running = self._signal(signal.SIGINT)
        if running:
            self._signals.forget()  # of two at once the other one asks for the same
        try:
            with self._signals.raised():  # one more kills at once
                if running:
                    workers = "1 worker" if len(running) == 1 else f"{len(running)} workers"
                    self.say(f"ending {workers}; Ctrl-C ends them at once")
                _wait(running)
                _wait(self._signal(signal.SIGTERM))
        finally:
            killed = self._signal(signal.SIGKILL)
            with self._signals.raised():  # the system may not let go of one; nobody may read what they wrote
                for process in killed:
                    process.wait()
                for follower in self._followers:
                    follower.join()

    def _signal(self, number: signal.Signals) -> list["subprocess.Popen[bytes]"]:
        """Signal those that still run, with all that belongs to them, and list them."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        return running


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _terminal(*, reserve: int) -> tuple[int, int]:
    """Open a terminal as wide as ours, less what the prefix takes."""
    ours, theirs = os.openpty()
    size = os.get_terminal_size(2)
    fcntl.ioctl(
        theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, max(1, size.columns - reserve), 0, 0)
    )
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # bytes as they are: no carriage return before each line feed
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    return ours, theirs
