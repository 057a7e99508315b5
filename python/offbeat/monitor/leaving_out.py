"""The remedy that leaves out a worker."""

from typing import Any, cast

from offbeat.errors import ConfigError
from offbeat.monitor.protocols import Quarantines
from offbeat.monitor.remedy import Remedy, Taken

__all__ = ["Quarantine"]


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
