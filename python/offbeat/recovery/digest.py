"""A digest of nested values, by which what is read again is compared with what was read at first."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

__all__ = ["digest_of"]

MOST = 1024
"""Values that are looked at of each tensor, array and list: a batch of images may be of many megabytes."""

DEEPEST = 16
"""Nests in nests, and objects in objects, that are looked into: one may hold itself."""


def digest_of(value: object, *, before: str = "", most: int | None = MOST, of_all: bool = False) -> str:
    """Give a digest of a nest of tensors and arrays, in lists, mappings, sets, dataclasses and other objects.

    Where there is a tensor or an array, nothing else counts unless `of_all`: the path of a file, or a time,
    is no sample. Of mappings and sets the order does not count.

    Args:
        value: The nest.
        before: Digest of what came before it.
        most: About how many values of each tensor, array and list are looked at; None: all.
        of_all: All values count.
    """
    parts = list(_parts(value, most, DEEPEST))
    has_tensors = any(is_tensor for _, is_tensor in parts)
    seen = hashlib.sha256(before.encode())
    for part, is_tensor in parts:
        if is_tensor or of_all or not has_tensors:
            seen.update(part)
    return seen.hexdigest()


def _parts(value: object, most: int | None, depth: int) -> Iterator[tuple[bytes, bool]]:
    """Give a digest of each value in a nest, and whether that is a tensor or an array."""
    if not depth:
        return
    if isinstance(value, torch.Tensor):
        yield _of_tensor(value, most), True
    elif isinstance(value, np.ndarray | np.generic):
        yield _of_array(np.asarray(value), most), True
    elif isinstance(value, Mapping):
        items = (_sealed((key, item), most, depth - 1) for key, item in value.items())
        yield from sorted(items)
    elif isinstance(value, set | frozenset):
        yield from sorted(_sealed((item,), most, depth - 1) for item in value)
    elif isinstance(value, list | tuple | deque | range):
        for item in _some(list(value), most):
            yield from _parts(item, most, depth - 1)
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield _hashed(f"{type(value).__name__}{value!r}".encode()), False
    elif hasattr(value, "__dict__"):
        yield from _parts(vars(value), most, depth - 1)
    else:
        yield _hashed(type(value).__name__.encode()), False


def _sealed(item: tuple[object, ...], most: int | None, depth: int) -> tuple[bytes, bool]:
    """Give one digest for an item of what has no order."""
    parts = list(_parts(item, most, depth))
    is_tensor = any(of_tensor for _, of_tensor in parts)
    key = repr(item[0]).encode() if len(item) > 1 and isinstance(item[0], str) else b""
    counting = [part for part, of_tensor in parts if of_tensor or not is_tensor]
    return _hashed(key, *counting), is_tensor


def _hashed(*parts: bytes) -> bytes:
    seen = hashlib.sha256()
    for part in parts:
        seen.update(part)
    return seen.digest()


def _of_tensor(tensor: torch.Tensor, most: int | None) -> bytes:
    tensor = tensor.detach()
    name = f"{tensor.dtype}{tensor.layout}".encode()
    with suppress(RuntimeError, TypeError):  # what has no memory that can be read so is known by its kind
        if tensor.layout is torch.sparse_coo:
            parts = tensor.coalesce()
            return _hashed(name, _of_tensor(parts.indices(), most), _of_tensor(parts.values(), most))
        if tensor.layout is not torch.strided:
            return _of_tensor(tensor.to_sparse_coo(), most)  # type: ignore[no-untyped-call]
        name += str(list(tensor.shape)).encode()
        numbers = _at(tensor, most, torch.arange, torch.unravel_index)
        bits = numbers.resolve_conj().resolve_neg().cpu().contiguous().view(torch.uint8)
        return _hashed(name, bits.numpy().tobytes())
    return _hashed(name)


def _of_array(array: "np.ndarray[Any, Any]", most: int | None) -> bytes:
    name = f"{array.dtype}{array.shape}".encode()
    if array.dtype.hasobject:
        return _hashed(name, repr(_some(array.reshape(-1).tolist(), most)).encode())
    return _hashed(name, _at(array, most, np.arange, np.unravel_index).tobytes())


def _at(values: Any, most: int | None, arange: Any, unravel: Any) -> Any:  # noqa: ANN401  of torch or of numpy
    """Take values of a tensor or an array, in one dimension; what is not in order in memory is not copied."""
    number = 1
    for size in values.shape:
        number *= size
    first, distance = _places(number, most)
    is_in_order = values.is_contiguous() if isinstance(values, torch.Tensor) else values.flags.c_contiguous
    if is_in_order or distance == 1:
        return values.reshape(-1)[first::distance]
    return values[unravel(arange(first, number, distance), values.shape)]


def _some(values: list[Any], most: int | None) -> list[Any]:
    first, distance = _places(len(values), most)
    return values[first::distance]


def _places(number: int, most: int | None) -> tuple[int, int]:
    """Give the first place that is looked at, and from each to the next: the last one is among them."""
    if most is None or number <= most:
        return 0, 1
    distance = number // most
    return (number - 1) % distance, distance
