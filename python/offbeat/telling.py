"""Saying why something waits, once it has waited for some seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from offbeat import log

__all__ = ["LONG_S", "Waits", "telling"]

LONG_S = 10.0
"""A wait for other members that is longer than this is told of; less is ordinary training."""


@contextmanager
def telling(
    text: str | Callable[[], str | None] | None,
    *,
    after_s: float,
    tell: Callable[[str], None] = log.warn,
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
    # The thread outlasts the wait a little, and is not to be the last to hold what the text is made from: a
    # process group that it let go of, while Python ends, would end the process with SIGABRT.
    held = [text]

    def say() -> None:
        found = [one() if callable(one) else one for one in held]
        if held and found[0] is not None:  # the wait may be over by the time that it is found
            tell(found[0])

    timer = threading.Timer(after_s, say)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread is to be had, as where Python ends: the wait counts
        timer.start()
    try:
        yield
    finally:
        held.clear()
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
