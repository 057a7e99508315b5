"""Hooks around the steps of all optimizers, which are never taken back.

Torch bears no change of its hooks while a step goes through them, and whoever wants one may come, or be
closed or collected, within a step. So a hook stays from the first time on, and finds nothing to do where
nobody is left.
"""

import threading
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["Hook", "after_every_step", "before_every_step", "with_closure"]

Hook = Callable[..., Any]
"""Of an optimizer, and of the args and kwargs of its step, as torch calls it."""

_registered: set[Hook] = set()
_last: dict[Hook, RemovableHandle] = {}
_lock = threading.Lock()


def before_every_step(hook: Hook) -> None:
    """See that a function is called before each step of any optimizer, behind those that came before it."""
    with _lock:
        if hook not in _registered:
            _registered.add(hook)
            optimizer.register_optimizer_step_pre_hook(hook)


def after_every_step(hook: Hook) -> None:
    """See that a function is called after each step of any optimizer, behind all that there are by now."""
    with _lock:
        if (handle := _last.get(hook)) is not None:
            others = optimizer._global_optimizer_post_hooks  # noqa: SLF001  torch does not tell otherwise
            if next(reversed(others), None) == handle.id:
                return
            handle.remove()
        _last[hook] = optimizer.register_optimizer_step_post_hook(hook)


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a step's arguments with its closure changed, as a hook may return them; None: it has none.

    Args:
        args: As torch gives them to a hook: first the optimizer.
        kwargs: Likewise.
        change: Makes the closure that takes the place of one.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": change(closure)}
    return (args[0], change(closure), *args[2:]), kwargs
