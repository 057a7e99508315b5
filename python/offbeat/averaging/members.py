"""Who takes part in a round: this process alone, or all of a process group of torch's."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed

from offbeat.errors import StateError
from offbeat.local.flat import Flat
from offbeat.local.group import begin_alike, check_alike, check_device, is_alike, is_other, own_group
from offbeat.local.sums import Sums

__all__ = ["DIFFERENT", "Alone", "Group", "Heard", "Members", "Said"]


DIFFERENT = (
    "members average differently: method, averaging_policy with its frequency and bounds, adaptation_metric, "
    "overlap, BatchNorm layers, and which parameters are trained (requires_grad) have to be the same "
    "in all of "
    "them when they are made"
)
"""What to say where members' settings differ."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a member says in a round.

    Attributes:
        parameters: Of which it speaks.
        values: What they are, in flat memory, which is nobody's from here on.
        weight: Of these; 0 adds nothing, whatever they are.
        samples: It has had since the round before; weigh all but the parameters.
        is_at_work: It has not ended.
        metric: What the pace goes by; None where there is none.
        rate: Learning rate of its optimizer.
        statistics: Of its BatchNorm layers.
        mark: Digest of what has to be the same in all members.
        want: Digest of what is followed once it is the same in all members.
    """

    parameters: Sequence[torch.Tensor]
    values: Flat
    weight: float
    samples: float
    is_at_work: bool
    metric: float | None
    rate: float
    statistics: torch.Tensor
    mark: float
    want: float


@dataclass(frozen=True, slots=True)
class Heard:
    """What all members together have said.

    Attributes:
        means: Of the parameters, by weight; nothing that makes sense where that is 0.
        weight: Of all.
        samples: Of all.
        num_at_work: Members that have not ended.
        metric: Mean over those that had one; None where nobody had.
        rate: Mean by samples; 0 where there are none.
        statistics: Mean by samples; likewise nothing that makes sense.
        is_same: All gave the same mark.
        are_agreed: All want the same.
    """

    means: Flat
    weight: float
    samples: float
    num_at_work: int
    metric: float | None
    rate: float
    statistics: torch.Tensor
    is_same: bool = True
    are_agreed: bool = True


class Members(Protocol):
    """Puts together what members say. One round may be under way at a time.

    Attributes:
        size: How many there are.
        is_alone: There can be no others.
        is_waited_for: A member waits for a round's end before it begins the next; else it begins that later.
        has_gone_on: Others had made rounds before this member came, and it has begun with what they made.
    """

    size: int
    is_alone: bool
    is_waited_for: bool
    has_gone_on: bool

    def begin(self, said: Said) -> None:
        """Begin a round with what this member says."""

    def is_there(self) -> bool:
        """Tell whether what all have said is known, without waiting."""

    def finish(self) -> Heard:
        """Wait for it."""

    def is_alike(self, value: object) -> bool:
        """Tell in all members at once whether a value, as JSON can have it, is the same in all of them."""

    def make_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all members the first one's values, in place."""

    def close(self) -> None:
        """Take part no more."""


class Alone:
    """Nobody else: what is said is heard, and keeps its bits."""

    size = 1
    is_alone = True
    is_waited_for = True
    has_gone_on = False

    def __init__(self) -> None:
        self._said: Said | None = None

    def begin(self, said: Said) -> None:
        """Keep it."""
        self._said = said

    def is_there(self) -> bool:
        """It is."""
        return True

    def finish(self) -> Heard:
        """Give it back."""
        said, self._said = self._said, None
        assert said is not None  # noqa: S101  something was begun
        return Heard(
            said.values,
            said.weight,
            said.samples,
            int(said.is_at_work),
            said.metric,
            said.rate,
            said.statistics,
        )

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

    is_alone = False
    is_waited_for = True
    has_gone_on = False

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
        check_alike(own, named, self._device)
        if not is_alike(own, setting, self._device):
            raise StateError(DIFFERENT)
        begin_alike(own, (tensor for _, tensor in named))
        self._values: Flat = {}
        self._facts = self._statistics = torch.empty(0)

    def begin(self, said: Said) -> None:
        """Start to add up.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        metric = (0.0, 0.0) if said.metric is None else (said.metric, 1.0)
        marks = said.mark, said.mark**2, said.want, said.want**2
        sizes = said.weight, said.samples, float(said.is_at_work)
        facts = [*sizes, *metric, said.samples * said.rate, *marks]
        self._facts = torch.tensor(facts, dtype=torch.float64, device=self._device)
        self._values = {kind: _times(flat, said.weight) for kind, flat in said.values.items()}
        self._statistics = _times(said.statistics.clone(), said.samples)
        self._sums.begin([self._facts, self._statistics, *self._values.values()])

    def is_there(self) -> bool:
        """Ask the group's threads."""
        return self._sums.is_there()

    def finish(self) -> Heard:
        """Wait for all members, and divide.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._sums.finish()
        means, self._values = self._values, {}
        weight, samples, num_at_work, metrics, num_metrics, rates, *marks = self._facts.tolist()
        for flat in means.values():
            flat.div_(weight or 1.0)
        return Heard(
            means,
            weight,
            samples,
            round(num_at_work),
            metrics / num_metrics if num_metrics else None,
            rates / (samples or 1.0),
            self._statistics.div_(samples or 1.0),
            is_same=not is_other(marks[0], marks[1], self.size),
            are_agreed=not is_other(marks[2], marks[3], self.size),
        )

    def is_alike(self, value: object) -> bool:
        """Compare over the group."""
        return is_alike(self._sums.group, value, self._device)

    def make_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast."""
        begin_alike(self._sums.group, tensors)

    def close(self) -> None:
        """Destroy the group of one's own."""
        self._sums.close()


def _times(flat: torch.Tensor, weight: float) -> torch.Tensor:
    """Multiply in place; by 0 what is not finite as well."""
    return flat.mul_(weight) if weight else flat.zero_()
