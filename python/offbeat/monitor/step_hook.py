"""One hook before each optimizer's step, for all who want one.

Whoever has one may be closed within a step, by a callback, or be collected there, where nobody holds it any
more. Among a user's own hooks on every optimizer this one stands where the first who asked came.
"""

import contextlib
import weakref
from typing import Any, Protocol

import torch

from offbeat.local.every_step import before_every_step

__all__ = ["Asked", "ask", "ask_no_more"]


class Asked(Protocol):
    """Who is asked before each step."""

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give other arguments for the step; None: they stay."""


_asked: list[weakref.ref[Asked]] = []


def ask(who: Asked) -> None:
    """Ask it before each step of any optimizer, as long as it is there, behind those asked already."""
    before_every_step(_before)
    for gone in [one for one in _asked if one() is None]:
        _leave(gone)
    _asked.append(weakref.ref(who))


def ask_no_more(who: Asked) -> None:
    """Ask it no more; it may be asked no more already."""
    _leave(weakref.ref(who))


def _leave(reference: weakref.ref[Asked]) -> None:
    """Take it out in one go: another thread, or the collector, may change the list meanwhile."""
    with contextlib.suppress(ValueError):
        _asked.remove(reference)


def _before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    given = None
    for reference in tuple(_asked):
        who = reference() if reference in _asked else None  # another may have closed it just now
        answer = None if who is None else who.before_step(optimizer, args, kwargs)
        if answer is not None:
            given = args, kwargs = answer
    return given
