"""Who takes part in a round: this process alone, or all of a process group of torch's."""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed

from offbeat.errors import StateError
from offbeat.local.flat import Flat
from offbeat.local.group import begin_alike, check_alike, check_device, destroy, is_alike, own_group
from offbeat.local.sums import Sums

__all__ = ["DIFFERENT", "Alone", "Group", "Members"]


DIFFERENT = (
    "members average differently: method, averaging_policy with its frequency and bounds, adaptation_metric, "
    "overlap, BatchNorm layers, and which parameters are trained (requires_grad) have to be the same "
    "in all of "
    "them when they are made"
)
"""What to say where members' settings differ."""


class Members(Protocol):
    """Adds up over members. One round may be under way at a time."""

    size: int

    def begin(self, sent: Flat, facts: Sequence[float], statistics: torch.Tensor) -> None:
        """Send what this member has: flat memory and statistics, which become sums over all, and facts."""

    def is_there(self) -> bool:
        """Tell whether the sums have come, without waiting."""

    def finish(self) -> tuple[Flat, list[float], torch.Tensor]:
        """Wait for the sums over all members of what was begun."""

    def is_alike(self, value: object) -> bool:
        """Tell in all members at once whether a value, as JSON can have it, is the same in all of them."""

    def make_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all members the first one's values, in place."""

    def close(self) -> None:
        """Take part no more."""


class Alone:
    """Nobody else: what is sent is the sum."""

    size = 1

    def __init__(self) -> None:
        self._sent: tuple[Flat, list[float], torch.Tensor] | None = None

    def begin(self, sent: Flat, facts: Sequence[float], statistics: torch.Tensor) -> None:
        """Keep it."""
        self._sent = sent, list(facts), statistics

    def is_there(self) -> bool:
        """It is."""
        return True

    def finish(self) -> tuple[Flat, list[float], torch.Tensor]:
        """Give it back."""
        sent, self._sent = self._sent, None
        assert sent is not None  # noqa: S101  something was begun
        return sent

    def is_alike(self, value: object) -> bool:
        """It is."""
        del value
        return True

    def make_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are."""

    def close(self) -> None:
        """Nobody has to be told."""


class Group:
    """A process group: all-reduces on its own threads, while this one goes on."""

    def __init__(
        self,
        group: distributed.ProcessGroup,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        setting: object,
        more_time: timedelta,
    ) -> None:
        """Begin with the first member's values.

        Args:
            group: The members.
            named: Parameters and buffers, each once, with its name.
            setting: What has to be the same in all members, as JSON can have it.
            more_time: How much longer a round waits for others than the group given does.

        Raises:
            ConfigError: If the group has no backend for the parameters' device.
            ModelMismatchError: If members hold different models.
            StateError: If they are set differently.
        """
        self.size = distributed.get_world_size(group)
        self._device = named[0][1].device
        check_device(group, self._device)
        own = own_group(group, more=more_time)
        self._sums = Sums(own, of="the models")
        self._destroy = weakref.finalize(self, destroy, own)
        self._destroy.atexit = False  # the default group takes all others with it
        check_alike(own, named, self._device)
        if not is_alike(own, setting, self._device):
            raise StateError(DIFFERENT)
        begin_alike(own, (tensor for _, tensor in named))
        self._sent: Flat = {}
        self._facts = self._statistics = torch.empty(0)

    def begin(self, sent: Flat, facts: Sequence[float], statistics: torch.Tensor) -> None:
        """Start the sums.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._sent = sent
        self._facts = torch.tensor(facts, dtype=torch.float64, device=self._device)
        self._statistics = statistics
        self._sums.begin([self._facts, statistics, *sent.values()])

    def is_there(self) -> bool:
        """Ask the group's threads."""
        return self._sums.is_there()

    def finish(self) -> tuple[Flat, list[float], torch.Tensor]:
        """Wait for all members.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._sums.finish()
        sent, self._sent = self._sent, {}
        return sent, self._facts.tolist(), self._statistics

    def is_alike(self, value: object) -> bool:
        """Compare over the group."""
        return is_alike(self._sums.group, value, self._device)

    def make_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast."""
        begin_alike(self._sums.group, tensors)

    def close(self) -> None:
        """Destroy the group of one's own."""
        self._sums.close()
        self._destroy()
