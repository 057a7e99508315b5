"""A window: the gradients of several micro-batches, added up where autograd adds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offbeat.local.flat import wide

__all__ = ["Sum", "Window", "brought", "square_norm"]

NOTHING = (0, 0.0, 0.0)
"""Measured of no micro-batch."""


@dataclass(frozen=True, slots=True)
class Sum:
    """What a window has gathered: a sum of gradients, each times its micro-batch's count over `unit`.

    Attributes:
        gradients: By parameter; None where no micro-batch had one.
        counts: Samples, or what a normalizer counts. The sum, times `unit`, is to be divided by those of all
            members; None where it is not to be divided.
        unit: The first micro-batch's count where losses are means, so that its gradient is not touched, nor
            that of any as large; else 1.
        samples: Of all micro-batches.
        measured: Where that is asked for: micro-batches, their counts, and the sum of the squared norms of
            their mean gradients times their counts.
    """

    gradients: list[torch.Tensor | None]
    counts: float | None
    unit: float
    samples: int
    measured: tuple[int, float, float] = NOTHING


class Window:
    """Micro-batches since the last update.

    Between two micro-batches their gradients are not on the module: what a user zeroes, clips or adds there
    is not the window's.

    Attributes:
        batches: How many.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, are_means: bool, is_divided: bool, is_measured: bool
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

    def add(self, loss: torch.Tensor, *, counts: float, samples: int) -> None:
        """Add a micro-batch's gradients. If that raises, the window begins anew: autograd had begun to add.

        Args:
            loss: Of the micro-batch; what it was reduced by is `counts`.
            counts: How much of the window's loss it is. Of 0 nothing is added: a mean over nothing is NaN.
            samples: In it.
        """
        if counts:
            unit = self._unit or (counts if self._are_means else 1.0)
            factor = counts / unit if self._are_means else 1.0
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = None if self._is_measured else gradient
            try:
                (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
            except BaseException:
                self.drop()
                raise
            finally:
                gradients = [parameter.grad for parameter in self._parameters]
                for parameter in self._parameters:
                    parameter.grad = None
            if self._is_measured:
                num, seen, squares = self._measured
                square = square_norm(gradients) * unit**2 / counts
                self._measured = num + 1, seen + counts, squares + square
                gradients = _added(self._gradients, gradients)
            self._gradients = gradients
            self._unit = unit
        self.batches += 1
        self._samples += samples
        self._counts += counts

    def take(self) -> Sum:
        """Give what was gathered, and begin anew."""
        counts = self._counts if self._is_divided else None
        taken = Sum(self._gradients, counts, self._unit or 1.0, self._samples, self._measured)
        self.drop()
        return taken

    def drop(self) -> None:
        """Begin anew."""
        self.batches = self._samples = 0
        self._gradients = [None] * len(self._parameters)
        self._counts = self._unit = 0.0
        self._measured = NOTHING

    def state_dict(self) -> dict[str, Any]:
        """Give copies of what was gathered: the next micro-batch is added to it in place."""
        return {
            "batches": self.batches,
            "samples": self._samples,
            "counts": self._counts,
            "unit": self._unit,
            "measured": list(self._measured),
            "gradients": [None if g is None else g.detach().clone() for g in self._gradients],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same parameters."""
        self.batches, self._samples = state["batches"], state["samples"]
        self._counts, self._unit = state["counts"], state["unit"]
        num, seen, squares = state["measured"]
        self._measured = num, seen, squares
        self._gradients = brought(state["gradients"], self._parameters)


def brought(
    gradients: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[torch.Tensor | None]:
    """Copy gradients to where their parameters are; strides stay, as they are what sums are made in."""
    pairs = zip(gradients, parameters, strict=True)
    return [None if g is None else g.detach().to(p.device, copy=True) for g, p in pairs]


def square_norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """Give the squared norm of all gradients as one vector; a device is waited for to know."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            by_dtype.setdefault(values.dtype, []).append(values.detach())
    square = 0.0
    for dtype, some in by_dtype.items():
        norms = torch._foreach_norm(some, 2.0, dtype=wide(dtype))  # noqa: SLF001  as torch's clipping
        square += torch.stack(norms).double().square().sum().item()
    return square


def _added(
    sums: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Add gradients to sums, in place where both are dense."""
    dense = [
        (one, two)
        for one, two in zip(sums, gradients, strict=True)
        if one is not None and two is not None and one.layout is two.layout is torch.strided
    ]
    if dense:
        torch._foreach_add_([one for one, _ in dense], [two for _, two in dense])
    in_place = {id(one) for one, _ in dense}
    return [
        two if one is None else one if two is None or id(one) in in_place else one + two
        for one, two in zip(sums, gradients, strict=True)
    ]
