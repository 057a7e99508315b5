"""What it costs that an update is one window late: how much smaller a learning rate has to be."""

import torch

__all__ = ["momentum_of", "shrinks", "words_of"]

HIGH = 0.5
"""Momentum from which on it is warned of."""


def shrinks(momentum: float) -> float:
    """Tell how many times smaller the largest stable learning rate is where each gradient is one update old.

    On a quadratic of curvature c, SGD with momentum m, as torch has it, is stable for a learning rate below
    2(1 + m)/c. With the gradient of one update before its characteristic polynomial is
    z² - (1 + m)z + m + lr·c, whose roots are within the unit circle where lr·c < 1 - m. For Adam, between two
    changes of its second moment, both have 1 - m as a factor, and the ratio is the same.

    Source: our own derivation, by the Jury criterion; compare Giladi, Nacson, Hoffer, Soudry 2020, "At
    Stability's Edge: How to Adjust Hyperparameters to Preserve Minima Selection in Asynchronous Training of
    Neural Networks?", where momentum and delay narrow what is stable in the same way.
    """
    return 2 * (1 + momentum) / (1 - momentum)


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Give the largest of an optimizer's groups: SGD's momentum, or the first of Adam's betas; 0 without."""
    found = [0.0]
    for group in optimizer.param_groups:
        betas = group.get("betas")
        one = betas[0] if isinstance(betas, tuple | list) and betas else group.get("momentum", 0.0)
        found += [float(one)] if isinstance(one, int | float | torch.Tensor) else []
    return max(one for one in found if one < 1)


def words_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Word the warning; None where momentum is low, and a late update does little harm."""
    momentum = momentum_of(optimizer)
    if momentum < HIGH:
        return None
    return (
        f"updates are one window late (overlap=True), and the {type(optimizer).__name__}'s momentum is "
        f"{momentum:g}: the largest learning rate that is stable is up to {shrinks(momentum):.0f} times "
        f"smaller than with overlap=False, and what trains well alone may diverge. Give overlap=False, which "
        f"waits and is exact; or less momentum (0.5: {shrinks(0.5):.0f} times; none: {shrinks(0.0):.0f}) or "
        f"a smaller lr"
    )
