"""What a member has learnt and not brought to the others: it may fall behind, or be forgotten at the end."""

import os
from collections.abc import Callable

from offbeat import log, process
from offbeat.forgotten import warn_of_forgotten as _warn_of_forgotten
from offbeat.forgotten import with_something_left as _open

__all__ = ["FAR", "Unshared"]

FAR = 10
"""Times the averaging frequency that a round may take before the member is told."""


class Unshared:
    """The iterations of a member since what it has of the others' was made.

    Where the process ends well and some are left, that `flush` was not called is warned of. What has ended
    otherwise has said so: by an exception, `close`, or a state that was saved to go on from.
    """

    def __init__(self, rank: int) -> None:
        """`rank`: of the member, to say who it is."""
        self._rank = rank
        self._pid = os.getpid()
        self._iterations = self._shared = 0
        self._begun: dict[
            int, int
        ] = {}  # of each fragment's last round that ended, after how many iterations
        self._num_fragments = self._num_members = 1
        self._has_told = False

    def count(self, iterations: int, *, num_members: int, num_fragments: int) -> None:
        """Take note of an iteration."""
        self._iterations, self._num_members, self._num_fragments = iterations, num_members, num_fragments
        _open.add(self)
        process.at_end(_warn_of_forgotten)

    def end_round(self, fragment: int, begun: int) -> None:
        """Take note that a round has brought a fragment together, as it was after so many iterations."""
        self._begun[fragment] = begun

    def end(self, iterations: int) -> None:
        """Take note that everything is the same in all members."""
        self._iterations = self._shared = iterations
        self._begun.clear()
        self.leave()

    def leave(self) -> None:
        """Take note that what is left is accounted for; until the next iteration."""
        _open.discard(self)

    def look_behind(self, times: float, done: str, *, policy: str, seek: Callable[[], str | None]) -> None:
        """Warn once of a round, at a server, that takes very long.

        Args:
            times: How many times the averaging frequency has passed since it began.
            done: What the member has done since then, in words.
            policy: By which it is time to average; with "adaptive" each member's frequency is its own.
            seek: Looks for the server, and gives how it was not reached.
        """
        if times < FAR or self._has_told:
            return
        self._has_told = True
        text = (
            f"averaging is far behind: member {self._rank} {done} since its round began, {FAR} times "
            f"averaging_frequency, and it has not ended: "
        )
        if (away := seek()) is not None:
            log.warn(f"{text}the members' server is away, and is tried again: {away}")
            return
        slower = "other members, or the server, are slower than this one's training"
        if policy == "adaptive":
            log.warn(
                f"{text}{slower}, or by their own adaptation_metric they average less often (at a server "
                f"each member goes by its own); bring min_averaging_frequency and max_averaging_frequency "
                f"nearer to one another, or take averaging_policy='iteration' or 'time'"
            )
            return
        by_time = (
            "" if policy == "time" else "where members differ in speed by time (averaging_policy='time'), "
        )
        log.warn(
            f"{text}{slower}; average less often (averaging_frequency=), {by_time}or wait for each round "
            f"(overlap=False)"
        )

    @property
    def num(self) -> int:
        """How many they are."""
        oldest = min(self._begun.get(number, self._shared) for number in range(self._num_fragments))
        return self._iterations - oldest

    def _warn_of_forgotten(self, what_ends: str = "process") -> None:
        if self._pid == os.getpid() and self._num_members > 1 and self.num:
            log.warn(
                f"{self.num} iteration(s) since the last average are in the model of member {self._rank} "
                f"alone, and the {what_ends} ends: members' models differ; call flush() in every member "
                f"before that, when its data is at its end; close() tells that this is meant"
            )
