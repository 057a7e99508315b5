"""BatchNorm's running statistics, averaged by samples while their owners go on."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Statistics", "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """Statistics as they were when a round began.

    Attributes:
        values: All of them, one behind the other; float64.
        counts: Batches that each module had seen.
    """

    values: torch.Tensor
    counts: list[int]


class Statistics:
    """Of all modules of a model that have them.

    They are exponential means: each batch that a module sees after a round began leaves a share of
    (1 - momentum) of what was there then, and what is left of it at the end is replaced by as much of the
    members' mean. So nothing that was seen since is lost, and a variance, as a sum of positive parts, stays
    positive. With `momentum=None`, which is a mean over all batches, the share is that of the batches before.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the modules; which they are may change, as where a layer is replaced."""
        self._model = model

    def take(self, device: torch.device) -> Taken:
        """Copy what is there."""
        modules = list(self._modules())
        parts = [part.detach().flatten().double() for module in modules for part in _parts(module)]
        values = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
        return Taken(values.to(device), [_batches(module) for module in modules])

    def settle(self, mean: torch.Tensor, taken: Taken) -> None:
        """Put the members' mean in the place of what was taken."""
        start = 0
        with torch.no_grad():
            for module, before in zip(self._modules(), taken.counts, strict=True):
                share = _share_left(module, before)
                for part in _parts(module):
                    end = start + part.numel()
                    own, theirs = (flat[start:end].view_as(part) for flat in (taken.values, mean))
                    start = end
                    part.copy_(theirs if share == 1.0 else share * theirs + (part.double() - share * own))

    def _modules(self) -> Iterator[_BatchNorm]:
        for module in self._model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                yield module


def _parts(module: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    assert module.running_mean is not None  # noqa: S101  such a module is not asked
    assert module.running_var is not None  # noqa: S101  it has both or none
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
