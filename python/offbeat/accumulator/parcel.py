"""What a member sends: large gradients where they are, all others one behind the other in flat memory."""

from collections.abc import Sequence

import torch
from torch import nn

from offbeat.local.flat import Flat, pack, slices, wide

__all__ = ["LARGE", "Parcel"]

LARGE = 1 << 20
"""Bytes from which a gradient is reduced by itself: it is worth a message, and copying it would take long."""


class Parcel:
    """Gradients that are added up over members, in the same number of sums of the same sizes in all of them.

    Attributes:
        like: Their parameters.
        sums: What is to be added up over members, in place.
    """

    def __init__(
        self, like: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, scale: float
    ) -> None:
        """Pack gradients, which are nobody else's from here on.

        Args:
            like: The parameters: what is large goes by them, as they are alike in all members.
            gradients: As many, dense; None is zeros.
            scale: What they are multiplied by; 1 keeps the bits.
        """
        self.like = like
        self._are_large = [p.dtype == wide(p.dtype) and p.nbytes >= LARGE for p in like]
        every = list(zip(like, gradients, self._are_large, strict=True))
        self._large = [_by_itself(p, gradient, scale) for p, gradient, is_large in every if is_large]
        self._small = [p for p, _, is_large in every if not is_large]
        self._flat: Flat = {}
        if self._small:
            self._flat = pack(self._small, (g for _, g, is_large in every if not is_large), scale=scale)
        self.sums = [*self._flat.values(), *self._large]

    def divide(self, by: float) -> None:
        """Divide what came of the sums."""
        if by != 1.0 and self.sums:
            torch._foreach_div_(self.sums, by)

    def open(self) -> list[torch.Tensor]:
        """Give what came of each parameter's gradient, laid out as the parameter is."""
        large, small = iter(self._large), iter(slices(self._small, self._flat))
        parts = [next(large if is_large else small) for is_large in self._are_large]
        return list(map(_laid_out, parts, self.like))


def _by_itself(like: nn.Parameter, gradient: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Give a gradient to be reduced where it is, if all of its memory is its own, or a copy of it."""
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    gradient = gradient.detach().resolve_conj().resolve_neg()  # else its memory is not what it is
    is_alone = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
    if not is_alone or (gradient.dtype, gradient.device) != (like.dtype, like.device):
        gradient = gradient.to(like.device, like.dtype, copy=True, memory_format=torch.contiguous_format)
    return gradient if scale == 1.0 else gradient.mul_(scale)


def _laid_out(part: torch.Tensor, like: nn.Parameter) -> torch.Tensor:
    if part.dtype == like.dtype and like.is_contiguous():
        return part
    return torch.empty_like(like, requires_grad=False).copy_(part)
