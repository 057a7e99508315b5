"""The numbers of a step: its precision, the scale of its loss, what is computed twice, and clipping."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from offbeat import log
from offbeat.trainer.recompute import Recomputed
from offbeat.trainer.settings import Amp

__all__ = ["LEAST_SCALE", "Numerics"]

LEAST_SCALE = 2.0**-126
"""Of a loss, float32's least normal number: from somewhat below it 1 / scale is infinite."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Numerics:
    """Precision, loss scale, recomputation and clipping of a model's steps.

    Attributes:
        scaler: Of the losses, with "fp16"; torch's own.
        norm: Of the gradient before it was clipped last; None is for whoever wants to know of the next.
    """

    def __init__(
        self, amp: Amp, device: torch.device, max_grad_norm: float | None, twice: Sequence[nn.Module]
    ) -> None:
        """Begin; `twice`: parts of the model that are computed again for the backward pass."""
        self.scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
        self.norm: torch.Tensor | None = None
        self._dtype = DTYPES.get(amp)
        self._device = device
        self._max_grad_norm = max_grad_norm
        self._recomputed = Recomputed(twice)
        self._has_told_of_scale = False

    def forward(self) -> AbstractContextManager[object]:
        """Compute a forward pass and its loss in here."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def passes(self) -> AbstractContextManager[object]:
        """Compute forwards and backwards in here, by parts that are computed twice."""
        return self._recomputed.passes()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, of the scaled loss where it is scaled."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def is_usable(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale an optimizer's gradients, and tell whether they are finite; they need not be unless scaled.

        What `GradScaler.step` decides by; asked here, since there is more to a step than the optimizer's.
        """
        if self.scaler is None:
            return True
        self.scaler.unscale_(optimizer)
        try:
            found: dict[torch.device, list[torch.Tensor]] = {}
            for parameter in _parameters(optimizer):
                if (gradient := parameter.grad) is not None:
                    values = gradient.coalesce().values() if gradient.is_sparse else gradient
                    found.setdefault(values.device, []).append(values.isfinite().all())
            is_usable = all(
                bool(torch.stack(of_one).all()) for of_one in found.values()
            )  # each waited for once
        finally:
            self.scaler.update()  # also after Ctrl-C in that wait: else the scaler refuses the next step
        if not is_usable:
            self.tell_of_scale()
        return is_usable

    def tell_of_scale(self) -> None:
        """Warn, once, where what was skipped has brought the loss scale down to what it never rises from."""
        if (
            self.scaler is None
            or self._has_told_of_scale
            or (scale := self.scaler.get_scale()) >= LEAST_SCALE
        ):
            return
        self._has_told_of_scale = True
        log.warn(
            f"the loss scale has fallen to {scale:g}, by which no gradient can be divided: of so many "
            f"batches or updates in a row the scaled gradients were not finite, and from here on every one "
            f"is skipped, sound data or not. Mend what makes them so, and call "
            f"trainer.scaler.update(65536.0), or train with amp='bf16'"
        )

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip the gradients' total norm, if that was asked for."""
        if self._max_grad_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)

    def clip_in_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Clip as a hook of an optimizer that steps when its owner says."""
        del args, kwargs
        self.clip(_parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
