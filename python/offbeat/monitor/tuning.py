"""Remedies that set what trains to something milder: more averages, less staleness, a lower learning rate."""

import itertools
import math
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from offbeat.errors import ConfigError
from offbeat.monitor.attribute import attribute_of
from offbeat.monitor.change import AttributeChange, RateChange, make_all, rates_of, undo_all
from offbeat.monitor.protocols import HoldsOptimizer, ServesLearningRate, Steps, can_set
from offbeat.monitor.remedy import MILDLY, MOST_REPEATS, Find, Remedy, Taken

__all__ = ["ReduceLr", "SyncOften", "TightenStaleness"]

MOST_TOLD = 4
"""Learning rates in a text; groups that have the same are one."""

FIRST_BOUND = 8
"""Updates: the first bound on staleness where there was none, unless more is usual."""

TIMES_USUAL = 2
"""So many times as late as half of all pushes a worker may be: a bound below that would reject healthy ones,
and one below 1 is a ban on two pushes in flight."""


class _SetsAttributes(Remedy):
    """Sets an attribute of each object to something milder."""

    repeats = MOST_REPEATS
    growth = MILDLY
    _at_its_end: str
    """What to say where there is nothing milder."""

    def take(self, worker: str | None) -> Taken:
        """Do so once more."""
        del worker
        changes = []
        for place, thing in enumerate(self.found()):
            attribute = attribute_of(thing, self._attribute_of(thing))
            before = attribute.wanted()
            if (after := self._milder(thing, before)) != before:
                changes.append(AttributeChange(attribute, place, before, after))
        make_all(changes)
        told = "; ".join(f"{c.attribute} instead of {c.before!r}" for c in changes)
        return self._taken(changes, told or self._at_its_end)

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  places, and what was set there from what to what
        """Set what is as it was before; what is set already, or to something else, stays."""
        found = self.found()
        changes = []
        for place, before, after in held:
            thing = _at(found, place)
            attribute = attribute_of(thing, self._attribute_of(thing))
            change = AttributeChange(attribute, place, before, after)
            change.make() if change.now() == before else change.note()
            changes.append(change)
        return self._taken(changes, "; ".join(str(c.attribute) for c in changes) or self._at_its_end)

    def _taken(self, changes: list[AttributeChange], result: str) -> Taken:
        def undo() -> str:
            undo_all(changes)
            return "; ".join(str(change.attribute) for change in changes) or "nothing was changed"

        def forget(thing: object, name: str) -> bool:
            changes[:] = [change for change in changes if not change.attribute.is_of(thing, name)]
            held[:] = [change.entry for change in changes]
            return not changes and self.acts_on(thing) and self._attribute_of(thing) == name

        held = [change.entry for change in changes]
        return Taken(result, undo, held=held, forget=forget)

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
    """Halves the bound; a server's down to twice what is usual there."""

    _at_its_end = "the bound is as low as it may be already"
    slows = True

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        return can_set(thing, "max_staleness")

    def _attribute_of(self, thing: object) -> str:
        del thing
        return "max_staleness"

    def _milder(self, thing: object, value: Any) -> Any:  # noqa: ANN401  of an attribute of any type
        least = _least_bound(thing.status()) if isinstance(thing, ServesLearningRate) else 0
        return max(FIRST_BOUND, least) if value is None else max(value // 2, min(value, least))


class ReduceLr(Remedy):
    """Multiplies learning rates: a live optimizer's while it steps, a server's for all workers."""

    repeats = MOST_REPEATS
    growth = MILDLY
    slows = True
    helps_what_is_lost = False

    def __init__(self, find: Find, factor: float) -> None:
        super().__init__(find)
        self._factor = factor
        self._taken_by: list[float] = []  # by what rates are multiplied, each time that is in effect

    def take(self, worker: str | None) -> Taken:
        """Do so once more."""
        del worker
        served = []
        for place, server in enumerate(self._servers()):
            rates = rates_of(server)
            if not rates:
                raise ConfigError("the server has no optimizer whose learning rate could be set")
            served += [
                RateChange(server, place, group, rate, rate * self._factor)
                for group, rate in enumerate(rates)
            ]
        factors = [_Factor(live, self._factor) for live in self._live()]
        if not served and not factors:
            raise self._none()
        make_all([*served, *factors])
        return self._taken(served, factors, self._factor)

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  rates of servers, and how many optimizers run here
        """Scale the optimizers here; set a server's rates that are as they were before."""
        servers, live = self._servers(), self._live()
        if len(live) < held["num_live"]:
            raise self._none()
        served = [RateChange(_at(servers, place), place, *rest) for place, *rest in held["served"]]
        factors = [_Factor(one, held["factor"]) for one in live[: held["num_live"]]]
        is_before = [math.isclose(change.now(), change.before, rel_tol=1e-6) for change in served]
        make_all([*itertools.compress(served, is_before), *factors])
        for change in itertools.compress(served, map(operator.not_, is_before)):
            change.note()
        return self._taken(served, factors, held["factor"])

    def _none(self) -> ConfigError:
        """Say that there is no optimizer here, and where it is."""
        if any(getattr(thing, "awaits_optimizer", True) is False for thing in self._find()):  # a worker knows
            return ConfigError(
                "the optimizer runs on the server, and so does its learning rate: give acts_on= the "
                "ParameterServer, in its process, or train with a live torch optimizer here"
            )
        return ConfigError(
            "there is no optimizer yet (of one that runs on a server, acts_on= is to be the ParameterServer)"
        )

    def _servers(self) -> list[ServesLearningRate]:
        return [thing for thing in self.found() if isinstance(thing, ServesLearningRate)]

    def _live(self) -> list[Steps]:
        """Give the optimizers here, each once: a trainer's may be its averager's, too."""
        things = [thing for thing in self.found() if not isinstance(thing, ServesLearningRate)]
        found = [live for thing in things if (live := _live(thing)) is not None]
        return list({id(live): live for live in found}.values())

    def _taken(self, served: list[RateChange], factors: "list[_Factor]", factor: float) -> Taken:
        def told() -> str:
            live = [rate for one in factors for rate in one.rates()]
            rates = list(dict.fromkeys(f"{rate:g}" for rate in [*(c.now() for c in served), *live]))
            more = f" and {len(rates) - MOST_TOLD} more" if len(rates) > MOST_TOLD else ""
            return f"{', '.join(rates[:MOST_TOLD])}{more} now"

        def undo() -> str:
            self._taken_by.remove(factor)
            kept = undo_all([*served, *factors])
            return "; ".join([f"learning rates are divided by {factor:g} again: {told()}", *kept])

        def settle() -> None:
            for one in factors:
                one.keep_pace()

        self._taken_by.append(factor)
        total = math.prod(self._taken_by)
        in_all = f", by {total:g} in all" if len(self._taken_by) > 1 else ""
        entries = [change.entry for change in served]
        held = {"served": entries, "num_live": len(factors), "factor": factor}
        result = f"learning rates are multiplied by {factor:g}{in_all}: {told()}"
        return Taken(result, undo, held=held, settle=settle)

    def acts_on(self, thing: object) -> bool:
        """It needs what says so by its attributes."""
        if isinstance(thing, ServesLearningRate) or _live(thing) is not None:
            return True
        return hasattr(thing, "optimizer") and cast(HoldsOptimizer, thing).optimizer is None

    def may_act_on(self, thing: object) -> bool:
        """A worker hears of its optimizer in the first `train`; until then it may be one that runs here."""
        return self.acts_on(thing) or bool(getattr(thing, "awaits_optimizer", False))


class _Factor(NamedTuple):
    optimizer: Steps
    by: float

    def make(self) -> None:
        from offbeat.local.lr_scale import scale

        scale(cast(Any, self.optimizer), self.by)

    def undo(self) -> None:
        from offbeat.local.lr_scale import unscale

        unscale(cast(Any, self.optimizer), self.by)

    def keep_pace(self) -> None:
        """Let the parameters move on by as much as they did, where momentum is a sum of gradients.

        Such a sum, as SGD's and RMSprop's is, knows nothing of the rate by which it is multiplied. At a low
        one it fills with gradients of one direction, as nothing moves, and at a higher one it would move all
        by as many times more, at once. What follows is the sum that has the rate within, without what
        Goyal et al. 2017 (arXiv:1706.02677, section 3) call momentum correction. Of Muon's the size does not
        count, whoever's class it is.
        """
        import torch

        live = getattr(self.optimizer, "optim", self.optimizer)  # a ZeroRedundancyOptimizer's has the state
        kinds = (*type(live).__mro__, *type(self.optimizer).__mro__)
        if any("muon" in kind.__name__.lower() for kind in kinds):
            return
        states = list(getattr(live, "state", {}).values())  # another thread may make its first step
        for state in states:
            momentum = state.get("momentum_buffer") if isinstance(state, dict) else None
            if isinstance(momentum, torch.Tensor):
                momentum.mul_(self.by)

    def rates(self) -> list[float]:
        """Give those by which it steps."""
        from offbeat.local.lr_scale import factor_of

        factor = factor_of(cast(Any, self.optimizer))
        return [float(group["lr"]) * factor for group in self.optimizer.param_groups]


def _least_bound(status: Mapping[str, Any]) -> int:
    """Give the bound below which pushes would be rejected that are no later than is usual at a server.

    Each worker counts once: one that is there for long has pushed more often than those that came later, by
    whom the others' pushes are late from then on.

    Args:
        status: The server's, where it tells of workers. Of their pushes those that were applied are counted
            by staleness, up to the last number, which is of that and all above.
    """
    histograms = [worker["staleness_histogram"] for worker in status.get("workers", ())]
    usual = sorted(_median(counts) for counts in histograms if sum(counts))
    return max(TIMES_USUAL * usual[(len(usual) - 1) // 2], 1) if usual else 1


def _median(counts: Sequence[int]) -> int:
    """Give the median of numbers from 0 on, each as often as it is counted."""
    below = itertools.accumulate(counts)
    return next(number for number, num in enumerate(below) if 2 * num >= sum(counts))


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
    """Find the optimizer that has the learning rate here: an object itself, or the one that it holds.

    One whose step torch calls no hooks around, as what Accelerate makes of an optimizer, is what holds it.
    """
    for candidate in (thing, getattr(thing, "optimizer", None)):
        live = getattr(candidate, "live", candidate)  # a worker's stands for the one that it has, or for none
        groups = getattr(live, "param_groups", None)
        has_rates = groups and all(group.get("lr") is not None for group in groups)  # else it makes its own
        if has_rates and hasattr(getattr(type(live), "step", None), "hooked"):
            return cast(Steps, live)
    return None
