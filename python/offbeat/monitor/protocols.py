"""What can be asked of whoever trains: each remedy acts on whatever has one of these, and on nothing else."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "AveragesOften",
    "BoundsStaleness",
    "HoldsOptimizer",
    "KeepsSteps",
    "Quarantines",
    "RollsBack",
    "ServesLearningRate",
    "Steps",
    "SyncsOften",
    "can_set",
]


class AveragesOften(Protocol):
    """Averages its model every so many iterations, or every so many seconds as in "30s"; may be set."""

    averaging_frequency: int | str


class SyncsOften(Protocol):
    """Likewise, for what is not an average."""

    sync_frequency: int | str


class BoundsStaleness(Protocol):
    """Takes no update that is later than this; None takes all; may be set."""

    max_staleness: int | None


class Steps(Protocol):
    """An optimizer, as torch's are."""

    param_groups: Sequence[dict[str, Any]]

    def step(self) -> object:
        """Move the parameters."""


class HoldsOptimizer(Protocol):
    """Trains with an optimizer that runs here; None as long as there is none."""

    @property
    def optimizer(self) -> Steps | None:
        """The optimizer."""


@runtime_checkable
class ServesLearningRate(Protocol):
    """Has the learning rate for all workers, as a `ParameterServer` has."""

    def set_lr(self, lr: float, group: int | None = None) -> None:
        """Set it for a group of parameters."""

    def status(self) -> dict[str, Any]:
        """Tell which it is; and of workers, where there are any, by how much their pushes were late."""


@runtime_checkable
class RollsBack(Protocol):
    """Can go back to what it has kept, as a `ParameterServer` with checkpoints can.

    One that has `keeps_checkpoints`, or `is_training`, can only where these are true.
    """

    def rollback(self, version: int | None = None, /) -> object:
        """Go back; None: to the newest."""


@runtime_checkable
class KeepsSteps(Protocol):
    """Can go back while it trains, and tells to which of its steps, as a `FaultTolerantTrainer` does."""

    @property
    def began_step(self) -> int:
        """Steps that there were as the newest batch was begun."""

    def checkpoint_steps(self) -> list[int]:
        """List them, those written last first."""

    def rollback(self, step: int | None = None, /) -> int:
        """Go back to one."""


@runtime_checkable
class Quarantines(Protocol):
    """Can leave out what a worker computes, as an `AsyncWorker` can of itself."""

    def quarantine(self, worker_id: str) -> None:
        """Take nothing of that worker from now on."""

    def release(self, worker_id: str) -> None:
        """Take it again."""


def can_set(thing: object, name: str) -> bool:
    """Tell whether an object has an attribute that may be set."""
    described = getattr(type(thing), name, None)
    if isinstance(described, property):
        return described.fset is not None
    return hasattr(thing, name)
