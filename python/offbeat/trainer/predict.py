"""What a model gives for all of a loader."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offbeat.errors import ConfigError
from offbeat.local.batches import moved
from offbeat.local.evaluate import without_a_trace
from offbeat.naming import a_class

__all__ = ["predict"]


def predict(model: nn.Module, loader: Iterable[Any], *, device: torch.device) -> Any:  # noqa: ANN401  the model's
    """Run a model over all batches in eval mode; modes, buffers, random states and gradients stay.

    Args:
        model: The model.
        loader: Gives batches: inputs, or pairs (inputs, targets), of which the targets are not looked at.
        device: Where the model is.

    Returns:
        What the model gave, as a nest of the same form whose tensors are on the CPU, all batches one behind
        the other.

    Raises:
        ConfigError: If there is no batch, or what the model gives are no batches of tensors.
    """
    cpu = torch.device("cpu")
    with without_a_trace(model, loader, device), torch.no_grad():
        parts = [moved(model(moved(_inputs(batch), device)), cpu) for batch in loader]
    if not parts:
        raise ConfigError("predict got no batches: the loader is empty, or was used up before")
    return _joined(parts)


def _inputs(batch: object) -> object:
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields") and 1 <= len(batch) <= 2:  # noqa: PLR2004  a pair
        return batch[0]
    if isinstance(batch, torch.Tensor | Mapping):
        return batch
    raise ConfigError(
        f"a batch is inputs, a tensor or a dict of tensors, or a pair (inputs, targets), and the loader gave "
        f"{a_class(batch)}"
    )


def _joined(parts: Sequence[Any]) -> Any:  # noqa: ANN401  of the parts' type
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.ndim == 0:
            raise ConfigError(
                "the model gave a tensor without a batch dimension, which cannot be put together"
            )
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        columns = [_joined(column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise ConfigError(f"the model gave {a_class(first)}: predict puts together tensors, or nests of them")
