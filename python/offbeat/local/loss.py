"""What a loss is: a scalar of a batch, its mean or its sum."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from offbeat.errors import ConfigError

__all__ = ["LossFunction", "LossReduction", "check_loss", "wake"]

LossFunction = Callable[[Any, Any], torch.Tensor]
"""From (outputs, targets)."""

LossReduction = Literal["mean", "sum"]
"""What it gives of a batch."""


def check_loss(loss: object, *, owner: str) -> None:
    """See that a loss function gave a scalar.

    Args:
        loss: What it gave.
        owner: The class whose `loss_reduction` says which.

    Raises:
        ConfigError: If it is anything else.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ConfigError(
            f"loss_fn gave {what}: it takes (outputs, targets) and gives a scalar tensor, the mean over the "
            f'batch (or the sum, with {owner}(loss_reduction="sum"))'
        )


def wake(module: nn.Module) -> None:
    """Put a model that is in eval mode as a whole into training mode; what someone chose in parts stays."""
    if not any(part.training for part in module.modules()):
        module.train()
