"""The remedy that goes back: to what was kept last before the alert, and when taken again further back.

A `ParameterServer` is told which of its versions, a `FaultTolerantTrainer` which of its steps; of anything
else nothing is known but that it can.
"""

import json
from collections.abc import Sequence
from typing import Any, cast

from offbeat.errors import CheckpointError, ConfigError
from offbeat.monitor.protocols import KeepsSteps, RollsBack, ServesLearningRate
from offbeat.monitor.remedy import Find, Remedy, Taken

__all__ = ["Rollback"]


MOST_TRIES = 3
"""Its checkpoint may make room for a newer one while it is chosen, or turn out to be damaged."""


class Rollback(Remedy):
    """Goes back to what was kept last before the alert; repeated, each time one further and never forward.

    That is so until `begin`: of a new matter, what was kept since it went back is of before the alert, too.
    """

    repeats = 3
    keeps_out_non_finite = True

    def __init__(self, find: Find) -> None:
        super().__init__(find)
        self._before: dict[int, int] = {}  # by object: what is older than this is good
        self._gone_to: dict[int, int] = {}  # by object: where it went since the alert, if it did
        self._noted: dict[int, int] = {}  # by object: as `_before`, of a matter that came since
        self._recalled: list[list[int | None]] = []  # all three, of another process, for as many objects

    def begin(self) -> None:
        """Note where all is: what is newer may have come about by what the alert is about."""
        self._gone_to.clear()
        self._noted.clear()
        self._recalled = []
        self._before = {id(thing): _first_that_is_bad(thing) for thing in _counted(self.found())}

    def note(self) -> None:
        """Note where all is: what was kept until now, since it went back, is of before this matter."""
        self._settle_recalled()
        self._noted = {id(thing): _first_that_is_bad(thing) for thing in _counted(self.found())}

    @property
    def can_stay(self) -> bool:
        """Whether it is known where it went: of what does not tell, each going back may be further."""
        return bool(self._gone_to) or any(values[1] is not None for values in self._recalled)

    def stay(self) -> None:
        """Let the next going back be to where it was before a matter that is new, or where it was already.

        That is good: what came after it has gone astray, and what comes next is to be otherwise.
        """
        self._settle_recalled()
        self._before |= {thing: version + 1 for thing, version in self._gone_to.items()}
        self.renew()

    def renew(self) -> None:
        """Let the next going back be to where it was before a matter that is new, if one was noted."""
        self._settle_recalled()
        if self._noted:
            self._before, self._noted = self._noted, {}
            self._gone_to.clear()

    def take(self, worker: str | None) -> Taken:
        """Go back."""
        del worker
        told: list[str] = []
        things = self.found()
        counted = _counted(things)
        self._settle_recalled()
        self._noted.clear()
        for thing in counted:
            chosen = self._roll_back(thing)
            self._before[id(thing)] = self._gone_to[id(thing)] = chosen
            told.append(f"{_unit(thing)} {chosen}")
        others = [thing for thing in things if thing not in counted]
        told += [str(cast(RollsBack, thing).rollback()) for thing in others]
        held = [self._gone_to[id(thing)] for thing in counted]
        return Taken(f"went back to {', '.join(told)}", _stays, goes_back=True, held=held)

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  the versions that were gone back to
        """Remember to where it went: the next is further back."""
        counted = _counted(self.found())
        if not self._recalled:  # else that is newer, or as new
            for thing, version in zip(counted, held, strict=False):
                self._before[id(thing)] = self._gone_to[id(thing)] = version
        told = [f"{_unit(thing)} {version}" for thing, version in zip(counted, held, strict=False)]
        result = f"went back to {', '.join(told)}" if told else "had gone back"
        return Taken(result, _stays, goes_back=True, held=held)

    def noted(self) -> list[list[int | None]]:
        """Give what was older as alerts came, and where it went since, for each that is acted on."""
        if self._recalled:
            return self._recalled
        all_three = (self._before, self._gone_to, self._noted)
        return [[values.get(id(thing)) for values in all_three] for thing in self._known()]

    def recall(self, noted: Any) -> None:  # noqa: ANN401  as `noted` gave it
        """Go on from there, as soon as there is what it acts on."""
        self._before.clear()
        self._gone_to.clear()
        self._noted.clear()
        self._recalled = [list(values) for values in noted]

    def _known(self) -> list[Any]:
        """Give those of which something is noted, also where they do not train now: each keeps its place."""
        return _counted([thing for thing in self._find() if self.may_act_on(thing)])

    def _settle_recalled(self) -> None:
        if not self._recalled:
            return
        all_three = (self._before, self._gone_to, self._noted)
        for thing, recalled in zip(self._known(), self._recalled, strict=False):
            for values, one in zip(all_three, recalled, strict=False):  # older states have two
                if one is not None:
                    values[id(thing)] = one
        self._recalled = []

    def _roll_back(self, thing: Any) -> int:  # noqa: ANN401  one that is counted
        """Go back as far as it takes; one that makes room for a newer checkpoint meanwhile is asked again."""
        for _ in range(MOST_TRIES):
            kept = _kept_by(thing)
            chosen = self._chosen(thing, kept)
            try:
                return cast(int, thing.rollback(chosen))
            except CheckpointError:
                if chosen is None or chosen in _kept_by(thing):
                    raise
        raise ConfigError("each checkpoint that was chosen was removed before it could be gone back to")

    def _chosen(self, thing: object, kept: list[int]) -> int | None:
        """Choose among what is kept; None where nothing is.

        Raises:
            ConfigError: If all of it is newer than what was gone back to already.
        """
        before, gone_to = self._before.get(id(thing)), self._gone_to.get(id(thing))
        older = [version for version in kept if before is None or version < before]
        if older:
            return older[0]  # above it may be what was gone back from before
        if gone_to is None:  # nothing is left of before the alert: the oldest is the nearest to it
            return min(kept, default=None)
        if gone_to in kept:
            return gone_to
        raise ConfigError(
            f"no checkpoint is left that is as old as {_unit(thing)} {gone_to}, to which it went back before"
            + (f": kept are {', '.join(map(str, sorted(kept)))}" if kept else "")
        )

    def acts_on(self, thing: object) -> bool:
        """It needs what can do so now."""
        return self.may_act_on(thing) and bool(getattr(thing, "is_training", True))

    def may_act_on(self, thing: object) -> bool:
        """It needs what can do so, if only while it trains."""
        return isinstance(thing, RollsBack) and bool(getattr(thing, "keeps_checkpoints", True))

    def found(self) -> list[object]:
        """Give what it can act on now.

        Raises:
            ConfigError: If there is nothing.
        """
        idle = [thing for thing in self._find() if self.may_act_on(thing)]
        if idle and not any(self.acts_on(thing) for thing in idle):
            raise ConfigError(
                f"the {type(idle[0]).__name__} goes back while it trains, which it does not now"
            )
        return super().found()


