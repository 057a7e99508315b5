"""Remedies that set what trains to something milder: more averages, less staleness, a lower learning rate."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from offbeat.errors import ConfigError
from offbeat.monitor.attribute import Attribute
from offbeat.monitor.protocols import HoldsOptimizer, ServesLearningRate, Steps, can_set
from offbeat.monitor.remedy import MOST_REPEATS, Find, Remedy, Taken

__all__ = ["ReduceLr", "SyncOften", "TightenStaleness"]

FIRST_BOUND = 16
"""Updates: where there was no bound on staleness, the first one is half of it."""


class _SetsAttributes(Remedy):
    """Sets an attribute of each object to something milder."""

    repeats = MOST_REPEATS
    _at_its_end: str
    """What to say where there is nothing milder."""

    def __init__(self, find: Find) -> None:
        super().__init__(find)
        self._attributes: dict[int, Attribute] = {}  # by object, of those that are set to something else

    def take(self, worker: str | None) -> Taken:
        """Do so once more."""
        del worker
        changes = []
        for thing in self.found():
            name = self._attribute_of(thing)
            attribute = self._attributes.get(id(thing)) or Attribute(thing, name)
            before = attribute.wanted()
            if (after := self._milder(thing, before)) != before:
                changes.append(_Set(attribute, before, after, self._attributes))
        _make(changes)

        def undo() -> str:
            for change in reversed(changes):
                change.undo()
            return "; ".join(map(str, (c.attribute for c in changes))) or "nothing was changed"

        told = "; ".join(f"{c.attribute} instead of {c.before!r}" for c in changes)
        return Taken(told or self._at_its_end, undo)

    @abstractmethod
    def _attribute_of(self, thing: object) -> str:
        """Name it."""

    @abstractmethod
    def _milder(self, thing: object, value: Any) -> Any:  # noqa: ANN401  of an attribute of any type
        """Give the next value; the same where there is none."""


class SyncOften(_SetsAttributes):
    """Halves the frequency, which is the time between two."""

    _at_its_end = "every object averages as often as it can already"

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        return can_set(thing, "averaging_frequency") or can_set(thing, "sync_frequency")

    def may_act_on(self, thing: object) -> bool:
        """A trainer makes its averager when that one's turn comes; it registers itself then."""
        return self.acts_on(thing) or bool(getattr(thing, "averages_models", False))

    def _attribute_of(self, thing: object) -> str:
        return "averaging_frequency" if can_set(thing, "averaging_frequency") else "sync_frequency"

    def _milder(self, thing: object, value: Any) -> Any:  # noqa: ANN401  of an attribute of any type
        return _halved(value, getattr(thing, f"min_{self._attribute_of(thing)}", None))


class TightenStaleness(_SetsAttributes):
    """Halves the bound."""

    _at_its_end = "the bound is 0 already"

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        return can_set(thing, "max_staleness")

    def _attribute_of(self, thing: object) -> str:
        del thing
        return "max_staleness"

    def _milder(self, thing: object, value: Any) -> Any:  # noqa: ANN401  of an attribute of any type
        del thing
        return (FIRST_BOUND if value is None else value) // 2


