"""SIGTERM, as schedulers and containers send it: what is waited for stops, and the process ends well."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["TERMINATED", "Terminated", "noting_sigterm", "stopping_on_sigterm"]

TERMINATED = 128 + signal.SIGTERM
"""The exit code of what SIGTERM has ended before it was done, as of a process that the signal itself ends."""


class _Terminated(SystemExit):
    """SIGTERM came while something was being waited for."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
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


class Terminated:
    """Whether SIGTERM has come.

    Attributes:
        has_come: So.
    """

    def __init__(self) -> None:
        self.has_come = False


@contextmanager
def noting_sigterm() -> Iterator[Terminated]:
    """Take note of SIGTERM where work has places at which it can end; a second one ends the process at once.

    One that came too late for these ends the process when the work is done. Only on the main thread, and
    unless the signal has another handler: else nothing is noted.

    Raises:
        SystemExit: With code 143, where it came and the work ended as if it had not.
    """
    noted = Terminated()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        noted.has_come = True
        signal.signal(number, signal.SIG_DFL)

    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield noted
        return
    signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        if signal.getsignal(signal.SIGTERM) is note:  # else it was taken since
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if noted.has_come:
        raise SystemExit(TERMINATED)
