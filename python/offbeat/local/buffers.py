"""A module's buffers: how they get the values back that they had."""

from collections.abc import Mapping

import torch

__all__ = ["put_values"]


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
