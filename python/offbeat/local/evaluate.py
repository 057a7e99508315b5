"""Measuring a model without a trace: no mode, random state, gradient or buffer is other afterwards."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import Dataset

from offbeat.errors import ConfigError
from offbeat.local.batches import count, loaded, moved, split
from offbeat.local.buffer_snapshot import same_buffers
from offbeat.local.generators import Generators
from offbeat.local.loss import LossFunction, LossReduction
from offbeat.metrics import Meter, Metric, is_collection, meters
from offbeat.naming import a_class

__all__ = ["Each", "evaluate", "measure", "without_a_trace"]

Each: TypeAlias = Callable[[int], None]
"""Is told how many batches were measured so far."""


def evaluate(
    module: nn.Module,
    data: Iterable[Any] | Dataset[Any],
    metrics: Metric | list[Any] | tuple[Any, ...],
    *,
    batch_size: int,
    device: torch.device,
    loss_fn: LossFunction | None,
    reduction: LossReduction,
    first: Callable[[], object] | None = None,
    each: Each | None = None,
    keeps: Sequence[object] = (),
) -> float | dict[str, float]:
    """Run a model over all batches in eval mode; means are weighted by samples.

    Args:
        module: The model; every submodule's mode is restored.
        data: Gives batches (inputs, targets); or a dataset of samples, one for each index.
        metrics: One metric, or a list of them.
        batch_size: Samples at a time, of a dataset.
        device: Where the model is.
        loss_fn: For the metric "loss"; None if there is none.
        reduction: Whether it gives a mean or a sum over the batch.
        first: Is called once what was given is known to be usable, and before the first batch.
        each: As in `measure`.
        keeps: What a metric may have hold of beside the model, as in `apart`.

    Returns:
        The mean over all samples; for a list or a collection, a dict by name.

    Raises:
        ConfigError: If a metric or the data cannot be used, or there is no sample in it: of nothing there is
            no mean, and NaN would pass for a model that has diverged.
    """
    measured = meters(metrics, keeps=[module, *keeps])
    batches = loaded(data, batch_size)
    if first is not None:
        first()
    loss_fn = loss_fn if any(meter.name == "loss" for meter in measured) else None
    if not measure(module, batches, measured, device=device, loss_fn=loss_fn, reduction=reduction, each=each):
        raise ConfigError(
            f"loader is {a_class(data)} that gave no sample, and of none there is no mean: give data "
            f"that has some; what gives its batches once, as a generator does, has to be made anew each time"
        )
    found = {meter.name: meter.read() for meter in measured}
    several = isinstance(metrics, list | tuple) or is_collection(metrics)
    return found if several else found[measured[0].name]


def measure(
    module: nn.Module,
    batches: Iterable[Any],
    measured: Sequence[Meter],
    *,
    device: torch.device,
    loss_fn: LossFunction | None,
    reduction: LossReduction,
    each: Each | None = None,
    whose: str = "the loader",
) -> int:
    """Let meters see all batches, in eval mode and without a trace.

    Args:
        module: The model.
        batches: Of (inputs, targets).
        measured: What measures.
        device: Where the model is.
        loss_fn: As well without a trace, where it is a module; None where nobody asks for the loss.
        reduction: Whether it gives a mean or a sum over the batch.
        each: Is told how many batches were measured, after each: this may take long, and others may wait.
        whose: Who gives the batches, for people.

    Returns:
        How many samples there were.
    """
    seen = 0
    with ExitStack() as stack:
        stack.enter_context(without_a_trace(module, batches, device))
        if isinstance(loss_fn, nn.Module):
            stack.enter_context(_same_modes(loss_fn))
            stack.enter_context(same_buffers(loss_fn))
        stack.enter_context(torch.no_grad())
        for number, batch in enumerate(batches, 1):
            inputs, targets = split(batch, whose=whose)
            samples = count(inputs, targets)
            if not samples:
                continue  # its mean is NaN, and it would be that of all
            seen += samples
            inputs, targets = moved(inputs, device), moved(targets, device)
            outputs = module(inputs)
            loss = None
            if loss_fn is not None:
                loss = loss_fn(outputs, targets)
                loss = loss / samples if reduction == "sum" else loss
            for meter in measured:
                meter.update(outputs, targets, loss, samples)
            if each is not None:
                each(number)
    return seen


@contextmanager
def without_a_trace(module: nn.Module, batches: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Put a model into eval mode in here; afterwards all modes, buffers and random states are as they were.

    Those of the data's own generators, too.
    """
    with (
        _same_modes(module),
        _same_random_state(device),
        same_buffers(module, are_few=True),
        _same_generators(batches),
    ):
        yield


@contextmanager
def _same_modes(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        # By `train`, which some modules override: what its eval form folded or merged, it takes apart again.
        module.train(modes[0][1])
        for part, training in modes:
            if part.training != training:
                part.train(training)
        for part, training in modes:  # `train` speaks for children, too, and an override may say otherwise
            part.training = training


@contextmanager
def _same_generators(batches: Iterable[Any]) -> Iterator[None]:
    """Give the data's own generators their states back: they may be those of the training data, too."""
    generators = Generators(batches)
    states = generators.states()
    try:
        yield
    finally:
        generators.set(states)


@contextmanager
def _same_random_state(device: torch.device) -> Iterator[None]:
    """Give the generators back the state they had: iterating over a loader draws from them."""
    numpy = sys.modules.get("numpy")
    plain, arrays = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(plain)
        if numpy and arrays is not None:
            numpy.random.set_state(arrays)