def _stays() -> str:
    return "what was gone back to stays"


def _counted(things: Sequence[object]) -> list[Any]:
    """Give those that tell what they have kept."""
    return [thing for thing in things if isinstance(thing, ServesLearningRate | KeepsSteps)]


def _unit(thing: object) -> str:
    return "step" if isinstance(thing, KeepsSteps) else "version"


def _first_that_is_bad(thing: Any) -> int:  # noqa: ANN401  one that is counted
    """Tell from which version on what is kept may be of what the alert is about.

    What workers have measured is of versions before a server's newest. A trainer's alert is about the values
    that its newest batch was computed with, be its step made by now or not: a checkpoint of the step before
    that has these very ones.
    """
    if isinstance(thing, KeepsSteps):
        return thing.began_step
    return int(thing.status()["version"]) + 1


def _kept_by(thing: Any) -> list[int]:  # noqa: ANN401  one that is counted
    """List of which versions, or steps, good checkpoints have the values, those written last first."""
    if isinstance(thing, KeepsSteps):
        return list(thing.checkpoint_steps())
    from offbeat._offbeat import inspect_checkpoints

    found = json.loads(inspect_checkpoints(thing.status()["checkpoints"]["directory"]))
    good = [c["checkpoint"] for c in found["checkpoints"] if c["checkpoint"] and not c["error"]]
    return [c["version"] if c["gone_back_to"] is None else c["gone_back_to"] for c in good]
