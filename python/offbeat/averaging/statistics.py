"""BatchNorm's running statistics, averaged by samples while their owners go on."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from offbeat.errors import StateError

__all__ = ["Statistics", "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """Statistics as they were when a round began.

    Attributes:
        values: All of them, one behind the other; float64, and so on the CPU where a device has none of that.
        counts: Batches that each module had seen.
    """

    values: torch.Tensor
    counts: list[int]


class Statistics:
    """Of all modules that a model has with them when this is made.

    They are exponential means: each batch that a module sees after a round began leaves a share of
    (1 - momentum) of what was there then, and what is left of it at the end is replaced by as much of the
    members' mean. So nothing that was seen since is lost, and a variance, as a sum of positive parts, stays
    positive. With `momentum=None`, which is a mean over all batches, the share is that of the batches before.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find them."""
        self._modules = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        self._sizes = self._measured()

    def buffers(self) -> list[torch.Tensor]:
        """Give the running means and variances themselves."""
        return [part for module in self._modules for part in _parts(module)]

    def take(self, device: torch.device) -> Taken:
        """Copy what is there.

        Raises:
            StateError: If modules have other statistics than when this was made, which not all members can
                know.
        """
        if self._measured() != self._sizes:
            raise StateError(
                "a BatchNorm layer has other running statistics than when the averager was made, or none: "
                "change the model first, and make the averager of it then"
            )
        device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        # The first number says nothing: what is empty is no message, and members send one each.
        parts = [torch.zeros(1), *(part.detach().flatten() for part in self.buffers())]
        values = torch.cat([part.to(device).double() for part in parts])
        return Taken(values, [_batches(module) for module in self._modules])

    def settle(self, mean: torch.Tensor, taken: Taken) -> None:
        """Put the members' mean in the place of what was taken; of what is not finite, all that is there."""
        start = 1
        with torch.no_grad():
            for module, before in zip(self._modules, taken.counts, strict=True):
                share = _share_left(module, before)
                for part in _parts(module):
                    end = start + part.numel()
                    own, theirs = (flat[start:end].view_as(part) for flat in (taken.values, mean))
                    start = end
                    since = part.to(own.device).double() - share * own
                    part.copy_(
                        torch.where(since.isfinite(), share * theirs + since, theirs)
                        if share < 1.0
                        else theirs
                    )

    def _measured(self) -> list[tuple[int, ...]]:
        return [
            ()
            if module.running_mean is None or module.running_var is None
            else tuple(module.running_mean.shape)
            for module in self._modules
        ]


def _parts(module: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    assert module.running_mean is not None  # noqa: S101  `_measured` has seen it
    assert module.running_var is not None  # noqa: S101
    return module.running_mean, module.running_var


def _batches(module: _BatchNorm) -> int:
    return 0 if module.num_batches_tracked is None else int(module.num_batches_tracked)


def _share_left(module: _BatchNorm, before: int) -> float:
    """Give the share that what was there when `before` batches had been seen has in what is there now."""
    now = _batches(module)
    if now <= before:  # it has seen nothing since, or was reset
        return 1.0
    if module.momentum is None:
        return before / now
    share: float = (1.0 - module.momentum) ** (now - before)
    return share
