"""Which of a model's gradients count for a step: those that it steps by, and no other's.

A step's gradients are those that its optimizer holds: what none holds adds up from batch to batch, and what
another one has stepped by is of a batch before. Optimizers that step one after the other without a backward
in between, as where layers of two kinds have one each, step by one gradient, and are judged by the whole of
it; but for a GradScaler's, which is divided by its scale for each at another time.
"""

import torch
from torch import nn

__all__ = ["Counted"]


class Counted:
    """Follows the backwards and steps of one model."""

    def __init__(self) -> None:
        """Begin before the first backward."""
        self._is_new = True  # whether there was a backward since the last step
        self._stepped: set[int] = set()  # parameters of optimizers that have stepped since the last backward
        self._together: set[int] = set()  # likewise of those that did after the backward before it
        self._used: set[int] = set()  # of what has stepped since, those that had a gradient

    def note_backward(self) -> None:
        """Hear that gradients were accumulated."""
        self._is_new = True

    def begin(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Hear that an optimizer, if it is known, is about to step.

        Returns:
            Whether it steps by the gradients that another one has just stepped by.
        """
        own = _held_by(optimizer)
        if self._is_new:
            self._together, self._stepped = self._stepped, set()
        is_another_s = not self._is_new and not own & self._stepped
        if not is_another_s:
            self._used.clear()
        self._is_new = False
        self._stepped |= own
        return is_another_s

    def of(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, is_scaled: bool
    ) -> list[nn.Parameter]:
        """Give the parameters with gradients that count for a step that was begun.

        Args:
            model: Whose.
            optimizer: That steps; None: it is not known, and all count.
            is_scaled: Whether a GradScaler divides gradients, for each optimizer by itself.
        """
        there = [p for p in model.parameters() if p.is_leaf and p.grad is not None]
        if optimizer is None:
            return there
        counts = _held_by(optimizer)
        if not is_scaled:
            counts |= self._stepped | (self._together if counts <= self._together else set())
        return [p for p in there if id(p) in counts]

    def use(self, optimizer: torch.optim.Optimizer | None, there: list[nn.Parameter]) -> frozenset[int]:
        """Hear what an optimizer steps by, of what is there.

        Returns:
            The ids of what others have stepped by, of the same backward. What has no gradient any more was
            freed behind such a step; what had none at any was thrown away by the user.
        """
        before = frozenset(self._used)
        self._used |= _held_by(optimizer) & {id(parameter) for parameter in there}
        return before


def _held_by(optimizer: torch.optim.Optimizer | None) -> set[int]:
    """Give the ids of an optimizer's parameters."""
    if optimizer is None:
        return set()
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