class ReduceLr(Remedy):
    """Multiplies learning rates: a live optimizer's while it steps, a server's for all workers."""

    repeats = MOST_REPEATS

    def __init__(self, find: Find, factor: float) -> None:
        super().__init__(find)
        self._factor = factor

    def take(self, worker: str | None) -> Taken:
        """Do so once more."""
        del worker
        changes: list[_Change] = []
        scaled: list[Steps] = []  # a trainer's optimizer may be its averager's, too, and is scaled once
        for thing in self.found():
            if isinstance(thing, ServesLearningRate):
                rates = _served(thing)
                if not rates:
                    raise ConfigError("the server has no optimizer whose learning rate could be set")
                changes += [_Served(thing, i, rate, rate * self._factor) for i, rate in enumerate(rates)]
            elif (live := _live(thing)) is not None and not any(live is one for one in scaled):
                scaled.append(live)
                changes.append(_Factor(live, self._factor))
        if not changes:
            raise ConfigError("there is no optimizer yet")
        _make(changes)

        def undo() -> str:
            kept = [kept for change in reversed(changes) if (kept := change.undo()) is not None]
            return "; ".join([f"learning rates are divided by {self._factor:g} again", *kept])

        return Taken(f"learning rates are multiplied by {self._factor:g}", undo)

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        if isinstance(thing, ServesLearningRate) or _live(thing) is not None:
            return True
        return hasattr(thing, "optimizer") and cast(HoldsOptimizer, thing).optimizer is None

    def may_act_on(self, thing: object) -> bool:
        """A worker hears of its optimizer in the first `train`; until then it may be one that runs here."""
        return self.acts_on(thing) or bool(getattr(thing, "awaits_optimizer", False))


class _Change(Protocol):
    """Something that is set to something else, and can be set back."""

    def make(self) -> None:
        """Set it."""

    def undo(self) -> str | None:
        """Set what was before; where somebody has set something else since, leave that, and say so."""


class _Set(NamedTuple):
    attribute: Attribute
    before: Any
    after: Any
    known: dict[int, Attribute]

    def make(self) -> None:
        self.attribute.want(self.after)
        self.attribute.depth += 1
        self.known[id(self.attribute.thing)] = self.attribute

    def undo(self) -> None:
        self.attribute.depth -= 1
        if not self.attribute.depth:
            self.known.pop(id(self.attribute.thing), None)
        if self.attribute.wanted() == self.after:
            self.attribute.want(self.before)


class _Served(NamedTuple):
    server: ServesLearningRate
    group: int
    before: float
    after: float

    def make(self) -> None:
        self.server.set_lr(self.after, self.group)

    def undo(self) -> str | None:
        rates = _served(self.server)
        now = rates[self.group] if self.group < len(rates) else math.nan
        if math.isclose(now, self.after, rel_tol=1e-6):
            self.server.set_lr(self.before, self.group)
            return None
        return f"that of group {self.group} was set to {now:g} since, and stays"


class _Factor(NamedTuple):
    optimizer: Steps
    by: float

    def make(self) -> None:
        from offbeat.local.lr_scale import scale

        scale(cast(Any, self.optimizer), self.by)

    def undo(self) -> None:
        self._replace(by=1 / self.by).make()


def _make(changes: Sequence[_Change]) -> None:
    """Make all of them, or none: what would stay of one that failed halfway, nobody would take back."""
    for num_made, change in enumerate(changes):
        try:
            change.make()
        except BaseException:
            for made in reversed(changes[:num_made]):
                made.undo()
            raise


def _halved(frequency: float | str, least: object) -> float | str:
    """Give half of a number of iterations, of seconds, or of a time as "30s"; no less than the least."""
    if isinstance(frequency, str):
        digits = frequency.rstrip("abcdefghijklmnopqrstuvwxyz ")
        return f"{float(digits) / 2:g}{frequency[len(digits) :].strip()}"
    if isinstance(frequency, float):
        return max(frequency / 2, float(least)) if isinstance(least, int | float) else frequency / 2
    return max(frequency // 2, least if isinstance(least, int) else 1, 1)


def _live(thing: object) -> Steps | None:
    """Find the optimizer that has the learning rate here: an object itself, or the one that it holds."""
    for candidate in (thing, getattr(thing, "optimizer", None)):
        live = getattr(candidate, "live", candidate)  # a worker's stands for the one that it has, or for none
        groups = getattr(live, "param_groups", None)
        if groups and all("lr" in group for group in groups):
            return cast(Steps, live)
    return None


def _served(server: ServesLearningRate) -> list[float]:
    """Give the learning rates of a server's groups, as they are set; none where it has no optimizer."""
    groups = (server.status()["optimizer"] or {}).get("spec", {}).get("groups", [])
    return [group["lr"] for group in groups]
