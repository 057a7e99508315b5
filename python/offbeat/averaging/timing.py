"""When a member averages, and what of that is to change in mid-run."""

from offbeat.averaging.pace import Pace

__all__ = ["Timing"]


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
        self._sent: tuple[Pace | None, bool | int | None] = (None, None)

    def ask(self, *, pace: Pace | None = None, overlap: bool | int | None = None) -> None:
        """Want another pace, or another end, from the round after the next on; None: as it is."""
        self._wanted_pace = self._wanted_pace if pace is None else pace
        self._wanted_overlap = self._wanted_overlap if overlap is None else overlap

    def setting(self) -> list[object]:
        """Give what has to be the same in all members that begin a round, as JSON can have it."""
        pace = self.pace if self._wanted_pace is None else self._wanted_pace
        overlap = self.overlap if self._wanted_overlap is None else self._wanted_overlap
        return [pace.setting(), overlap]

    def begin(self) -> None:
        """Take down what the round that begins tells the others."""
        self._sent = self._wanted_pace, self._wanted_overlap

    def agree(self) -> None:
        """Do from here on what all members have told in the round that has ended."""
        pace, overlap = self._sent
        self._sent = (None, None)
        if pace is not None:
            self.pace = pace
            self._wanted_pace = None if self._wanted_pace is pace else self._wanted_pace
        if overlap is not None:
            self.overlap = overlap
            self._wanted_overlap = None if self._wanted_overlap is overlap else self._wanted_overlap
