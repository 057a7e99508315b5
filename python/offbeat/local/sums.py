"""Sums over the members of a process group, added up on its own threads while this one goes on."""

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import distributed

from offbeat.errors import ConnectionLostError

__all__ = ["Sums"]


class Sums:
    """All-reduces, of which one set may be under way at a time.

    A member that is gone is an error here, and in each call from then on: what other members have added to
    the sums under way is lost, and torch's group cannot go on.
    """

    def __init__(self, group: distributed.ProcessGroup, *, of: str) -> None:
        """`of`: what is added up, for people."""
        self._group = group
        self._of = of
        self._works: list[distributed.Work] = []
        self._lost: str | None = None

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to add up tensors, in place; they are nobody's until `finish`.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._check()
        try:
            self._works = [self._reduce(tensor) for tensor in tensors]
        except RuntimeError as error:
            self._lose(error)

    def is_there(self) -> bool:
        """Tell whether the sums are, without waiting; of what has failed `finish` tells."""
        return all(work.is_completed() for work in self._works)

    def finish(self) -> None:
        """Wait until the tensors that were given are the sums over all members.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._check()
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._lose(error)

    def _reduce(self, tensor: torch.Tensor) -> distributed.Work:
        work = distributed.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None  # noqa: S101  this process is a member
        return work

    def _check(self) -> None:
        if self._lost is not None:
            raise ConnectionLostError(self._lost)

    def _lose(self, error: RuntimeError) -> NoReturn:
        cause = str(error).strip().partition("\n")[0]
        self._lost = (
            f"{self._of} of all members could not be added up, for one is gone or was waited for too long: "
            f"{cause}; torch's process groups do not outlive a member: start all of them again. Each member "
            f"has to call flush() when its data is at its end, as others may have more"
        )
        raise ConnectionLostError(self._lost) from error
