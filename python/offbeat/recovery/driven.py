"""An `AsyncTrainer`, batch by batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import distributed, nn

from offbeat import trained_by
from offbeat.errors import StateError
from offbeat.history import History, Record
from offbeat.local.group import group_of, is_alike
from offbeat.local.log_lines import Skipped
from offbeat.local.loss import LossFunction
from offbeat.local.saved import bring_back_memory, of_classes, of_groups, of_settings, settings_of
from offbeat.metrics import Mean
from offbeat.module.table import unwrap
from offbeat.receipt import Receipt
from offbeat.recovery.averaged import Patience
from offbeat.recovery.buffers import Holder, holder_of_loss
from offbeat.recovery.local import of_buffers
from offbeat.recovery.trainee import Stepped, Trainee
from offbeat.recovery.values import WithMetadata, fill, unlisted
from offbeat.trainer import AsyncTrainer
from offbeat.trainer.alone import alone
from offbeat.trainer.driven import Driven

__all__ = ["Trained"]


class Trained(Trainee):
    """A trainer's loop. Its model is the server's while it trains against one."""

    def __init__(self, trainer: AsyncTrainer, driven: Driven, loss_fn: LossFunction, holder: Holder) -> None:
        self._trainer = trainer
        self._driven = driven
        self._loss_fn = loss_fn
        self._holder, self._loss_holder = holder, holder_of_loss(loss_fn)
        self._patience = Patience()
        live = trainer.optimizer
        self._settings = [] if live is None else [settings_of(group) for group in live.param_groups]

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._trainer.model

    @property
    def optimizer_name(self) -> str:
        """Its optimizer's class; of one on a server, words."""
        live = self._trainer.optimizer
        return "on the server" if live is None else type(live).__name__

    @contextmanager
    def training(self) -> Iterator[None]:
        """Train in here, where the trainer's own `train` is refused."""
        with alone(self._trainer), self._driven.training():
            yield

    def begin_epoch(self, epoch: int) -> None:
        """Begin the strategy of a pass."""
        self._driven.begin_epoch(epoch)

    def step(self, batch: object, epoch: int) -> Stepped:
        """Train on a batch as the trainer's strategy does."""
        given, made, steps = self._driven.batch(batch, epoch)
        mean = made.loss if self._trainer.loss_reduction == "mean" else made.loss / given.samples
        return Stepped(made.outputs, given.targets, mean, given.samples, steps, made.is_skipped, made.lost)

    def after_step(self) -> None:
        """Let the trainer's callbacks hear of it."""
        self._driven.after_step()

    def take_skipped(self) -> int:
        """Count batches, or updates that are of many."""
        return self._driven.take_skipped()

    @property
    def skips(self) -> Skipped:
        """Which of both, as its strategy has it."""
        return self._driven.skips

    def end_epoch(self, epoch: int) -> int:
        """End a pass."""
        return self._driven.end_epoch(epoch)

    def after_epoch(self, epoch: int) -> None:
        """Let the trainer's scheduler and callbacks hear of it."""
        self._driven.after_epoch(epoch)

    def show(self, history: History) -> None:
        """Let the trainer give the run's history as its own."""
        self._trainer.show(history)

    def note_measured(self, batches: int) -> None:
        """Tell whom the trainer meets."""
        self._driven.note_measured(batches)

    def validated(self, numbers: dict[str, float], step: int) -> None:
        """Let the trainer's trackers hear of it."""
        self._driven.validated(numbers, step)

    def end(self) -> int:
        """End together with the others."""
        return self._driven.settle()

    def settle(self) -> int:
        """Be ready to be saved without the others."""
        return self._driven.part()

    @property
    def stands_alone(self) -> bool:
        """Whether a strategy is at work that averages, or trains alone."""
        return self._driven.stands_alone

    @property
    def is_settled(self) -> bool:
        """Whether no round is under way, nor batches gathered for a server."""
        return self._patience.is_over(is_under_way=self._driven.is_under_way, number=self._driven.version)

    @property
    def is_about_to_settle(self) -> bool:
        """Whether a round is under way of this member alone."""
        return self._driven.is_about_to_settle

    @property
    def meets_at_server(self) -> bool:
        """Whether members do, by the strategy that is at work."""
        return self._driven.meets_at_server

    @property
    def hosts_server(self) -> bool:
        """Whether the trainer does."""
        return self._driven.hosts_server

    def bring(self) -> None:
        """Average what is left."""
        self._driven.bring()

    def abandon(self) -> None:
        """Forget what a batch that broke off has left."""
        self._driven.abandon()

    def version(self, steps: int) -> int:
        """How often the model was brought together with the others'."""
        del steps
        return self._driven.version

    def take_receipts(self) -> list[Receipt]:
        """Give out what a server has answered."""
        return self._driven.take_receipts()

    def agree(self, value: object) -> bool:
        """Ask the others, where they are a process group."""
        group = self._group()
        return group is None or is_alike(group, value, self._trainer.device)

    def _group(self) -> "distributed.ProcessGroup | None":
        """Give the process group of several in which it trains, if it does."""
        group = group_of(self._trainer.process_group) if self._trainer.needs_group else None
        return None if group is None or distributed.get_world_size(group) == 1 else group

    @property
    def scheduler_meter(self) -> Mean | None:
        """The trainer's."""
        return cast(Mean | None, self._driven.scheduler_meter)  # as it was seen to be

    @property
    def keepers(self) -> list[trained_by.Keeper]:
        """The trainer's callbacks with a state, too."""
        return [*super().keepers, *self._driven.keepers]

    def logged(self, record: Record, numbers: dict[str, float]) -> None:
        """Let the trainer's trackers and callbacks hear of it."""
        self._driven.logged(record, numbers)

    def finished(self, history: History) -> None:
        """Let the trainer's callbacks hear of it."""
        self._driven.finished(history)

    def state_dict(self) -> dict[str, Any]:
        """Give the trainer's state, and the model's."""
        own = self._trainer.state_of_now()
        self._patience = Patience()
        module = unwrap(self.module)
        state = module.state_dict()
        return {
            "model": dict(state),
            "metadata": dict(getattr(state, "_metadata", {})),
            "beside": unlisted(module),
            "loss": self._loss_holder.tensors(),
            "buffers": {"model": self._holder.registered(), "loss": self._loss_holder.registered()},
            "trainer": own,
            "classes": self._classes(),
            "settings": self._settings,
        }

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Word which tensors, classes or strategies are others."""
        if found := of_classes(self._classes(), state["classes"]):
            return found
        found = self.differences_of_model(state)
        told = of_buffers(state, "loss")
        found += [f"of loss_fn: {text}" for text in self._loss_holder.differences(state["loss"], told)]
        found += of_groups(self._trainer.optimizer, state["trainer"]["optimizer"])
        return [*found, *self._trainer.differences(state["trainer"])]

    def differences_of_model(self, state: dict[str, Any]) -> list[str]:
        """Word what of the model's training cannot have changed."""
        return self._holder.differences(state["model"], of_buffers(state, "model"))

    def notes(self, state: dict[str, Any]) -> list[str]:
        """Word which settings given here are not the run's."""
        return of_settings(self._settings, state["settings"], state["trainer"]["optimizer"])

    def go_back(self, state: dict[str, Any]) -> None:
        """Take back what was learnt, where it trains as a plain loop; all else of the trainer's goes on."""
        self._take_buffers(state)
        self._load_model(state)
        live, scaler = self._trainer.optimizer, self._trainer.scaler
        if live is not None:
            bring_back_memory(live, state["trainer"]["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(state["trainer"]["scaler"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a state that fits.

        Members of a group meet in here, and see that their models are the same; what has grown in each by
        itself is no longer of the same size.

        Raises:
            StateError: If a strategy by which members meet has begun, or ended, between some of their states.
        """
        is_met = self._group() is not None
        if not self.agree(self._trainer.meetings(state["trainer"])):
            raise StateError(
                f"this member's checkpoint is of {_shown_stage(state['trainer'])}, and it cannot go on with "
                f"another's: a strategy by which members meet in the process group has begun, or ended, "
                f"between the one and the other. Move the save-* folders of later epochs out of the "
                f"checkpoint_dir of those that are ahead, so that all go on from the epoch of the one that "
                f"is behind; or begin anew, with other directories"
            )
        if not is_met:
            self._take_buffers(state)
        self._load_model(state)
        self._trainer.load_state_dict(state["trainer"])
        if is_met:
            self._take_buffers(state)
        self._settings = state["settings"]  # what the run began with, whatever was given here

    def _take_buffers(self, state: dict[str, Any]) -> None:
        self._holder.take(state["model"], of_buffers(state, "model"))
        self._loss_holder.take(state["loss"], of_buffers(state, "loss"))

    def _load_model(self, state: dict[str, Any]) -> None:
        module = unwrap(self.module)
        values = self._holder.fitting(state["model"])
        module.load_state_dict(WithMetadata.of(values, state["metadata"]))
        fill(module, state["beside"])
        if isinstance(self._loss_fn, nn.Module):
            fill(self._loss_fn, state["loss"])

    def _classes(self) -> dict[str, str | None]:
        return {"wrapper": type(self._trainer).__name__} | self._trainer.classes


def _shown_stage(state: dict[str, Any]) -> str:
    stage = state["stage"]
    if stage is None:
        return "a run that had not begun"
    epoch = stage["epoch"]
    return (
        f"epoch {epoch} as strategy= counts them ({epoch + 1} in the table that `offbeat checkpoint inspect` "
        f"makes of a directory), strategy {stage['kind']}"
    )
