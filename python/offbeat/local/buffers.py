"""A module's buffers: which of them are worth copies, and how they get back what they held."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["few", "put_values", "same_buffers"]

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


@contextmanager
def same_buffers(module: nn.Module, *, are_few: bool = False) -> Iterator[None]:
    """Give a module its buffers back, with their values: a running scale is one that moves in eval mode, too.

    Where that is assigned, as in `self.scale = 0.9 * self.scale + ...`, the buffer is another tensor
    afterwards. What was not there before stays, as what made it does not know that it would be gone; so does
    a cache that grew, and begins with what it was: the module may have noted elsewhere how far.

    Args:
        module: The module.
        are_few: Only as many values as are worth copies (`few`).
    """
    places = [vars(part).get("_buffers", {}) for part in module.modules()]  # a traced module has them in C++
    before = [dict(place) for place in places]
    held_now = {name: b for name, b in module.named_buffers() if not is_lazy(b)}
    buffers = {name: b.detach() for name, b in held_now.items() if b.layout is torch.strided}
    copied = few(module, buffers) if are_few else buffers
    values = {name: buffer.clone() for name, buffer in copied.items()}
    try:
        yield
    finally:
        put_values(values, buffers)
        for place, held in zip(places, before, strict=True):
            now = dict(place)
            for name, buffer in held.items():
                if buffer is not None and not _has_grown(buffer, now.get(name)):
                    place[name] = buffer


def _has_grown(then: torch.Tensor, now: torch.Tensor | None) -> bool:
    """Whether a buffer is another that begins with what was there, and goes on."""
    if now is None or now is then or is_lazy(then) or is_lazy(now) or now.ndim != then.ndim:
        return False
    if now.shape == then.shape or any(n < t for n, t in zip(now.shape, then.shape, strict=True)):
        return False
    begin = now[tuple(map(slice, then.shape))]
    return begin.dtype == then.dtype and begin.device == then.device and torch.equal(begin, then)


def put_values(values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Write values to strided buffers that have their shapes still, and changed.

    Args:
        values: By the buffer's name.
        buffers: Likewise; others are left alone.
    """
    with torch.inference_mode():  # in which those can be written to as well that were made in it
        for name, value in values.items():
            buffer = buffers.get(name)
            if buffer is None or buffer.shape != value.shape or torch.equal(buffer, value):
                continue
            # An expanded one has fewer numbers than its shape says, and torch writes to none of them twice.
            each_once = tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())
            buffer[each_once].copy_(value[each_once])
