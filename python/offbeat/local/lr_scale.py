"""A learning rate that is scaled only while an optimizer steps.

What stands in the parameter groups stays the user's and the scheduler's: one that computes each rate anew
would undo a change there with its next step, and one that multiplies would keep it for ever. So no other hook
of the step sees the scaled rate either: one that lets a scheduler step reads and writes what was set.
"""

import math
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from offbeat.local.every_step import before_every_step, with_closure

__all__ = ["arrange", "factor_of", "listen", "scale", "unscale"]


@dataclass(slots=True)
class _Scaled:
    """An optimizer's factor, and the hooks of its that apply it.

    Attributes:
        factors: What its rates are multiplied by, each until it is taken back.
        hooks: Before its step, after it, and before its state is taken; None where there are none yet.
        held: By group the rate that was set and the scaled one, while it steps.
        thread: Which it does so on.
    """

    factors: list[float] = field(default_factory=list)
    hooks: tuple[RemovableHandle, ...] | None = None
    held: list[tuple[Any, Any]] = field(default_factory=list)
    thread: int = 0

    @property
    def factor(self) -> float:
        """Their product, to the bit whatever came and went before: a run that is resumed has the same."""
        return math.prod(sorted(self.factors), start=1.0)


# By identity: a class of optimizers may have an equality of its own, and then perhaps no hash.
_scaled: MutableMapping[torch.optim.Optimizer, _Scaled] = WeakIdKeyDictionary()


def factor_of(optimizer: torch.optim.Optimizer) -> float:
    """Give what an optimizer's learning rates are multiplied by while it steps."""
    known = _scaled.get(optimizer)
    return 1.0 if known is None else known.factor


def scale(optimizer: torch.optim.Optimizer, by: float) -> None:
    """Multiply an optimizer's learning rates, from its next step on, until `unscale`.

    In a hook of the optimizer, too: its own hooks, which torch goes through then, change in `arrange`.
    """
    listen()
    _scaled.setdefault(optimizer, _Scaled()).factors.append(by)


def unscale(optimizer: torch.optim.Optimizer, by: float) -> None:
    """Take back what `scale` did.

    Raises:
        ValueError: If it did not, or that was taken back already.
    """
    known = _scaled.setdefault(optimizer, _Scaled())
    known.factors.remove(by)
    if not known.factors:
        _put_back(optimizer, known)


def listen() -> None:
    """Hear of each step of any optimizer, of which those that are scaled need it; from the first time on.

    Whoever scales within such a hook of his own calls this before he registers that: torch goes through them
    while he scales, and bears no change of them then.
    """
    before_every_step(_arrange)


def arrange(optimizer: torch.optim.Optimizer) -> None:
    """Enclose the step of an optimizer that is scaled, before torch goes through its hooks.

    Ours are the last one before the step and the first one after it, whoever has registered since. Who scales
    in a hook of every optimizer's step calls this behind it, and the step is scaled that is about to be made.
    """
    if (known := _scaled.get(optimizer)) is None:
        return
    _put_back(optimizer, known)  # a step that raised has left them
    if not known.factors:
        del _scaled[optimizer]
        for hook in known.hooks or ():
            hook.remove()
        return
    if known.hooks is None:
        known.hooks = (
            optimizer.register_step_pre_hook(_before),
            optimizer.register_step_post_hook(_after),
            optimizer.register_state_dict_pre_hook(_before_state),
        )
    pre, post, _ = known.hooks
    hooks: Any = optimizer  # torch prepends only a module's
    hooks._optimizer_step_pre_hooks.move_to_end(pre.id)  # noqa: SLF001  see above
    hooks._optimizer_step_post_hooks.move_to_end(post.id, last=False)  # noqa: SLF001  see above


def _arrange(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    arrange(optimizer)


def _before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if (known := _scaled.get(optimizer)) is None:
        return None
    _put_back(optimizer, known)  # where a step calls the one of its base class, that has hooks, too
    rates = [group["lr"] for group in optimizer.param_groups]
    known.held = [(_copy(rate), rate * known.factor) for rate in rates]
    known.thread = threading.get_ident()
    for group, (_, scaled) in zip(optimizer.param_groups, known.held, strict=True):
        _set(group, scaled)
    return with_closure(args, kwargs, lambda closure: _guarded(optimizer, known, closure))


def _guarded(
    optimizer: torch.optim.Optimizer, known: _Scaled, closure: Callable[[], object]
) -> Callable[[], object]:
    """Give a closure that leaves the rates as they were set where it raises: torch calls no hook then."""

    def guarded() -> object:
        try:
            return closure()
        except BaseException:
            _put_back(optimizer, known)
            raise

    return guarded


def _before_state(optimizer: torch.optim.Optimizer) -> None:
    """Put rates back that a step which raised has left, before they are saved."""
    known = _scaled.get(optimizer)
    if known is not None and known.thread == threading.get_ident():  # else another thread may be stepping
        _put_back(optimizer, known)


def _after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    if (known := _scaled.get(optimizer)) is not None:
        _put_back(optimizer, known)


def _put_back(optimizer: torch.optim.Optimizer, known: _Scaled) -> None:
    held, known.held = known.held, []
    for group, (rate, scaled) in zip(optimizer.param_groups, held, strict=False):
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
