"""Measuring a model without a trace: no mode, no random state and no gradient is other afterwards."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offbeat.local.batches import count, moved, split
from offbeat.local.loss import LossFunction, LossReduction
from offbeat.metrics import Meter

__all__ = ["measure", "without_a_trace"]


def measure(
    module: nn.Module,
    loader: Iterable[Any],
    meters: list[Meter],
    *,
    device: torch.device,
    loss_fn: LossFunction | None,
    reduction: LossReduction,
) -> dict[str, float]:
    """Run a model over all batches in eval mode; means are weighted by samples.

    Args:
        module: The model; every submodule's mode is restored.
        loader: Gives batches (inputs, targets).
        meters: What to measure.
        device: Where the model is.
        loss_fn: For the metric "loss"; None if there is none.
        reduction: Whether it gives a mean or a sum over the batch.

    Returns:
        One number per meter, by name.
    """
    with without_a_trace(module, device), torch.no_grad():
        for batch in loader:
            inputs, targets = split(batch)
            samples = count(inputs, targets)
            inputs, targets = moved(inputs, device), moved(targets, device)
            outputs = module(inputs)
            loss = None
            if loss_fn is not None:
                loss = loss_fn(outputs, targets)
                loss = loss / samples if reduction == "sum" else loss
            for meter in meters:
                meter.update(outputs, targets, loss, samples)
    return {meter.name: meter.read() for meter in meters}


@contextmanager
def without_a_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put a model into eval mode in here; afterwards all modes and random states are as they were."""
    with _same_modes(module), _same_random_state(device):
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
