"""A model's tensors as a server of averaging holds them: float32 arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from offbeat.errors import NonFiniteError, UnsupportedTensorError
from offbeat.local.flat import PIECE
from offbeat.local.group import is_plain

__all__ = ["Array", "Arrays", "array_of", "check_held", "holds", "set_share"]

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

EXACT = frozenset(
    {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.int16,
        torch.uint16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""Dtypes of which each value is one of float32, too. Trained are the first three; the rest are frozen."""


def check_held(tensors: Mapping[str, torch.Tensor]) -> None:
    """See that a server can hold tensors, before anybody is met: each member finds that by itself.

    Raises:
        UnsupportedTensorError: If it would round one, or cannot take it up.
        NonFiniteError: If one is not finite.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in EXACT or not is_plain(tensor):
            kind = "" if is_plain(tensor) else " and not plain (sparse, quantized or nested)"
            raise UnsupportedTensorError(
                f"{name!r} is of {tensor.dtype}{kind}, and a server holds float32: cast it, make it a buffer "
                f"if it is not trained (register_buffer), or take communication_backend='gloo'"
            )
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.detach().to(torch.float32)).all()):
            raise NonFiniteError(
                f"{name!r} is not finite as the averager is made, and a server takes no such model: look at "
                f"how it was initialized or loaded; a mask with infinite values is to be a buffer "
                f"(register_buffer)"
            )


def holds(tensor: torch.Tensor, array: Array) -> bool:
    """Tell whether a tensor has an array's values, in its own dtype."""
    return torch.equal(tensor.detach(), torch.from_numpy(array).to(tensor.device, tensor.dtype))


def array_of(tensor: torch.Tensor) -> Array:
    """Give a copy, float32."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()


def set_share(to: Array, own: Array, mean: Array, share: float) -> None:
    """Set a contiguous array to the way from the mean, times the share; on one core, as numpy does it."""
    to, own, mean = to.reshape(-1), own.reshape(-1), mean.reshape(-1)
    with np.errstate(over="ignore"):
        for start in range(0, len(to), PIECE):
            part = to[start : start + PIECE]
            np.subtract(own[start : start + PIECE], mean[start : start + PIECE], out=part)
            np.multiply(part, np.float32(share), out=part)
