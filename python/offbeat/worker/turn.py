"""One thread at a time in a worker: two would mix their gradients on one module."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from offbeat.errors import StateError

__all__ = ["one_thread"]

F = TypeVar("F", bound=Callable[..., Any])


def one_thread(method: F) -> F:
    """Let a method refuse what comes while another thread is in one; its object has the lock, `_turn`.

    That is an RLock: the thread that is in may come again, as with a metric that evaluates.

    Raises:
        StateError: From the method made; nothing was done.
    """

    @wraps(method)
    def alone(self: Any, *args: object, **keywords: object) -> object:  # noqa: ANN401  whatever has a turn
        turn = self._turn
        if not turn.acquire(blocking=False):
            raise StateError(
                f"another thread is in a call of this worker, and {method.__name__}() would mix its "
                f"gradients with that thread's: use a worker from one thread, or make one for each"
            )
        try:
            return method(self, *args, **keywords)
        finally:
            turn.release()

    return cast(F, alone)
