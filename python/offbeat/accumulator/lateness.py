"""What it costs that an update is one window late: how much smaller a learning rate has to be."""

import math
from typing import Any

import torch

__all__ = ["momentum_of", "shrinks", "words_of"]

HIGH = 0.5
"""Momentum from which on it is warned of."""
LEAST = 1e-3
"""Momentum below which Nesterov's is as any, but for rounding."""


def shrinks(momentum: float, *, is_nesterov: bool = False) -> float:
    """Tell how many times smaller the largest stable learning rate is where each gradient is one update old.

    On a quadratic of curvature c, SGD with momentum m, as torch has it, is stable for a = lr·c below
    2(1 + m). With the gradient of one update before its characteristic polynomial is z² - (1 + m)z + m + a,
    whose roots are within the unit circle where a < 1 - m. With Nesterov's momentum the first bound is
    2(1 + m)/(1 + 2m); the polynomial is z³ - (1 + m)z² + (m + (1 + m)a)z - ma, and the bound the smaller root
    in size of m²a² + (1 - m²)a - (1 - m). For Adam, between two changes of its second moment, both have 1 - m
    as a factor, and the ratio is the same; for NAdam it is nearly Nesterov's.

    Source: our own derivation, by the Jury criterion; compare Giladi, Nacson, Hoffer, Soudry 2020, "At
    Stability's Edge: How to Adjust Hyperparameters to Preserve Minima Selection in Asynchronous Training of
    Neural Networks?", where momentum and delay narrow what is stable in the same way.

    Args:
        momentum: m, from 0 to below 1.
        is_nesterov: It is Nesterov's.
    """
    m = momentum
    if not is_nesterov or m < LEAST:
        return 2 * (1 + m) / (1 - m)
    root = math.sqrt((1 - m**2) ** 2 + 4 * m**2 * (1 - m))
    return 2 * (1 + m) / (1 + 2 * m) * 2 * m**2 / (root - (1 - m**2))


def momentum_of(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Give the momentum that costs most among an optimizer's groups, and whether it is Nesterov's.

    That is SGD's, or the first of Adam's betas; 0 where none is high.
    """
    is_nadam = isinstance(optimizer, torch.optim.NAdam)
    found = [
        (momentum, is_nadam or bool(group.get("nesterov")))
        for group in optimizer.param_groups
        if HIGH <= (momentum := _of_group(group)) < 1
    ]
    return max(found, key=lambda one: shrinks(one[0], is_nesterov=one[1]), default=(0.0, False))


def _of_group(group: dict[str, Any]) -> float:
    betas = group.get("betas")
    one = betas[0] if isinstance(betas, tuple | list) and betas else group.get("momentum")
    is_one = isinstance(one, int | float) or (isinstance(one, torch.Tensor) and one.numel() == 1)
    return float(one) if is_one and one is not None else 0.0


def words_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Word the warning; None where momentum is low, and a late update does little harm."""
    momentum, is_nesterov = momentum_of(optimizer)
    if momentum == 0:
        return None
    times, less = (f"{shrinks(one, is_nesterov=is_nesterov):.0f}" for one in (momentum, HIGH))
    lower = f"or less momentum ({HIGH:g}: {less} times; none: {shrinks(0.0):.0f}) or a smaller lr"
    return (
        f"updates are one window late (overlap=True), and the {type(optimizer).__name__}'s momentum is "
        f"{momentum:g}: the largest learning rate that is stable is up to {times} times smaller than with "
        f"overlap=False, and what trains well alone may diverge. Give overlap=False, which waits and is "
        f"exact; {lower}"
    )
