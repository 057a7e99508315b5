"""Who adds to a sum of gradients: this process alone, or all of a process group of torch's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import distributed, nn

from offbeat.accumulator.window import Sum

__all__ = ["Alone", "Group", "Members", "Total"]


@dataclass(frozen=True, slots=True)
class Total:
    """An update's gradient, over all members.

    Attributes:
        gradients: By parameter, divided; None where no member had one.
        samples: Of all members.
        num_at_work: Members that had something to add.
    """

    gradients: list[torch.Tensor | None]
    samples: int
    num_at_work: int


class Members(Protocol):
    """Adds sums up over members. One total may be under way at a time."""

    size: int

    def begin(self, own: Sum | None) -> None:
        """Send what this member has; None takes part with nothing, having ended."""

    def finish(self) -> Total:
        """Wait for the total of what was begun."""


class Alone:
    """Nobody else."""

    size = 1

    def __init__(self) -> None:
        self._own: Sum | None = None

    def begin(self, own: Sum | None) -> None:
        """Keep it."""
        self._own = own

    def finish(self) -> Total:
        """Divide it."""
        own, self._own = self._own, None
        if own is None:
            return Total([], 0, 0)
        if own.counts is not None:
            # Times `unit` over `counts`: by 1 where there was one micro-batch, which so keeps its bits.
            _divide(own.gradients, own.counts / own.unit)
        return Total(own.gradients, own.samples, 1)


class Group:
    """A process group: the gradients of all in one all-reduce per dtype, on the group's own threads."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, is_divided: bool) -> None:
        """`is_divided`: totals are, by the counts of all."""
        self.size = distributed.get_world_size()
        self._is_divided = is_divided
        self._parameters = parameters
        self._device = parameters[0].device
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._facts = torch.empty(0)
        self._works: list[distributed.Work] = []

    def begin(self, own: Sum | None) -> None:
        """Copy the sums into flat memory and start their reduction."""
        gradients: Sequence[torch.Tensor | None] = [None] * len(self._parameters)
        facts = [0.0, 0.0, 0.0]
        if own is not None:
            gradients = own.gradients
            facts = [own.counts or 0.0, float(own.samples), 1.0]
        unit = 1.0 if own is None else own.unit
        self._flat = _flat(self._parameters, gradients, unit)
        presence = [0.0 if gradient is None else 1.0 for gradient in gradients]
        self._facts = torch.tensor([*facts, *presence], dtype=torch.float64, device=self._device)
        self._works = [_reduce(tensor) for tensor in (self._facts, *self._flat.values())]

    def finish(self) -> Total:
        """Wait for all members, divide, and give each parameter its part."""
        for work in self._works:
            work.wait()
        counts, samples, num_at_work, *presence = self._facts.tolist()
        gradients = _parts(self._parameters, self._flat, presence)
        if self._is_divided and counts:
            _divide(gradients, counts)
        self._works, self._flat = [], {}
        return Total(gradients, round(samples), round(num_at_work))


def _reduce(tensor: torch.Tensor) -> distributed.Work:
    work = distributed.all_reduce(tensor, async_op=True)
    assert work is not None  # noqa: S101  this process is a member
    return work


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _flat(
    parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], unit: float
) -> dict[torch.dtype, torch.Tensor]:
    """Lay gradients one behind the other, by dtype, float32 at least; zeros for what is not there."""
    parts: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        kind = _wide(parameter.dtype)
        if gradient is None:
            part = parameter.new_zeros(parameter.numel(), dtype=kind)
        else:
            part = gradient.reshape(-1).to(kind)
        parts.setdefault(kind, []).append(part)
    flat = {kind: torch.cat(tensors) for kind, tensors in parts.items()}
    if unit != 1.0:
        for tensor in flat.values():
            tensor.mul_(unit)
    return flat


def _parts(
    parameters: Sequence[nn.Parameter], flat: dict[torch.dtype, torch.Tensor], presence: Sequence[float]
) -> list[torch.Tensor | None]:
    starts = dict.fromkeys(flat, 0)
    parts: list[torch.Tensor | None] = []
    for parameter, is_there in zip(parameters, presence, strict=True):
        kind = _wide(parameter.dtype)
        start = starts[kind]
        starts[kind] = end = start + parameter.numel()
        part = flat[kind][start:end].view(parameter.shape).to(parameter.dtype)
        parts.append(part if is_there else None)
    return parts


def _divide(gradients: Sequence[torch.Tensor | None], by: float) -> None:
    there = [gradient for gradient in gradients if gradient is not None]
    if there and by != 1.0:
        torch._foreach_div_(there, by)
