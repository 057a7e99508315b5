"""What is trained: something that takes a batch and can give and take back its state."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from offbeat import trained_by
from offbeat.errors import ConnectionLostError
from offbeat.history import History, Record
from offbeat.local.log_lines import Skipped
from offbeat.metrics import Mean
from offbeat.module.table import unwrap
from offbeat.receipt import Receipt
from offbeat.recovery.values import of_tensors

__all__ = ["GoesBack", "Scheduler", "Stepped", "Trainee"]


class Scheduler(Protocol):
    """A learning rate scheduler in the manner of torch's."""

    def step(self) -> None:
        """Set the next learning rate."""

    def state_dict(self) -> dict[str, Any]:
        """Give where it is."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back there."""


@runtime_checkable
class GoesBack(Protocol):
    """Can take back, between two steps, what was learnt alone: where the run is stays."""

    def go_back(self, state: dict[str, Any]) -> None:
        """Take back the model, what the optimizer remembers and the loss scale, of a state that fits.

        What an optimizer's groups are set to stays, and so does a scheduler: it counts the steps of the run,
        which go on. A learning rate that a scheduler has lowered since would else stay high: many multiply.
        """


@dataclass(frozen=True, slots=True)
class Stepped:
    """A batch that was trained on.

    Attributes:
        outputs: The model's.
        targets: The batch's, on the device.
        loss: Mean over the batch, detached and not yet waited for.
        samples: In the batch.
        steps: That it made: 0 where it was gathered, or nothing was asked of the optimizer.
        is_skipped: Nothing came of it: its scaled gradients were not finite, or a monitor dropped them. It
            counts in no mean.
        lost: Others were, when this had been trained on.
    """

    outputs: Any
    targets: Any
    loss: torch.Tensor
    samples: int
    steps: int = 1
    is_skipped: bool = False
    lost: ConnectionLostError | None = None


class Trainee(ABC):
    """What a `FaultTolerantTrainer` trains, batch by batch.

    Where it is settled, it has no state but what `state_dict` gives.
    """

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The model."""

    @property
    @abstractmethod
    def optimizer_name(self) -> str:
        """Its optimizer's class."""

    @abstractmethod
    def step(self, batch: object, epoch: int) -> Stepped:
        """Train on a batch of a pass, which are counted from 0."""

    @abstractmethod
    def end_epoch(self, epoch: int) -> int:
        """End a pass; tell how many steps that were."""

    @abstractmethod
    def take_skipped(self) -> int:
        """Count what was skipped since this was last asked."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Give the state, a nest; "model" is the model's own. Tensors are not copied."""

    @abstractmethod
    def differences(self, state: dict[str, Any]) -> list[str]:
        """Word why a state does not fit; nothing if it does."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a state that fits."""

    # ------------------------------------------------------------------ most have nothing to say to these

    def differences_of_model(self, state: dict[str, Any]) -> list[str]:
        """Word what of the model's does not fit."""
        return of_tensors(unwrap(self.module).state_dict(), state["model"])

    def notes(self, state: dict[str, Any]) -> list[str]:
        """Word which settings of a state that fits are others than those given here."""
        del state
        return []

    def training(self) -> AbstractContextManager[object]:
        """Train in here."""
        return nullcontext()

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027
        """Do what belongs before a pass, or the rest of one: no batch is taken yet."""

    @property
    def stands_alone(self) -> bool:
        """Whether all that was trained is in the model here, and can be saved, should others be lost."""
        return False

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way that a state would lack; asked where one is wanted."""
        return True

    @property
    def is_about_to_settle(self) -> bool:
        """Whether what is under way ends with the next batches, whatever others do."""
        return False

    @property
    def meets_at_server(self) -> bool:
        """Whether `end` waits for others at a server, as long as they train."""
        return False

    @property
    def hosts_server(self) -> bool:
        """Whether that is this process's: where it goes the others have none."""
        return False

    def bring(self) -> None:  # noqa: B027
        """Let the others have what is trained, before `end` waits for theirs."""

    def settle(self) -> int:
        """End what is under way, for the process is about to end; tell how many steps that were."""
        return 0

    def end(self) -> int:
        """Do what belongs at the end of all passes; tell how many steps that were."""
        return 0

    def after_step(self) -> None:  # noqa: B027
        """Do what belongs after a batch that is in the account: callbacks look at the history there."""

    def after_epoch(self, epoch: int) -> None:  # noqa: B027
        """Do what belongs after a pass that is in the account: a scheduler's step, say."""

    def show(self, history: History) -> None:  # noqa: B027
        """Hear which history is the run's."""

    def note_measured(self, batches: int) -> None:  # noqa: B027
        """Tell whoever may wonder that this member gets on while its model is measured."""

    def validated(self, numbers: dict[str, float], step: int) -> None:  # noqa: B027
        """Hear what was measured after a pass, by the names under which trackers keep it."""

    def abandon(self) -> None:  # noqa: B027
        """Forget what a batch that broke off has left."""

    def version(self, steps: int) -> int:
        """Give what a log line calls the model's version, after so many steps."""
        return steps

    @property
    def skips(self) -> Skipped:
        """What is counted as skipped."""
        return "batch"

    def take_receipts(self) -> list[Receipt]:
        """Give out what a server has answered since the last call."""
        return []

    def agree(self, value: object) -> bool:
        """Tell in all who train together whether a value is the same in all of them."""
        del value
        return True

    @property
    def scheduler_meter(self) -> Mean | None:
        """Measures what the scheduler goes by, once told of what counts; None where it goes by nothing."""
        return None

    @property
    def keepers(self) -> list[trained_by.Keeper]:
        """What guards this run, and has a state beside that of what is trained."""
        return trained_by.keepers_of(self.module)

    def logged(self, record: Record, numbers: dict[str, float]) -> None:  # noqa: B027
        """Hear of a log line, and of its numbers by the names under which trackers keep them."""

    def finished(self, history: History) -> None:  # noqa: B027
        """Hear that all is done and saved."""
