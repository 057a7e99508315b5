"""A learning rate that is scaled only while an optimizer steps.

What stands in the parameter groups stays the user's and the scheduler's: one that computes each rate anew
would undo a change there with its next step, and one that multiplies would keep it for ever.
"""

import math
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["factor_of", "scale"]

_factors: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
_held: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = weakref.WeakKeyDictionary()
_hooks: list[RemovableHandle] = []


def factor_of(optimizer: torch.optim.Optimizer) -> float:
    """Give what an optimizer's learning rates are multiplied by while it steps."""
    return _factors.get(optimizer, 1.0)


def scale(optimizer: torch.optim.Optimizer, by: float) -> None:
    """Multiply an optimizer's factor, from its next step on; the inverse takes it back."""
    factor = factor_of(optimizer) * by
    if math.isclose(factor, 1.0):
        _factors.pop(optimizer, None)
    else:
        _factors[optimizer] = factor
    if _factors and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))
    elif not _factors:
        while _hooks:
            _hooks.pop().remove()


def _before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    _put_back(optimizer)  # a step that raised has left them
    factor = _factors.get(optimizer)
    if factor is None:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    _held[optimizer] = [(_copy(rate), rate * factor) for rate in rates]
    for group, (_, scaled) in zip(optimizer.param_groups, _held[optimizer], strict=True):
        _set(group, scaled)


def _after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    _put_back(optimizer)


def _put_back(optimizer: torch.optim.Optimizer) -> None:
    for group, (rate, scaled) in zip(optimizer.param_groups, _held.pop(optimizer, []), strict=False):
        if bool(group["lr"] == scaled):  # else somebody has set it since
            _set(group, rate)


def _copy(rate: float | torch.Tensor) -> float | torch.Tensor:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set(group: dict[str, Any], rate: float | torch.Tensor) -> None:
    """Set a rate; one that is a tensor stays the object that a captured graph reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(torch.as_tensor(rate))
    else:
        group["lr"] = rate
