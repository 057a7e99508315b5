"""The accumulator's keywords, checked together."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offbeat.checks import at_least_one, functions
from offbeat.errors import ConfigError

__all__ = [
    "Normalizer",
    "count_of",
    "extra_faults",
    "other_faults",
    "settings_by_name",
    "size_faults",
    "steps_of",
    "unscaled_faults",
]

Normalizer = Callable[[Any, Any], float]
"""From a micro-batch's (inputs, targets) to what its loss is a mean over."""


def steps_of(steps: int | None, base: int | None, target: int | None, num_members: int) -> int:
    """Give the micro-batches of an update and member, of sizes without faults."""
    if steps is not None:
        return steps
    assert base is not None  # noqa: S101  `size_faults` has seen to it
    assert target is not None  # noqa: S101
    return math.ceil(target / (base * num_members))


def count_of(given: object) -> float:
    """Take what a normalizer gave.

    Raises:
        ConfigError: If it is no count.
    """
    try:
        counts = math.nan if isinstance(given, str) else float(given)  # type: ignore[arg-type]  # looked at
    except (OverflowError, RuntimeError, TypeError, ValueError):  # of a tensor of many, too
        counts = math.nan
    if not (math.isfinite(counts) and counts >= 0):
        raise ConfigError(f"normalizer gave {given!r}: it gives a count, 0 or more")
    return counts


def settings_by_name(
    reduction: str,
    normalizer: Normalizer | None,
    most: int | None,
    *,
    target: int | None,
    overlap: bool,
    has_scaler: bool,
) -> dict[str, object]:
    """Give what has to be the same in all members by the keywords that say it.

    Args:
        reduction: Of losses.
        normalizer: None where there is none.
        most: Micro-batches of an update and member, where that is adapted.
        target: `target_batch_size`, as given: of all members, where `accumulation_steps` are each one's own.
        overlap: As given.
        has_scaler: Losses are scaled.
    """
    setting: dict[str, object] = {
        "target_batch_size": target,
        "overlap": overlap,
        "adaptive_accumulation": most is not None,
        "loss_reduction": reduction,
        "normalizer": None if normalizer is None else "a function",
        "grad_scaler": "a GradScaler" if has_scaler else None,
    }
    return setting if most is None else {**setting, "accumulation_steps": most}


def size_faults(steps: object, base: object, target: object) -> list[str]:
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
        faults.append(
            f"target_batch_size is {target} and base_batch_size {base}: one micro-batch is larger; give a "
            f"target_batch_size of {base} or more, or smaller micro-batches"
        )
    return faults


def other_faults(overlap: object, reduction: object, normalizer: object) -> list[str]:
    """Tell what is wrong with these."""
    faults = []
    if not isinstance(overlap, bool):
        faults.append(f"overlap is {overlap!r}: give True or False")
    if not isinstance(reduction, str) or reduction not in ("mean", "sum"):
        faults.append(f'loss_reduction is {reduction!r}: give "mean" or "sum"')
    if normalizer is not None:
        faults += functions("a function of (inputs, targets)", normalizer=normalizer)
    return faults


def extra_faults(
    model: object, adaptive: object, scaler: object, *, reduction: object, normalizer: object
) -> list[str]:
    """Tell what is wrong with the first three, given the others."""
    faults = []
    if not isinstance(adaptive, bool):
        faults.append(f"adaptive_accumulation is {adaptive!r}: give True or False")
    elif adaptive and reduction == "sum" and normalizer is None:
        faults.append(
            'adaptive_accumulation is True and loss_reduction "sum", whose gradients grow with the '
            "micro-batches of an update, as the learning rate does besides: give a loss that is a mean, or "
            "normalizer=, the count by which the sum is divided"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        faults.append(f"grad_scaler is {scaler!r}: give a torch.amp.GradScaler, or None")
    elif scaler is not None and isinstance(model, nn.Module):
        faults += unscaled_faults(model, "grad_scaler is given")
    return faults


def unscaled_faults(model: nn.Module, given: str) -> list[str]:
    """Tell what is trained whose gradients torch's GradScaler refuses; `given` says that there is one."""
    halves = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]
    return [
        f"{given} and parameter {name!r} is of float16, whose gradients torch does not unscale: keep what is "
        f"trained in float32 and compute under torch.autocast"
        for name in halves[:1]
    ]
