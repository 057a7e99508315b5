"""Hooks before the steps of all optimizers, each registered once and never taken back.

Torch bears no change of its hooks while a step goes through them, and whoever wants one may come, or be
closed or collected, within a step. So a hook stays from the first time on, and finds nothing to do where
nobody is left.
"""

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Hook", "before_every_step"]

Hook = Callable[..., Any]
"""Of an optimizer, and of the args and kwargs of its step, as torch calls it."""

_registered: set[Hook] = set()


def before_every_step(hook: Hook) -> None:
    """See that a function is called before each step of any optimizer, behind those that came before it."""
    if hook not in _registered:
        _registered.add(hook)
        register_optimizer_step_pre_hook(hook)
