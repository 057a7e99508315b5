"""What is trained: something that takes a batch and can give and take back its state."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from offbeat.errors import StateError
from offbeat.local.batches import count, moved, split
from offbeat.local.loss import LossFunction, LossReduction, check_loss
from offbeat.module.table import unwrap

__all__ = ["Local", "Scheduler", "SchedulerStep", "Stepped", "Trainee"]

SchedulerStep = str
"""When a scheduler steps: after each "epoch" or each "step"."""


class Scheduler(Protocol):
    """A learning rate scheduler in the manner of torch's."""

    def step(self) -> None:
        """Set the next learning rate."""

    def state_dict(self) -> dict[str, Any]:
        """Give where it is."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back there."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step.

    Attributes:
        outputs: The model's.
        targets: The batch's, on the device.
        loss: Mean over the batch, detached and not yet waited for.
        samples: In the batch.
        is_skipped: Its scaled gradients were not finite, so nothing was made of them.
    """

    outputs: Any
    targets: Any
    loss: torch.Tensor
    samples: int
    is_skipped: bool = False


class Trainee(Protocol):
    """What a `FaultTolerantTrainer` trains, batch by batch.

    Between two calls it has no state but what `state_dict` gives.
    """

    @property
    def module(self) -> nn.Module:
        """The model."""

    @property
    def optimizer_name(self) -> str:
        """Its optimizer's class."""

    def step(self, batch: object) -> Stepped:
        """Train on a batch."""

    def end_epoch(self) -> None:
        """Do what belongs after a pass."""

    def state_dict(self) -> dict[str, Any]:
        """Give the state, a nest; "model" is the model's own. Tensors are not copied."""

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Word why a state does not fit; nothing if it does."""

    def notes(self, state: dict[str, Any]) -> list[str]:
        """Word which settings of a state that fits are others than those given here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a state that fits."""


class Local:
    """A module that is trained in this process."""

    def __init__(
        self,
        module: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        reduction: LossReduction,
        device: torch.device,
        scheduler: Scheduler | None,
        scheduler_step: SchedulerStep,
        scaler: "torch.amp.GradScaler | None",
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._device = device
        self._scheduler = scheduler
        self._per_step = scheduler_step == "step"
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._settings = [_settings_of(group) for group in optimizer.param_groups]
        optimizer.zero_grad()  # of what the user did before

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._module

    @property
    def optimizer_name(self) -> str:
        """Its optimizer's class."""
        return type(self._optimizer).__name__

    def step(self, batch: object) -> Stepped:
        """Train on a batch.

        Raises:
            ConfigError: If the batch or the loss is not what can be trained on.
            StateError: If no parameter gets a gradient.
        """
        inputs, targets = split(batch)
        samples = count(inputs, targets)
        inputs, targets = moved(inputs, self._device), moved(targets, self._device)
        outputs = self._module(inputs)
        loss = self._loss_fn(outputs, targets)
        check_loss(loss, owner="FaultTolerantTrainer")
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if all(p.grad is None for group in self._optimizer.param_groups for p in group["params"]):
            raise StateError(
                "no parameter has a gradient: the loss does not come from this model's parameters"
            )
        is_skipped = not self._make_step()
        self._optimizer.zero_grad()
        if self._scheduler is not None and self._per_step and not is_skipped:
            self._scheduler.step()
        shown = loss.detach()
        mean = shown / samples if self._reduction == "sum" else shown
        return Stepped(outputs, targets, mean, samples, is_skipped)

    def _make_step(self) -> bool:
        """Let the optimizer step; tell whether it has, which a GradScaler decides and does not say."""
        if self._scaler is None:
            self._optimizer.step()
            return True
        steps: list[bool] = []
        hook = self._optimizer.register_step_post_hook(lambda *_: steps.append(True))
        try:
            self._scaler.step(self._optimizer)
        finally:
            hook.remove()
        self._scaler.update()
        return bool(steps)

    def end_epoch(self) -> None:
        """Let a scheduler step that does so after each pass."""
        if self._scheduler is not None and not self._per_step:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Give the state of the model, the optimizer, the scheduler and the GradScaler."""
        state = unwrap(self._module).state_dict()
        return {
            "model": dict(state),
            "metadata": dict(getattr(state, "_metadata", {})),
            "beside": unlisted(unwrap(self._module)),
            "loss": _of_loss(self._loss_fn),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "classes": self._classes(),
            "settings": self._settings,
        }

    def differences(self, state: dict[str, Any]) -> list[str]:
        """Word which tensors, classes or groups are others than a state's."""
        found = _of_tensors(unwrap(self._module).state_dict(), state["model"])
        found += [f"of loss_fn: {text}" for text in _of_tensors(_of_loss(self._loss_fn), state["loss"])]
        for name, own in self._classes().items():
            if own != (theirs := state["classes"][name]):
                found.append(f"the {name} is {own or 'none'}, and the checkpoint's is {theirs or 'none'}")
        own_groups = [len(group["params"]) for group in self._optimizer.param_groups]
        groups = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
        if own_groups != groups:
            found.append(
                f"the optimizer's groups have {own_groups} parameters, and the checkpoint's {groups}"
            )
        return found

    def notes(self, state: dict[str, Any]) -> list[str]:
        """Word with which settings the optimizer began, where these are others."""
        return [
            f"the optimizer's {name} is {own[name]!r}, and the checkpoint's run began with {theirs[name]!r}"
            for own, theirs in zip(self._settings, state["settings"], strict=True)
            for name in own
            if name in theirs and own[name] != theirs[name]
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back a state that fits, in place."""
        unwrap(self._module).load_state_dict(_WithMetadata.of(state["model"], state["metadata"]))
        fill(unwrap(self._module), state["beside"])
        if isinstance(self._loss_fn, nn.Module):
            fill(self._loss_fn, state["loss"])
        self._optimizer.load_state_dict(state["optimizer"])
        _undo_casts(self._optimizer, state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _classes(self) -> dict[str, str | None]:
        parts = {"optimizer": self._optimizer, "scheduler": self._scheduler, "grad_scaler": self._scaler}
        return {name: None if part is None else type(part).__name__ for name, part in parts.items()}


def unlisted(module: nn.Module) -> dict[str, torch.Tensor]:
    """Give the buffers that a module's `state_dict` leaves out; they are part of its state all the same."""
    listed = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name not in listed}


