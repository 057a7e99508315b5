"""A window: the gradients of several micro-batches, added up where autograd adds them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offbeat.local.norm import square_norm

__all__ = ["Sum", "Window", "brought"]

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
    ) -> None:
        """Begin with nothing.

        Args:
            parameters: Whose gradients are gathered.
            are_means: Each loss is one over its counts.
            is_divided: Their sum is to be one over all.
            is_measured: Micro-batches' gradients are; for that they are added up here, not by autograd.
        """
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
            try:
                gradients = self._with_those_of(loss if factor == 1.0 else loss * factor)
            except BaseException:
                self.drop()
                raise
            if self._is_measured:
                num, seen, squares = self._measured
                square = square_norm(gradients) * unit**2 / counts
                self._measured = num + 1, seen + counts, squares + square
                gradients = list(map(_sum, self._gradients, gradients))
            self._gradients = gradients
            self._unit = unit
        self.batches += 1
        self._samples += samples
        self._counts += counts

    def _with_those_of(self, loss: torch.Tensor) -> list[torch.Tensor | None]:
        """Let autograd add a loss's gradients to the window's, or give them alone if they are measured."""
        before = [None] * len(self._parameters) if self._is_measured else self._gradients
        try:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            loss.backward()  # type: ignore[no-untyped-call]
            return _apart([parameter.grad for parameter in self._parameters], before)
        finally:
            for parameter in self._parameters:
                parameter.grad = None

    def see(self, loss: float) -> None:
        """Take note of what a micro-batch's loss was."""
        self._is_finite = self._is_finite and math.isfinite(loss)

    @property
    def there(self) -> list[torch.Tensor]:
        """What was gathered."""
        return [gradient for gradient in self._gradients if gradient is not None]

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
        self._gradients = brought(state["gradients"], self._parameters)


def brought(
    gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[torch.Tensor | None]:
    """Copy gradients to where their parameters are; strides stay, as they are what sums are made in."""
    pairs = zip(gradients, parameters, strict=True)
    return [None if g is None else g.detach().to(p.device, copy=True) for g, p in pairs]


def _apart(
    gradients: list[torch.Tensor | None], before: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Give each gradient memory of its own.

    What two parameters go into in the same way, as a sum of both, hands one tensor's memory to both as their
    gradients: to add to each of them, or to divide it, would do so twice. Later micro-batches add to what is
    there.
    """
    memories = set()
    for place, (gradient, was_there) in enumerate(zip(gradients, before, strict=True)):
        if gradient is None or was_there is not None or gradient.layout is not torch.strided:
            continue
        memory = gradient.untyped_storage().data_ptr()
        if memory in memories:
            gradients[place] = gradient.clone()
        memories.add(memory)
    return gradients


def _sum(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    """Add two gradients, if dense in the first one's memory."""
    if one is None or two is None:
        return two if one is None else one
    if not one.layout is two.layout is torch.strided:
        return one + two
    with torch.no_grad():
        return one.add_(two)
