"""SIGTERM, as schedulers and containers send it: what is waited for stops, and the process ends well."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

__all__ = ["TERMINATED", "Terminated", "is_noted", "noting_sigterm", "stopping_on_sigterm"]

TERMINATED = 128 + signal.SIGTERM
"""The exit code of what SIGTERM has ended before it was done, as of a process that the signal itself ends."""


ECHO_S = 0.25
"""Within which another SIGTERM is the same one: of a killed launch, workers get one for each thread."""


SET_BY_LAUNCH = ("OFFBEAT_SERVER", "LOCAL_RANK")
"""Variables that are set, both, in workers of `offbeat launch`."""


class _Terminated(SystemExit):
    """SIGTERM came while something was being waited for."""


def _let_echoes_pass(number: int) -> None:
    """Take no notice of the signal for a moment; its handler is to be set after this."""
    signal.signal(number, signal.SIG_IGN)
    time.sleep(ECHO_S)  # noqa: TID251  nothing tells that no more are to come


def _let_workers_go() -> None:
    """Raise no more, wherever this thread is, that a worker of torch's loaders has gone.

    Who sends the signal to a whole group has ended them as well, and what is under way needs them no more.
    The handler stays so: this process is about to end, and torch would tell of them until it has.
    """
    theirs = signal.getsignal(signal.SIGCHLD)
    if not callable(theirs):
        return

    def hear(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            theirs(number, frame)

    signal.signal(signal.SIGCHLD, hear)


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


class Terminated:
    """Whether SIGTERM has come.

    Attributes:
        has_come: So.
    """

    def __init__(self) -> None:
        self.has_come = False


_noted: list[Terminated] = []
"""Of the work that takes note of it now."""


def is_noted() -> bool:
    """Tell whether work in this process is to end at its next place: what holds it up lets it go on there."""
    return any(noted.has_come for noted in _noted)


@contextmanager
def noting_sigterm() -> Iterator[Terminated]:
    """Take note of SIGTERM where work has places at which it can end; under `offbeat launch` of SIGINT, too.

    For that is how it passes SIGTERM on, and who presses Ctrl-C there asks the same. A second one, a moment
    later, ends the process at once. One that came too late for these places ends it when the work is done.
    A process that is forked meanwhile has none of these places, and takes the signal as usual.
    Only on the main thread, and unless the signal has another handler: else nothing is noted.

    Raises:
        SystemExit: With code 143, where it came and the work ended as if it had not.
    """
    noted = Terminated()
    asked: dict[signal.Signals, object] = {signal.SIGTERM: signal.SIG_DFL}
    if all(name in os.environ for name in SET_BY_LAUNCH):
        asked[signal.SIGINT] = signal.default_int_handler
    on_main = threading.current_thread() is threading.main_thread()
    usual: dict[int, Any] = {n: h for n, h in asked.items() if on_main and signal.getsignal(n) is h}

    pid = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != pid:  # a forked child has inherited this, and nobody there looks at what is noted
            signal.signal(number, usual[number])
            os.kill(os.getpid(), number)
            return
        noted.has_come = True
        _let_workers_go()
        _let_echoes_pass(number)
        signal.signal(number, usual[number])

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
    if noted.has_come:
        raise SystemExit(TERMINATED)
