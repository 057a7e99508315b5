"""A module's buffers: how they get back what they held."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["put_values", "same_buffers"]


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Give a module its buffers back, with their values: a running scale is one that moves in eval mode, too.

    Where that is assigned, as in `self.scale = 0.9 * self.scale + ...`, the buffer is another tensor
    afterwards; one that was not there before stays, as what made it does not know that it would be gone.
    """
    places = [vars(part)["_buffers"] for part in module.modules()]
    before = [dict(place) for place in places]
    buffers = {name: b.detach() for name, b in module.named_buffers() if b.layout is torch.strided}
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        put_values(values, buffers)
        for place, held in zip(places, before, strict=True):
            for name, buffer in held.items():
                place[name] = buffer


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
