"""The values of a module's buffers: which of them are worth copies, and how they are written."""

import functools
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offbeat.local.flat import wide

__all__ = ["few", "fits", "has_values", "put_values", "with_values", "write"]

FEW = 2**22
"""Numbers whose copies cost next to nothing: of float32, 16 MiB. The statistics of large nets are fewer."""


def few(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Choose the smallest buffers, with no more numbers than the parameters in training have, or `FEW`.

    Which of them forwards write to is not known before: torch's version counters count neither BatchNorm's
    writes nor those of a user's own kernel, and what stays for a while may be written to later. So this goes
    by size. Statistics have a few numbers for each of a layer's units, whoever wrote the layer, and a memory
    bank or a codebook mostly has fewer than what is trained; a table, or frozen weights that are held as
    buffers, may have any number, and their copies would cost more time and memory than training does.

    Args:
        module: Whose they are.
        buffers: By name.
    """
    left = sum(buffer.numel() for buffer in buffers.values())
    if left <= FEW:
        return dict(buffers)
    most = max(FEW, sum(p.numel() for p in module.parameters() if p.requires_grad))
    chosen = dict(sorted(buffers.items(), key=lambda named: named[1].numel()))
    while left > most:
        left -= chosen.popitem()[1].numel()
    return chosen


def with_values(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give those that have numbers of their own to be copied, one after another.

    What is written to them counts as little as BatchNorm's own writes: a graph that a user keeps over a step
    may hold them, as a generator's does whose discriminator steps first, and its backward is still to come.
    """
    return {name: buffer.data for name, buffer in buffers.items() if has_values(buffer)}


def has_values(buffer: torch.Tensor) -> bool:
    """Tell whether it is dense and has been given its shape."""
    is_plain = buffer.layout is torch.strided and not buffer.is_nested and not buffer.is_quantized
    is_plain &= _has_whole_numbers(buffer.dtype)
    return not is_lazy(buffer) and is_plain and not buffer.is_meta


@functools.cache
def _has_whole_numbers(dtype: torch.dtype) -> bool:
    """Tell whether each of its numbers has bytes of its own: torch can do next to nothing with others."""
    return re.search(r"int[1-7]$|bits|_x2$", str(dtype)) is None


def fits(memory: torch.Tensor | None, buffer: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Tell whether a buffer's values can be copied to memory that there is, if there is any."""
    return memory is not None and (memory.shape, memory.dtype, memory.device) == (
        buffer.shape,
        buffer.dtype,
        buffer.device,
    )


def put_values(values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Write values to strided buffers that have their shapes still, and changed.

    Args:
        values: By the buffer's name.
        buffers: Likewise; others are left alone.
    """
    for name, value in values.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != value.shape:
            continue
        with _writing_to(buffer):
            there = value.to(buffer.device, buffer.dtype)
            if not bool((buffer == there).all()):  # torch.equal knows no float8
                write(there, buffer)


def write(value: torch.Tensor, to: torch.Tensor, *, num_eps: float = 0.0) -> None:
    """Write values to a tensor of their shape, whichever way it lies in memory.

    One that is expanded has fewer numbers than its shape says, and torch writes to none of them twice; where
    values differ along there, it gets memory for all of them.

    Args:
        value: What to write.
        to: Where.
        num_eps: Epsilons of their dtype, relatively, by which values along there may differ and are one.
    """
    with _writing_to(to):
        if to.layout is torch.strided and not to.is_nested and 0 in to.stride():
            each_once = tuple(slice(1) if stride == 0 else slice(None) for stride in to.stride())
            if _are_alike(value, value[each_once], num_eps):
                value, to = value[each_once], to[each_once]
            else:
                to.data = to.contiguous()
        to.copy_(value)


def _are_alike(values: torch.Tensor, first: torch.Tensor, num_eps: float) -> bool:
    """Tell whether all values along some dimensions are the first."""
    if not (values.is_floating_point() or values.is_complex()):
        return bool((values == first).all())
    values, first = (part.to(wide(part.dtype)) for part in (values, first))
    rtol = num_eps * torch.finfo(values.dtype).eps
    return bool(torch.isclose(values, first, rtol=rtol, atol=0.0, equal_nan=True).all())


def _writing_to(tensor: torch.Tensor) -> AbstractContextManager[None]:
    # Those that were made in inference mode are written to in it, and DTensors are compared in no such.
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
