"""Remedies that set what trains to something milder: more averages, less staleness, a lower learning rate."""

from typing import Any, NamedTuple, cast

from offbeat.errors import ConfigError
from offbeat.monitor.protocols import HoldsOptimizer, ServesLearningRate, Steps, can_set
from offbeat.monitor.remedy import MOST_REPEATS, Find, Remedy, Taken

__all__ = ["ReduceLr", "SyncOften", "TightenStaleness"]

FIRST_BOUND = 16
"""Updates: where there was no bound on staleness, the first one is half of it."""


class SyncOften(Remedy):
    """Halves the frequency, which is the time between two."""

    repeats = MOST_REPEATS

    def take(self, worker: str | None) -> Taken:
        """Do so once more."""
        del worker
        changes = []
        for thing in self.found():
            name = _frequency_of(thing)
            before = getattr(thing, name)
            if (after := _halved(before, getattr(thing, f"min_{name}", 1))) != before:
                setattr(thing, name, after)
                changes.append(_Change(thing, name, before, after))
        return _changed(changes, "every object averages as often as it can already")

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        return can_set(thing, "averaging_frequency") or can_set(thing, "sync_frequency")


class TightenStaleness(Remedy):
    """Halves the bound."""

    repeats = MOST_REPEATS

    def take(self, worker: str | None) -> Taken:
        """Do so once more."""
        del worker
        changes = []
        for thing in cast(list[Any], self.found()):
            before = thing.max_staleness
            after = (FIRST_BOUND if before is None else before) // 2
            if after != before:
                thing.max_staleness = after
                changes.append(_Change(thing, "max_staleness", before, after))
        return _changed(changes, "the bound is 0 already")

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        return can_set(thing, "max_staleness")


class ReduceLr(Remedy):
    """Multiplies learning rates: a live optimizer's while it steps, a server's for all workers."""

    repeats = MOST_REPEATS

    def __init__(self, find: Find, factor: float) -> None:
        super().__init__(find)
        self._factor = factor

    def take(self, worker: str | None) -> Taken:
        """Do so once more."""
        del worker
        things = self.found()
        servers = [thing for thing in things if isinstance(thing, ServesLearningRate)]
        optimizers = [live for thing in things if (live := _live(thing)) is not None]
        if not servers and not optimizers:
            raise ConfigError("there is no optimizer yet")
        for server in servers:
            _scale_served(server, self._factor)
        for optimizer in optimizers:
            _scale(optimizer, self._factor)

        def undo() -> str:
            for server in servers:
                _scale_served(server, 1 / self._factor)
            for optimizer in optimizers:
                _scale(optimizer, 1 / self._factor)
            return f"learning rates are divided by {self._factor:g} again"

        return Taken(f"learning rates are multiplied by {self._factor:g}", undo)

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        if isinstance(thing, ServesLearningRate) or _live(thing) is not None:
            return True
        return hasattr(thing, "optimizer") and cast(HoldsOptimizer, thing).optimizer is None


class _Change(NamedTuple):
    thing: object
    name: str
    before: Any
    after: Any

    def undo(self) -> None:
        """Set what was before, unless somebody has set something else since."""
        if getattr(self.thing, self.name) == self.after:
            setattr(self.thing, self.name, self.before)


def _changed(changes: list[_Change], else_: str) -> Taken:
    def undo() -> str:
        for change in reversed(changes):
            change.undo()
        return (
            "; ".join(f"{c.name} is {getattr(c.thing, c.name)!r}" for c in changes) or "nothing was changed"
        )

    told = "; ".join(f"{c.name} is {c.after!r} instead of {c.before!r}" for c in changes)
    return Taken(told or else_, undo)


def _frequency_of(thing: object) -> str:
    return "averaging_frequency" if can_set(thing, "averaging_frequency") else "sync_frequency"


def _halved(frequency: int | str, least: int | str | None) -> int | str:
    """Give half of a number of iterations, or of a time such as "30s"; no less than the least."""
    if isinstance(frequency, str):
        digits = frequency.rstrip("abcdefghijklmnopqrstuvwxyz ")
        return f"{float(digits) / 2:g}{frequency[len(digits) :].strip()}"
    return max(frequency // 2, least if isinstance(least, int) else 1, 1)


def _live(thing: object) -> Steps | None:
    """Find the optimizer that has the learning rate here: an object itself, or the one that it holds."""
    for candidate in (thing, getattr(thing, "optimizer", None)):
        live = getattr(candidate, "live", candidate)  # a worker's stands for the one that it has, or for none
        groups = getattr(live, "param_groups", None)
        if groups and all("lr" in group for group in groups):
            return cast(Steps, live)
    return None


def _scale(optimizer: Steps, by: float) -> None:
    from offbeat.local.lr_scale import scale

    scale(cast(Any, optimizer), by)


def _scale_served(server: ServesLearningRate, by: float) -> None:
    groups = (server.status()["optimizer"] or {}).get("spec", {}).get("groups", [])
    if not groups:
        raise ConfigError("the server has no optimizer whose learning rate could be set")
    for i, group in enumerate(groups):
        server.set_lr(group["lr"] * by, i)
