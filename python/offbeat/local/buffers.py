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
    afterwards; where it began as None, as the state of a recurrent net may, it is None again. What was not
    there before stays, as what made it does not know that it would be gone. So does a buffer that is no part
    of the module's state (``persistent=False``) and got a size, or another one: a cache that was made or
    grew, of which the module may have noted elsewhere how far.

    Args:
        module: The module.
        are_few: Only as many values as are worth copies (`few`).
    """
    places = [
        (part, vars(part).get("_buffers", {})) for part in module.modules()
    ]  # a traced one has none here
    before = [(place, dict(place), getattr(part, _CACHES, ())) for part, place in places]
    buffers = {name: b.detach() for name, b in module.named_buffers() if _has_values(b)}
    copied = few(module, buffers) if are_few else buffers
    values = {name: buffer.clone() for name, buffer in copied.items()}
    try:
        yield
    finally:
        for place, held, caches in before:
            for name, buffer in held.items():
                if name not in caches or not _has_resized(buffer, place.get(name)):
                    place[name] = buffer
        put_values(values, buffers)


_CACHES = "_non_persistent_buffers_set"
"""Where torch keeps the names of a module's buffers that are no part of its state."""


def _has_values(buffer: torch.Tensor) -> bool:
    """Whether it has numbers of its own to be copied, one after another."""
    is_plain = buffer.layout is torch.strided and not buffer.is_nested
    return not is_lazy(buffer) and is_plain and not buffer.is_meta


def _has_resized(then: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if now is None or now is then or is_lazy(now):
        return False
    return then is None or (not is_lazy(then) and now.shape != then.shape)


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
