"""A wish that training ends: of a callback, a metric, or another thread."""

from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.checks import refuse
from offbeat.errors import StateError

__all__ = ["Stop"]


class Stop:
    """Whether somebody wants that `train` ends, and why.

    Attributes:
        is_wanted: Since `train` began.
        reason: In the words of who wants it; None: he gave none.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.reason: str | None = None
        self._is_training = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hear wishes in here, each time from the first on."""
        self.is_wanted, self.reason = False, None
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def end(self) -> None:
        """Hear no more wishes: nothing is left to stop."""
        self._is_training = False

    def ask(self, reason: str | None) -> None:
        """Want it; of several the first one's reason counts.

        Raises:
            ConfigError: If the reason is no text.
            StateError: If nothing is trained.
        """
        if reason is not None and not isinstance(reason, str):
            refuse([f"reason is {reason!r:.100}: give text, or nothing"])
        if not self._is_training:
            raise StateError(
                "stop() was called outside of train(), or at its end, and there is nothing to stop: call it "
                "in a callback, or in another thread while train() runs"
            )
        if not self.is_wanted:
            self.reason = reason
            self.is_wanted = True
