"""Gradients for an optimizer on the server, averaged over the samples of several batches."""

import torch

from offbeat.errors import ConfigError, StateError
from offbeat.local.loss import LossReduction
from offbeat.module import Binding, Slot
from offbeat.receipt import Receipt
from offbeat.worker.contribution import Kind, Values, require_gradient, with_buffers

__all__ = ["Gradients"]


class Gradients:
    """The gradient of the mean over the samples of all batches; of the sum, where losses are sums.

    Batches are weighted by their size and divided once, in float32 at least; one batch alone keeps its bits.
    """

    kind: Kind = "gradient"

    def __init__(self, binding: Binding, reduction: LossReduction, *, waits: bool = True) -> None:
        """`waits`: a batch may be pushed after the next one's backward, not only before."""
        self._binding = binding
        self._reduction = reduction
        self._first: Values | None = None
        self._first_samples = 0
        self._sum: Values | None = None
        self._samples = 0
        self._waits = waits

    def add(self, samples: int) -> None:
        """Take the batch whose gradients are on the module; weighted, unless it stays the only one."""
        gradients = self._binding.gradients()
        require_gradient(gradients)
        self._binding.clear_gradients()
        self._samples += samples
        if self._first is None:
            # The next batch's may be written into the same memory: DDP's buckets, or a user's own. No tensor
            # tells whether anybody else has its memory.
            kept = [g if g is None else g.detach().clone() for g in gradients] if self._waits else gradients
            self._first, self._first_samples = kept, samples
            return
        if self._sum is None:
            self._sum = [None] * len(gradients)
            self._accumulate(self._sum, self._first, self._first_samples)
        self._accumulate(self._sum, gradients, samples)

    def take(self) -> Values:
        """Give the mean gradient, or the sum, and the buffers."""
        values, total = self._sum, self._samples
        if self._first is None:
            raise StateError("there is nothing to push: no batch since the last push")
        if values is None:
            values = self._first
        elif self._reduction == "mean":
            values = [None if value is None else value.div_(total) for value in values]
        self.drop()
        return with_buffers(values, self._binding)

    def settled(self, receipt: Receipt) -> None:
        """Nothing of a gradient push is kept here."""

    def unsent(self) -> None:
        """Nothing of a gradient push is kept here."""

    def drop(self, in_flight: int = 0) -> None:  # noqa: ARG002  nothing of a push is kept here
        """Forget what was not pushed."""
        self._first = self._sum = None
        self._first_samples = self._samples = 0

    def close(self) -> None:
        """Forget what was not pushed."""
        self.drop()

    def _accumulate(self, total: Values, gradients: Values, samples: int) -> None:
        weight = samples if self._reduction == "mean" else 1
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            gradient = _dense(self._binding.slots[i], gradient.detach())  # noqa: PLW2901  the same, usable
            so_far = total[i]
            if so_far is None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                total[i] = gradient.to(wide) * weight
            else:
                so_far.add_(gradient, alpha=weight)


def _dense(slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient
    raise ConfigError(
        f"the gradient of {slot.spec['name']!r} is sparse and cannot be accumulated: build its layer without "
        f"sparse=True"
    )
