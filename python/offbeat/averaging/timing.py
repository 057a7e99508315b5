"""When a member averages, and what of that is to change in mid-run."""

from typing import TypeAlias

from offbeat.averaging.pace import Pace

__all__ = ["Asked", "Timing"]

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

    def asked(self) -> Asked:
        """Give what a round that begins now tells the others."""
        return self._wanted_pace, self._wanted_overlap

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
