"""Whose losses were not finite: told with each sum of gradients, in numbers that add up to all of them.

A total that is NaN does not show whose part was, and to look at each member's own sum would be a pass over
memory in each window. Its losses are numbers that are there anyhow.
"""

from collections.abc import Sequence

__all__ = ["culprits_in", "num_numbers", "told", "worded"]

PER_NUMBER = 50
"""Members, a bit each: float64 adds up 53 exactly."""


def num_numbers(size: int) -> int:
    """Tell how many numbers are told among so many members; one that is alone tells none."""
    return 0 if size == 1 else -(-size // PER_NUMBER)


def told(rank: int, size: int, *, is_finite: bool) -> list[float]:
    """Give what a member tells of itself, to be added up over all."""
    numbers = [0.0] * num_numbers(size)
    if numbers and not is_finite:
        numbers[rank // PER_NUMBER] = 2.0 ** (rank % PER_NUMBER)
    return numbers


def culprits_in(numbers: Sequence[float]) -> list[int]:
    """Give the ranks that have told that a loss of theirs was not finite, of the sums over all members."""
    return [
        PER_NUMBER * place + bit
        for place, number in enumerate(numbers)
        for bit in range(PER_NUMBER)
        if int(number) >> bit & 1
    ]


def worded(culprits: Sequence[int], size: int) -> str:
    """Say whose losses they were, behind "the gradient is NaN or infinite"."""
    if size == 1:
        return ""
    if not culprits:
        return " (while the losses of all members were finite)"
    first, *others = culprits
    more = f" and of {len(others)} more" if others else ""
    return f" (a loss of member {first}{more} was)"
