"""`AsyncGradientAccumulator`."""

import logging
import math
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import distributed, nn

from offbeat import process, trained_by
from offbeat.accumulator.members import Alone, Group, Members
from offbeat.accumulator.window import Window
from offbeat.checks import Faults, at_least_one, functions, refuse
from offbeat.errors import ConfigError, StateError
from offbeat.launchers import find
from offbeat.local import LocalOptimizer
from offbeat.local.batches import count, moved
from offbeat.local.device import usable_device
from offbeat.local.loss import LossFunction, LossReduction, check_loss, other_reduction, wake
from offbeat.local.lr_scale import factor_of
from offbeat.module import named_parameters

__all__ = ["AsyncGradientAccumulator", "Normalizer"]

Normalizer = Callable[[Any, Any], float]
"""From a micro-batch's (inputs, targets) to what its loss is a mean over."""

_log = logging.getLogger("offbeat")


class AsyncGradientAccumulator:
    """Trains a model with the gradients of several micro-batches at a time, as of one large batch.

    Alone, an update is what one batch of all samples would give: exact for losses that are a mean or a sum
    over the batch, and models without batch statistics (BatchNorm sees micro-batches). With a process group
    of torch's (`offbeat.init_distributed("gloo")`) an update is of all members' micro-batches, weighted by
    their counts; all members start from the first one's model, and their parameters stay equal. Buffers,
    such as BatchNorm's running statistics, are each member's own until `flush`, which gives all their mean.

    With ``overlap=True`` members reduce a window's sum while they work on the next window: its update is
    made at the end of that, one update late. With ``overlap=False``, and alone, an update is made at the end
    of its own window.

    What belongs to each update, such as clipping or a scheduler that steps, goes into hooks of the optimizer
    (`register_step_pre_hook`, `register_step_post_hook`): `flush` may make two updates, and those of members
    that have more to do.

    Args:
        model: An `nn.Module`, complete: its parameters are to stay the same objects. It is brought to
            `device` and trained in place.
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
        process_group: The members; None: torch's default group where there is one, else this process alone;
            False: alone, whatever there is.

    Raises:
        ConfigError: Naming all settings that cannot be used; or if this is one of several processes, and
            there is no group of them.
        ModelMismatchError: If members hold different models.

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

    gathers_gradients = True
    """What its optimizer steps by is of several backwards: a monitor measures it then, not after each."""

    @property
    def shares_updates(self) -> bool:
        """Whether there are other members, whose parameters stay equal to these."""
        return self._members.size > 1

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
        process_group: "distributed.ProcessGroup | Literal[False] | None" = None,
    ) -> None:
        sizes = accumulation_steps, base_batch_size, target_batch_size
        faults = Faults(_of_sizes(*sizes))
        faults += _of_the_rest(model, overlap, loss_reduction, normalizer)
        where = faults.catch(lambda: usable_device(device))
        group = faults.catch(lambda: _group_of(process_group))
        refuse(faults)
        assert where is not None  # noqa: S101  else there is a fault
        size = 1 if group is None else distributed.get_world_size(group)
        self.model = model.to(where)
        self.device = where
        self.updates = 0
        self._steps = _steps_of(*sizes, size)
        self._base_batch_size = base_batch_size
        self._reduction: LossReduction = loss_reduction
        self._normalizer = normalizer
        self._optimizer = LocalOptimizer(model)
        self._named = _parameters_of(model)
        are_means = loss_reduction == "mean"
        is_divided = are_means or normalizer is not None
        self._parameters = [parameter for _, parameter in self._named]
        self._window = Window(self._parameters, are_means=are_means, is_divided=is_divided)
        self._members: Members = (
            Alone()
            if group is None or size == 1
            else Group(group, self._named, list(model.buffers()), is_divided=is_divided)
        )
        self._overlaps = overlap and self._members.size > 1
        self._is_under_way = False
        self._was_update = False
        self._has_warned = False
        self._samples = 0
        self._samples_since_end = 0
        trained_by.register(model, self)
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
            ConfigError: If the optimizer, the batch or the loss cannot be used; nothing is added then. What
                is raised in the backward pass drops the window.
            StateError: If the model has other parameters than when this was made, or members' optimizers are
                set differently.
        """
        live = self._optimizer.use(optimizer)
        samples = count(
            inputs, targets, instead="give inputs or targets whose first dimension is the batch's"
        )
        counts = float(samples if self._normalizer is None else self._normalizer(inputs, targets))
        if not (math.isfinite(counts) and counts >= 0):
            raise ConfigError(f"normalizer gave {counts}: it gives a count, 0 or more")
        if not self._window.batches:
            self._check_parameters()
        self._warn_of_reduction(loss_fn)
        inputs, targets = moved(inputs, self.device), moved(targets, self.device)
        wake(self.model)
        loss = loss_fn(self.model(inputs), targets)
        check_loss(loss, owner=type(self).__name__)
        shown = loss.detach()
        trained_by.tell(self.model, loss=shown if self._reduction == "mean" else shown / (counts or 1.0))
        self._was_update = False
        self._window.add(loss, counts=counts, samples=samples)
        self._samples_since_end += samples
        if self._window.batches >= self._steps:
            self._end_window(live)
        return float(shown)

    def is_update_step(self) -> bool:
        """Tell whether the last call made an update."""
        return self._was_update

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The live optimizer that makes the updates; None before the first step."""
        return self._optimizer.live

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

    def flush(self, *, optimizer: object = None) -> None:
        """Make the updates that are due: of a window that is not full, and of one that is under way.

        To be called by every member when its data is at its end: one that has more to do goes on, and those
        that have ended take part with nothing, so that the parameters of all stay equal.

        Args:
            optimizer: As in `train_step`; needed by a member that had no data at all.

        Raises:
            ConfigError: If others make an update and there is no optimizer here.
            StateError: As `train_step`.
        """
        if optimizer is not None:
            self._optimizer.use(optimizer)
        num_before = self.updates
        if self._window.batches:
            self._end_window(self._optimizer.use(None))
        if self._is_under_way:
            self._update()
        if self._members.size > 1:
            self._end_together()
        self._was_update = self.updates > num_before

    # ------------------------------------------------------------------ inside

    def _end_window(self, live: torch.optim.Optimizer) -> None:
        own = self._window.take()
        if own.counts != 0 and all(gradient is None for gradient in own.gradients):
            raise StateError(
                "no parameter has a gradient: the loss does not come from this model's parameters"
            )
        if self._is_under_way:
            self._update()
        self._members.begin(own, _settings(live))
        del own  # what is sent is a copy
        self._is_under_way = True
        if not self._overlaps:
            self._update()

    def _update(self) -> int:
        """Wait for the total that is under way and step by it; give how many members had something to add."""
        total = self._members.finish()
        self._is_under_way = False
        if total.num_at_work:
            live = self._optimizer.use(None)
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
        """Take part with nothing until nobody has anything to add any more; then make buffers alike."""
        while True:
            self._members.begin(None, _settings(self._optimizer.live))
            if not self._update():
                break
        self._members.end(list(self.model.buffers()), self._samples_since_end)
        self._samples_since_end = 0

    def _check_parameters(self) -> None:
        for (name, before), (_, now) in zip(self._named, _parameters_of(self.model), strict=False):
            if before is not now:
                raise StateError(
                    f"the model's parameter {name!r} is another object than when this was made: change "
                    f"the model "
                    f"first, or load values without assign=True"
                )
        if len(self._named) != len(_parameters_of(self.model)):
            raise StateError(
                "the model has more or fewer parameters than when this was made: change it first"
            )

    def _warn_of_reduction(self, loss_fn: LossFunction) -> None:
        warning = other_reduction(loss_fn, self._reduction, owner=type(self).__name__)
        if warning is not None and not self._has_warned:
            self._has_warned = True
            process.warn(warning)


def _parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List a model's parameters, each once, by its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in named_parameters(model):
        found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def _settings(live: torch.optim.Optimizer | None) -> list[float] | None:
    """Give what may change from update to update and has to be the same for all members: learning rates."""
    return None if live is None else [float(group["lr"]) * factor_of(live) for group in live.param_groups]


def _group_of(given: object) -> "distributed.ProcessGroup | None":
    """Choose the members; None is this process alone.

    Raises:
        ConfigError: If it is no group, or this is one of several processes that have none.
    """
    if given is False:
        return None
    is_there = distributed.is_available() and distributed.is_initialized()
    if given is None and is_there:
        return distributed.group.WORLD
    if given is None:
        place = find(os.environ)
        if place.world_size > 1:
            raise ConfigError(
                f"this is process {place.rank} of {place.world_size}, by {place.told_by}, and there is "
                f"no process "
                f"group of them: call offbeat.init_distributed('gloo') (or 'nccl') first, or give "
                f"process_group=False to train alone"
            )
        return None
    if not is_there or not isinstance(given, distributed.ProcessGroup):
        raise ConfigError(f"process_group is {given!r}: give a torch.distributed.ProcessGroup, None or False")
    return given


def _steps_of(steps: int | None, base: int | None, target: int | None, num_members: int) -> int:
    if steps is not None:
        return steps
    assert base is not None  # noqa: S101  `_of_sizes` has seen to it
    assert target is not None  # noqa: S101
    steps = math.ceil(target / (base * num_members))
    if (made := steps * base * num_members) != target:
        process.warn(
            f"target_batch_size is {target}, and an update is of {made} samples: {steps} micro-batches "
            f"of {base} "
            f"of {num_members} members"
        )
    return steps


def _of_sizes(steps: object, base: object, target: object) -> list[str]:
    """Tell what is wrong with the sizes: steps, or the two others."""
    given = {"accumulation_steps": steps, "base_batch_size": base, "target_batch_size": target}
    given = {name: value for name, value in given.items() if value is not None}
    faults = at_least_one(**given)
    if not given:
        faults.append("no size is given: give accumulation_steps, or base_batch_size and target_batch_size")
    elif ("accumulation_steps" in given) == ("target_batch_size" in given) or list(given) == [
        "target_batch_size"
    ]:
        faults.append(
            f"{' and '.join(given)} given: give accumulation_steps, or base_batch_size and target_batch_size"
        )
    elif not faults and isinstance(base, int) and isinstance(target, int) and target < base:
        faults.append(f"target_batch_size is {target} and base_batch_size {base}: one micro-batch is larger")
    return faults


def _of_the_rest(model: object, overlap: object, reduction: object, normalizer: object) -> list[str]:
    faults = []
    if not isinstance(model, nn.Module):
        faults.append(f"model is {model!r}: give an nn.Module")
    elif any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        faults.append(
            "model is, or holds, a module in DDP, which reduces every micro-batch: give what is inside"
        )
    elif not any(True for _ in model.parameters()):
        faults.append(f"model is a {type(model).__name__} without parameters, so there is nothing to train")
    if not isinstance(overlap, bool):
        faults.append(f"overlap is {overlap!r}: give True or False")
    if reduction not in ("mean", "sum"):
        faults.append(f'loss_reduction is {reduction!r}: give "mean" or "sum"')
    if normalizer is not None:
        faults += functions("a function of (inputs, targets)", normalizer=normalizer)
    return faults
