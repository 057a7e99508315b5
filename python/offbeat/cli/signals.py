"""SIGINT and SIGTERM, for a command that ends in good order: where they break it off, and nowhere else.

A command marks the places that a signal may break off, `with signals.raised()`. There one is raised, as
`Stopped`; what comes anywhere else is kept for the next such place. So what is to be done to its end needs no
care, and of two signals at once neither breaks into what the other one has begun.
"""

import math
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["Signals", "Stopped", "handlers", "ignored", "install"]

NUMBERS = (signal.SIGINT, signal.SIGTERM)

Handlers = Mapping[int, Any]
"""What `signal.getsignal` gives, by the signal's number."""


class Stopped(BaseException):
    """SIGINT or SIGTERM asked for an end in good order. No error, so no `except Exception` may take it."""


class Signals:
    """Takes SIGINT and SIGTERM from here on; `install(handlers())`, with those of before, gives them back."""

    def __init__(self) -> None:
        self._came: list[str] = []  # since the last one that was raised
        self._to_pass_over = math.inf
        install(dict.fromkeys(NUMBERS, self._take))

    def raised(self, *, but_for: int = 0) -> "_Place":
        """Mark a place that a signal may break off.

        Args:
            but_for: How many to pass over before that. Launchers and containers send theirs also to what is
                about to end, and some of them twice.
        """
        return _Place(self, but_for)

    def pass_over(self, number: float) -> None:
        """Raise only what goes beyond so many, and at once what has gone beyond already.

        Raises:
            Stopped: If more have come.
        """
        self._to_pass_over = number
        if len(self._came) > self._to_pass_over:
            stopped = Stopped(self._came[-1])
            self._came, self._to_pass_over = [], math.inf
            raise stopped

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        self._came.append(name)
        self.pass_over(self._to_pass_over)
        if math.isfinite(self._to_pass_over):
            # Ctrl-C ends the reader of a pipe, too, and the model is to be saved all the same.
            with suppress(OSError):
                # Not by print, which may be what the signal has interrupted.
                os.write(2, f"offbeat: {name}, and this ends already; one more breaks that off\n".encode())


@dataclass(frozen=True, slots=True)
class _Place:
    # No generator: one that a signal breaks off as it is entered ends whenever it is collected.
    signals: Signals
    but_for: int

    def __enter__(self) -> None:
        self.signals.pass_over(self.but_for)

    def __exit__(self, *_: object) -> None:
        self.signals.pass_over(math.inf)


def handlers() -> Handlers:
    """Give those that there are."""
    return {number: signal.getsignal(number) for number in NUMBERS}


def ignored() -> Handlers:
    """Give those of a process whose exit code stands; Python's own would be gone before it is."""
    return dict.fromkeys(NUMBERS, signal.SIG_IGN)


def install(wanted: Handlers) -> None:
    """Let these be the handlers; only the main thread may change one."""
    for number, handler in wanted.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