def fill(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Bring tensors into a module's parameters and buffers, in place, or in their stead if the shape differs."""
    own = dict(module.named_buffers()) | dict(module.named_parameters())
    for name, tensor in tensors.items():
        held = own.get(name)
        if held is None:
            continue
        if held.shape == tensor.shape and held.dtype == tensor.dtype and not is_overlapping(held):
            with torch.no_grad():
                held.copy_(tensor)
        else:  # as of a table that has grown
            owner, _, key = name.rpartition(".")
            setattr(module.get_submodule(owner), key, tensor.to(held.device))


def is_overlapping(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as an expanded tensor's do, so that none can be written."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _of_loss(loss_fn: LossFunction) -> dict[str, Any]:
    if not isinstance(loss_fn, nn.Module):
        return {}
    return dict(loss_fn.named_parameters()) | dict(loss_fn.named_buffers())


class _WithMetadata(dict[str, Any]):
    """A state with the versions of its modules' formats, as torch looks for them."""

    _metadata: dict[str, Any]

    @classmethod
    def of(cls, state: dict[str, Any], metadata: dict[str, Any]) -> "_WithMetadata":
        made = cls(state)
        made._metadata = metadata  # torch's own name for it
        return made

    def copy(self) -> "_WithMetadata":
        return self.of(self, self._metadata)


def _of_tensors(own: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Word how a checkpoint's tensors differ from a model's: which are missing, or of another shape."""
    found = [f"the checkpoint has no {name!r}, which the model has" for name in own if name not in theirs]
    found += [f"the checkpoint has a {name!r}, which the model has not" for name in theirs if name not in own]
    for name, tensor in own.items():
        other = theirs.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor):
            ours, told = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (tensor, other))
            if ours != told:
                found.append(f"{name!r} is {ours}, and the checkpoint's is {told}")
    return found


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Give a group's plain numbers as the run begins with them: a scheduler keeps the learning rate's."""
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | tuple)}
    return plain | {"lr": plain.get("initial_lr", plain.get("lr"))}


def _undo_casts(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give state its dtype back: torch casts it to its parameter's, as float32 averages to bfloat16."""
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entry in saved["state"].items():
        if not isinstance(index, int) or not isinstance(entry, dict):
            continue
        held = optimizer.state[parameters[index]]
        for name, value in entry.items():
            now = held.get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                held[name] = value.to(now.device)
