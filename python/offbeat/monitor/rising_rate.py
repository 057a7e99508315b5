"""Whether a range was made while the learning rate was lower than it is soon after."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["FOLLOWS_RATE", "RisingRate"]

FOLLOWS_RATE = frozenset({"gradient_norm", "update_ratio", "clip"})
"""Metrics, and a remedy with a range of its own, of what grows in a sound run whose rate is warmed up. Of
Fashion-MNIST with the rate at a hundredth first, and whole after 100 steps, `"reduce_lr"` cost 1 to 19 points
by alerts of the gradient's norm, `"reject"` 0 to 17; with `warm_up=125` there was no alert."""

MORE = 1.1
"""Times the highest rate that there was."""

AS_LONG = 10
"""Times the steps of the range, after which a rate that rises is another matter."""


@dataclass(slots=True)
class _Seen:
    num_steps: int = 0
    highest: list[float] = field(default_factory=list)  # by group, while the range was made


class RisingRate:
    """Looks at the rates of each optimizer's steps, and tells once."""

    def __init__(self, warm_up: int, *, is_followed: bool) -> None:
        """Begin.

        Args:
            warm_up: Values, of which each step has one, before there is a range.
            is_followed: Whether anything that is judged follows the rate.
        """
        self._warm_up = warm_up
        self._is_followed = is_followed
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self._is_over = not is_followed

    def begin(self) -> None:
        """Begin anew, as ranges do."""
        self._seen.clear()
        self._is_over = not self._is_followed

    def end(self) -> None:
        """Look no more: ranges have come from elsewhere."""
        self._is_over = True

    def see(self, optimizer: torch.optim.Optimizer) -> str:
        """Look before a step; say so where a rate is higher than it was while the range was made."""
        if self._is_over:
            return ""
        seen = self._seen.setdefault(optimizer, _Seen())
        seen.num_steps += 1
        rates = _rates_of(optimizer.param_groups)
        if seen.num_steps <= self._warm_up:
            known = [*seen.highest, *rates[len(seen.highest) :]]
            seen.highest = [max(pair) for pair in zip(known, rates, strict=False)]
            return ""
        if seen.num_steps > AS_LONG * self._warm_up:
            self._is_over = True
        risen = [(a, b) for a, b in zip(seen.highest, rates, strict=False) if 0 < a * MORE < b]
        if not risen:
            return ""
        self._is_over = True
        before, now = risen[0]
        return (
            f"the learning rate is {now:g} in step {seen.num_steps} of the {type(optimizer).__name__}, and "
            f"was {before:g} at most while the range of the gradient's norm was made: what rises with it, in "
            f"a sound run, too, may be an alert. Give warm_up= as many as the steps in which it rises, and "
            f"25 more"
        )


def _rates_of(groups: Sequence[dict[str, Any]]) -> list[float]:
    return [_rate_of(group.get("lr")) for group in groups]


def _rate_of(rate: object) -> float:
    """Give a rate as a number; 0 where it is none, as of an optimizer that makes its own."""
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.numel() == 1 else 0.0
    return float(rate) if isinstance(rate, int | float) else 0.0
