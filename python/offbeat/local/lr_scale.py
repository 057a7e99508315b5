"""A learning rate that is scaled only while an optimizer steps.

What stands in the parameter groups stays the user's and the scheduler's: one that computes each rate anew
would undo a change there with its next step, and one that multiplies would keep it for ever. So no other hook
of the step, and no closure, sees the scaled rate either: one that lets a scheduler step reads and writes what
was set.

The code of a step reads the scaled rate, as it has to. A step that sets its own rate may make it of that one,
or of nothing that is there, and nobody can tell which by the value. It is taken as made of the scaled one, so
that no factor stays in a rate and grows there with each step; and as the other kind is then off by the factor
until it is set again, the user is told.

Torch calls hooks around the step of a class, and again around its base class's if that is called there and
somebody has made one of that class. So rates are as they were set around each, and scaled in between.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from offbeat import log
from offbeat.local.every_step import after_every_step, before_every_step, with_closure

__all__ = ["arrange", "as_set", "factor_of", "largest_rate", "listen", "scale", "scaled", "unscale"]

Rate = float | torch.Tensor

_STEP: Any = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step)
"""What torch makes of a step, to call hooks around it: all have the same code."""


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
_shown: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()  # whose are as they were set
_told: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()


def factor_of(optimizer: torch.optim.Optimizer) -> float:
    """Give what an optimizer's learning rates are multiplied by while it steps."""
    known = _scaled.get(optimizer)
    return 1.0 if known is None else known.factor


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """Give the largest rate by which a group steps; 0 where the optimizer makes its own."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    return factor_of(optimizer) * max(rates, default=0.0)


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

    Rates are as they were set then. Our hooks are the last one before the step and the first one after it,
    whoever has registered since. Who scales in a hook of every optimizer's step calls this behind it, and the
    step is scaled that is about to be made.
    """
    if (known := _scaled.get(optimizer)) is None:
        return
    # Else a step that raised has left them, and a user has come since.
    _put_back(optimizer, known, is_by_step=_is_within_another(optimizer))
    if not known.factors:
        del _scaled[optimizer]
        for hook in known.hooks or ():
            hook.remove()
        return
    after_every_step(_go_on)
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


@contextmanager
def as_set(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let rates be as they were set for what a step calls, a closure; what follows that is scaled again.

    That is so also where the scale comes meanwhile, and where this is within another. Where it raises they
    stay as they were set: torch calls no hook then.
    """
    if optimizer in _shown:
        yield
        return
    if (known := _scaled.get(optimizer)) is not None:
        _put_back(optimizer, known, is_by_step=True)
    _shown[optimizer] = None
    try:
        yield
    finally:
        del _shown[optimizer]
    arrange(optimizer)
    if (known := _scaled.get(optimizer)) is not None:
        _multiply(optimizer, known)


def _arrange(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    arrange(optimizer)


def _is_within_another(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether torch calls hooks around a step of an optimizer that another step of it has called.

    By the stack: what counts steps would not hear of one that raised.
    """
    is_within = False
    frame: Any = sys._getframe()  # noqa: SLF001  which Python has for such as this
    while frame is not None:
        if frame.f_code is _STEP.__code__ and frame.f_locals["args"][0] is optimizer:
            if is_within:
                return True
            is_within = True
        frame = frame.f_back
    return False


def _before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if (known := _scaled.get(optimizer)) is None:
        return None
    _multiply(optimizer, known)

    def seeing(closure: Callable[[], object]) -> Callable[[], object]:
        def as_it_was_set() -> object:
            with as_set(optimizer):
                return closure()

        return as_it_was_set

    return with_closure(args, kwargs, seeing)


def _multiply(optimizer: torch.optim.Optimizer, known: _Scaled) -> None:
    _put_back(optimizer, known)
    if not known.factors:
        return
    known.by = by = known.factor
    known.thread = threading.get_ident()
    # One that has none makes its own.
    groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
    known.held = [(group, _copy(group["lr"]), group["lr"] * by) for group in groups]
    _set([(group, rate) for group, _, rate in known.held])


def _before_state(optimizer: torch.optim.Optimizer) -> None:
    """Put rates back that a step which raised has left, before they are saved."""
    known = _scaled.get(optimizer)
    if known is not None and known.thread == threading.get_ident():  # else another thread may be stepping
        _put_back(optimizer, known)


def _after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    del args, kwargs
    if (known := _scaled.get(optimizer)) is not None:
        _put_back(optimizer, known, is_by_step=True)


def _go_on(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Scale what a step does behind that of its base class."""
    del args, kwargs
    if (known := _scaled.get(optimizer)) is not None and _is_within_another(optimizer):
        _multiply(optimizer, known)


def _put_back(optimizer: torch.optim.Optimizer, known: _Scaled, *, is_by_step: bool = False) -> None:
    """Let rates be as they were set; one that is another now is as it is, or as a step has made it."""
    held, known.held = known.held, []
    own: list[tuple[dict[str, Any], Rate]] = []
    for group, rate, was in held:
        now = group.get("lr")
        if bool(now == was):
            own.append((group, rate))
        elif is_by_step and now is not None:
            _tell_of_own(optimizer, now, known.by)
            own.append((group, now / known.by))
    _set(own)


def _tell_of_own(optimizer: torch.optim.Optimizer, rate: Rate, by: float) -> None:
    if optimizer in _told:
        return
    _told[optimizer] = None
    rate = float(rate)
    log.warn(
        f"the step of {type(optimizer).__name__} has set its learning rate to {rate:g} while that was "
        f"multiplied by {by:g}, which is taken as part of it: as {rate / by:g}. If the step computes the "
        f"rate anew, this is not what it means: set it by a scheduler, or outside of the step"
    )


def _copy(rate: Rate) -> Rate:
    return rate.clone() if _is_in_place(rate) else rate


def _set(rates: Sequence[tuple[dict[str, Any], Rate]]) -> None:
    """Set groups' rates, of which all are known by now: groups may share a tensor."""
    for group, rate in rates:
        if _is_in_place(group["lr"]):
            group["lr"].copy_(torch.as_tensor(rate))
        else:
            group["lr"] = rate


def _is_in_place(rate: Rate) -> TypeGuard[torch.Tensor]:
    """Tell whether it is a tensor, which stays the object that a captured graph reads."""
    return isinstance(rate, torch.Tensor) and not rate.requires_grad
