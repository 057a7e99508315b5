"""Remedies that leave something out: a worker, or what came about since a checkpoint."""

import json
from typing import Any, cast

from offbeat.errors import CheckpointError, ConfigError
from offbeat.monitor.protocols import Quarantines, RollsBack, ServesLearningRate
from offbeat.monitor.remedy import Find, Remedy, Taken

__all__ = ["Quarantine", "Rollback"]


MOST_TRIES = 3
"""Of a rollback: its checkpoint may make room for a newer one while it is chosen."""


class Quarantine(Remedy):
    """Leaves out the worker whose metric it was."""

    keeps_out_non_finite = True

    def take(self, worker: str | None) -> Taken:
        """Leave it out, until this is taken back."""
        things = cast(list[Any], self.found())
        ours = [thing for thing in things if worker in (None, getattr(thing, "id", worker))]
        if len(ours) != 1 or (name := worker or getattr(ours[0], "id", None)) is None:
            raise ConfigError(
                f"{len(things)} objects can quarantine workers, and whose metric it was is "
                f"{'not known' if worker is None else repr(worker)}: give observe(worker=...)"
            )
        thing: Quarantines = ours[0]
        was_out = (
            getattr(thing, "is_quarantined", False) is True
        )  # somebody else's doing, and for him to undo
        thing.quarantine(name)

        def undo() -> str:
            if was_out:
                return f"worker {name} had been left out before, and stays so"
            thing.release(name)
            return f"worker {name} takes part again"

        return Taken(f"worker {name} is left out", undo, left_out=name, held=name)

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  the worker's name
        """Leave it out again."""
        return self.take(held)

    def acts_on(self, thing: object) -> bool:
        """It needs what can do so."""
        return isinstance(thing, Quarantines)


class Rollback(Remedy):
    """Goes back to what was kept last before the alert; repeated, each time one further and never forward."""

    repeats = 3
    keeps_out_non_finite = True

    def __init__(self, find: Find) -> None:
        super().__init__(find)
        self._before: dict[int, int] = {}  # by object: what is older than this is good
        self._gone_to: dict[int, int] = {}  # by object: where it went since the alert, if it did

    def begin(self) -> None:
        """Note the versions: what is newer may have come about by what the alert is about."""
        self._gone_to.clear()
        self._before = {id(thing): thing.status()["version"] + 1 for thing in self._servers()}

    def take(self, worker: str | None) -> Taken:
        """Go back."""
        del worker
        told: list[str] = []
        servers = self._servers()
        for server in servers:
            version = self._roll_back(server)
            self._before[id(server)] = self._gone_to[id(server)] = version
            told.append(f"version {version}")
        others = [thing for thing in self.found() if thing not in servers]
        told += [str(cast(RollsBack, thing).rollback()) for thing in others]
        held = [self._gone_to[id(server)] for server in servers]
        return Taken(f"went back to {', '.join(told)}", _stays, goes_back=True, held=held)

    def resume(self, held: Any) -> Taken:  # noqa: ANN401  the versions that servers went back to
        """Remember to where it went: the next is further back."""
        for server, version in zip(self._servers(), held, strict=False):
            self._before[id(server)] = self._gone_to[id(server)] = version
        return Taken("had gone back", _stays, held=held)

    def _roll_back(self, server: Any) -> int:  # noqa: ANN401  a server
        """Go back as far as it takes; one that makes room for a newer checkpoint meanwhile is asked again."""
        for _ in range(MOST_TRIES):
            kept = _kept_by(server)
            chosen = self._chosen(server, kept)
            try:
                return cast(int, server.rollback(chosen))
            except CheckpointError:
                if chosen is None or chosen in _kept_by(server):
                    raise
        raise ConfigError("each checkpoint that was chosen was removed before it could be gone back to")

    def _chosen(self, server: object, kept: list[int]) -> int | None:
        """Choose among what is kept; None where nothing is.

        Raises:
            ConfigError: If all of it is newer than what was gone back to already.
        """
        before, gone_to = self._before.get(id(server)), self._gone_to.get(id(server))
        older = [version for version in kept if before is None or version < before]
        if older:
            return older[0]  # above it may be what was gone back from before
        if gone_to is None:  # nothing is left of before the alert: the oldest is the nearest to it
            return min(kept, default=None)
        if gone_to in kept:
            return gone_to
        raise ConfigError(
            f"no checkpoint is left that is as old as version {gone_to}, to which it went back before"
            + (f": kept are {', '.join(map(str, sorted(kept)))}" if kept else "")
        )

    def acts_on(self, thing: object) -> bool:
        """It needs what can do so."""
        return isinstance(thing, RollsBack) and bool(getattr(thing, "keeps_checkpoints", True))

    def _servers(self) -> list[Any]:
        return [thing for thing in self.found() if isinstance(thing, ServesLearningRate)]


def _stays() -> str:
    return "what was gone back to stays"


def _kept_by(server: Any) -> list[int]:  # noqa: ANN401  a server
    """List of which versions a server's good checkpoints have the values, those written last first."""
    from offbeat._offbeat import inspect_checkpoints

    found = json.loads(inspect_checkpoints(server.status()["checkpoints"]["directory"]))
    good = [c["checkpoint"] for c in found["checkpoints"] if c["checkpoint"] and not c["error"]]
    return [c["version"] if c["gone_back_to"] is None else c["gone_back_to"] for c in good]
