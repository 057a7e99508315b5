"""Who takes part in a round: this process alone, or all of a process group of torch's."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn, Protocol

import torch
from torch import distributed

from offbeat.errors import ConnectionLostError, StateError
from offbeat.local.flat import Flat
from offbeat.local.group import begin_alike, check_alike, check_device, is_alike, own_group

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
        self._works: list[distributed.Work] = []
        self._lost: str | None = None

    def begin(self, sent: Flat, facts: Sequence[float], statistics: torch.Tensor) -> None:
        """Start the sums.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._check()
        self._sent = sent
        self._facts = torch.tensor(facts, dtype=torch.float64, device=self._device)
        self._statistics = statistics
        every = [self._facts, *([statistics] if statistics.numel() else []), *sent.values()]
        try:
            self._works = [self._reduce(tensor) for tensor in every]
        except RuntimeError as error:
            self._lose(error)

    def is_there(self) -> bool:
        """Ask the group's threads; of what has failed there is an error to be had, at `finish`."""
        return all(work.is_completed() for work in self._works)

    def finish(self) -> tuple[Flat, list[float], torch.Tensor]:
        """Wait for all members.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._check()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._lose(error)
        sent, self._sent, self._works = self._sent, {}, []
        return sent, self._facts.tolist(), self._statistics

    def _reduce(self, tensor: torch.Tensor) -> distributed.Work:
        work = distributed.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None  # noqa: S101  this process is a member
        return work

    def _check(self) -> None:
        if self._lost is not None:
            raise ConnectionLostError(self._lost)

    def _lose(self, error: RuntimeError) -> NoReturn:
        self._sent, self._works = {}, []
        cause = str(error).strip().partition("\n")[0]
        self._lost = (
            f"a round of averaging failed, for a member is gone or was waited for too long: {cause}; torch's "
            f"process groups do not outlive a member: start all of them again. Each member has to call "
            f"flush() when its data is at its end, as others may have more"
        )
        raise ConnectionLostError(self._lost) from error
