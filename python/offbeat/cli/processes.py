"""Processes side by side on one terminal: their output by rank, one bar among them, and one end for all."""

import contextlib
import fcntl
import io
import os
import queue
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self

from offbeat.cli.signals import Signals

__all__ = ["Ended", "Output", "Processes"]

GRACE_S = 5.0
"""Time between asking a process to end, and asking less politely."""

LAST_WORDS_S = 2.0
"""Time for the output of a process that has ended to be read."""

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

    def __init__(self, stream: BinaryIO | io.RawIOBase) -> None:
        self.lost: OSError | None = None
        self._stream = stream
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
            while text:
                text = text[self._stream.write(text) :]
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
        self._out = Output(open(1, "wb", buffering=0, closefd=False))  # noqa: SIM115  it closes nothing
        self._err = Output(open(2, "wb", buffering=0, closefd=False))  # noqa: SIM115
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
        # Children that it left behind may hold the other ends, and are not waited for.
        out.join(LAST_WORDS_S)
        errors.join(LAST_WORDS_S)
        if rank == self._first_rank:
            self._err.drop_bar()
        self._ended.put(Ended(rank, code, errors.last_line))

    def _end(self) -> None:
        """End what still runs: SIGINT, so that Python code cleans up; then SIGTERM; then SIGKILL."""
        running = self._signal(signal.SIGINT)
        self._signals.forget()  # of two at once the other one asks for the same
        try:
            with self._signals.raised():  # one more kills at once
                if running:
                    workers = "1 worker" if len(running) == 1 else f"{len(running)} workers"
                    self._err.write(b"offbeat: ", f"ending {workers}; Ctrl-C ends them at once\n".encode())
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
        self.start()

    def run(self) -> None:
        rest = b""
        while chunk := _read(self._descriptor):
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
