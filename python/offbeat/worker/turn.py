"""One thread at a time in a worker: two would mix their gradients on one module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from offbeat.errors import ConnectionLostError, StateError

if TYPE_CHECKING:
    from threading import RLock

__all__ = ["AFTER_A_LOSS", "one_thread", "whole_turn"]

F = TypeVar("F", bound=Callable[..., Any])

AFTER_A_LOSS = (
    ". This worker cannot go on, and worker.model keeps the parameters last pulled: when a server is there "
    "again, make a new AsyncWorker, with model=worker.model, which a server without a model begins with"
)
"""What to say to who has the worker."""


def one_thread(method: F) -> F:
    """Let a method refuse what comes while another thread is in one; its object has the lock, `_turn`.

    Raises:
        ForkedError, ClosedError: From the method made, if the object may not be used here any more.
        StateError: From the method made; nothing was done.
        ConnectionLostError: From the method made, with what to do then.
    """

    @wraps(method)
    def alone(self: Any, *args: object, **keywords: object) -> object:  # noqa: ANN401  whatever has a turn
        self._usable()  # first: in a forked child the turn stays with a thread that is not there
        with whole_turn(self._turn, f"{method.__name__}()"):
            try:
                return method(self, *args, **keywords)
            except ConnectionLostError as error:
                # A server that was stopped has said so. Once: a method may have been called by another.
                if type(error) is ConnectionLostError and AFTER_A_LOSS not in str(error):
                    error.args = (f"{error}{AFTER_A_LOSS}",)
                raise

    return cast(F, alone)


@contextmanager
def whole_turn(turn: "RLock", call: str) -> "Iterator[None]":
    """Keep other threads out; the one that is in may come again, as with a metric that evaluates.

    Raises:
        StateError: If another thread is in.
    """
    if not turn.acquire(blocking=False):
        raise StateError(
            f"another thread is in a call of this worker, and {call} would mix its gradients with that "
            f"thread's: use a worker from one thread, or make one for each"
        )
    try:
        yield
    finally:
        turn.release()
