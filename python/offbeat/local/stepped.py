"""Which parameters optimizers have stepped: torch counts no writes of fused ones, nor those by `.data`."""

import itertools
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from offbeat.local.every_step import before_every_step

__all__ = ["count_steps", "num_steps", "stepped_since"]

_newest: "WeakKeyDictionary[Optimizer, int]" = WeakKeyDictionary()
_numbers = itertools.count(1)


def count_steps() -> None:
    """Count the steps of all optimizers from here on."""
    before_every_step(_count)


def num_steps() -> int:
    """Give the number of the newest step of any optimizer."""
    return max(list(_newest.values()), default=0)


def stepped_since(number: int) -> set[int]:
    """Give the ids of parameters that are in an optimizer which has stepped after that step."""
    return {
        id(parameter)
        for optimizer, newest in list(_newest.items())
        if newest > number
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _count(optimizer: Optimizer, *_: object) -> None:
    _newest[optimizer] = next(_numbers)
