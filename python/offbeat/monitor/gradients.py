"""A model's gradients between backward and the optimizer's step: measured, scaled, dropped.

Their norm is that which backward left, unless they have grown since: a user who clips them, or a GradScaler
that has multiplied them, would else hide what is to be seen.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from offbeat import log
from offbeat.monitor.counted import Counted
from offbeat.monitor.skips import is_told_to_skip

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Gradients", "Reading"]

MOST_CLIPPED = 1000.0
"""At the first step; a gradient that has become so much smaller since backward was unscaled, not clipped."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured before a step.

    Attributes:
        norm: L2 norm of the gradient that backward left, over all parameters that optimizers step; of what is
            there now, where that is more.
        num_non_finite: Its elements that are NaN or infinite, as they are now.
    """

    norm: float
    num_non_finite: int


class Gradients:
    """Those of one model.

    A hook on each parameter takes the norm of what backward has accumulated there, on the parameter's device;
    that is waited for once, when the step is judged.
    """

    def __init__(
        self,
        model: nn.Module,
        scaler: Any,  # noqa: ANN401  torch has several classes of them
        *,
        is_measured: bool,
        are_gathered: Callable[[], bool],
        are_unscaled: Callable[[], bool],
    ) -> None:
        """Begin to measure.

        Args:
            model: Whose.
            is_measured: Whether their norm is wanted; else it costs nothing, and is 0.
            scaler: The GradScaler that multiplies the loss; None: there is none.
            are_gathered: Whether what an optimizer steps by is not what the last backward left, but what a
                trainer of ours has added up, or divided by its loss's scale.
            are_unscaled: Whether a trainer of ours is at work that may have done the latter: none who has
                trained with it needs to be told of a scale.
        """
        self._model = model
        self._scaler = scaler
        self._is_measured = is_measured
        self._are_gathered = are_gathered
        self._are_unscaled = are_unscaled
        self._left: dict[int, _Left] = {}  # by parameter
        self._judged: dict[int, _Judged] = {}  # likewise what the last backward left, behind the first step
        self._counted = Counted()
        self._is_first = True
        self._is_scaled_by_others = False
        self._before: list[torch.Tensor] = []  # parameters, when the update ratio was last asked for
        self._ratio_since: float | None = None  # where they are of another process
        ours = weakref.ref(self)  # a parameter outlives a monitor that is let go of

        def accumulated(parameter: torch.Tensor) -> None:
            if (gradients := ours()) is not None:
                gradients._accumulated(parameter)  # noqa: SLF001  this very class

        self._hook = accumulated
        # By parameter, without a reference to it: torch swaps the tensors of none that has a weak one.
        self._hooks: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove, self._hooks)
        self._is_open = True
        self._listen()

    def _listen(self) -> None:
        """Hear of all that is trained by now; of what is frozen torch lets nobody hear."""
        if not (self._is_measured and self._is_open):
            return
        there = {id(parameter): parameter for parameter in self._model.parameters()}
        # An id may be another's by now: a hook goes with its parameter.
        gone = [key for key, hook in self._hooks.items() if key not in there or hook.hooks_dict_ref() is None]
        for key in gone:
            self._hooks.pop(key).remove()
        for key, parameter in there.items():
            if parameter.requires_grad and parameter.is_leaf and key not in self._hooks:
                self._hooks[key] = parameter.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Measure no more."""
        self._is_open = False
        _remove(self._hooks)
        self._left.clear()
        self._judged.clear()

    def read(self, optimizer: torch.optim.Optimizer | None = None) -> Reading | None:
        """Measure what is on the model now, of which nothing is kept.

        Args:
            optimizer: The one that is about to step, if it is known.

        Returns:
            What was measured; None where the optimizer has been told not to step.
        """
        if not self._is_measured:
            return Reading(0.0, 0)
        own_scale = getattr(optimizer, "grad_scale", None)  # of a fused one, which divides by it itself
        if is_told_to_skip(optimizer):
            self._left.clear()
            return None
        self._listen()
        if not self._counted.begin(optimizer):
            self._judged.clear()
        there = self._of(optimizer)
        if not there:
            return None
        own = 1.0 if own_scale is None else float(own_scale)
        factor = own if self._scaler is None else float(self._scaler.get_scale())
        left = self._left_by_backward(there)
        used = self._counted.use(optimizer, there)
        is_shared = optimizer is not None and not self._is_scaled(optimizer)
        freed = self._freed(used, there) if is_shared else []
        then = None if left is None else _norm([*(one.norm for one in left), *freed]) / factor
        if left is None or self._is_first or any(one.has_changed for one in left):
            now = _norm([*(_norm_of(p) for p in there), *freed]) / own
            then = self._without_unknown_scale(now if then is None else then, now)
            # What has grown since was not clipped; it is what will be stepped by.
            norm = now if math.isfinite(now) and not math.isfinite(then) else max(then, now, key=_size)
        else:
            norm = cast(float, then)
        self._is_first = False
        num = 0 if math.isfinite(norm) else sum(_num_non_finite(p) for p in there)
        return Reading(norm, num)

    def update_ratio(self) -> float | None:
        """Tell how far the parameters have moved since this was last asked, as a share of their norm.

        Returns:
            ‖change‖ / ‖before‖; None where there is nothing to compare with.
        """
        ratio = self.ratio_since()
        self._before = [p.detach().clone() for p in self._model.parameters()]
        return ratio

    def ratio_since(self) -> float | None:
        """Tell so, and let it be told once more: where what is to come moves them, or they are not kept."""
        now, before = [p.detach() for p in self._model.parameters()], self._before
        if not before:
            return self._ratio_since
        if [(p.shape, p.device) for p in before] != [(p.shape, p.device) for p in now]:
            return None
        pairs = [(a, b) for a, b in zip(now, before, strict=True) if _is_measurable(a)]
        change = _norm([_norm_of_one(a - b) for a, b in pairs])
        whole = _norm([_norm_of_one(b) for _, b in pairs])
        return change / whole if whole else None

    def resume(self, ratio_since: float | None) -> None:
        """Go on from a state's."""
        self._before, self._ratio_since = [], ratio_since

    def clip(self, most: float, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Scale the gradients down to a norm. Returns whether they were larger."""
        there = self._of(optimizer)
        own_scale = getattr(optimizer, "grad_scale", None)
        norm = _norm([_norm_of(p) for p in there]) / (1.0 if own_scale is None else float(own_scale))
        if norm <= most:
            return False
        with torch.no_grad():
            for p in there:
                if p.grad is not None:
                    p.grad.mul_(most / norm)
        return True

    def drop(self) -> None:
        """Take them away: an optimizer leaves a parameter without one, and its state, as they are."""
        for p in self._model.parameters():
            p.grad = None

    def _of(self, optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
        return self._counted.of(self._model, optimizer, is_scaled=self._is_scaled(optimizer))

    def _is_scaled(self, optimizer: torch.optim.Optimizer | None) -> bool:
        has_own_scale = getattr(optimizer, "grad_scale", None) is not None
        return self._is_scaled_by_others or self._scaler is not None or has_own_scale

    def _freed(self, used: frozenset[int], there: list[nn.Parameter]) -> list[torch.Tensor]:
        """Give norms of what another optimizer has stepped by since, where that was taken away behind it."""
        here = {id(parameter) for parameter in there}
        return [one.norm for key, one in self._judged.items() if key in used and key not in here]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        # The gradient is kept until the step is judged: then it is known whether this is still its norm.
        self._counted.note_backward()
        gradient = parameter.grad
        if gradient is not None and not self._is_scaled_by_others:
            version = gradient._version  # noqa: SLF001  torch's own way to ask
            self._left[id(parameter)] = _Left(gradient, version, _norm_of(parameter))

    def _left_by_backward(self, there: list[nn.Parameter]) -> "list[_Left | _Judged] | None":
        """Give what backward left; None if the parameters have other gradients than that."""
        known, self._left = self._left, {}
        # The gradients may be freed now; where another optimizer steps by them, they are the same.
        self._judged.update((key, _Judged(id(one.gradient), one.norm)) for key, one in known.items())
        if self._is_scaled_by_others or self._are_gathered():
            return None
        left = [known.get(id(p)) or self._judged.get(id(p)) for p in there]
        pairs = zip(there, left, strict=True)
        if any(one is None or not one.is_of(parameter.grad) for parameter, one in pairs):
            return None
        return cast("list[_Left | _Judged]", left)

    def _without_unknown_scale(self, then: float, now: float) -> float:
        if not self._is_first or self._scaler is not None or not 0 < now * MOST_CLIPPED < then:
            return then
        self._is_scaled_by_others = True
        if self._are_unscaled():
            return now
        log.warn(
            f"the gradients became {then / now:.3g} times smaller between backward and the optimizer's step: "
            f"a GradScaler seems to be at work; give AsyncTrainingMonitor(grad_scaler=...), and they are "
            f"measured as backward leaves them; until then as the optimizer gets them, clipped if they are"
        )
        return now


@dataclass(frozen=True, slots=True)
class _Left:
    """A parameter's gradient as backward left it."""

    gradient: torch.Tensor
    version: int
    norm: torch.Tensor

    @property
    def has_changed(self) -> bool:
        """Whether somebody has written to it since."""
        return self.gradient._version != self.version  # noqa: SLF001  torch's own way to ask

    def is_of(self, gradient: torch.Tensor | None) -> bool:
        """Tell whether it is of this one."""
        return self.gradient is gradient


@dataclass(frozen=True, slots=True)
class _Judged:
    """What is known of it behind the first step: the gradient may be freed then, and changed."""

    gradient: int
    norm: torch.Tensor
    has_changed: bool = True  # as far as is known

    def is_of(self, gradient: torch.Tensor | None) -> bool:
        """Tell whether it is of this one."""
        return self.gradient == id(gradient)


def _remove(hooks: "dict[int, RemovableHandle]") -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()


def _size(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm


def _values(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _norm_of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return _norm_of_one(_values(gradient))


def _is_measurable(tensor: torch.Tensor) -> bool:
    """Whether it has a norm: not what frozen, quantized weights are stored in."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def _norm_of_one(tensor: torch.Tensor) -> torch.Tensor:
    """Give it in float32 where the squares would soon be infinite, or lose all, in the tensor's own dtype."""
    dtype = torch.float32 if tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize else None
    return cast(torch.Tensor, torch.linalg.vector_norm(tensor, dtype=dtype))


def _norm(norms: list[torch.Tensor]) -> float:
    """Give the norm of what has these norms; each device is waited for."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm)
    squares = (float(torch.stack(group).cpu().double().square().sum()) for group in by_device.values())
    return math.sqrt(sum(squares))


def _num_non_finite(parameter: torch.Tensor) -> int:
    gradient = parameter.grad
    return 0 if gradient is None else int((~_values(gradient).isfinite()).sum())
