"""Saying why something waits, once it has waited for some seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offbeat import process

__all__ = ["LONG_S", "Waits", "telling"]

LONG_S = 10.0
"""A wait for other members that is longer than this is told of; less is ordinary training."""


@contextmanager
def telling(
    text: str | Callable[[], str | None] | None,
    *,
    after_s: float,
    tell: Callable[[str], None] = process.warn,
) -> Iterator[None]:
    """Say why this waits, if it does for so long.

    Args:
        text: What to say, or what finds that out, on a thread of its own; None: there is nothing to say.
        after_s: Seconds of waiting before it is said.
        tell: Says it.
    """
    if text is None:
        yield
        return
    is_over = threading.Event()

    def say() -> None:
        found = text() if callable(text) else text
        if found is not None and not is_over.is_set():  # as it may be by the time that it is found
            tell(found)

    timer = threading.Timer(after_s, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        is_over.set()
        timer.cancel()


class Waits:
    """Waits for the same others, one after another: those that are unusually long are told of, each once.

    Where all are long, only what takes twice as long as the wait before is news. Waits within a wait, as in
    `flush` for one round after another of those who train on, are that one.
    """

    def __init__(self) -> None:
        """Begin where nothing has been waited for."""
        self._told_s = 0.0
        self._is_in = False

    @contextmanager
    def telling(self, words: Callable[[float], str | None]) -> Iterator[None]:
        """Say why this waits, if it does for long.

        Args:
            words: Makes the text of the seconds that have been waited for by then; None: nothing is said.
        """
        if self._is_in:
            yield
            return
        after_s, since = max(LONG_S, 2.0 * self._told_s), time.monotonic()
        self._is_in = True
        try:
            with telling(lambda: words(after_s), after_s=after_s):
                yield
        finally:
            waited_s = time.monotonic() - since
            self._told_s, self._is_in = waited_s if waited_s >= LONG_S else 0.0, False
