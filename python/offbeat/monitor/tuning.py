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
        held = []
        for place, thing in enumerate(self.found()):
            name = self._attribute_of(thing)
            attribute = self._attributes.get(id(thing)) or Attribute(thing, name)
            before = attribute.wanted()
            if (after := self._milder(thing, before)) != before:
                changes.append(_Set(attribute, before, after, self._attributes))
                held.append((place, before, after))
        _make(changes)
        told = "; ".join(f"{c.attribute} instead of {c.before!r}" for c in changes)
        return self._taken(changes, told or self._at_its_end, held)

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  places, and what was set there from what to what
        """Set what is as it was before; what is set already, or to something else, stays."""
        found = self.found()
        changes = []
        for place, before, after in held:
            thing = _at(found, place)
            attribute = self._attributes.get(id(thing)) or Attribute(thing, self._attribute_of(thing))
            change = _Set(attribute, before, after, self._attributes)
            change.make() if attribute.wanted() == before else change.note()
            changes.append(change)
        return self._taken(changes, "; ".join(str(c.attribute) for c in changes) or self._at_its_end, held)

    def _taken(self, changes: "list[_Set]", result: str, held: Any) -> Taken:  # noqa: ANN401  as above
        def undo() -> str:
            for change in reversed(changes):
                change.undo()
            return "; ".join(map(str, (c.attribute for c in changes))) or "nothing was changed"

        return Taken(result, undo, held=held)

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
        served: list[_Served] = []
        held = []
        for place, thing in enumerate(self._servers()):
            rates = _served(thing)
            if not rates:
                raise ConfigError("the server has no optimizer whose learning rate could be set")
            for group, rate in enumerate(rates):
                served.append(_Served(thing, group, rate, rate * self._factor))
                held.append((place, group, rate, rate * self._factor))
        factors = [_Factor(live, self._factor) for live in self._live()]
        if not served and not factors:
            raise ConfigError("there is no optimizer yet")
        _make([*served, *factors])
        return self._taken([*served, *factors], self._factor, {"served": held, "num_live": len(factors)})

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  rates by server and group, and how many optimizers run here
        """Scale the optimizers here; set a server's rates that are as they were before."""
        servers, live = self._servers(), self._live()
        factor = held.get("factor", self._factor)
        if len(live) < held["num_live"]:
            raise ConfigError("there is no optimizer yet")
        served = [_Served(_at(servers, place), *rest) for place, *rest in held["served"]]
        factors = [_Factor(one, factor) for one in live[: held["num_live"]]]
        _make([*(one for one in served if one.is_undone), *factors])
        return self._taken([*served, *factors], factor, held)

    def _servers(self) -> list[ServesLearningRate]:
        return [thing for thing in self.found() if isinstance(thing, ServesLearningRate)]

    def _live(self) -> list[Steps]:
        """Give the optimizers here, each once: a trainer's may be its averager's, too."""
        things = [thing for thing in self.found() if not isinstance(thing, ServesLearningRate)]
        found = [live for thing in things if (live := _live(thing)) is not None]
        return list({id(live): live for live in found}.values())

    def _taken(self, changes: "list[_Change]", factor: float, held: dict[str, Any]) -> Taken:
        def undo() -> str:
            kept = [kept for change in reversed(changes) if (kept := change.undo()) is not None]
            return "; ".join([f"learning rates are divided by {factor:g} again", *kept])

        held = {**held, "factor": factor}
        return Taken(f"learning rates are multiplied by {factor:g}", undo, held=held)

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
        self.note()

    def note(self) -> None:
        """Count it as set."""
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

    @property
    def now(self) -> float:
        rates = _served(self.server)
        return rates[self.group] if self.group < len(rates) else math.nan

    @property
    def is_undone(self) -> bool:
        return math.isclose(self.now, self.before, rel_tol=1e-6)

    def undo(self) -> str | None:
        now = self.now
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


def _at(found: Sequence[Any], place: int) -> Any:  # noqa: ANN401  what is there
    """Give what is in the place where something was when a remedy was taken.

    Raises:
        ConfigError: If there is nothing.
    """
    if place >= len(found):
        raise ConfigError(f"of what was acted on, number {place + 1} is not there")
    return found[place]


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
