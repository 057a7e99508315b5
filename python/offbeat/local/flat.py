"""Tensors one behind the other in flat memory, by dtype, so that one operation or message has them all."""

import mmap
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PIECE", "Flat", "Room", "add_way", "empty", "pack", "slices", "wide"]

PIECE = 1 << 16
"""Numbers that several operations are done to before the next: a core's own memory holds three times as many.

What is done there goes through the machine's memory once for all of them, and that is what it takes time for.
"""

LARGE = 1 << 22
"""Bytes from which memory is asked for in large pages, of which 2 MiB are one on most machines."""

Flat = dict[torch.dtype, torch.Tensor]
"""One-dimensional tensors by their dtype, which is float32 at least."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which values of a dtype are added up: float32 at least."""
    if dtype.is_floating_point and dtype.itemsize == 1:  # of float8 torch promotes nothing
        return torch.float32
    return torch.promote_types(dtype, torch.float32)


def empty(tensors: Sequence[torch.Tensor]) -> Flat:
    """Make flat memory for tensors of these shapes and dtypes, on the first one's device."""
    sizes = _sizes(tensors)
    return {kind: torch.empty(size, dtype=kind, device=tensors[0].device) for kind, size in sizes.items()}


def _sizes(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        kind = wide(tensor.dtype)
        sizes[kind] = sizes.get(kind, 0) + tensor.numel()
    return sizes


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


def pack(
    like: Sequence[torch.Tensor],
    values: Iterable[torch.Tensor | None],
    *,
    room: "Room | None" = None,
    scale: float = 1.0,
) -> Flat:
    """Copy values into flat memory of their own.

    Args:
        like: What says shapes and dtypes.
        values: As many; None is zeros.
        room: Where the memory is from; None: the system.
        scale: What they are multiplied by; 1 keeps the bits.
    """
    flat = empty(like) if room is None else room.empty(like)
    for part, value in zip(slices(like, flat), values, strict=True):
        if value is None:
            part.zero_()
        elif scale == 1.0:
            part.copy_(value.detach())
        else:
            part.copy_(value.detach()).mul_(scale)
    return flat


def add_way(to: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> None:
    """Add what it is from a beginning to an end, which stay as they are."""
    if to.device.type != "cpu" or not to.is_contiguous():
        to.add_(end - begin)
        return
    way = begin.new_empty(min(PIECE, begin.numel()))
    pieces = (torch.split(tensor.view(-1), PIECE) for tensor in (to, begin, end))
    for piece, first, last in zip(*pieces, strict=True):
        piece.add_(torch.sub(last, first, out=way[: piece.numel()]))


class Room:
    """Flat memory that is used again once nobody holds any of it, nor a view of it.

    Large memory that is given back to the system and asked for again comes page by page, each blanked at its
    first use, which takes several times as long as to write into it. On a device torch sees to that itself.
    """

    def __init__(self, num: int) -> None:
        """`num`: flats of one dtype that are kept at most; a further one is the system's."""
        self._num = num
        self._kept: dict[torch.dtype, list[np.ndarray[Any, Any]]] = {}

    def empty(self, tensors: Sequence[torch.Tensor]) -> Flat:
        """Make flat memory as `empty` does."""
        if tensors[0].device.type != "cpu":
            return empty(tensors)
        return {kind: self._flat(kind, size) for kind, size in _sizes(tensors).items()}

    def _flat(self, kind: torch.dtype, size: int) -> torch.Tensor:
        kept = self._kept.setdefault(kind, [])
        free = [
            number for number in range(len(kept)) if sys.getrefcount(kept[number]) == _HELD_BY_LIST_AND_CALL
        ]
        chosen = next((number for number in free if len(kept[number]) >= size), None)
        if chosen is None and (free or len(kept) < self._num):
            if free:
                del kept[free[0]]  # it is too small
            kept.append(_array(kind, size))
            chosen = len(kept) - 1
        if chosen is None:
            return torch.empty(size, dtype=kind)
        # A tensor made of an array holds the array, and so does whatever shares the tensor's storage.
        return torch.from_numpy(kept[chosen][:size])


def _array(kind: torch.dtype, size: int) -> "np.ndarray[Any, Any]":
    """Make an array, of large pages where the system has them: a pass over it looks up fewer of them."""
    like = torch.empty(0, dtype=kind).numpy().dtype
    if size * like.itemsize < LARGE or sys.platform != "linux":
        return torch.empty(size, dtype=kind).numpy()
    import numpy as np

    memory = mmap.mmap(-1, size * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=like)  # which holds the memory


_HELD_BY_LIST_AND_CALL = 2
"""References to an array in a list, as `sys.getrefcount` counts: the list's and its own argument's."""
