"""What a push carries, whichever kind it is: the protocol of both, and what they share."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from offbeat.errors import StateError
from offbeat.module import Binding
from offbeat.receipt import Receipt

__all__ = ["Contribution", "Kind", "Values", "require_gradient", "with_buffers"]

Kind = Literal["gradient", "delta"]

#: One tensor per slot of the binding; None for what is left out.
Values = list[torch.Tensor | None]


class Contribution(Protocol):
    """Gathers batches until they are pushed. The binding was refreshed before each call."""

    kind: Kind

    def add(self, samples: int) -> None:
        """Take the batch whose gradients are on the module, and set those to None."""

    def take(self) -> Values:
        """Give what to push, by slot, and begin anew."""

    def settled(self, receipt: Receipt) -> None:
        """The oldest push that was not settled yet now is."""

    def unsent(self) -> None:
        """What was taken last was refused here: the server will not see it. What is in flight stays so."""

    def drop(self, in_flight: int = 0) -> None:
        """Forget what was not pushed, and what was pushed and not answered.

        But for the newest `in_flight` of these, which are still to be settled.
        """

    def close(self) -> None:
        """Let go of what belongs to the user."""


def with_buffers(values: Values, binding: Binding) -> Values:
    """Add the buffers."""
    return [b if v is None else v for v, b in zip(values, binding.buffers(), strict=True)]


def require_gradient(gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse a batch that left no gradient anywhere."""
    if all(gradient is None for gradient in gradients):
        raise StateError(
            "no parameter of the model has a gradient: call loss.backward() before worker.step(), with the "
            "loss computed by worker.model"
        )
