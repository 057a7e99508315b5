"""What a loss is: a scalar of a batch, its mean or its sum."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from offbeat.errors import ConfigError
from offbeat.naming import a_class

__all__ = ["LossFunction", "LossReduction", "check_loss", "other_reduction", "wake"]

LossFunction = Callable[[Any, Any], torch.Tensor]
"""From (outputs, targets)."""

LossReduction = Literal["mean", "sum"]
"""What it gives of a batch."""


def check_loss(loss: object, *, owner: str | None) -> None:
    """See that a loss function gave a scalar that can be trained by.

    Args:
        loss: What it gave.
        owner: The class whose `loss_reduction` says which; None where there is no such keyword.

    Raises:
        ConfigError: If it is anything else.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ConfigError(
            f"loss_fn gave {what}: it takes (outputs, targets) and gives a scalar tensor, the mean over the "
            "batch" + (f' (or the sum, with {owner}(loss_reduction="sum"))' if owner else "")
        )
    if not loss.requires_grad:
        raise ConfigError(
            "loss_fn gave a loss without a way back to the model: it was detached, made of plain numbers "
            "(item()), or computed under torch.no_grad(); or all of the model is frozen (requires_grad)"
        )


def other_reduction(loss_fn: LossFunction, told: LossReduction, *, owner: str) -> str | None:
    """Word a warning of a loss function that reduces otherwise than was told; None if it does not.

    Args:
        loss_fn: As torch's, which have a `reduction`.
        told: What was told.
        owner: The class that was told so.
    """
    said = getattr(loss_fn, "reduction", None)
    if said not in ("mean", "sum") or said == told:
        return None
    return (
        f'the loss function is {a_class(loss_fn)}(reduction="{said}") and the {owner} has '
        f'loss_reduction="{told}": what it gives is taken for the {told} over the batch; make the '
        f'{owner} with loss_reduction="{said}", or the loss function with reduction="{told}"'
    )


def wake(module: nn.Module) -> None:
    """Put a model that is in eval mode as a whole into training mode; what someone chose in parts stays."""
    if not any(part.training for part in module.modules()):
        module.train()
