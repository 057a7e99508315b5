"""A digest of nested values, by which what is read again is compared with what was read at first."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["digest_of"]

MOST = 1024
"""Numbers of a tensor that are looked at, at even distances: a batch of images may be of many megabytes."""

PLAIN = (str, bytes, int, float, complex, bool, type(None))


def digest_of(value: object, *, before: str = "", most: int | None = MOST) -> str:
    """Give a digest of a nest of tuples, lists, mappings, arrays and tensors.

    Of what is none of these, and no plain value, its class alone.

    Args:
        value: The nest.
        before: Digest of what came before it.
        most: About how many numbers of each tensor or array are looked at; None: all.
    """
    seen = hashlib.sha256(before.encode())
    _add(seen, value, most)
    return seen.hexdigest()


def _add(seen: Any, value: object, most: int | None) -> None:  # noqa: ANN401  one of hashlib's
    seen.update(f"{type(value).__name__}:".encode())
    if isinstance(value, torch.Tensor):
        seen.update(f"{value.dtype}{list(value.shape)}".encode())
        if value.layout is torch.strided and not (value.is_quantized or value.is_nested):
            numbers = _some(value.detach().resolve_conj().resolve_neg().reshape(-1), most)
            seen.update(numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        seen.update(f"{value.dtype}{value.shape}".encode())
        if not value.dtype.hasobject:
            seen.update(_some(value.reshape(-1), most).tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(seen, key, most)
            _add(seen, item, most)
    elif isinstance(value, list | tuple):
        seen.update(f"{len(value)}".encode())
        for item in value:
            _add(seen, item, most)
    elif isinstance(value, PLAIN):
        seen.update(repr(value).encode())


def _some(flat: Any, most: int | None) -> Any:  # noqa: ANN401  a tensor or an array
    """Take about so many numbers at even distances, the last one among them."""
    if most is None or len(flat) <= most:
        return flat
    distance = len(flat) // most
    return flat[(len(flat) - 1) % distance :: distance]
