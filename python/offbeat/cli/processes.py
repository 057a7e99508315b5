"""Processes side by side on one terminal: their output by rank, one bar among them, and one end for all."""

import contextlib
import fcntl
import os
import queue
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from offbeat.cli.say import write_all
from offbeat.cli.signals import Signals

__all__ = ["Ended", "Output", "Processes"]

GRACE_S = 5.0
"""Time between asking a process to end, and asking less politely."""

LAST_WORDS_S = 2.0
"""So long without a byte after a process has ended, only its children can hold what it wrote to."""

CHUNK_BYTES = 65_536
CLEAR_LINE = b"\r\x1b[K"
CONTROL = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended.

    Attributes:
        rank: Which one.
        code: Its exit code; -n if signal n ended it.
        last_line: The last it wrote to stderr, which of an exception is what happened.
    """

    rank: int
    code: int
    last_line: str


class Output:
    """One stream of ours, shared by several processes: whole lines, each with its rank.

    A line that ends in a carriage return is a bar: it stays at the bottom, and other lines go above it.

    Attributes:
        lost: Why some of it could not be written; not that nobody reads it any more.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.lost: OSError | None = None
        self._write_all = write
        self._lock = threading.Lock()
        self._bar = b""

    def write(self, prefix: bytes, line: bytes) -> None:
        """Write a line with its end, a line feed, or a bar with its start, a carriage return."""
        with self._lock:
            is_bar, is_whole = line.startswith(b"\r"), line.endswith(b"\n")
            text = b"\r" + prefix + line[1:] if is_bar else prefix + line
            if is_bar:
                self._bar = b"" if is_whole else text
            elif self._bar and line == b"\n":  # the bar's own end
                text, self._bar = line, b""
            elif self._bar:
                text = CLEAR_LINE + text + self._bar
            self._write(text)

    def drop_bar(self) -> None:
        """Leave the bar where it is, and go on below it."""
        with self._lock:
            if self._bar:
                self._bar = b""
                self._write(b"\n")

    def _write(self, text: bytes) -> None:
        # The work goes on without a reader, or with a full disk.
        try:
            self._write_all(text)
        except BrokenPipeError:
            pass
        except OSError as error:
            self.lost = error


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
        self._out = Output(partial(write_all, sys.stdout.fileno()))
        self._err = Output(partial(write_all, sys.stderr.fileno()))
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
        copies = _Copy(out, self._out, prefix), _Copy(errors, self._err, prefix)
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
        follower = threading.Thread(target=self._follow, args=(rank, process, *copies), daemon=True)
        follower.start()
        self._followers.append(follower)

    def _follow(self, rank: int, process: "subprocess.Popen[bytes]", out: "_Copy", errors: "_Copy") -> None:
        code = process.wait()
        out.finish()
        errors.finish()
        if rank == self._first_rank:
            self._err.drop_bar()
        self._ended.put(Ended(rank, code, errors.last_line))

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


class _Copy(threading.Thread):
    """Copies what a process writes, line by line, until it writes no more; then closes the descriptor.

    Attributes:
        last_line: The last line that said something.
    """

    def __init__(self, descriptor: int, output: Output, prefix: bytes) -> None:
        super().__init__(daemon=True)
        self.last_line = ""
        self._descriptor = descriptor
        self._output = output
        self._prefix = prefix
        self._num_reads = 0
        self._is_reading = False
        self.start()

    def finish(self) -> None:
        """Wait until all is copied that a process which has ended wrote, however slowly it is taken.

        Children that it left behind may hold the other end; what they still write is not waited for.
        """
        num_reads = self._num_reads
        while self.is_alive():
            self.join(LAST_WORDS_S)
            if self._is_reading and self._num_reads == num_reads:
                return
            num_reads = self._num_reads

    def _next(self) -> bytes:
        self._is_reading = True
        chunk = _read(self._descriptor)
        self._is_reading = False
        self._num_reads += 1
        return chunk

    def run(self) -> None:
        rest = b""
        while chunk := self._next():
            *lines, rest = re.split(rb"(?<=\n)|(?=\r(?!\n))", rest + chunk)
            for line in lines:
                self._write(line)
            if rest.startswith(b"\r"):  # a bar as it is now, which the next carriage return replaces
                self._write(rest)
                rest = b""
        if rest:
            self._write(rest + b"\n")
        os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        if line:
            self._output.write(self._prefix, line)
        if said := CONTROL.sub(b"", line).strip():
            self.last_line = said.decode(errors="replace")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, CHUNK_BYTES)
    except OSError:  # how Linux says that a terminal's other side is closed
        return b""


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
