"""What passes from one strategy to the next, and what the next may begin without."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from offbeat import log
from offbeat.averaging.methods import Method
from offbeat.local.buffers import write
from offbeat.local.group import digest
from offbeat.trainer.away import Away
from offbeat.trainer.first import First, first_brings, first_goes_on
from offbeat.trainer.next import next_of
from offbeat.trainer.served import Left, Served
from offbeat.trainer.settings import Kind, shown_kind
from offbeat.trainer.strategies import Strategy, Workshop

__all__ = ["Handover"]

LEAST_S = 1.0
"""How long a server is tried to be reached at the least, however long the end of a place there took."""


@dataclass(frozen=True, slots=True)
class _Unbrought:
    """What was trained here, which a strategy that has not begun yet may begin without.

    Attributes:
        by: The strategy that it was trained by, as it is shown.
        how: "alone"; "together" with the members of a process group; "served": with those at a server.
        is_due: The members are to bring it, if what begins is at a server.
        run: By a number, the server that the first member has brought it to, where this one is still to join;
            0: to none.
    """

    by: str
    how: Literal["alone", "together", "served"]
    is_due: bool = False
    run: float = 0.0


_MISSING = {
    First.STALE: (
        "the model that the first member has, as it had pulled it when close() came: what others have pushed "
        "to the server since is not in it. Where the server is there, change the strategy without close() in "
        "between, within one train or two: members wait until all have pushed then, and go on from the "
        "server's model"
    ),
    First.OTHERS: (
        "what is at another server than the one that members had pushed to, or at an older checkpoint of it: "
        "what they have pushed is in that as far as its owner, or the checkpoint, gave it that, or, where it "
        "had no model, as far as the first member had pulled it"
    ),
}
"""What is not in what all go on from, in words."""


class Handover:
    """Keeps account of what was trained while one strategy is left for another, and brings it to that.

    A change may fail at any point, as where a server is away: the model here is what was trained then, and
    the account says what is still to be done when the next `train` tries again, also from a state.

    Attributes:
        has_begun: The strategy at work has, and was not only made.
        knows_server: Strategy "parameter_server" was ever to come, as it was in all members.
    """

    def __init__(self, workshop: Workshop) -> None:
        """`workshop`: whose model it is."""
        self.has_begun = self.knows_server = False
        self._workshop = workshop
        self._unbrought: _Unbrought | None = None  # None once a strategy has begun, for all is in that
        self._left: Left | None = None  # the newest server, with this
        self._has_left = False  # a server by `close`, without what others had still to push to it
        self._name: str | None = None  # there
        self._place: Away | None = None  # there, as long as this member is to come back
        self._comes_back = False  # so it is, also if a process before this one had the place

    def come_from_server(self, strategy: Strategy | None, was: Kind | None, kind: Kind, epoch: int) -> bool:
        """Where members come from a server to a process group: wait until all have pushed, and pull.

        Args:
            strategy: That is left, and has settled; None: it was left before, by `close` or by a failure.
            was: Which it is.
            kind: What comes next.
            epoch: That begins with it.

        Returns:
            Whether what was pushed is in what all go on from, or a warning has said that it is not.

        Raises:
            StateError: If members do not all do the same next, or the first could not pull.
            ConnectionLostError: If a member is lost, or the server.
        """
        places = self._workshop.places
        is_from_group = strategy is not None and was is not None and places.need_group([was])
        if is_from_group or not (self.knows_server and places.need_group([kind])):
            return False

        def take() -> tuple[First, float]:
            if self._has_left:
                return First.STALE, 0.0
            if not (isinstance(strategy, Served) and strategy.pull()):
                return First.ITS_OWN, 0.0
            return (First.OTHERS if strategy.may_lack else First.NEWEST), _number(self._left_by(strategy))

        first, run = first_goes_on(self._workshop, next_of(kind), take)
        own = self._left_by(strategy)
        if first == First.NEWEST and run and own is not None and _number(own) != run:
            first = First.OTHERS  # for this one, which has pushed elsewhere
        if first in _MISSING:
            log.warn(f"epoch {epoch}: {_named(kind)} goes on from {_MISSING[first]}")
        return first != First.ITS_OWN

    def leave(self, strategy: Strategy | None, kind: Kind | None, *, has_all: bool) -> None:
        """Note what the next strategy may begin without, as one is left for it.

        Args:
            strategy: That is left, and has settled; None: it was left before.
            kind: Which it is.
            has_all: The next has what was trained, as `come_from_server` tells.
        """
        if strategy is not None:
            self._note(strategy, kind, is_closed=False)
        if has_all:
            self._unbrought = None

    def keep_place(self) -> None:
        """Keep a place at the server that was left, if there was one, as members come back to it."""
        if self._place is None and self._left is not None:
            self._place = Away(self._workshop.places, self._name, self._left.run)
            self._comes_back = True

    def give_place_up(self, failure: BaseException | None = None) -> None:
        """Keep none any more; `failure`: by which this member ends, if it does."""
        place, self._place, self._comes_back = self._place, None, False
        if place is not None:
            place.end(failure)

    def close(self, strategy: Strategy | None, kind: Kind | None, failure: BaseException | None) -> None:
        """Note what the next strategy may begin without, where this one ends without the others.

        Args:
            strategy: That ends; None: none is at work.
            kind: Which it is.
            failure: By which.
        """
        self.give_place_up(failure)
        if isinstance(strategy, Served):
            self._has_left = self._has_left or self.has_begun
        if strategy is not None or self.has_begun:  # what a state has may not be made again, and was trained
            self._note(strategy, kind, is_closed=True)
        elif self._unbrought is not None:
            self._unbrought = replace(self._unbrought, is_due=False)

    @contextmanager
    def to(self, kind: Kind, epoch: int) -> Iterator[Callable[[Strategy], None]]:
        """Let a strategy be made, and begin, in here; where that fails, the model is what it was.

        Args:
            kind: Which it is.
            epoch: Since which it is to be at work.

        Yields:
            What begins it, once it is made: members of a group have the first one's values by then.
        """
        before, made = self._before(kind), list[Strategy]()

        def begin(strategy: Strategy) -> None:
            nonlocal before
            made.append(strategy)
            if before is None and self._comes_again(strategy):
                before = self._copies()
            self._begin(strategy, kind, epoch, before)

        try:
            yield begin
        except BaseException as failure:
            try:
                if before is not None:
                    for tensor, value in zip(self._tensors(), before, strict=True):
                        write(value, tensor)
            finally:  # what has taken the server's model, perhaps, is to come anew
                for strategy in made:
                    if isinstance(strategy, Served):
                        strategy.close(failure)
            raise

    @property
    def is_unfinished(self) -> bool:
        """Whether a change of strategy broke off, and what was trained before is in none that has begun."""
        return not self.has_begun and self._unbrought is not None

    def state_dict(self, strategy: Strategy | None) -> dict[str, Any]:
        """Give the account; `strategy`: at work."""
        left = self._left_by(strategy)
        return {
            "left": None if left is None else list(left),
            "name": self._name,
            "has_left": self._has_left,
            "comes_back": self._comes_back,
            "has_begun": self.has_begun,
            "unbrought": None if self._unbrought is None else asdict(self._unbrought),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take it over; None: of an older state, in which whatever was at work had begun."""
        if state is None:
            state = {"left": None, "has_left": False, "has_begun": True, "unbrought": None}
        unbrought = state["unbrought"]
        self._unbrought = None if unbrought is None else _Unbrought(**unbrought)
        self._left, self._has_left = Left.of(state["left"]), state["has_left"]
        self._name, self._comes_back = state.get("name"), state.get("comes_back", False)
        self.has_begun = state["has_begun"]

    # ------------------------------------------------------------------ inside

    def _note(self, strategy: Strategy | None, kind: Kind | None, *, is_closed: bool) -> None:
        self._left = self._left_by(strategy)
        if isinstance(strategy, Served):
            self._name = strategy.name
        unbrought = self._unbrought
        if self.has_begun and kind is not None:
            if kind == "local":
                unbrought = _Unbrought(shown_kind(kind), "alone")
            elif self._workshop.places.need_group([kind]):
                unbrought = _Unbrought(shown_kind(kind), "together", is_due=True)
            else:
                unbrought = _Unbrought(shown_kind(kind), "served")
        if unbrought is not None and is_closed:
            unbrought = replace(unbrought, is_due=False)  # others may not come to that any more
        self._unbrought, self.has_begun = unbrought, False

    def _begin(self, strategy: Strategy, kind: Kind, epoch: int, before: list[torch.Tensor] | None) -> None:
        """Let what was made begin, with what is due brought to it; again, where that failed."""
        left, is_brought = None, False
        if isinstance(strategy, Served):
            left = self._left_by(strategy)
            if self._comes_back and left is not None:
                strategy.patience_s = left.patience_s
            if self._unbrought is not None and self._unbrought.is_due:
                own, values = strategy, self._copies() if before is None else before

                def bring(most_s: float) -> tuple[bool, float]:
                    until = time.monotonic() + most_s
                    self.give_place_up()
                    own.patience_s = min(own.patience_s, max(until - time.monotonic(), LEAST_S))
                    return own.hand_over(left, values), _number(own.left)

                is_taken, run = first_brings(self._workshop, bring)
                self._unbrought = replace(self._unbrought, is_due=False, run=run if is_taken else 0.0)
                self._left = None if is_taken else self._left  # what was there before is of no account now
            self.give_place_up()  # not before: the first one is there, whom the others wait for
        strategy.begin()
        if isinstance(strategy, Served):
            now, unbrought = strategy.left, self._unbrought
            # Also where this one has come to it later than the first.
            is_brought = unbrought is not None and unbrought.run != 0 and unbrought.run == _number(now)
            if left is not None and now is not None and not is_brought:
                strategy.may_lack |= now.run != left.run or now.version < left.version
        text = None if is_brought else self._lost(strategy, kind, left)
        if before is not None and text is not None:
            own_parameters = before[: len(list(self._workshop.model.parameters()))]
            if not all(map(torch.equal, own_parameters, self._workshop.model.parameters())):
                log.warn(f"epoch {epoch}: {text}")
        self.has_begun, self._unbrought, self._has_left = True, None, False

    def _comes_again(self, strategy: Strategy) -> bool:
        """Tell whether it is about to join a server, and members were at one before."""
        is_to_join = isinstance(strategy, Served) and strategy.is_to_join
        return is_to_join and self._left_by(strategy) is not None

    def _left_by(self, strategy: Strategy | None) -> Left | None:
        """Tell where members are at a server, if they are, or else were as they left the newest.

        Where what is at work could not begin, it may have joined one all the same, whose model is nobody's.
        """
        own = strategy.left if self.has_begun and isinstance(strategy, Served) else None
        return self._left if own is None else own

    def _before(self, kind: Kind) -> list[torch.Tensor] | None:
        """Give all values as another strategy has left them, which this one may begin without."""
        if self._unbrought is None or self._unbrought.by == shown_kind(kind) or kind == "local":
            return None
        return self._copies()

    def _copies(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._workshop.model.parameters(), *self._workshop.model.buffers()]

    def _lost(self, strategy: Strategy, kind: Kind, left: Left | None) -> str | None:
        """Word that members begin with one model, which is not this one's; None: it is as it is to be."""
        unbrought = self._unbrought
        is_averaged = isinstance(kind, Method) and self._workshop.places.are_served
        instead = ", or start a server without a model, which takes this one"
        if unbrought is None or unbrought.by == shown_kind(kind):
            if not isinstance(strategy, Served) or not strategy.may_lack or left is None:
                return None
            return (
                f"{_named(kind)} goes on from the model of another server than the one that was trained with "
                f"(whose run was {left.run!r}), or of an older checkpoint of it: what was trained here is "
                f"lost, unless that server was given it, or others have it; start a server again with its "
                f"newest checkpoint{instead}"
            )
        if not (kind == "parameter_server" or is_averaged):
            whose, instead = "the first member has", ""
        else:
            whose = "the server has"
            if unbrought.how == "together":
                whose += (
                    " (it was pushed to, was given other values or was started again since these members "
                    "left it, or trained before they came; or close() was called in between)"
                )
        return (
            f"{_named(kind)} goes on from the model that {whose}, in which what was trained here without it "
            f"is not: that is lost, unless others have it; let it come before other strategies{instead}"
        )


def _number(left: Left | None) -> float:
    """Give a number that tells servers apart."""
    return 0.0 if left is None else digest(left.run)


def _named(kind: Kind) -> str:
    return f'"{kind}"' if isinstance(kind, str) else shown_kind(kind)
