"""When a member averages, and what of that is to change in mid-run."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from offbeat import log
from offbeat.averaging.methods import Method
from offbeat.averaging.pace import Adaptive, Pace, of_setting

__all__ = ["Agreement", "Asked", "Timing"]

ROUNDS_TO_AGREE = 3
"""Rounds in a row in which members want different things before they are told."""

Asked: TypeAlias = tuple[Pace | None, bool | int | None]
"""Another pace, and another end of rounds; None: nothing was asked."""


class Timing:
    """The pace of rounds and where they end. A change is agreed upon in a round, and holds after that.

    Members that changed at once would begin rounds at different iterations; one that alone were changed would
    not be noticed until its rounds and the others' are long out of step.

    Attributes:
        pace: When a round begins, at present.
        overlap: When it ends, at present.
    """

    def __init__(self, pace: Pace, overlap: bool | int) -> None:  # noqa: FBT001  as users give it
        self.pace = pace
        self.overlap = overlap
        self._wanted_pace: Pace | None = None
        self._wanted_overlap: bool | int | None = None
        self._followed: Pace | None = None

    def ask(self, *, pace: Pace | None = None, overlap: bool | int | None = None) -> None:
        """Want another pace, or another end, once all members do; None: as it is."""
        self._wanted_pace = self._wanted_pace if pace is None else pace
        self._wanted_overlap = self._wanted_overlap if overlap is None else overlap

    def setting(self) -> list[object]:
        """Give what is in force, which has to be the same in all members; as JSON can have it."""
        return [self.pace.setting(), self.overlap]

    @property
    def wished_pace(self) -> Pace:
        """What is wanted, or else in force."""
        return self.pace if self._wanted_pace is None else self._wanted_pace

    @property
    def wished_overlap(self) -> bool | int:
        """Likewise."""
        return self.overlap if self._wanted_overlap is None else self._wanted_overlap

    def wish(self) -> list[object]:
        """Give what is wanted, as JSON can have it."""
        return [self.wished_pace.setting(), self.wished_overlap]

    def wishes(self) -> dict[str, tuple[object, object]]:
        """Give what is wanted and not in force, by its keyword, beside what is."""
        pace, found = self.wished_pace, dict[str, tuple[object, object]]()
        if pace.setting() != self.pace.setting():
            found["averaging_frequency"] = pace.every, self.pace.every
        if repr(overlap := self.wished_overlap) != repr(self.overlap):  # 1 is another than True
            found["overlap"] = overlap, self.overlap
        return found

    def asked(self) -> Asked:
        """Give what a round that begins now tells the others."""
        return self._wanted_pace, self._wanted_overlap

    def state_dict(self) -> dict[str, Any]:
        """Give what is in force, and what an adaptive pace has measured."""
        pace = self.pace
        return {
            "timing": self.setting(),
            "pace": [pace.every, list(pace.seen), pace.smooth] if isinstance(pace, Adaptive) else None,
        }

    def of_state(self, state: Mapping[str, Any], *, longest: float) -> tuple[Pace, bool | int]:
        """Give the pace and the overlap of a state that is of the same policy; else those here.

        Args:
            state: As `state_dict` gave it.
            longest: Seconds that a round can be waited for, where the pace is of time.
        """
        pace, overlap = self.pace, self.overlap
        if timing := state.get("timing"):  # which older states do not have
            setting, overlap = timing
            pace = of_setting(pace, setting, longest=longest)
        if isinstance(pace, Adaptive):
            every, seen, smooth = state["pace"]
            pace = pace.resumed(every=every, seen=tuple(seen), smooth=smooth)
        return pace, overlap

    def resume(self, pace: Pace, overlap: bool | int) -> None:  # noqa: FBT001  likewise
        """Go on with what was in force in another life."""
        self.pace, self.overlap = pace, overlap

    def agree(self, asked: Asked) -> None:
        """Do from here on what all members have wanted in a round: what `asked` gave when that began.

        Of rounds that follow one another the same may be said again, where they are known of later: a pace
        that has gone on since is not taken back to where it began.
        """
        pace, overlap = asked
        if pace is not None and pace is not self._followed:
            self.pace = self._followed = pace
            self._wanted_pace = None if self._wanted_pace is pace else self._wanted_pace
        if overlap is not None:
            self.overlap = overlap
            self._wanted_overlap = None if self._wanted_overlap is overlap else self._wanted_overlap


class Agreement:
    """Whether members come to want the same."""

    def __init__(self) -> None:
        """Begin as they were made: they do."""
        self._num_disagreed = 0

    def count(self, *, are_agreed: bool, kept: Method, rank: int, wishes: Sequence[str]) -> None:
        """Take note of a round; tell of it once members keep to `kept` for want of one wish.

        Args:
            are_agreed: All have wanted the same.
            kept: The method in force.
            rank: Of this member.
            wishes: What it wants that is not in force, in words.
        """
        self._num_disagreed = 0 if are_agreed else self._num_disagreed + 1
        if self._num_disagreed == ROUNDS_TO_AGREE:
            own = (
                f"this member (rank {rank}) wishes for {', '.join(wishes)}, and not all others do"
                if wishes
                else f"this member (rank {rank}) wishes for what is in force, and others for something else"
            )
            log.warn(
                f"members want different things since {ROUNDS_TO_AGREE} rounds: {own}; all keep to {kept!r}, "
                f"and to the frequency and the parameters they trained until then: set method, "
                f"averaging_frequency and overlap, and freeze parameters (requires_grad), in all of them; "
                f"one that waits in flush() cannot follow"
            )
