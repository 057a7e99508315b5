"""What is lost where a process ends well and something was not called: warned of then, when it is certain."""

from typing import Protocol

from offbeat import process

__all__ = ["Leaves", "forget", "remember", "tell_at_end_of_block", "warn_of_forgotten", "with_something_left"]


class Leaves(Protocol):
    """Knows what is left of something, and holds nothing else: it outlives what it is about."""

    def _warn_of_forgotten(self, what_ends: str = "process") -> None:
        """Warn of what is left, if anything is, and if it is this process's."""


with_something_left: "set[Leaves]" = set()
"""Also of what nobody holds any more: a script's end is often a function's."""


def remember(one: Leaves) -> None:
    """Have it warn at the process's end, unless that is a failure, which says so itself."""
    with_something_left.add(one)
    process.at_end(warn_of_forgotten)


def forget(one: Leaves) -> None:
    """Take note that what is left is accounted for."""
    with_something_left.discard(one)


def tell_at_end_of_block(one: Leaves, failure: BaseException | None) -> None:
    """Let one warn of what is left as its `with` block ends, unless that is by a failure."""
    if process.failure_in(failure) is None and one in with_something_left:
        one._warn_of_forgotten("with block")  # noqa: SLF001  likewise


def warn_of_forgotten(failure: BaseException | None) -> None:
    """Let all warn that have something left, as the process ends."""
    for one in list(with_something_left) if failure is None else ():
        one._warn_of_forgotten()  # noqa: SLF001  which is for this alone
