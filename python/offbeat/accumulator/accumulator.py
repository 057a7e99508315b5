"""`AsyncGradientAccumulator`."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from offbeat.accumulator.members import Alone, Group, Members
from offbeat.accumulator.window import Window
from offbeat.checks import Faults, at_least_one, functions, refuse
from offbeat.errors import ConfigError
from offbeat.local import LocalOptimizer
from offbeat.local.batches import count, moved
from offbeat.local.device import usable_device
from offbeat.local.loss import LossFunction, LossReduction, check_loss, wake
from offbeat.module import named_parameters

__all__ = ["AsyncGradientAccumulator", "Normalizer"]

Normalizer = Callable[[Any, Any], float]
"""From a micro-batch's (inputs, targets) to what its loss is a mean over."""

_log = logging.getLogger("offbeat")


class AsyncGradientAccumulator:
    """Trains a model with the gradients of several micro-batches at a time, as of one large batch.

    Alone, an update is what one batch of all samples would give: exact for losses that are a mean or a sum
    over the batch, and models without batch statistics (BatchNorm sees micro-batches). With torch's default
    process group of several members (`offbeat.init_distributed("gloo")`) an update is of all members'
    micro-batches, weighted by their counts; all members start from the first one's model and stay equal.

    With ``overlap=True`` members reduce a window's sum while they work on the next window: its update is
    made at the end of that, one update late. With ``overlap=False``, and alone, an update is made at the end
    of its own window.

    Args:
        model: An `nn.Module`; it is brought to `device` and trained in place.
        accumulation_steps: Micro-batches per update and member.
        base_batch_size: Samples in a micro-batch.
        target_batch_size: Samples in an update, of all members, rounded up to whole micro-batches; with
            `base_batch_size`, in place of `accumulation_steps`.
        overlap: Reduce behind the next window's work. Without others there is nothing to reduce.
        device: Where to train.
        loss_reduction: Whether `loss_fn` gives the ``"mean"`` over a batch or the ``"sum"``.
        normalizer: From a micro-batch's (inputs, targets) to the count that its loss is a mean over, where
            that is not its samples: tokens, or targets that are not ignored. With ``"sum"``: what the sum of
            all is divided by.

    Raises:
        ConfigError: Naming all settings that cannot be used.

    Example:
        >>> accumulator = offbeat.AsyncGradientAccumulator(nn.Linear(4, 2), accumulation_steps=2)
        >>> for _ in range(2):
        ...     loss = accumulator.train_step(
        ...         inputs=torch.ones(8, 4),
        ...         targets=torch.zeros(8, dtype=torch.long),
        ...         optimizer=offbeat.optim.SGD(lr=0.1),
        ...         loss_fn=nn.CrossEntropyLoss(),
        ...     )
        >>> accumulator.is_update_step(), accumulator.effective_batch_size
        (True, 16)
    """

    def __init__(
        self,
        model: nn.Module,
        accumulation_steps: int | None = None,
        *,
        base_batch_size: int | None = None,
        target_batch_size: int | None = None,
        overlap: bool = True,
        device: str | torch.device = "cpu",
        loss_reduction: LossReduction = "mean",
        normalizer: Normalizer | None = None,
    ) -> None:
        size = distributed.get_world_size() if _has_a_group() else 1
        sizes = accumulation_steps, base_batch_size, target_batch_size
        faults = Faults(_of_sizes(*sizes))
        faults += _of_the_rest(model, loss_reduction, normalizer)
        where = faults.catch(lambda: usable_device(device))
        refuse(faults)
        assert where is not None  # noqa: S101  else there is a fault
        self.model = model.to(where)
        self.device = where
        self.updates = 0
        self._steps = _steps_of(*sizes, size)
        self._base_batch_size = base_batch_size
        self._reduction: LossReduction = loss_reduction
        self._normalizer = normalizer
        self._optimizer = LocalOptimizer(model)
        parameters = list({id(p): p for _, p in named_parameters(model)}.values())
        are_means = loss_reduction == "mean"
        is_divided = are_means or normalizer is not None
        self._parameters = parameters
        self._window = Window(parameters, are_means=are_means, is_divided=is_divided)
        self._members: Members = Group(parameters, is_divided=is_divided) if size > 1 else Alone()
        self._overlaps = overlap and size > 1
        self._is_under_way = False
        self._was_update = False
        self._samples = 0
        if size > 1:
            _begin_alike(model)
        late = "one window late, behind the next one's work" if self._overlaps else "at the end of its window"
        _log.info("an update is of %d micro-batches of %d members, made %s", self._steps, size, late)

    def train_step(
        self,
        *,
        inputs: Any,  # noqa: ANN401  whatever the model takes
        targets: Any,  # noqa: ANN401  whatever the loss takes
        optimizer: object = None,
        loss_fn: LossFunction,
    ) -> float:
        """Add a micro-batch, and make an update if it is time to.

        Args:
            inputs: What the model takes: a tensor, or a nest of them; brought to the device.
            targets: What the loss takes, likewise.
            optimizer: A spec of `offbeat.optim`, which becomes torch's optimizer; a class; or a live one. The
                same at each call, or its equal; may be left out after the first.
            loss_fn: From (outputs, targets) to a scalar.

        Returns:
            The loss of this micro-batch, as `loss_fn` gave it.

        Raises:
            ConfigError: If the optimizer or the loss cannot be used; nothing is added then.
        """
        live = self._optimizer.use(optimizer)
        samples = count(inputs, targets)
        counts = float(samples if self._normalizer is None else self._normalizer(inputs, targets))
        if not (math.isfinite(counts) and counts >= 0):
            raise ConfigError(f"normalizer gave {counts}: it gives a count, 0 or more")
        inputs, targets = moved(inputs, self.device), moved(targets, self.device)
        wake(self.model)
        loss = loss_fn(self.model(inputs), targets)
        check_loss(loss, owner=type(self).__name__)
        self._window.add(loss, counts=counts, samples=samples)
        self._was_update = False
        if self._window.batches >= self._steps:
            self._end_window(live)
        return float(loss.detach())

    def is_update_step(self) -> bool:
        """Tell whether the last micro-batch's call made an update."""
        return self._was_update

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per update and member."""
        return self._steps

    @property
    def effective_batch_size(self) -> int:
        """Samples in an update, of all members.

        By `base_batch_size` where that was given; else those of the newest update, 0 before the first.
        """
        if self._base_batch_size is not None:
            return self._base_batch_size * self._steps * self._members.size
        return self._samples

    def flush(self) -> None:
        """Make the updates that are due: of a window that is not full, and of one that is under way.

        To be called when the data is at its end, by every member: one that has more to do goes on, and those
        that have ended take part with nothing, so that all stay equal.
        """
        live = self._optimizer.use(None) if self._window.batches or self._is_under_way else None
        num_before = self.updates
        if live is not None and self._window.batches:
            self._end_window(live)
        if live is not None and self._is_under_way:
            self._update(live)
        if self._members.size > 1:
            self._end_together()
        self._was_update = self.updates > num_before

    # ------------------------------------------------------------------ inside

    def _end_window(self, live: torch.optim.Optimizer) -> None:
        own = self._window.take()
        if self._is_under_way:
            self._update(live)
        self._members.begin(own)
        self._is_under_way = True
        if not self._overlaps:
            self._update(live)

    def _update(self, live: torch.optim.Optimizer) -> int:
        """Wait for the total that is under way and step by it; give how many members had something to add."""
        total = self._members.finish()
        self._is_under_way = False
        if total.num_at_work:
            for parameter, gradient in zip(self._parameters, total.gradients, strict=True):
                parameter.grad = gradient
            live.step()
            for parameter in self._parameters:
                parameter.grad = None
            self.updates += 1
            self._samples = total.samples
            self._was_update = True
        return total.num_at_work

    def _end_together(self) -> None:
        """Take part with nothing until nobody has anything to add any more."""
        live = self._optimizer.use(None)
        while True:
            self._members.begin(None)
            if not self._update(live):
                return


def _has_a_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _begin_alike(model: nn.Module) -> None:
    """Give all members the first one's parameters and buffers."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            distributed.broadcast(tensor, src=0)


