"""SIGINT, SIGTERM, SIGHUP, for a command that ends in good order: where they break it off, and nowhere else.

A command marks the places that a signal may break off, `with signals.raised()`. There one is raised, as
`Stopped`; what comes anywhere else is kept for the next such place, so that of two signals at once neither
breaks into what the other one has begun. Whoever goes on sending them ends the process all the same.
"""

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from offbeat.cli.say import takes_more

__all__ = ["LOOK_S", "Signals", "Stopped", "handlers", "ignored", "install"]

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The last is of a terminal that is closed, or an ssh that has lost its connection."""

LAST = 3
"""This one of those that are kept ends the process at once: what it waits for, a terminal that somebody has
stopped or a pipe that nobody empties, does not come. Two come from launchers that send theirs twice."""

LOOK_S = 0.1
"""How long the main thread waits at once: it runs the handlers, and a signal that comes to another thread, or
just before the wait, does not wake it."""

Handlers = Mapping[int, Any]
"""What `signal.getsignal` gives, by the signal's number."""


class Stopped(BaseException):
    """A signal asked for an end in good order. No error, so no `except Exception` may take it."""


class Signals:
    """Takes the signals from here on; `install(handlers())`, with those of before, gives them back.

    A SIGHUP that is ignored, as by nohup, stays so; SIGINT a shell ignores for all that it starts with `&`.

    Attributes:
        before_the_last: Called before the process ends at once.
    """

    def __init__(self) -> None:
        self._came: list[str] = []  # and were not raised
        self._to_pass_over = math.inf  # nowhere: all are kept
        self.before_the_last: Callable[[], object] = lambda: None
        kept = [n for n in NUMBERS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        install(dict.fromkeys(kept, self._take))

    def raised(self, *, but_for: int = 0) -> "_Place":
        """Mark a place that a signal may break off.

        Args:
            but_for: How many to pass over before that. Launchers and containers send theirs also to what is
                about to end, and some of them twice.
        """
        return _Place(self, but_for)

    def forget(self) -> None:
        """Drop what was kept: what it asks for is what is done now."""
        self._came.clear()

    def enter(self, but_for: int) -> None:
        """Raise what goes beyond so many, and at once what has gone beyond already.

        Raises:
            Stopped: If more have come.
        """
        self._to_pass_over = but_for
        self._raise_beyond()

    def leave(self) -> None:
        """Keep what comes from here on, and forget what was passed over."""
        if math.isfinite(self._to_pass_over):  # else one was raised, and what has come since is kept
            passed_over = len(self._came)
            self._to_pass_over = math.inf
            del self._came[:passed_over]

    def _raise_beyond(self) -> None:
        if len(self._came) > self._to_pass_over:
            stopped = Stopped(self._came[-1])
            self._came, self._to_pass_over = [], math.inf
            raise stopped

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        self._came.append(name)
        if math.isinf(self._to_pass_over):
            if len(self._came) >= LAST:
                self.before_the_last()
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._raise_beyond()
        # Ctrl-C ends the reader of a pipe, too, and the model is to be saved all the same.
        with suppress(OSError):
            # Not by print, which may be what the signal has interrupted; and without waiting for a reader.
            if takes_more(sys.stderr):
                os.write(2, f"offbeat: {name}, and this ends already; one more breaks that off\n".encode())


@dataclass(frozen=True, slots=True)
class _Place:
    # No generator: one that a signal breaks off as it is entered ends whenever it is collected.
    signals: Signals
    but_for: int

    def __enter__(self) -> None:
        self.signals.enter(self.but_for)

    def __exit__(self, *_: object) -> None:
        self.signals.leave()


def handlers() -> Handlers:
    """Give those that there are."""
    return {number: signal.getsignal(number) for number in NUMBERS}


def ignored() -> Handlers:
    """Give those of a process whose exit code stands; Python's own would be gone before it is."""
    return dict.fromkeys(NUMBERS, signal.SIG_IGN)


def install(wanted: Handlers) -> None:
    """Let these be the handlers. Only the main thread may change one, and none can give back one of C."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in wanted.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
