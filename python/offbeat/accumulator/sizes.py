"""How many samples micro-batches really have, where something was said of it."""

from typing import Any

__all__ = ["Sizes"]


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
