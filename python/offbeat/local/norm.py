"""The norm of gradients, of whatever dtypes, dense or sparse."""

from collections.abc import Sequence

import torch

from offbeat.local.flat import wide

__all__ = ["square_norm"]


def square_norm(gradients: Sequence[torch.Tensor | None]) -> float:
    """Give the squared norm of all gradients as one vector; a device is waited for to know."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            by_dtype.setdefault(values.dtype, []).append(values.detach())
    square = 0.0
    for dtype, some in by_dtype.items():
        norms = torch._foreach_norm(some, 2.0, dtype=wide(dtype))  # noqa: SLF001  as torch's clipping
        square += torch.stack(norms).cpu().double().square().sum().item()
    return square
