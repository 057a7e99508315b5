"""Which parameters optimizers have stepped: torch counts no writes of fused ones, nor those by `.data`."""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.local.every_step import Hook, before_every_step

__all__ = ["Stepped"]

_lock = threading.RLock()  # any thread may step, and be broken into by a signal
_all: "weakref.WeakSet[Stepped]" = weakref.WeakSet()


class Stepped:
    """Counts the steps of optimizers, and knows which parameters each has stepped, also once it is gone.

    Attributes:
        number: Of the newest step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count from here on; the parameters are kept by whoever makes this."""
        self.number = 0
        self._own = {id(parameter) for parameter in parameters}
        self._steps: dict[int, _Steps] = {}  # by the optimizer's id, which another may have later
        self._gone: list[_Steps] = []
        before_every_step(_hook())
        with _lock:
            _all.add(self)

    def since(self, number: int) -> set[int]:
        """Give the ids of parameters that were stepped after that step."""
        with _lock:
            every = (*self._steps.values(), *self._gone)
            return {one for steps in every if steps.newest > number for one in steps.ids}

    def optimizers(self) -> list[Optimizer]:
        """Give those that have stepped some since what is forgotten, and are there still."""
        with _lock:
            every = [steps.optimizer() for steps in (*self._gone, *self._steps.values()) if steps.ids]
        return list({id(optimizer): optimizer for optimizer in every if optimizer is not None}.values())

    def forget(self, number: int) -> None:
        """Nobody asks for what was stepped up to that step any more."""
        with _lock:
            every = (*self._steps.values(), *self._gone)
            self._steps, self._gone = {}, [steps for steps in every if steps.newest > number]

    def count(self, optimizer: Optimizer) -> None:
        """Count a step."""
        with _lock:
            self.number += 1
            known = self._steps.get(id(optimizer))
            shape = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
            if known is not None and known.optimizer() is optimizer and known.shape == shape:
                known.newest = self.number
                return
            if known is not None:
                self._gone.append(self._steps.pop(id(optimizer)))
            self._merge()
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._own
            self._steps[id(optimizer)] = _Steps(weakref.ref(optimizer), shape, ids, self.number)

    def _merge(self) -> None:
        # Of those that are gone one is enough for the same parameters: who makes an optimizer for each epoch,
        # and averages with nobody, has no list that grows.
        there = {key: steps for key, steps in self._steps.items() if steps.optimizer() is not None}
        gone = [*self._gone, *(steps for key, steps in self._steps.items() if key not in there)]
        newest = {
            (id(steps.optimizer()), frozenset(steps.ids)): steps
            for steps in sorted(gone, key=lambda one: one.newest)
        }
        self._steps, self._gone = there, list(newest.values())


@dataclass(slots=True)
class _Steps:
    """Of one optimizer, while it had the same lists of parameters, of these lengths."""

    optimizer: "weakref.ref[Optimizer]"
    shape: list[tuple[int, int]]
    ids: set[int]
    newest: int


@cache
def _hook() -> Hook:
    """Give what counts, out of torch's compiler: it would compile a step anew for each number.

    That imports the compiler, as the first optimizer does that anybody makes.
    """
    hook: Hook = torch.compiler.disable(_count)  # type: ignore[no-untyped-call]
    return hook


def _count(optimizer: Optimizer, *_: object) -> None:
    with _lock:
        living = list(_all)
    for one in living:
        one.count(optimizer)
