"""A torch optimizer that runs on the worker, and the difference it makes."""

import copy
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.errors import NonFiniteError, StateError
from offbeat.local import check_holds, check_steps_alone
from offbeat.module import Binding, Slot
from offbeat.receipt import Receipt
from offbeat.worker.contribution import Kind, Values, require_gradient, with_buffers

__all__ = ["LiveOptimizer"]


class LiveOptimizer:
    """A torch optimizer that runs here: its local steps, and the difference they made since the last pull.

    Pulls land in spare memory, which therefore holds the parameters as they were read.
    """

    kind: Kind = "delta"

    def __init__(self, binding: Binding, optimizer: torch.optim.Optimizer) -> None:
        """Take over the optimizer's `step`.

        Raises:
            ConfigError: If it does not hold the module's trainable parameters, or holds others, or computes
                gradients itself.
        """
        check_steps_alone(optimizer)
        self._held = _check_holds(optimizer, binding)
        self.optimizer = optimizer
        self._binding = binding
        self._gate = _Gate()
        loaded = weakref.WeakMethod(self._loaded)  # weak: a worker that goes out of scope leaves at once

        def has_loaded(optimizer: torch.optim.Optimizer) -> None:
            if (take := loaded()) is not None:
                take(optimizer)

        self._hooks = (
            optimizer.register_step_pre_hook(self._gate),
            optimizer.register_load_state_dict_post_hook(has_loaded),
        )
        self._stepped: set[int] = set()
        self._before: dict[torch.Tensor, Any] | None = None
        self._in_flight: deque[dict[torch.Tensor, Any] | None] = deque()
        binding.use_spares()

    def add(self, samples: int) -> None:  # noqa: ARG002  local steps count alike, whatever their batch
        """Make one local step, if all gradients are finite; a device is waited for to know.

        Looking only when the push is due would wait less, and take back the good batches with the bad one.
        """
        gradients = self._binding.gradients()
        require_gradient(gradients)
        slots = self._binding.slots
        moving = {id(s.tensor) for s, g in zip(slots, gradients, strict=True) if g is not None}
        if not moving <= self._held:
            self._held = _check_holds(self.optimizer, self._binding)
        try:
            _check_finite(slots, gradients)
        except NonFiniteError:  # whoever skips the batch goes on without its gradients
            self._binding.clear_gradients()
            raise
        if self._before is None:
            self._before = _copied(dict(self.optimizer.state))
        self._gate.is_open = True
        try:
            self.optimizer.step()
        finally:
            self._gate.is_open = False
        self._binding.clear_gradients()
        self._stepped |= moving

    def take(self) -> Values:
        """Give what the steps changed since the last pull, and the buffers."""
        binding = self._binding
        moved = [slot for slot in binding.parameters if id(slot.tensor) in self._stepped]
        self._stepped.clear()
        now = binding.host_values(moved)
        read = [slot.spare for slot in moved if slot.spare is not None]
        with torch.no_grad():
            differences = torch._foreach_sub(now, read) if moved else ()  # noqa: SLF001  as torch's optimizers
        difference = dict(zip(map(id, moved), differences, strict=True))
        self._in_flight.append(self._before)
        self._before = None
        return with_buffers([difference.get(id(slot)) for slot in binding.slots], binding)

    def settled(self, receipt: Receipt) -> None:
        """Give the optimizer back the state from before the push, if that was rejected.

        The push that follows it, if one is in flight, was made with a state that held its steps. Should that
        be rejected too, this same state comes back. Should it be applied, its steps are in no state from here
        on: they cannot be had without the rejected ones.
        """
        before = self._in_flight.popleft() if self._in_flight else None
        if not receipt.applied and before is not None:
            self._in_flight = deque(_copied(before) for _ in self._in_flight)
            self._restore(before)

    def unsent(self) -> None:
        """Give optimizer and module back what they held before the steps that were refused.

        The module's buffers too, which are of the values that the steps made.
        """
        before = self._in_flight.pop() if self._in_flight else None
        if before is not None:
            self._restore(before)
        self._binding.restore()
        self._binding.restore_buffers()

    def drop(self, in_flight: int = 0) -> None:
        """Take back the local steps that were not pushed, in the optimizer's state and in the model.

        The states from before the newest `in_flight` pushes stay, for their receipts.
        """
        if self._before is not None:
            self._restore(self._before)
            self._before = None
            self._binding.restore()
        self._stepped.clear()
        while len(self._in_flight) > in_flight:
            self._in_flight.popleft()

    def close(self) -> None:
        """Give the user back the optimizer's `step`."""
        for hook in self._hooks:
            hook.remove()

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what the user has loaded, whatever becomes of the pushes that were begun before."""
        state = dict(optimizer.state)
        self._before = None if self._before is None else _copied(state)
        self._in_flight = deque(None if before is None else _copied(state) for before in self._in_flight)

    def _restore(self, state: dict[torch.Tensor, Any]) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update(state)


class _Gate:
    """Lets `step` through only from inside `worker.step`."""

    def __init__(self) -> None:
        self.is_open = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        if not self.is_open:
            raise StateError(
                f"{type(optimizer).__name__}.step() was called beside the worker, which would push the "
                f"difference it makes a second time: call worker.step() (or worker.optimizer.step()) instead"
            )


def _check_finite(slots: Sequence[Slot], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse NaN and infinity before an optimizer's state takes them in, where they would stay."""
    every = [
        (slot, (g.coalesce().values() if g.is_sparse else g).detach())
        for slot, g in zip(slots, gradients, strict=True)
        if g is not None
    ]
    there = [(slot, values) for slot, values in every if values.numel()]
    if not there:
        return
    largest = torch._foreach_norm([g for _, g in there], float("inf"))  # noqa: SLF001  as torch's clipping
    devices = {n.device for n in largest}
    if all(bool(torch.stack([n for n in largest if n.device == d]).isfinite().all()) for d in devices):
        return
    for (slot, gradient), norm in zip(there, largest, strict=True):
        if not bool(norm.isfinite()):
            index = int((~gradient.isfinite()).flatten().nonzero()[0])
            value = float(gradient.flatten()[index])
            raise NonFiniteError(
                f"the gradient of {slot.spec['name']!r} is {value} at index {index} (flattened): the "
                f"optimizer was not called and nothing was pushed"
            )


def _check_holds(optimizer: torch.optim.Optimizer, binding: Binding) -> set[int]:
    parameters = ((slot.spec["name"], slot.tensor) for slot in binding.parameters)
    return check_holds(optimizer, parameters, called="worker.model")


def _copied(value: object) -> Any:  # noqa: ANN401  of the same type
    """Copy an optimizer's state: tensors cloned, containers rebuilt, keys (the parameters) as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) is list:
        return [_copied(item) for item in value]
    if type(value) is tuple:
        return tuple(_copied(item) for item in value)
    return copy.deepcopy(value)
