"""Updates: what is made of a gradient once all of it is there."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from offbeat import trained_by
from offbeat.errors import NonFiniteError
from offbeat.local import LocalOptimizer, lr_scale

__all__ = ["LocalUpdates", "Scaler", "Updates", "kept_in", "on"]


class Scaler:
    """A GradScaler of the user's, or none: then nothing is scaled, and nothing skipped.

    All losses of a window are multiplied by the scale that its first one met, though the user, or another
    accumulator with the same scaler, may change that meanwhile. The sum of a window may come when the scale
    is another already. Its gradients are brought to the scale that there is, so that what torch's scaler does
    with them is right.

    Attributes:
        has_skipped: What was unscaled last was not finite, and no update is made of it.
    """

    def __init__(self, given: torch.amp.GradScaler | None, device: torch.device) -> None:
        """Take a scaler that is enabled; one that is not is as none."""
        self._scaler = given if given is not None and given.is_enabled() else None
        self._of_window: torch.Tensor | None = None  # the scale; a tensor, so that no device is waited for
        self.has_skipped = False
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=device))  # a member without data makes updates, too

    @property
    def is_there(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    @property
    def scale(self) -> float:
        """What losses are multiplied by; 1 where they are not."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    @property
    def scale_of_window(self) -> float | None:
        """What losses of the window are multiplied by; None before the first, or where there is no scaler."""
        return None if self._of_window is None else float(self._of_window)

    def begin_window(self, scale: float | None = None) -> None:
        """Multiply what comes by one scale: as given, else that of the first loss."""
        self._of_window = None if scale is None else torch.tensor(scale)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Give a loss times the window's scale."""
        if self._scaler is None:
            return loss
        if self._of_window is None:
            self._of_window = self._scaler.scale(torch.ones((), device=loss.device))
        self._of_window = self._of_window.to(loss.device)
        return loss * self._of_window

    def end_window(self) -> float:
        """Give what losses of the window were multiplied by."""
        scale = self.scale_of_window
        self._of_window = None
        return self.scale if scale is None else scale

    @contextmanager
    def unscaled(
        self, gradients: Sequence[torch.Tensor | None], optimizer: torch.optim.Optimizer, scale: float
    ) -> Iterator[bool]:
        """Unscale the gradients that are on the optimizer's parameters, and adapt the scale in the end.

        Args:
            gradients: The same.
            optimizer: Whose parameters they are on.
            scale: Which they were made with.

        Yields:
            Whether there is an update to be made of them: all are finite.
        """
        there = [g for g in gradients if g is not None]
        self.has_skipped = False
        if self._scaler is None or not there:
            yield True
            return
        # Where every update is skipped, the scale falls to 0: what was multiplied by that, nobody can tell.
        if (ratio := self.scale / scale if scale else math.nan) != 1.0:
            for gradient in there:
                gradient.mul_(ratio)
        self._scaler.unscale_(optimizer)
        try:
            # Not by torch's scaler, which looks before it divides: by 0, or nearly so, zeros become NaN.
            is_finite = are_finite(there)
            self.has_skipped = not is_finite
            yield is_finite
        finally:
            self._scaler.update()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer step, by the scaler, which some optimizers ask for what it has found."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)

    def state_dict(self) -> dict[str, Any] | None:
        """Give the scaler's state; None where there is none."""
        return None if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scaler's state."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state)


class Updates(Protocol):
    """Makes updates."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, as users may hold it; None before there is one."""

    @property
    def own(self) -> torch.optim.Optimizer | None:
        """The optimizer whose state is the accumulator's to keep, if there is one."""

    def use(self, optimizer: object) -> torch.optim.Optimizer:
        """Give the optimizer, of what a user gives for one."""

    def make(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        number: int,
        samples: int,
        scale: float,
        gain: float,
        whose: str = "",
    ) -> bool:
        """Make an update, and tell whether one was made.

        Args:
            gradients: By parameter.
            number: Of the update, for people.
            samples: In it.
            scale: What the losses were multiplied by.
            gain: AdaScale's.
            whose: Where the gradient is not finite: what is known of whose fault that is, for people.
        """

    def end(self) -> None:
        """Wait for updates that are on their way."""


class LocalUpdates:
    """Steps of an optimizer here.

    Attributes:
        chosen: Has it, once there is one.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], scaler: Scaler) -> None:
        self._model = model
        self.chosen = LocalOptimizer(model)
        self._parameters = parameters
        self._scaler = scaler

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The live optimizer; None before there is one."""
        return self.chosen.live

    @property
    def own(self) -> torch.optim.Optimizer | None:
        """The same."""
        return self.chosen.live

    def use(self, optimizer: object) -> torch.optim.Optimizer:
        """Give the live optimizer; see `LocalOptimizer.use`."""
        return self.chosen.use(optimizer)

    def make(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        number: int,
        samples: int,
        scale: float,
        gain: float,
        whose: str = "",
    ) -> bool:
        """Let the optimizer step; see `Updates.make`.

        Raises:
            NonFiniteError: If the gradient is not finite, and there is no scaler, which expects it at times.
        """
        del samples
        live = self.chosen.use(None)
        with on(self._parameters, gradients), self._scaler.unscaled(gradients, live, scale) as is_finite:
            if not (is_finite and trained_by.admits(self._model)):
                return False  # the scale's doing, or who watches the model drops it
            if not self._scaler.is_there:
                _check_finite([p.grad for p in self._parameters if p.grad is not None], number, whose)
            has_any = any(gradient is not None for gradient in gradients)
            with lr_scale.scaled(live, _factor(live, gain)):
                self._scaler.step(live) if has_any else live.step()
            return True

    def end(self) -> None:
        """Nothing is on its way."""


@contextmanager
def on(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Put gradients on their parameters, and take them off again."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.grad = None


def _factor(optimizer: torch.optim.Optimizer, gain: float) -> float:
    """Give what AdaScale's gain is to learning rates.

    Optimizers that divide by what gradients were before (all but SGD and ASGD) get its square root, as
    AdaptDL has it (Qiao et al., 2021): their steps grow no longer with the gradient.
    """
    return gain if isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD) else gain**0.5


def _check_finite(gradients: Sequence[torch.Tensor], number: int, whose: str) -> None:
    if not are_finite(gradients):
        raise NonFiniteError(
            f"the gradient of update {number} is NaN or infinite{whose}, so it was dropped and nothing was "
            f"changed: look at the data, the loss and the learning rate. This may be caught, and training "
            f"go on with the next window"
        )


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Tell whether all numbers are."""
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    # A norm is one number for all of them; where it overflows, each is looked at.
    return (
        not values
        or bool(nn.utils.get_total_norm(values).isfinite())
        or all(bool(v.isfinite().all()) for v in values)
    )


@contextmanager
def kept_in(faults: list[NonFiniteError]) -> Iterator[None]:
    """Keep what is raised of an update that is not finite, and go on behind it."""
    try:
        yield
    except NonFiniteError as error:
        faults.append(error)
