"""Whether a range is of a learning rate that still rises, which sound values will leave."""

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["FOLLOWS_RATE", "RisingRate"]

FOLLOWS_RATE = ("gradient_norm", "update_ratio")
"""What grows in a sound run whose rate is warmed up. Of Fashion-MNIST with the rate at a hundredth first, and
whole after 100 steps, `"reduce_lr"` cost 1 to 19 points by alerts of the gradient's norm, `"reject"` 0 to 17;
with `warm_up=125` there was no alert."""


class _Optimizer(Protocol):
    param_groups: list[dict[str, Any]]


class RisingRate:
    """Looks at the rate as the range of metrics is complete."""

    def __init__(self, metrics: Sequence[str], warm_up: int) -> None:
        """Begin.

        Args:
            metrics: What is judged.
            warm_up: Values, of which each step has one, before there is a range.
        """
        self._metrics = [metric for metric in metrics if metric in FOLLOWS_RATE]
        self._warm_up = warm_up
        self._before: float | None = None

    def see(self, optimizer: _Optimizer | None, num_steps: int) -> str:
        """Look before a step; say so where the rate still rises, and nothing else.

        Args:
            optimizer: Whose step it is, if it is here.
            num_steps: How many have been made.
        """
        if optimizer is None or not self._metrics or num_steps not in (self._warm_up - 1, self._warm_up):
            return ""
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        before, self._before = self._before, max(rates, default=None)
        if before is None or self._before is None or not self._before > before:
            return ""
        return (
            f"the learning rate still rises, from {before:g} to {self._before:g} in this step, as the range "
            f"of {' and '.join(self._metrics)} is complete after {self._warm_up}: what rises with it, as in "
            f"a sound run, may be an alert. Give warm_up= as many as the steps in which it rises, and "
            f"{self._warm_up} more"
        )
