"""A module that is trained in this process."""

from typing import Any

import torch
from torch import nn

from offbeat import trained_by
from offbeat.errors import StateError
from offbeat.local.batches import check_any, count, moved, split
from offbeat.local.loading import bring_back
from offbeat.local.loss import LossFunction, LossReduction, check_loss
from offbeat.local.saved import (
    bring_back_memory,
    of_classes,
    of_groups,
    of_settings,
    settings_of,
)
from offbeat.metrics import Mean
from offbeat.module.table import unwrap
from offbeat.recovery.buffers import Holder, holder_of_loss
from offbeat.recovery.trainee import Scheduler, Stepped, Trainee
from offbeat.recovery.values import WithMetadata, fill, unlisted
from offbeat.trainer.scheduling import Interval, bring_back_scheduler, step_by

__all__ = ["Local", "of_buffers", "of_loss"]


class Local(Trainee):
    """A loop of torch's own.

    Attributes:
        optimizer: The live one.
    """

    owner: str | None = "FaultTolerantTrainer"

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        reduction: LossReduction,
        device: torch.device,
        scheduler: Scheduler | None,
        scheduler_interval: Interval,
        scheduler_meter: Mean | None,
        scaler: "torch.amp.GradScaler | None",
        holder: Holder,
    ) -> None:
        self._module = module
        self._holder, self._loss_holder = holder, holder_of_loss(loss_fn)
        self.optimizer = optimizer
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._device = device
        self._scheduler = scheduler
        self._per_step = scheduler_interval == "step"
        self._scheduler_meter = scheduler_meter
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._settings = [settings_of(group) for group in optimizer.param_groups]
        self._num_skipped = 0  # since that was asked
        optimizer.zero_grad()  # of what the user did before

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._module

    @property
    def optimizer_name(self) -> str:
        """Its optimizer's class."""
        return type(self.optimizer).__name__

    def step(self, batch: object, epoch: int) -> Stepped:
        """Train on a batch.

        Raises:
            ConfigError: If the batch, as one without a sample, or the loss is not what can be trained on.
            StateError: If no parameter gets a gradient.
        """
        del epoch
        done = self.stepped(batch)
        self.optimizer.zero_grad()
        return done

    def stepped(self, batch: object) -> Stepped:
        """Do so, and leave the gradients where they are."""
        inputs, targets = split(batch)
        check_any(samples := count(inputs, targets))
        inputs, targets = moved(inputs, self._device), moved(targets, self._device)
        outputs = self._module(inputs)
        loss = self._loss_fn(outputs, targets)
        check_loss(loss, owner=self.owner)
        shown = loss.detach() / samples if self._reduction == "sum" else loss.detach()
        self.heard(shown)
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if all(p.grad is None for group in self.optimizer.param_groups for p in group["params"]):
            raise StateError(
                "no parameter has a gradient: the loss does not come from this model's parameters"
            )
        has_stepped = self._make_step()
        if not has_stepped:
            trained_by.skipped(self._module)
        is_skipped = not has_stepped or trained_by.has_dropped(self._module)
        self._num_skipped += is_skipped
        if self._scheduler is not None and self._per_step and not is_skipped:
            self._scheduler.step()
        return Stepped(outputs, targets, shown, samples, int(has_stepped), is_skipped)

    def heard(self, loss: torch.Tensor) -> None:
        """Tell of a batch's loss, a mean over it, before its gradients are there."""
        trained_by.tell(self._module, loss=loss)

    def _make_step(self) -> bool:
        """Let the optimizer step; tell whether it has, which a GradScaler decides and does not say."""
        if self._scaler is None:
            self.optimizer.step()
            return True
        steps: list[bool] = []

        def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
            # A fused one is called in any case, and told that way to change nothing.
            overflow = getattr(optimizer, "found_inf", None)
            steps.append(overflow is None or not bool(overflow))

        hook = self.optimizer.register_step_post_hook(stepped)
        try:
            self._scaler.step(self.optimizer)
        finally:
            hook.remove()
        self._scaler.update()
        return any(steps)

    def take_skipped(self) -> int:
        """Count batches."""
        num, self._num_skipped = self._num_skipped, 0
        return num

    def end_epoch(self, epoch: int) -> int:
        """Leave nothing to do."""
        del epoch
        return 0

    def after_epoch(self, epoch: int) -> None:
        """Let a scheduler step that does so after each pass."""
        del epoch
        if self._scheduler is not None and not self._per_step:
            step_by(self._scheduler, self._scheduler_meter)

    @property
    def scheduler_meter(self) -> Mean | None:
        """As given."""
        return self._scheduler_meter

    def abandon(self) -> None:
        """Drop a batch's gradients."""
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Give the state of the model, the optimizer, the scheduler and the GradScaler."""
        state = unwrap(self._module).state_dict()
        return {
            "model": dict(state),
            "metadata": dict(getattr(state, "_metadata", {})),
            "beside": unlisted(unwrap(self._module)),
            "loss": self._loss_holder.tensors(),
            "buffers": {"model": self._holder.registered(), "loss": self._loss_holder.registered()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "classes": self._classes(),
            "settings": self._settings,
        }

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Word which tensors, classes or groups are others than a state's."""
        found = self.differences_of_model(state)
        told = of_buffers(state, "loss")
        found += [f"of loss_fn: {text}" for text in self._loss_holder.differences(state["loss"], told)]
        found += of_classes(self._classes(), state["classes"])
        if found:
            return found
        return of_groups(self.optimizer, state["optimizer"])

    def differences_of_model(self, state: dict[str, Any]) -> list[str]:
        """Word what of the model's training cannot have changed."""
        return self._holder.differences(state["model"], of_buffers(state, "model"))

    def notes(self, state: dict[str, Any]) -> list[str]:
        """Word which settings given here are not the run's."""
        return of_settings(self._settings, state["settings"], state["optimizer"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a state that fits, in place."""
        self.load_model(state)
        self.load_rest(state)

    def go_back(self, state: dict[str, Any]) -> None:
        """Take back what was learnt; settings of the optimizer, and the scheduler, go on."""
        self.load_model(state)
        self._fill_beside(state)
        bring_back_memory(self.optimizer, state["optimizer"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def load_model(self, state: dict[str, Any]) -> None:
        """Take back the model's values."""
        self._holder.take(state["model"], of_buffers(state, "model"))
        values = self._holder.fitting(state["model"])
        unwrap(self._module).load_state_dict(WithMetadata.of(values, state["metadata"]))

    def load_rest(self, state: dict[str, Any]) -> None:
        """Take back all else."""
        self._fill_beside(state)
        bring_back(self.optimizer, state["optimizer"])
        self._settings = state["settings"]  # what the run began with, whatever was given here
        if self._scheduler is not None:
            bring_back_scheduler(self._scheduler, state["scheduler"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _fill_beside(self, state: dict[str, Any]) -> None:
        fill(unwrap(self._module), state["beside"])
        self._loss_holder.take(state["loss"], of_buffers(state, "loss"))
        if isinstance(self._loss_fn, nn.Module):
            fill(self._loss_fn, state["loss"])

    def _classes(self) -> dict[str, str | None]:
        """Name the classes that have to be the same."""
        parts = {"optimizer": self.optimizer, "scheduler": self._scheduler, "grad_scaler": self._scaler}
        return {name: None if part is None else type(part).__name__ for name, part in parts.items()}


def of_buffers(state: dict[str, Any], whose: str) -> list[str] | None:
    """Name what was registered as a buffer of the "model" or the "loss"; older checkpoints do not tell."""
    told: list[str] | None = state.get("buffers", {}).get(whose)
    return told


def of_loss(loss_fn: LossFunction) -> dict[str, Any]:
    """Give the parameters and buffers of a loss that is a module."""
    if not isinstance(loss_fn, nn.Module):
        return {}
    return dict(loss_fn.named_parameters()) | dict(loss_fn.named_buffers())
