"""How many samples micro-batches really have, where something was said of it."""

from collections.abc import Sequence
from typing import Any

from offbeat import log

__all__ = ["Brought", "Sizes", "others_of", "warn_of_target", "words_of_other"]

Brought = tuple[int, int | None]
"""Of a member, the micro-batches in an update, and the samples in each as it said."""


class Sizes:
    """Sees micro-batches, and tells when they are not of the size that was told.

    One that is larger tells so at once. One that is shorter may be the last of an epoch: two of them, one
    behind the other, tell.

    Attributes:
        told: Samples in a micro-batch, as the user said; None where nothing was said.
        usual: Samples in a micro-batch: as told while nothing else was seen, then the mean of the newest
            window; None where nothing was told.
    """

    def __init__(self, told: int | None) -> None:
        """`told` is `base_batch_size`."""
        self.told = told
        self.usual: float | None = told
        self._was_short = self._is_other = False

    def see(self, samples: int) -> bool:
        """Take down a micro-batch; tell whether it is the first that shows that what was told is wrong."""
        if self.told is None or self._is_other:
            return False
        is_short = samples < self.told
        self._is_other = samples > self.told or (is_short and self._was_short)
        self._was_short = is_short
        if self._is_other:
            self.usual = samples
        return self._is_other

    def end_window(self, samples: int, batches: int) -> None:
        """Take down a window, of so many samples in so many micro-batches."""
        if self._is_other:
            self.usual = samples / batches

    def state_dict(self) -> dict[str, Any]:
        """Give what was seen."""
        return {"usual": self.usual, "is_other": self._is_other}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, but for what was told here; a warning is given in each life."""
        if self.told is not None and state["is_other"]:
            self.usual = state["usual"]


def words_of_other(
    told: int | None,
    samples: int,
    target: int | None,
    num_members: int,
    *,
    steps: int,
    really: int,
    are_alike: bool,
) -> str:
    """Say that micro-batches are of another size than was told, and what to do.

    Args:
        told: `base_batch_size`.
        samples: In a micro-batch.
        target: `target_batch_size`.
        num_members: That make an update.
        steps: Micro-batches of each in it.
        really: Samples in it.
        are_alike: All members bring as much.
    """
    of_members = f" of {num_members} members" if num_members > 1 else ""
    if not are_alike:
        of_members = f", and what {num_members - 1} other member(s) bring"
    remedy = f"load batches of {told}"
    if target is None or samples <= target:
        remedy = f"give base_batch_size={samples}, or {remedy}"
    asked = "" if target is None else f", where target_batch_size is {target}"
    return (
        f"base_batch_size is {told}, and micro-batches are of {samples} samples: an update is of "
        f"{steps} of them{of_members}, so of {really} samples{asked}: {remedy}"
    )


def others_of(brought: Sequence[Brought], rank: int) -> float | None:
    """Give how many samples all others bring for each micro-batch of this member.

    Args:
        brought: By each member.
        rank: This one's.

    Returns:
        None where all bring as much, so that this one's size stands for all, or one said no size.
    """
    if len(set(brought)) == 1 or (samples := _samples_of(brought)) is None:
        return None
    steps, base = brought[rank]
    return samples / steps - (base or 0)


def warn_of_target(target: int | None, brought: Sequence[Brought], rank: int) -> None:
    """Tell where an update is not of `target_batch_size`, which is rounded up to whole micro-batches."""
    if target is None or (made := _samples_of(brought)) in {target, None}:
        return
    steps, base = brought[rank]
    others = f" of {len(brought)} members"
    if len(set(brought)) > 1:
        others = f" of member {rank}, and what {len(brought) - 1} other member(s) bring"
    log.warn(
        f"target_batch_size is {target}, and an update is of {made} samples: {steps} micro-batches of {base}"
        f"{others}"
    )


def _samples_of(brought: Sequence[Brought]) -> int | None:
    """Give the samples in an update; None where a member said no size."""
    each = [steps * base for steps, base in brought if base is not None]
    return sum(each) if len(each) == len(brought) else None
