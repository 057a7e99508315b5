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
from types import TracebackType
from typing import Self

from offbeat.cli.background import Background
from offbeat.cli.copying import READER_S, Copy, Output
from offbeat.cli.signals import LOOK_S, Signals, Stopped

__all__ = ["Ended", "Processes"]

UNKNOWN = 1
"""An exit code that nobody knows: that such a process has not failed would be the worse guess."""

GRACE_S = 5.0
"""Time between asking a process to end, and asking less politely."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended.

    Attributes:
        rank: Which one.
        order: How many ended before it.
        code: Its exit code; -n if signal n ended it; `UNKNOWN` if something else here has taken it.
        was_asked: Whether it had been asked to end by then.
        errors: What copies its stderr.
    """

    rank: int
    order: int
    code: int
    was_asked: bool
    errors: Copy

    def last_line_if_known(self) -> str:
        """The last it wrote to stderr, which of an exception is what happened; a slow reader holds it up."""
        return self.errors.last_line if self.errors.is_done.is_set() else ""


class Processes:
    """Runs one command several times; used as a context manager, at whose end none of them is left.

    They are ended by SIGINT. The tracebacks that Python prints of that are not copied, unless
    `shows_interrupts`: of several processes they would hide what each says of its end.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        signals: Signals,
        background: Background,
        *,
        first_rank: int = 0,
        shows_interrupts: bool = False,
    ) -> None:
        self._command = command
        self._environments = environments
        self._signals = signals
        self._first_rank = first_rank
        self._shows_interrupts = shows_interrupts
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_ending = False
        self._at_last = contextlib.ExitStack()
        self._ends = threading.Condition()  # by its RLock, since a signal's handler kills, too
        self._followers: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._copies: list[Copy] = []
        self._out = Output.to(sys.stdout, 1, beside=(sys.stderr, background.output))
        self._err = background.output
        self._background = background
        self._order = itertools.count()
        self._width = len(str(first_rank + len(environments) - 1))

    def __enter__(self) -> Self:
        """Start them all."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # As some daemons leave it to what they start: the system forgets exit codes.
            self._at_last.callback(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            for index, environment in enumerate(self._environments):
                self._start(index, environment)
        except BaseException:
            with self._at_last, contextlib.suppress(Stopped):  # it hides no error
                self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._at_last:
            self._end()

    @property
    def lost_output(self) -> OSError | None:
        """Why some of the workers' output is lost, if it is."""
        lost = self._out.lost
        return lost and OSError(lost.errno, lost.strerror, "stdout")

    def finish_output(self) -> None:
        """Wait until all is copied that they wrote, however slowly somebody reads it.

        Raises:
            Stopped: At a signal.
        """
        self._signals.forget()  # one that came before this was for work that has ended
        with self._signals.raised():
            for copy in self._copies:
                while not copy.is_done.wait(LOOK_S):
                    pass
            self._err.drop_bar()

    def kill(self) -> None:
        """End all that still run at once."""
        self._signal(signal.SIGKILL)

    def as_they_end(self) -> Iterator[Ended]:
        """Give each as it ends, until all have."""
        for _ in self._followers:
            ended = None
            while ended is None:
                with contextlib.suppress(queue.Empty):
                    ended = self._ended.get(timeout=LOOK_S)
            yield ended

    def left_over(self) -> Iterator[Ended]:
        """Give those that have ended and were not given."""
        while not self._ended.empty():
            yield self._ended.get()

    def _start(self, index: int, environment: Mapping[str, str]) -> None:
        # Only the first gets a terminal, so that it alone shows a bar.
        has_terminal = index == 0 and os.isatty(2)
        errors, errors_to = _terminal(reserve=self._width + 3) if has_terminal else os.pipe()
        out, out_to = os.pipe()
        rank = self._first_rank + index
        prefix = f"[{rank:{self._width}}] ".encode()
        is_first = index == 0  # there is one line at the bottom, and in a file none
        copies = [
            Copy(
                number,
                output,
                prefix,
                has_bar=is_first and output.is_terminal,
                is_interrupted=lambda: self._is_ending and not self._shows_interrupts,
            )
            for number, output in ((out, self._out), (errors, self._err))
        ]
        try:
            process = subprocess.Popen(  # noqa: S603  the user's own script
                self._command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out_to,
                stderr=errors_to,
                process_group=0,  # a process of its own and its data loaders: signals come from us, once
            )
        except BaseException:
            for copy in copies:
                copy.process_has_ended()
            raise
        finally:
            os.close(out_to)
            os.close(errors_to)
        self._running.add(process)
        self._copies += copies
        follower = threading.Thread(target=self._follow, args=(rank, process, *copies), daemon=True)
        follower.start()
        self._followers.append(follower)

    def _follow(self, rank: int, process: "subprocess.Popen[bytes]", out: "Copy", errors: "Copy") -> None:
        is_ours = True
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            is_ours = False  # something else has waited for it: its number may be another's
        for copy in (out, errors):
            copy.process_has_ended()
        with self._ends:  # its number is its group's, and no other's, until it is waited for
            if self._is_ending and is_ours:
                _signal_group(process, signal.SIGKILL)
            is_known = is_ours or process.returncode is not None
            code = process.wait()  # 0 where it is not known
            order, was_asked = next(self._order), self._is_ending
            self._running.remove(process)
            self._ends.notify_all()
        deadline = time.monotonic() + READER_S
        for copy in (out, errors):  # whoever reads more slowly than that is waited for at the end
            copy.is_done.wait(max(0.0, deadline - time.monotonic()))
        if rank == self._first_rank:
            self._background.drop_bar()
        self._ended.put(Ended(rank, order, code if is_known else UNKNOWN, was_asked, errors))

    def _end(self) -> None:
        """End what still runs: SIGINT, so that Python code cleans up; then SIGTERM; then SIGKILL.

        Of one that has ended by then, what it has left in its group is killed.
        """
        self._is_ending = True
        running = self._signal(signal.SIGINT)
        if running:
            self._signals.forget()  # of two at once the other one asks for the same
        try:
            with self._signals.raised():  # one more kills at once
                if running:
                    workers = "1 worker" if running == 1 else f"{running} workers"
                    self._background.say(f"ending {workers}; Ctrl-C ends them at once")
                    self._wait()
                    self._signal(signal.SIGTERM)
                    self._wait()
        finally:
            self._signal(signal.SIGKILL)
            with self._signals.raised():  # the system may not let go of one; nobody may read what they wrote
                for follower in self._followers:
                    while follower.is_alive():
                        follower.join(LOOK_S)

    def _signal(self, number: signal.Signals) -> int:
        """Signal those that still run, with all that belongs to them, and count them."""
        with self._ends:
            for process in self._running:
                _signal_group(process, number)
            return len(self._running)

    def _wait(self) -> None:
        with self._ends:
            self._ends.wait_for(lambda: not self._running, GRACE_S)


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _terminal(*, reserve: int) -> tuple[int, int]:
    """Open a terminal as wide as ours, less what the prefix takes."""
    ours, theirs = os.openpty()
    size = os.get_terminal_size(2)
    columns = size.columns and max(1, size.columns - reserve)  # 0 is a size that nobody knows
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, columns, 0, 0))
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # bytes as they are: no carriage return before each line feed
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    return ours, theirs
