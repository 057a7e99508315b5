"""Who takes part in a round: this process alone, or all of a process group of torch's."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed

from offbeat.errors import StateError
from offbeat.local.flat import Flat
from offbeat.local.group import begin_alike, check_alike, check_device, is_alike, own_group
from offbeat.local.sums import Sums

__all__ = ["DIFFERENT", "Alone", "Group", "Members"]


DIFFERENT = (
    "members average differently: the method, the policy and its numbers, overlap, and which parameters are "
    "trained (requires_grad) have to be the same in all of them, and to change before the same round"
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


class Group:
    """A process group: all-reduces on its own threads, while this one goes on."""

    def __init__(
        self,
        group: distributed.ProcessGroup,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        setting: object,
        timeout: timedelta | None,
    ) -> None:
        """Begin with the first member's values.

        Args:
            group: The members.
            named: Parameters and buffers, each once, with its name.
            setting: What has to be the same in all members, as JSON can have it.
            timeout: How long a round waits for others; None: as long as torch does.

        Raises:
            ConfigError: If the group has no backend for the parameters' device.
            ModelMismatchError: If members hold different models.
            StateError: If they are set differently.
        """
        self.size = distributed.get_world_size(group)
        self._device = named[0][1].device
        check_device(group, self._device)
        self._group = own_group(group, timeout=timeout)
        check_alike(self._group, named, self._device)
        if not is_alike(self._group, setting, self._device):
            raise StateError(DIFFERENT)
        begin_alike(self._group, (tensor for _, tensor in named))
        self._sent: Flat = {}
        self._facts = self._statistics = torch.empty(0)
        self._sums = Sums(self._group, of="the models")

    def begin(self, sent: Flat, facts: Sequence[float], statistics: torch.Tensor) -> None:
        """Start the sums.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._sent = sent
        self._facts = torch.tensor(facts, dtype=torch.float64, device=self._device)
        self._statistics = statistics
        self._sums.begin([self._facts, *([statistics] if statistics.numel() else []), *sent.values()])

    def is_there(self) -> bool:
        """Ask the group's threads."""
        return self._sums.is_there()

    def finish(self) -> tuple[Flat, list[float], torch.Tensor]:
        """Wait for all members.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        sent, self._sent = self._sent, {}
        self._sums.finish()
        return sent, self._facts.tolist(), self._statistics
