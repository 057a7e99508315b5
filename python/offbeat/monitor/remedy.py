"""What a remedy is, and those whose work is the monitor's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from offbeat.errors import ConfigError
from offbeat.monitor.ladder import Growth

__all__ = ["MILDLY", "MOST_REPEATS", "Find", "OnGradients", "Remedy", "Taken"]

Find = Callable[[], Sequence[object]]
"""Gives what there is to act on now: looked up each time, so that what came later counts."""

MOST_REPEATS = 10
"""Of a remedy that does more each time: ten times half is a thousandth."""

MILDLY = Growth(after=3, most=8, is_renewed=True)
"""Of such a one: it is cut to an eighth quickly, as a run that diverges has no time. By then it is either the
wrong remedy, or one that takes time to show. Fashion-MNIST whose pictures or labels change for good ended at
15 to 71 % where each five steps cut the rate, and ends at 66 to 84 % (84 % without a monitor); runs at 30 or
100 times the rate end at 72 % on average, as before."""


class Taken(NamedTuple):
    """A remedy that was taken.

    Attributes:
        result: What came of it, in words.
        undo: Takes it back, and says what came of that.
        left_out: The worker that takes no part any more, where it is that.
        goes_back: Whether the parameters are what they were before, and gradients of now are of others.
        is_done: Whether it could be done.
        held: What `Remedy.resume` needs to have it in effect in another process: plain data.
        forget: Takes an object and the name of its attribute, which somebody has set since, out of what is to
            be taken back; tells whether nothing is left, and the remedy has ended.
        settle: Follows `undo` where training goes on from here, and not from a state that was loaded.
    """

    result: str
    undo: Callable[[], str]
    left_out: str | None = None
    goes_back: bool = False
    is_done: bool = True
    held: Any = None
    forget: Callable[[object, str], bool] = lambda *_: False
    settle: Callable[[], None] = lambda: None


class Remedy(ABC):
    """One of them. What is to be taken back is held as long as it is in effect, and nothing else.

    Attributes:
        repeats: How often it may be taken while an alert persists.
        growth: How the patience with it grows; None: it is the same each time.
        keeps_out_non_finite: It does something about a gradient that is NaN or infinite. In spite of another
            remedy such a one comes again, or ends the run, so that waiting for more of them is for nothing.
        is_mending: It changes how training goes on.
        slows: As long as it is in effect a run learns less: where alerts never end, for ever.
        helps_what_is_lost: There may be something in taking it again where parameters are not finite.
    """

    repeats = 1
    growth: Growth | None = None
    keeps_out_non_finite = False
    is_mending = True
    slows = False
    helps_what_is_lost = True

    def __init__(self, find: Find) -> None:
        self._find = find

    def begin(self) -> None:  # noqa: B027  few have something to note
        """Hear that an alert has come that is a new matter: it is to go by how all is now."""

    def note(self) -> None:  # noqa: B027  likewise
        """Hear that an alert has come that is a new matter, while something is in effect for another."""

    def renew(self) -> None:  # noqa: B027  likewise
        """Hear that it is to be taken: for the matter that was noted last, if one was."""

    @property
    def can_stay(self) -> bool:
        """Whether it can be taken once more to do what it did already."""
        return False

    def stay(self) -> None:  # noqa: B027  likewise
        """Hear that it is to be taken once more for a later remedy's sake, and need do no more than that."""

    @abstractmethod
    def take(self, worker: str | None) -> Taken:
        """Act.

        Args:
            worker: Whose metric it was, where that is known.

        Raises:
            OffbeatError: If it cannot be done now.
        """

    @abstractmethod
    def resume(self, held: Any) -> Taken:  # noqa: ANN401  each remedy's own
        """Have in effect what was in effect when a checkpoint was written.

        What it acts on may have come back with it or not; what somebody has set otherwise since stays.

        Args:
            held: As `Taken` had it.

        Raises:
            OffbeatError: If what it acts on is not there, or not yet.
        """

    def noted(self) -> Any:  # noqa: ANN401  each remedy's own
        """Give what `begin`, and what was done since, have noted, as plain data; None: few note something."""
        return None

    def recall(self, noted: Any) -> None:  # noqa: ANN401, B027  as `noted` gave it
        """Go on from what another process has noted."""

    @abstractmethod
    def acts_on(self, thing: object) -> bool:
        """Tell whether it can act on an object."""

    def may_act_on(self, thing: object) -> bool:
        """Tell whether it can act on an object, or on what that will have or make when it trains."""
        return self.acts_on(thing)

    def found(self) -> list[object]:
        """Give what it can act on now.

        Raises:
            ConfigError: If there is nothing.
        """
        things = [thing for thing in self._find() if self.acts_on(thing)]
        if not things:
            raise ConfigError("there is nothing left to act on")
        return things


class OnGradients(Remedy):
    """What the monitor does itself where it judges: "alert", "clip", "reject" and "pause"."""

    def __init__(
        self,
        taken: str,
        undone: str,
        *,
        repeats: int = 1,
        growth: Growth | None = None,
        drops: bool = True,
        is_mending: bool = True,
    ) -> None:
        super().__init__(list)
        self.repeats, self.growth = repeats, growth
        self.keeps_out_non_finite, self.is_mending = drops, is_mending
        self._taken, self._undone = taken, undone

    def take(self, worker: str | None) -> Taken:
        """Say what the monitor does from now on."""
        del worker
        return Taken(self._taken, lambda: self._undone)

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  there is none
        """Say so again."""
        del held
        return self.take(None)

    def acts_on(self, thing: object) -> bool:
        """It needs nobody else."""
        del thing
        return False
