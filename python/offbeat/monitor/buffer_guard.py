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
        # Any thread may observe, and what a signal or the garbage collector calls in this one may close.
        self._lock = threading.RLock()
        self._kept = BufferSnapshot(model, are_few=True)
        self._are_at_first = True
        self._skips = Skips(scaler)
        self._trains_in = threading.get_ident()  # as far as is known
        self._is_to_mend = False  # a skip was heard of, and not mended while no forward could write

    def take_skip(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Tell whether a step that is about to be made is skipped, or one was since the last was made.

        Args:
            optimizer: The one that is about to step, if it is known.
        """
        with self._lock:
            return self._hear() or is_told_to_skip(optimizer)

    def settle(self, *, is_used: bool, is_skipped: bool) -> None:
        """Hear what becomes of the batch, before its step."""
        with self._lock:
            self._trains_in = threading.get_ident()
            if not is_used:
                self._restore()
                return
            if is_skipped:
                self._kept.put_back_broken()
            self._keep()

    def look(self) -> None:
        """Mend them where the scaler has skipped a step: in a user's loop, of which nothing else tells.

        In another thread than that which trains it writes while a forward may: what is done there next mends
        once more. Which one trains is known by the last step, and it may be another by now.
        """
        with self._lock:
            if self._hear():
                self._kept.put_back_broken()
                self._is_to_mend = self._trains_in != threading.get_ident()

    def mend(self) -> None:
        """Undo what a batch has broken of them, whose step a trainer of ours has skipped."""
        with self._lock:
            self._kept.put_back_broken()

    def keep(self) -> None:
        """Keep what they hold now, which is not of a batch: one that is dropped next is to leave these."""
        with self._lock:
            self._keep()

    # ------------------------------------------------------------------ under the lock

    def _hear(self) -> bool:
        """Tell whether there is something to mend: until that is done, whatever breaks off in between."""
        self._is_to_mend |= self._skips.take()
        return self._is_to_mend

    def _keep(self) -> None:
        self._kept.renew()
        self._are_at_first = self._is_to_mend = False

    def _restore(self) -> None:
        """Let them hold what was kept.

        What the batch assigned goes back where it is broken: a user may have assigned, too, as pruning does.
        Before any step was used no part goes back that is whole: it may have been loaded since it was kept.
        """
        self._kept.put_back_broken()
        if not self._are_at_first:
            self._kept.put_back_written()
        self._is_to_mend = False
