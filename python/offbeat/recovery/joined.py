"""An `AsyncWorker`, whose truth is its server's: what is saved of it is what is its own."""

from typing import Any

import torch
from torch import nn

from offbeat import trained_by
from offbeat.local.batches import count, moved, split
from offbeat.local.loading import bring_back
from offbeat.local.loss import LossFunction, LossReduction, check_loss
from offbeat.local.saved import of_classes, of_groups, of_settings, settings_of
from offbeat.metrics import Mean
from offbeat.module.table import unwrap
from offbeat.receipt import Receipt
from offbeat.recovery.local import of_loss
from offbeat.recovery.trainee import Scheduler, Stepped, Trainee
from offbeat.recovery.values import fill, of_tensors, unlisted
from offbeat.trainer.scheduling import Interval, bring_back_scheduler, step_by
from offbeat.worker import AsyncWorker

__all__ = ["Joined"]


class Joined(Trainee):
    """A worker's loop.

    The model's values are saved for whoever looks at them, and never brought back: the server has gone on.
    """

    def __init__(
        self,
        worker: AsyncWorker,
        *,
        optimizer: object,
        loss_fn: LossFunction,
        reduction: LossReduction,
    ) -> None:
        """Give the worker its optimizer, and the newest model.

        Raises:
            ConfigError: If the optimizer is not the run's, or there is none.
        """
        self._worker = worker
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._scheduler: Scheduler | None = None
        self._per_step = False
        self._scheduler_meter: Mean | None = None
        self._num_skipped = 0  # since that was asked
        self._receipts: list[Receipt] = worker.prepare(optimizer)
        live = worker.live_optimizer
        self._settings = [] if live is None else [settings_of(group) for group in live.param_groups]

    def follow(self, scheduler: Scheduler | None, when: Interval, meter: Mean | None) -> None:
        """Let a scheduler move the live optimizer's learning rate, by a meter if it goes by that."""
        self._scheduler, self._per_step, self._scheduler_meter = scheduler, when == "step", meter

    @property
    def module(self) -> nn.Module:
        """The worker's model."""
        return self._worker.model

    @property
    def optimizer_name(self) -> str:
        """Which optimizer runs, and where."""
        return self._worker.optimizer_words

    def step(self, batch: object, epoch: int) -> Stepped:
        """Hand a batch's gradients to the worker, which pushes if it is time to.

        Raises:
            ConfigError: If the batch or the loss is not what can be trained on.
        """
        del epoch
        inputs, targets = split(batch)
        samples = count(inputs, targets)
        device = self._worker.device
        inputs, targets = moved(inputs, device), moved(targets, device)
        outputs = self.module(inputs)
        loss = self._loss_fn(outputs, targets)
        check_loss(loss, owner="AsyncWorker")
        loss.backward()  # type: ignore[no-untyped-call]
        shown = loss.detach()
        mean = shown / samples if self._reduction == "sum" else shown
        trained_by.tell(self.module, loss=mean)
        before, left_out = self._worker.steps_made, self._worker.num_left_out
        receipt = self._worker.step(samples)
        if receipt is not None:
            self._receipts.append(receipt)
        steps = self._worker.steps_made - before
        if steps and self._scheduler is not None and self._per_step:
            self._scheduler.step()
        is_skipped = self._worker.num_left_out > left_out
        self._num_skipped += is_skipped
        return Stepped(outputs, targets, mean, samples, steps, is_skipped)

    def take_skipped(self) -> int:
        """Count batches."""
        num, self._num_skipped = self._num_skipped, 0
        return num

    def end_epoch(self, epoch: int) -> int:
        """Push what is gathered."""
        del epoch
        return self._flush()

    def after_epoch(self, epoch: int) -> None:
        """Let a scheduler step that does so after each pass."""
        del epoch
        if self._scheduler is not None and not self._per_step:
            step_by(self._scheduler, self._scheduler_meter)

    @property
    def scheduler_meter(self) -> Mean | None:
        """As given."""
        return self._scheduler_meter

    def end(self) -> int:
        """Push what is gathered, and wait for what is in flight."""
        return self._flush()

    def settle(self) -> int:
        """Push what is gathered: the next life would not have it."""
        return self._flush()

    @property
    def is_settled(self) -> bool:
        """Whether no batch is gathered, which the next life would not have."""
        return not self._worker.num_gathered

    def abandon(self) -> None:
        """Drop what is not pushed."""
        self._worker.drop()

    def version(self, steps: int) -> int:
        """The server's, as last heard."""
        del steps
        return self._worker.version

    def take_receipts(self) -> list[Receipt]:
        """Give them out, once."""
        taken, self._receipts = self._receipts, []
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Give what is the worker's own, and the model as last pulled."""
        module, live = unwrap(self.module), self._live
        return {
            "model": dict(module.state_dict()),
            "beside": unlisted(module),
            "own": self._own_buffers(),
            "loss": of_loss(self._loss_fn),
            "optimizer": None if live is None else live.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "classes": self._classes(),
            "settings": self._settings,
            "run": self._worker.run_id,
        }

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Word which tensors or classes are others, and whether the server is another run's."""
        found = of_classes(self._classes(), state["classes"])
        if found:
            return found
        found += self.differences_of_model(state)
        found += [f"of loss_fn: {text}" for text in of_tensors(of_loss(self._loss_fn), state["loss"])]
        found += of_groups(self._live, state["optimizer"])
        if (run := self._worker.run_id) != state["run"]:
            found.append(
                f"the server's run is {run!r}, and the checkpoint's was {state['run']!r}, whose model is not "
                f"there: start the server with the checkpoints of that run (checkpoint_dir=, as then)"
            )
        return found

    def notes(self, state: dict[str, Any]) -> list[str]:
        """Word which settings given here are not the run's."""
        return of_settings(self._settings, state["settings"], state["optimizer"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what is the worker's own."""
        fill(unwrap(self.module), state["beside"] | state["own"])
        if isinstance(self._loss_fn, nn.Module):
            fill(self._loss_fn, state["loss"])
        live = self._live
        if live is not None:
            bring_back(live, state["optimizer"])
        self._settings = state["settings"]  # what the run began with, whatever was given here
        if self._scheduler is not None:
            bring_back_scheduler(self._scheduler, state["scheduler"])

    @property
    def _live(self) -> torch.optim.Optimizer | None:
        return self._worker.live_optimizer

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        return dict(unwrap(self.module).named_buffers()) if self._worker.keeps_buffers else {}

    def _flush(self) -> int:
        before = self._worker.steps_made
        self._receipts += self._worker.flush()
        return self._worker.steps_made - before

    def _classes(self) -> dict[str, str | None]:
        parts = {"wrapper": self._worker, "optimizer here": self._live, "scheduler": self._scheduler}
        return {name: None if part is None else type(part).__name__ for name, part in parts.items()}