def _steps_of(steps: int | None, base: int | None, target: int | None, num_members: int) -> int:
    if steps is not None:
        return steps
    assert base is not None  # noqa: S101  `_of_sizes` has seen to it
    assert target is not None  # noqa: S101
    return math.ceil(target / (base * num_members))


def _of_sizes(steps: object, base: object, target: object) -> list[str]:
    """Tell what is wrong with the sizes: steps, or the two others."""
    given = {"accumulation_steps": steps, "base_batch_size": base, "target_batch_size": target}
    given = {name: value for name, value in given.items() if value is not None}
    faults = at_least_one(**given)
    match sorted(given):
        case (
            ["accumulation_steps"]
            | ["accumulation_steps", "base_batch_size"]
            | [
                "base_batch_size",
                "target_batch_size",
            ]
        ):
            if not faults and isinstance(base, int) and isinstance(target, int) and target < base:
                faults.append(
                    f"target_batch_size is {target} and base_batch_size {base}: a micro-batch alone is larger"
                )
        case []:
            faults.append(
                "no size is given: give accumulation_steps, or base_batch_size and target_batch_size"
            )
        case _:
            faults.append(
                f"{' and '.join(given)} are given: give accumulation_steps, or base_batch_size and "
                f"target_batch_size"
            )
    return faults


def _of_the_rest(model: object, reduction: object, normalizer: object) -> list[str]:
    faults = []
    if not isinstance(model, nn.Module):
        faults.append(f"model is {model!r}: give an nn.Module")
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        faults.append("model is wrapped in DDP, which reduces every micro-batch: give the module inside")
    elif not any(True for _ in model.parameters()):
        faults.append(f"model is a {type(model).__name__} without parameters, so there is nothing to train")
    if reduction not in ("mean", "sum"):
        faults.append(f'loss_reduction is {reduction!r}: give "mean" or "sum"')
    if normalizer is not None:
        faults += functions("a function of (inputs, targets)", normalizer=normalizer)
    return faults
