"""Tracebacks of KeyboardInterrupt, which say nothing where it is known who interrupted, and why."""

import re
from collections.abc import Callable

__all__ = ["Sieve"]

FIRST = b"Traceback (most recent call last):"
LAST = b"KeyboardInterrupt"
BETWEEN = (
    b"",
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
"""What stands between two tracebacks that are told together."""

MOST_LINES = 10_000
"""A longer one is nobody's."""

STYLE = re.compile(rb"\x1b\[[0-9;]*m")


class Sieve:
    """Takes out of the lines of one stream the tracebacks that end in KeyboardInterrupt, and nothing else.

    One that is told with that of another exception, before or after it, is passed on whole, and so is one
    that does not come to its end, or that another process of the stream writes into.

    Args:
        is_closed: Whether they are to be taken out of what comes now.
    """

    def __init__(self, is_closed: Callable[[], bool]) -> None:
        self._is_closed = is_closed
        self._held: list[bytes] = []
        self._num_whole = 0  # of those that are held, the lines of tracebacks that have come to their end
        self._is_inside = False  # of one that has not
        self._belongs = False  # whether a traceback would belong to one that was passed on

    def pass_on(self, line: bytes) -> list[bytes]:
        """Give what is to be written, now that this line has come."""
        text = STYLE.sub(b"", line).rstrip()
        if self._is_inside:
            if text != LAST and not (text.startswith(b" ") and len(self._held) < MOST_LINES):
                return [*self._all(), line]
            self._held.append(line)
            if text == LAST:
                self._num_whole, self._is_inside = len(self._held), False
            return []
        if text == FIRST and self._is_closed() and not self._belongs:
            self._held.append(line)
            self._is_inside = True
            return []
        if self._num_whole and text in BETWEEN and len(self._held) - self._num_whole < len(BETWEEN):
            self._held.append(line)
            return []
        self._belongs = text in BETWEEN[1:] or (self._belongs and not text)
        return [*self.rest(), line]

    def rest(self) -> list[bytes]:
        """Give what is to be written where nothing more comes."""
        if not self._is_inside:
            del self._held[: self._num_whole]
        return self._all()

    def _all(self) -> list[bytes]:
        held, self._held, self._num_whole, self._is_inside = self._held, [], 0, False
        return held
