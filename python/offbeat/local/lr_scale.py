"""A learning rate that is scaled only while an optimizer steps.

What stands in the parameter groups stays the user's and the scheduler's: one that computes each rate anew
would undo a change there with its next step, and one that multiplies would keep it for ever. So no other hook
of the step, and no closure, sees the scaled rate either: one that lets a scheduler step reads and writes what
was set.

The code of a step reads the scaled rate, as it has to. A step that sets its own rate may make it of that one,
or of nothing that is there, and nobody can tell which by the value. It is taken as made of the scaled one, so
that no factor stays in a rate and grows there with each step; and as the other kind is then off by the factor
until it is set again, the user is told.
"""

import math
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from offbeat import log
from offbeat.local.every_step import before_every_step, with_closure

__all__ = ["arrange", "arrange_within", "factor_of", "listen", "scale", "scaled", "unscale"]

Rate = float | torch.Tensor


@dataclass(slots=True)
class _Scaled:
    """An optimizer's factor, and the hooks of its that apply it.

    Attributes:
        factors: What its rates are multiplied by, each until it is taken back.
        hooks: Before its step, after it, and before its state is taken; None where there are none yet.
        held: While it steps, each group that has a rate, with the one that was set and the scaled one.
        by: What the scaled ones were multiplied by.
        thread: Which it does so on.
    """

    factors: list[float] = field(default_factory=list)
    hooks: tuple[RemovableHandle, ...] | None = None
    held: list[tuple[dict[str, Any], Rate, Rate]] = field(default_factory=list)
    by: float = 1.0
    thread: int = 0

    @property
    def factor(self) -> float:
        """Their product, to the bit whatever came and went before: a run that is resumed has the same."""
        return math.prod(sorted(self.factors), start=1.0)


# By identity: a class of optimizers may have an equality of its own, and then perhaps no hash.
_scaled: MutableMapping[torch.optim.Optimizer, _Scaled] = WeakIdKeyDictionary()
_told: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()


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


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, by: float) -> Iterator[None]:
    """Multiply an optimizer's learning rates for the steps that are made meanwhile, by whatever else is."""
    if by == 1.0:
        yield
        return
    scale(optimizer, by)
    known = _scaled[optimizer]
    try:
        yield
    finally:
        _put_back(optimizer, known, is_by_step=True)  # where one raised
        unscale(optimizer, by)


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
    # A step calls the one of its base class; else one that raised has left them, and a user has come since.
    _put_back(optimizer, known, is_by_step=_num_hooked(type(optimizer)) > 1)
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


def arrange_within(optimizer: torch.optim.Optimizer) -> None:
    """Do likewise in the closure of a step, of which the hooks are through: what follows that is scaled."""
    arrange(optimizer)
    if (known := _scaled.get(optimizer)) is not None:
        _multiply(optimizer, known)


def _arrange(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    arrange(optimizer)


def _num_hooked(kind: type[torch.optim.Optimizer]) -> int:
    """Count the steps of a class and of those that it is based on by which torch calls hooks, as it marks."""
    return sum(getattr(vars(base).get("step"), "hooked", False) for base in kind.__mro__)


def _before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if (known := _scaled.get(optimizer)) is None:
        return None
    _multiply(optimizer, known)
    return with_closure(args, kwargs, lambda closure: _as_set(optimizer, known, closure))


def _multiply(optimizer: torch.optim.Optimizer, known: _Scaled) -> None:
    _put_back(optimizer, known)
    if not known.factors:  # they were taken back in a closure
        return
    known.by = known.factor
    known.thread = threading.get_ident()
    for group in optimizer.param_groups:
        if (rate := group.get("lr")) is not None:  # else the optimizer makes its own
            known.held.append((group, _copy(rate), rate * known.by))
            _set(group, rate * known.by)


def _as_set(
    optimizer: torch.optim.Optimizer, known: _Scaled, closure: Callable[[], object]
) -> Callable[[], object]:
    """Give a closure that sees the rates as they were set, as hooks do; where it raises, torch calls none."""

    def seeing() -> object:
        _put_back(optimizer, known, is_by_step=True)
        loss = closure()
        _multiply(optimizer, known)
        return loss

    return seeing


def _before_state(optimizer: torch.optim.Optimizer) -> None:
    """Put rates back that a step which raised has left, before they are saved."""
    known = _scaled.get(optimizer)
    if known is not None and known.thread == threading.get_ident():  # else another thread may be stepping
        _put_back(optimizer, known)


def _after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    if (known := _scaled.get(optimizer)) is not None:
        _put_back(optimizer, known, is_by_step=True)


def _put_back(optimizer: torch.optim.Optimizer, known: _Scaled, *, is_by_step: bool = False) -> None:
    """Let rates be as they were set; one that is another now is as it is, or as a step has made it."""
    held, known.held = known.held, []
    for group, rate, scaled in held:
        now = group.get("lr")
        if bool(now == scaled):
            _set(group, rate)
        elif is_by_step and now is not None:
            _tell_of_own(optimizer, now, known.by)
            _set(group, now / known.by)


def _tell_of_own(optimizer: torch.optim.Optimizer, rate: Rate, by: float) -> None:
    if optimizer in _told:
        return
    _told[optimizer] = None
    rate = float(rate)
    log.warn(
        f"the step of {type(optimizer).__name__} has set its learning rate to {rate:g} while that was "
        f"multiplied by {by:g}, which is taken as part of it: {rate / by:g} stays. If the step computes the "
        f"rate anew, this is not what it means: set it by a scheduler, or outside of the step"
    )


def _copy(rate: Rate) -> Rate:
    return rate.clone() if isinstance(rate, torch.Tensor) else rate


def _set(group: dict[str, Any], rate: Rate) -> None:
    """Set a rate; one that is a tensor stays the object that a captured graph reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(torch.as_tensor(rate))
    else:
        group["lr"] = rate
