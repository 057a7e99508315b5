"""SIGTERM, as schedulers and containers send it, and Ctrl-C: what is under way stops and ends well."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

__all__ = ["TERMINATED", "BrokenOff", "Terminated", "is_noted", "noting_signals", "stopping_on_sigterm"]

TERMINATED = 128 + signal.SIGTERM
"""The exit code of what SIGTERM has ended before it was done, as of a process that the signal itself ends."""


ECHO_S = 0.25
"""Within which another SIGTERM is the same one: of a killed launch, workers get one for each thread."""


SET_BY_LAUNCH = ("OFFBEAT_SERVER", "LOCAL_RANK")
"""Variables that are set, both, in workers of `offbeat launch`."""

CTRL_C_NOTED = (
    "offbeat: Ctrl-C: training ends after the step under way, and is saved; Ctrl-C once more ends it without "
    "that, when a checkpoint that is being written is\n"
)
"""Who pressed it, and sees that nothing ends for a while, is told at once."""


class _Terminated(SystemExit):
    """SIGTERM came while something was being waited for."""


def _let_echoes_pass(number: int) -> None:
    """Take no notice of the signal for a moment; its handler is to be set after this."""
    signal.signal(number, signal.SIG_IGN)
    time.sleep(ECHO_S)  # noqa: TID251  nothing tells that no more are to come


def _let_workers_go() -> Any:  # noqa: ANN401  of the signal module
    """Raise no more, wherever this thread is, that a worker of torch's loaders has gone.

    Who sends the signal to a whole group has ended them as well, and what is under way needs them no more.
    Where this process is about to end the handler stays so, as torch would tell of them until it has.

    Returns:
        The handler that it had.
    """
    theirs = signal.getsignal(signal.SIGCHLD)
    if not callable(theirs):
        return theirs

    def hear(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            theirs(number, frame)

    signal.signal(signal.SIGCHLD, hear)
    return theirs


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    _let_echoes_pass(number)
    signal.signal(number, _terminate)
    raise _Terminated(0)


@contextmanager
def stopping_on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM stop what is waited for and end the process with code 0, unless it has another handler."""
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except _Terminated:
        stop()
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class BrokenOff(BaseException):
    """A signal came in a wait that it is to end; who has asked for that says how the work ends."""


class Terminated:
    """Whether a signal has come that is to end the work.

    Attributes:
        has_come: So.
        is_ctrl_c: The first was Ctrl-C, which ends no process that catches `KeyboardInterrupt`.
    """

    def __init__(self) -> None:
        self.has_come = self.is_ctrl_c = False
        self._breaks_off = False

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Let a signal end a wait in here, wherever it comes.

        Raises:
            BrokenOff: Where one comes, or has come.
        """
        try:
            self._breaks_off = True
            if self.has_come:
                raise BrokenOff
            yield
        finally:
            self._breaks_off = False

    def note(self, *, is_ctrl_c: bool) -> None:
        """Take note of the first that has come."""
        self.has_come, self.is_ctrl_c = True, is_ctrl_c

    def break_off(self) -> None:
        """End the wait that one ends, if there is one.

        Raises:
            BrokenOff: So.
        """
        breaks_off, self._breaks_off = self._breaks_off, False
        if breaks_off:
            raise BrokenOff

    def end(self) -> BaseException:
        """Give what is to be raised when the work has ended."""
        return KeyboardInterrupt() if self.is_ctrl_c else SystemExit(TERMINATED)


_noted: list[Terminated] = []
"""Of the work that takes note of it now."""


def is_noted() -> bool:
    """Tell whether work in this process is to end at its next place: what holds it up lets it go on there."""
    return any(noted.has_come for noted in _noted)


@contextmanager
def noting_signals() -> Iterator[Terminated]:
    """Take note of SIGTERM and Ctrl-C where work has places at which it can end.

    Under `offbeat launch` SIGINT is the same as SIGTERM, for that is how it passes this on. A second one, a
    moment later, does as usual at once. One that came too late for these places does when the work is done.
    A process that is forked meanwhile has none of these places, and takes the signal as usual.
    Only on the main thread, and unless the signal has another handler: else nothing is noted.

    Raises:
        SystemExit: With code 143, where SIGTERM came and the work ended as if it had not.
        KeyboardInterrupt: Where Ctrl-C did.
    """
    noted, is_launched = Terminated(), all(map(os.environ.get, SET_BY_LAUNCH))
    asked = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    on_main = threading.current_thread() is threading.main_thread()
    usual: dict[int, Any] = {n: h for n, h in asked.items() if on_main and signal.getsignal(n) is h}

    pid, of_children = os.getpid(), signal.getsignal(signal.SIGCHLD)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal of_children
        del frame
        if os.getpid() != pid:  # a forked child has inherited this, and nobody there looks at what is noted
            signal.signal(number, usual[number])
            os.kill(os.getpid(), number)
            return
        if not noted.has_come:  # what comes first says how it ends: a group may be sent both
            of_children = _let_workers_go()
            noted.note(is_ctrl_c=number == signal.SIGINT and not is_launched)
        if noted.is_ctrl_c:
            with suppress(OSError):  # by no stream: the signal may have come while one was being written to
                os.write(2, CTRL_C_NOTED.encode())
        try:
            _let_echoes_pass(number)
        finally:  # the other signal may come meanwhile, and end the wait from in here
            signal.signal(number, usual[number])
        noted.break_off()

    for number in usual:
        signal.signal(number, note)
    _noted.append(noted)
    try:
        yield noted
    finally:
        _noted.remove(noted)
        for number, handler in usual.items():
            if signal.getsignal(number) is note:  # else it was taken since
                signal.signal(number, handler)
        if noted.is_ctrl_c and callable(of_children):  # for the process may go on
            signal.signal(signal.SIGCHLD, of_children)
    if noted.has_come:
        raise noted.end()
