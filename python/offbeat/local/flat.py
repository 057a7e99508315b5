"""Tensors one behind the other in flat memory, by dtype, so that one operation or message has them all."""

from collections.abc import Iterable, Sequence

import torch

__all__ = ["Flat", "empty", "pack", "slices", "wide"]

Flat = dict[torch.dtype, torch.Tensor]
"""One-dimensional tensors by their dtype, which is float32 at least."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which values of a dtype are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def empty(tensors: Sequence[torch.Tensor]) -> Flat:
    """Make flat memory for tensors of these shapes and dtypes, on the first one's device."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        kind = wide(tensor.dtype)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel()
    return {kind: torch.empty(size, dtype=kind, device=tensors[0].device) for kind, size in sizes.items()}


def slices(tensors: Sequence[torch.Tensor], flat: Flat) -> list[torch.Tensor]:
    """Give the part of flat memory that is each tensor's, as a view of its shape."""
    starts = dict.fromkeys(flat, 0)
    parts = []
    for tensor in tensors:
        kind = wide(tensor.dtype)
        start = starts[kind]
        starts[kind] = end = start + tensor.numel()
        parts.append(flat[kind][start:end].view(tensor.shape))
    return parts


def pack(like: Sequence[torch.Tensor], values: Iterable[torch.Tensor | None], *, scale: float = 1.0) -> Flat:
    """Copy values into flat memory of their own, times `scale`.

    Args:
        like: What says shapes and dtypes.
        values: As many; None is zeros.
        scale: 1 keeps the bits.
    """
    flat = empty(like)
    for part, value in zip(slices(like, flat), values, strict=True):
        if value is None:
            part.zero_()
        else:
            part.copy_(value.detach())
    if scale != 1.0:
        for tensor in flat.values():
            tensor.mul_(scale)
    return flat
