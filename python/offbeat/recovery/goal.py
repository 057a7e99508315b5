"""What `train` was asked for, and whether it is done."""

from dataclasses import dataclass
from typing import Self

from offbeat.recovery.manifest import Manifest

__all__ = ["Goal"]


@dataclass(frozen=True, slots=True)
class Goal:
    """Where a run is to end.

    Attributes:
        epochs: Passes over the data, in all lives of the run.
        max_steps: Steps, likewise; None for no limit.
    """

    epochs: int
    max_steps: int | None

    @classmethod
    def of(cls, manifest: Manifest) -> Self | None:
        """Give that of the `train` that wrote a checkpoint; None where older ones do not tell."""
        return None if manifest.epochs is None else cls(manifest.epochs, manifest.max_steps)

    def is_reached(self, *, epochs: int, steps: int) -> bool:
        """Whether so much is all of it."""
        return epochs >= self.epochs or (self.max_steps is not None and steps >= self.max_steps)

    def is_within(self, other: "Goal") -> bool:
        """Whether another goes as far."""
        has_steps = other.max_steps is None or (
            self.max_steps is not None and self.max_steps <= other.max_steps
        )
        return self.epochs <= other.epochs and has_steps

    def was_stopped(self, manifest: Manifest) -> bool:
        """Whether `stop()` has ended a `train` that was to go as far, where this checkpoint is."""
        other = self.of(manifest)
        return manifest.is_stopped and other is not None and self.is_within(other)

    def is_done(self, manifest: Manifest) -> bool:
        """Whether one that goes on from a checkpoint has nothing to do."""
        if manifest.is_end_due:
            return False
        is_all_made = not manifest.is_validation_due and self.is_reached(
            epochs=manifest.epoch, steps=manifest.step
        )
        return is_all_made or self.was_stopped(manifest)
