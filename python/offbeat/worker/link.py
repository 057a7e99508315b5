"""The session and the module together: what goes out, what comes in, and what is known after a failure."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from offbeat.module import Binding, Memory
from offbeat.receipt import Receipt

if TYPE_CHECKING:
    from offbeat._offbeat import Session

__all__ = ["Link"]


class Link:
    """Moves one module's tensors to and from one server.

    Attributes:
        session: The connection.
        binding: The module's tensors.
    """

    def __init__(self, session: "Session", binding: Binding, *, in_flight: int) -> None:
        """With two pushes in flight, pulls land in spare memory, from which the module is set."""
        self.session = session
        self.binding = binding
        # The memory of a push is kept until it is answered: should the connection break, it is sent again.
        self._unsettled: deque[Sequence[Memory | None]] = deque()
        self._in_flight = in_flight
        if in_flight > 1:
            binding.use_spares()

    def pull(self) -> None:
        """Bring the newest model into the module."""
        self.binding.refresh()
        binding = self.binding
        self._pull(incremental=binding.filled and not any(slot.dirty for slot in binding.parameters))

    def push_pull(self, values: Sequence[torch.Tensor | None], samples: int) -> Receipt | None:
        """Push one tensor or None per slot and bring the model that answers into the module.

        The binding is as of its last `refresh`, which comes after the last write to the module.

        Returns:
            The receipt of this push; with two in flight, of the push before it, None for the first.
        """
        binding = self.binding
        memories = binding.memories(values)
        # What is in the push comes back whole. What its owner wrote to besides would stay as it is.
        stays = any(
            s.dirty and s.is_parameter and v is None for s, v in zip(binding.slots, values, strict=True)
        )
        self._unsettled.append(memories)
        try:
            receipt = self.session.push_pull(memories, samples, binding.out(), binding.filled)
        except BaseException:
            self.binding.lost()
            raise
        while len(self._unsettled) >= self._in_flight:
            self._unsettled.popleft()
        binding.landed()
        if stays:
            self._pull(incremental=False)
        return receipt

    def settle(self) -> list[Receipt]:
        """Wait for what is in flight, and bring the model that answers it into the module."""
        out = self.binding.out()
        try:
            receipts = self.session.flush(out)
        except BaseException:
            self.binding.lost()
            raise
        self._unsettled.clear()
        if receipts:
            self.binding.landed()
        return receipts

    def _pull(self, *, incremental: bool) -> None:
        try:
            self.session.pull(self.binding.out(), incremental)
        except BaseException:
            self.binding.lost()
            raise
        self.binding.landed()
