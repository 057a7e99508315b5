"""A batch whose gradient is not used leaves nothing in the model's buffers, as in BatchNorm's averages."""

import threading
from typing import Any

import torch
from torch import nn

from offbeat.local.buffer_snapshot import BufferSnapshot
from offbeat.monitor.skips import Skips, is_told_to_skip

__all__ = ["BufferGuard"]


class BufferGuard:
    """Keeps what they hold after each step that was used.

    Of a batch that is dropped all goes back; of one whose step a GradScaler skips only what it has broken:
    the rest stays, as torch leaves it.
    """

    def __init__(self, model: nn.Module, scaler: Any) -> None:  # noqa: ANN401  torch has several classes
        """Keep what they hold before any step; the module may be loaded, or moved, before the first.

        Args:
            model: Whose.
            scaler: The GradScaler of a user's loop, if it is known.
        """
        self._kept = BufferSnapshot(model, are_few=True)
        self._are_at_first = True
        self._skips = Skips(scaler)
        self._trains_on: int | None = None  # the thread in which steps are made

    def is_skipped(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Tell whether a step that is about to be made, or one since the last was made, is skipped.

        Args:
            optimizer: The one that is about to step, if it is known.
        """
        was_skipped = self._skips.take()
        return is_told_to_skip(optimizer) or was_skipped

    def settle(self, *, is_used: bool, is_skipped: bool) -> None:
        """Hear what becomes of the batch, before its step."""
        self._trains_on = threading.get_ident()
        if not is_used:
            self._restore()
            return
        if is_skipped:
            self.mend()
        self.keep()

    def look(self) -> None:
        """Mend them where the scaler has skipped a step: in a user's loop, of which nothing else tells.

        In another thread than that which trains this does nothing: it would write while a forward does.
        """
        if self._trains_on in (None, threading.get_ident()) and self._skips.take():
            self.mend()

    def mend(self) -> None:
        """Undo what a batch has broken of them."""
        self._kept.put_back_broken()

    def keep(self) -> None:
        """Keep what they hold now: a batch that is dropped next is to leave these."""
        self._kept.renew()
        self._are_at_first = False

    def _restore(self) -> None:
        """Let them hold what was kept.

        What the batch assigned goes back where it is broken: a user may have assigned, too, as pruning does.
        Before any step was used no part goes back that is whole: it may have been loaded since it was kept.
        """
        self._kept.put_back_broken()
        if not self._are_at_first:
            self._kept.put_back_written()
