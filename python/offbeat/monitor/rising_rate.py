"""Whether a range was made while the learning rate was lower than it is soon after."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbeat.monitor.number import number

if TYPE_CHECKING:
    import torch

__all__ = ["RisingRate"]

FOLLOWING = ("gradient_norm", "update_ratio", "clip")
"""Metrics, and a remedy with a range of its own, of what grows in a sound run whose rate is warmed up. Of
Fashion-MNIST with the rate at a hundredth first, and whole after 100 steps, `"reduce_lr"` cost 1 to 19 points
by alerts of the gradient's norm, `"reject"` 0 to 17; with `warm_up=125` there was no alert."""

MORE = 1.1
"""Times the highest rate that there was."""

AS_LONG = 10
"""Times the steps of the range, after which a rate that rises is another matter."""


class RisingRate:
    """Looks at the learning rates of the first steps, and tells once of one that is above what it was.

    A rate is known by the first parameter that it is of, whichever optimizer of a class has it; what is first
    seen when the range is there already, or was 0 until then, is not compared.
    """

    def __init__(self, names: Sequence[str], warm_up: int) -> None:
        """Begin.

        Args:
            names: Of what is judged, and of remedies.
            warm_up: Values, of which each step has one, before there is a range.
        """
        self._following = [name for name in FOLLOWING if name in names]
        self._warm_up = warm_up
        self.begin()

    def begin(self, num_steps: int = 0) -> None:
        """Begin anew, as ranges do; or with ranges that know of some steps already."""
        self._highest: dict[tuple[type, int], float] = {}  # while the range was made
        self._num_steps = num_steps
        self._is_over = not self._following

    def end(self) -> None:
        """Look no more: ranges have come from elsewhere."""
        self._is_over = True

    def see(self, optimizer: "torch.optim.Optimizer") -> str:
        """Look before a step; say so where a rate is higher than it was while the range was made."""
        if self._is_over:
            return ""
        self._num_steps += 1
        self._is_over = self._num_steps > AS_LONG * self._warm_up
        for group in optimizer.param_groups:
            if not group["params"]:
                continue
            key = type(optimizer), id(group["params"][0])  # rates of two kinds cannot be compared
            rate = number(group.get("lr")) or 0.0  # an optimizer that makes its own has none here
            highest = self._highest.get(key, 0.0)
            if self._num_steps <= self._warm_up:
                self._highest[key] = max(rate, highest)
            elif 0 < highest * MORE < rate:
                self._is_over = True
                return (
                    f"a learning rate of the {type(optimizer).__name__} is {rate:g} by now, and was "
                    f"{highest:g} at most while the range of {' and '.join(self._following)} was made, which "
                    f"grows with it in a sound run, too, and may be an alert then. Give warm_up= as many as "
                    f"the steps in which the rate rises, and 25 more"
                )
        return ""
