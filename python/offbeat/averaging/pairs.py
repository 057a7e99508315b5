"""Members that meet in twos: who meets whom, what they exchange, and what all know some rounds later."""

import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import distributed

from offbeat.errors import ConnectionLostError
from offbeat.local.behind import Behind
from offbeat.local.flat import Flat
from offbeat.local.sums import Sums, reduce

__all__ = ["Later", "Met", "Pairs", "lag", "partner"]

NUM_SAID = 3
"""Numbers that a pair exchanges besides the statistics and the models."""


def partner(number: int, member: int, size: int) -> int | None:
    """Say whom a member meets in a round: a matching, as good as random, the same wherever it is asked.

    Members are put in an order by a hash of the round's number and their own, which no version of Python
    makes another one, and each two that follow one another meet.

    Args:
        number: Of the round.
        member: From 0 to below `size`.
        size: How many members there are.

    Returns:
        The other one; None: nobody, as one member where their number is odd.
    """
    order = sorted(range(size), key=lambda each: hashlib.sha256(f"{number} {each}".encode()).digest())
    other = order.index(member) ^ 1
    return order[other] if other < size else None


def lag(size: int) -> int:
    """Say how many rounds later members know what all have said in one.

    Whom a member meets has met another one in the round before, who has met another: after log2(size) rounds
    whatever comes had to wait for about all of them anyway. So that nobody is waited for on this account.
    """
    return max(1, (size - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Met:
    """What a partner has said.

    Attributes:
        values: Of the parameters.
        statistics: Of its BatchNorm layers.
        is_finite: They are.
        is_at_work: It has not ended.
        is_same: It has given the same mark.
    """

    values: Flat
    statistics: torch.Tensor
    is_finite: bool
    is_at_work: bool
    is_same: bool


class Pairs:
    """Exchanges models with one other member, over gloo and through the CPU's memory.

    Both send and receive at once, and each round is a matching: nobody waits for one who waits for it.

    Also where models are on a CUDA device: what waits for a partner there, as NCCL's kernels do, takes room
    from the training for as long. A thread waits for the messages, since torch tells of one of gloo's that it
    has come to nobody but who waits for it.
    """

    def __init__(self, sums: Sums, device: torch.device) -> None:
        """`sums`: of a group that carries the CPU's tensors; `device`: where models are."""
        self._sums = sums
        self._device = device
        self._behind = Behind[None]("offbeat-gossip")
        sums.waits_on(self._behind)
        self._works: list[distributed.Work] = []
        self._theirs: list[torch.Tensor] = []
        self._kinds: list[torch.dtype] = []
        self._mark = 0.0

    def begin(
        self,
        partner: int,
        *,
        values: Flat,
        statistics: torch.Tensor,
        is_finite: bool,
        is_at_work: bool,
        mark: float,
    ) -> None:
        """Send what this member says, which is not to change until `take`.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        said = torch.tensor([is_finite, is_at_work, mark], dtype=torch.float64)
        first = torch.cat([said, statistics.cpu()])
        self._kinds, self._mark = list(values), mark
        ours = [first, *(flat.cpu() for flat in values.values())]
        self._theirs = theirs = [torch.empty_like(flat) for flat in ours]

        def start(group: distributed.ProcessGroup) -> list[distributed.Work]:
            works = []
            for tag, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                works.append(distributed.irecv(other, group=group, group_src=partner, tag=tag))
                works.append(distributed.isend(one, group=group, group_dst=partner, tag=tag))
            assert None not in works  # noqa: S101  this process is a member
            return works  # type: ignore[return-value]

        self._works = works = self._sums.start(start, are_between_two=True)
        with suppress(RuntimeError):  # no thread is to be had: `wait` waits for the messages itself
            self._behind.begin(lambda: self._notice(works))

    def is_there(self) -> bool:
        """Look whether the thread has ended, if there is one."""
        return self._behind.has_ended()

    def wait(self) -> None:
        """Wait for the partner; what breaks off the wait leaves it under way.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        with self._sums.telling(is_there=self.is_there() and not self._works):
            self._behind.wait()
            self._receive(self._works)

    def take(self) -> Met | None:
        """Give what the partner has said, after `wait`; None: there was none to be met."""
        if not self._theirs:
            return None
        self._behind.end()
        (first, *flats), self._theirs = self._theirs, []
        is_finite, is_at_work, mark = first[:NUM_SAID].tolist()
        return Met(
            {kind: flat.to(self._device) for kind, flat in zip(self._kinds, flats, strict=True)},
            first[NUM_SAID:].to(self._device),
            bool(is_finite),
            bool(is_at_work),
            mark == self._mark,
        )

    def _notice(self, works: list[distributed.Work]) -> None:
        """Wait until all has come; of a member that is lost `wait` tells, for an error would hold these."""
        with suppress(ConnectionLostError):
            self._receive(works)

    def _receive(self, works: list[distributed.Work]) -> None:
        """Wait for each message once: who waits for it again, as gloo has it, waits for another one.

        One for which somebody has waited tells that it has come, also where Ctrl-C came in that wait.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._sums.wait([])  # it may have been before
        while works:
            if not works[-1].is_completed():
                self._sums.wait(works[-1:])
            works.pop()


class Later:
    """Sums over all members of a few numbers that each says in a round, which are had some rounds later.

    In all members after the same round, so that they act upon them alike; and in the round itself nobody else
    has to be waited for.
    """

    def __init__(self, sums: Sums, rounds: int) -> None:
        """`sums`: of a group that carries the CPU's tensors; `rounds`: how many later."""
        self._sums = sums
        self._rounds = rounds
        self._waiting: deque[tuple[list[distributed.Work], torch.Tensor, object]] = deque()

    def say(self, numbers: Sequence[float], own: object) -> None:
        """Say them; `own` is kept, to be given back with their sums.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        tensor = torch.tensor(numbers, dtype=torch.float64)
        works = self._sums.start(lambda group: [reduce(tensor, group)])
        self._waiting.append((works, tensor, own))

    def is_there(self) -> bool:
        """Tell whether `take` would not have to wait."""
        return len(self._waiting) <= self._rounds or all(work.is_completed() for work in self._waiting[0][0])

    def take(self) -> tuple[list[float], object] | None:
        """Wait for the sums of so many rounds ago; None: there was no such round yet.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        if len(self._waiting) <= self._rounds:
            return None
        works, tensor, own = self._waiting[0]
        with self._sums.telling(is_there=self.is_there()):
            self._sums.wait(works)
        self._waiting.popleft()
        return tensor.tolist(), own

    def forget(self) -> None:
        """Begin anew, at a round before which all members do."""
        self._waiting.clear()

    def state(self, *, but: int) -> list[list[float]]:
        """Give the sums that are still to be taken, waiting for them; but for so many of the newest.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        kept = list(self._waiting)[: len(self._waiting) - but]
        with self._sums.telling():
            for works, _, _ in kept:
                self._sums.wait(works)
        return [tensor.tolist() for _, tensor, _ in kept]

    def resume(self, state: Sequence[Sequence[float]]) -> None:
        """Go on with sums that `state` gave; what was kept with them is None."""
        newest = state[-self._rounds :]
        self._waiting = deque(([], torch.tensor(sums, dtype=torch.float64), None) for sums in newest)
