"""A window: the gradients of several micro-batches, added up where autograd adds them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offbeat.local.norm import square_norm

__all__ = ["Places", "Sum", "Window", "brought"]

Places = Sequence[torch.Tensor | None]
"""By parameter: memory for its gradient, None where it may be anywhere; or nothing at all."""

NOTHING = (0, 0.0, 0.0)
"""Measured of no micro-batch."""


@dataclass(frozen=True, slots=True)
class Sum:
    """What a window has gathered: a sum of gradients, each over `unit`, and times its count if of a mean.

    Attributes:
        gradients: By parameter; None where no micro-batch had one.
        counts: Samples, or what a normalizer counts. The sum, times `unit`, is to be divided by those of all
            members; None where it is not to be divided.
        unit: As given; else the first micro-batch's count where losses are means, so that its gradient is
            not touched, nor that of any as large; else 1.
        samples: Of all micro-batches.
        measured: Where that is asked for: micro-batches, their counts, and the sum of the squared norms of
            their mean gradients times their counts.
        is_finite: All losses were that count.
    """

    gradients: list[torch.Tensor | None]
    counts: float | None
    unit: float
    samples: int
    measured: tuple[int, float, float] = NOTHING
    is_finite: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(gradient is None for gradient in self.gradients)


class Window:
    """Micro-batches since the last update.

    Between two micro-batches their gradients are not on the module: what a user zeroes, clips or adds there
    is not the window's.

    Attributes:
        batches: How many.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        are_means: bool,
        is_divided: bool,
        is_measured: bool,
        places: Callable[[], Places] = list,
    ) -> None:
        """Begin with nothing.

        Args:
            parameters: Whose gradients are gathered.
            are_means: Each loss is one over its counts.
            is_divided: Their sum is to be one over all.
            is_measured: Micro-batches' gradients are; for that they are added up here, not by autograd.
            places: Where sums are to be in the end, asked for in each window once there is something to add
                to: nothing if anywhere. What is added there need not be copied there.
        """
        self._places = places
        self._at: Places = []  # in this window
        self._is_measured = is_measured
        self._measured = NOTHING
        self._parameters = parameters
        self._are_means = are_means
        self._is_divided = is_divided
        self.batches = 0
        self._gradients: list[torch.Tensor | None] = [None] * len(parameters)
        self._samples = 0
        self._counts = self._unit = 0.0
        self._is_finite = True

    def add(self, loss: torch.Tensor, *, counts: float, samples: int, unit: float | None = None) -> None:
        """Add a micro-batch's gradients. If that raises, the window begins anew: autograd had begun to add.

        Args:
            loss: Of the micro-batch; what it was reduced by is `counts`.
            counts: How much of the window's loss it is. Of 0 nothing is added: a mean over nothing is NaN.
            samples: In it.
            unit: The window's, if it has none yet; None: what leaves this micro-batch's gradient as it is.
        """
        if counts:
            own = counts if self._are_means else 1.0
            unit = self._unit or unit or own
            factor = own / unit
            if not self._at and any(gradient is not None for gradient in self._gradients):
                self._at = self._places()
            try:
                gradients = self._with_those_of(loss if factor == 1.0 else loss * factor)
            except BaseException:
                self.drop()
                raise
            if self._is_measured:
                num, seen, squares = self._measured
                square = square_norm(gradients) * unit**2 / counts
                self._measured = num + 1, seen + counts, squares + square
                at = self._at or [None] * len(gradients)
                gradients = list(map(_sum, self._gradients, gradients, at))
            self._gradients = gradients
            self._unit = unit
        self.batches += 1
        self._samples += samples
        self._counts += counts

    def _with_those_of(self, loss: torch.Tensor) -> list[torch.Tensor | None]:
        """Let autograd add a loss's gradients to the window's, or give them alone if they are measured."""
        nothing: Places = [None] * len(self._parameters)
        before = nothing if self._is_measured else self._gradients
        hooks = []
        try:
            for parameter, gradient, place in zip(self._parameters, before, self._at or nothing, strict=True):
                parameter.grad = gradient
                if gradient is None or place is None or gradient is place or not parameter.requires_grad:
                    continue
                parameter.grad = None  # so that autograd hands over what is new, of one parameter at a time
                move = functools.partial(_move, gradient, place)
                hooks.append(parameter.register_post_accumulate_grad_hook(move))  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]
            every = zip(self._parameters, before, strict=True)
            return [gradient if parameter.grad is None else parameter.grad for parameter, gradient in every]
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in self._parameters:
                parameter.grad = None

    def see(self, loss: float) -> None:
        """Take note of what a micro-batch's loss was."""
        self._is_finite = self._is_finite and math.isfinite(loss)

    def take(self) -> Sum:
        """Give what was gathered, and begin anew."""
        counts = self._counts if self._is_divided else None
        taken = Sum(
            self._gradients, counts, self._unit or 1.0, self._samples, self._measured, self._is_finite
        )
        self.drop()
        return taken

    def drop(self) -> None:
        """Begin anew."""
        self.batches = self._samples = 0
        self._gradients = [None] * len(self._parameters)
        self._at = []
        self._counts = self._unit = 0.0
        self._measured = NOTHING
        self._is_finite = True

    def state_dict(self) -> dict[str, Any]:
        """Give copies of what was gathered: the next micro-batch is added to it in place."""
        return {
            "batches": self.batches,
            "samples": self._samples,
            "counts": self._counts,
            "unit": self._unit,
            "measured": list(self._measured),
            "is_finite": self._is_finite,
            "gradients": [None if g is None else g.detach().clone() for g in self._gradients],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same parameters."""
        self.batches, self._samples = state["batches"], state["samples"]
        self._counts, self._unit = state["counts"], state["unit"]
        num, seen, squares = state["measured"]
        self._measured = num, seen, squares
        self._is_finite = state["is_finite"]
        self._at = []
        self._gradients = brought(state["gradients"], self._parameters)


def brought(
    gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[torch.Tensor | None]:
    """Copy gradients to where their parameters are; strides stay, as they are what sums are made in."""
    pairs = zip(gradients, parameters, strict=True)
    return [None if g is None else g.detach().to(p.device, copy=True) for g, p in pairs]


def _move(before: torch.Tensor, place: torch.Tensor, parameter: torch.Tensor) -> None:
    """Bring a parameter's gradient to its place, with what was there before this backward."""
    if parameter.grad is not None and parameter.grad is not place:  # autograd adds to what is there already
        parameter.grad = _sum(before, parameter.grad, place)


def _sum(
    one: torch.Tensor | None, two: torch.Tensor | None, place: torch.Tensor | None
) -> torch.Tensor | None:
    """Add two gradients, if dense in `place`, or in the first one's memory where there is none."""
    if one is None or two is None:
        return two if one is None else one
    if not one.layout is two.layout is torch.strided:
        return one + two
    with torch.no_grad():
        return torch.add(one, two, out=one if place is None else place)
