"""What an accumulator has gathered and made no update of: told of where the process ends without `flush`."""

import os

from offbeat import forgotten, log

__all__ = ["Unflushed"]


class Unflushed:
    """The micro-batches of a window that is not full, and the sum that is under way, by their numbers."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._batches = 0
        self._is_under_way = False

    def note(self, batches: int, *, is_under_way: bool) -> None:
        """Take note of what is left after a micro-batch."""
        self._batches, self._is_under_way = batches, is_under_way
        if batches or is_under_way:
            forgotten.remember(self)
        else:
            forgotten.forget(self)

    def end(self) -> None:
        """Take note that what is left is accounted for; until the next micro-batch."""
        forgotten.forget(self)

    def _warn_of_forgotten(self, what_ends: str = "process") -> None:
        if self._pid != os.getpid():
            return
        left = [f"{self._batches} micro-batch(es) that were gathered"] if self._batches else []
        left += ["the window before, whose sum is under way"] if self._is_under_way else []
        log.warn(
            f"no update was made of {', nor of '.join(left)}, and the {what_ends} ends: an accumulator makes "
            f"it in flush(), which every member calls before that, when its data is at its end; close() "
            f"before that tells that none is meant"
        )
