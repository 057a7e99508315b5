"""One `train` of a trainer at a time: a second one would take its optimizer, counts and history from it."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from offbeat.errors import StateError

__all__ = ["alone", "one_at_a_time", "see_alone"]

P = ParamSpec("P")
R = TypeVar("R")

_at_work: "weakref.WeakSet[Any]" = weakref.WeakSet()  # beside the trainers, which can be copied
_looks = threading.Lock()


def see_alone(trainer: object) -> None:
    """See that no `train` of it is at work.

    Raises:
        StateError: If one is.
    """
    if trainer in _at_work:
        raise StateError(
            "train() was called while a train() of this trainer is at work, as in a callback of it or in "
            "another thread: call it when that has ended; stop() ends it"
        )


@contextmanager
def alone(trainer: object) -> Iterator[None]:
    """Be the one `train` of it in here.

    Raises:
        StateError: If another is.
    """
    with _looks:
        see_alone(trainer)
        _at_work.add(trainer)
    try:
        yield
    finally:
        with _looks:
            _at_work.discard(trainer)


def one_at_a_time(train: Callable[P, R]) -> Callable[P, R]:
    """Let a trainer's `train` be alone."""

    @functools.wraps(train)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        with alone(args[0]):  # whose method it is
            return train(*args, **keywords)

    return checked
