"""The session and the module together: what goes out, what comes in, and what is known after a failure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from offbeat import log
from offbeat.errors import ConfigError, NonFiniteError, StateError, UnsupportedTensorError
from offbeat.module import Binding, Description
from offbeat.receipt import Receipt

if TYPE_CHECKING:
    from offbeat._offbeat import Session

__all__ = ["UNSENT", "Link"]

#: What `push_pull` raises before a byte has left, so that it is as if it had not been called: for what is
#: not finite, cannot be read or is too much, and where another thread is in a call. (What the server says to
#: a push is a receipt, or the end of the session.)
UNSENT = (ConfigError, NonFiniteError, StateError, UnsupportedTensorError)


class Link:
    """Moves one module's tensors to and from one server.

    Attributes:
        session: The connection.
        binding: The module's tensors.
        version: The model's version, as last heard. Other threads may read it; the session's they may not
            while a call is under way.
    """

    def __init__(self, session: "Session", binding: Binding, *, in_flight: int) -> None:
        """With two pushes in flight, pulls land in spare memory, from which the module is set."""
        self.session = session
        self.binding = binding
        self.version = session.version
        self._in_flight = in_flight
        self._num_unsettled = 0  # pushes that were sent and not answered
        self._broken_off = False  # a call was, so that the session may have more in flight than is known here
        self._astray = False  # its end could not be met
        self._unsure = False  # and the module may hold what no pull has brought
        self._orphans: list[Receipt] = []
        self._has_told_of_corrupt = False
        if in_flight > 1:
            binding.use_spares()

    @property
    def num_unsettled(self) -> int:
        """Pushes in flight, whose receipts `push_pull` and `settle` are still to give."""
        return 0 if self._broken_off else self._num_unsettled

    def pull(self) -> None:
        """Bring the newest model into the module."""
        self.binding.refresh()
        self._pull()

    def replace(self, since: tuple[int, int] | None) -> bool:
        """Make the module's values the server's, if its model is still that of (term, version); pull that.

        Args:
            since: None: if it is what the server's owner gave it, and nobody has trained it.

        Returns:
            Whether they are.

        Raises:
            NonFiniteError: If a parameter is NaN or infinite; the server's stay, and nothing is pulled.
        """
        self.binding.refresh()
        own = Description(self.session.wait_for_model(), [slot.tensor for slot in self.binding.slots])
        is_taken = self.session.replace(
            own.table, [(array, array.ctypes.data, array.nbytes) for array in own.arrays()], since
        )
        with self._in_order():
            self._fetch(incremental=False)
        return is_taken

    def push_pull(self, values: Sequence[torch.Tensor | None], samples: int) -> Receipt | None:
        """Push one tensor or None per slot and bring the model that answers into the module.

        Nobody reads the tensors any more when it has returned, answered or not: what is sent has left, and of
        a call that broke off the rest was copied.

        The binding is as of its last `refresh`, which comes after the last write to the module.

        Returns:
            The receipt of this push; with two in flight, of the push before it, None for the first.

        Raises:
            UNSENT: If it was not sent; the module is as it was, but for what was corrupt in its buffers, and
                what is in flight stays so.
        """
        binding = self.binding
        memories, corrupt = binding.without_corrupt(binding.memories(values))
        is_written = any(slot.dirty for slot in binding.parameters)
        # What was pushed and applied comes back. What else the module's owner wrote to would stay.
        slots = zip(binding.slots, values, strict=True)
        stays = self._unsure or (is_written and any(s.dirty and v is None for s, v in slots))
        with self._in_order():
            if self._broken_off:
                self._forget()
            was_unsure = self._unsure
            self._broken_off = True
            self._unsure |= is_written
            try:
                receipt, came = self.session.push_pull(memories, samples, binding.out(), binding.filled)
            except UNSENT:
                self._broken_off, self._unsure, self._astray = False, was_unsure, False
                raise
            self._num_unsettled = self._in_flight - 1
            self._broken_off = False
            self.version = self.session.version
            binding.landed(came=came)
            answered = receipt if self._in_flight == 1 else None
            if self._unsure and (stays or answered is None or not answered.applied or answered.reason):
                self._fetch(incremental=False)
            self._unsure = False
        if corrupt is not None:
            self._tell_of_corrupt(corrupt)
        return receipt

    def settle(self) -> tuple[list[Receipt], list[Receipt]]:
        """Wait for what is in flight, and bring the model that answers it into the module.

        Returns:
            The receipts of pushes whose call was broken off, and those of what was in flight.
        """
        with self._in_order():
            if self._broken_off:
                self._forget()
            in_flight = self._num_unsettled
            self._broken_off = in_flight > 0
            receipts = self.session.flush(self.binding.out())
            self._num_unsettled = 0
            self._broken_off = False
            self.version = self.session.version
            if in_flight:
                self._unsure |= any(slot.dirty for slot in self.binding.parameters)
                self.binding.landed()
        orphans, self._orphans = self._orphans, []
        known = len(receipts) - in_flight
        return [*orphans, *receipts[:known]], receipts[known:]

    def mend(self) -> bool:
        """See that the module holds what was read, where a second Ctrl-C kept a call from it.

        Returns:
            Whether one did.
        """
        was_astray = self._astray
        if was_astray:
            self.binding.lost()
            self._astray = False
        return was_astray

    def _tell_of_corrupt(self, buffer: str) -> None:
        """Warn, once, of a NaN that no gradient shows: where each batch brings it, no buffer ever moves."""
        if self._has_told_of_corrupt:
            return
        self._has_told_of_corrupt = True
        log.warn(
            f"worker {self.session.worker_id}: a number in its buffer {buffer!r} became NaN beside finite "
            f"gradients: a push that finds this changes no buffer on the server, and all are put back "
            f"here. If NaN is a value like others there, register that buffer with persistent=False, or make "
            f'the worker with buffers="local"'
        )

    def _pull(self) -> None:
        written = self._unsure or any(slot.dirty for slot in self.binding.parameters)
        with self._in_order():
            self._fetch(incremental=self.binding.filled and not written)
            self._unsure = False

    def _fetch(self, *, incremental: bool) -> None:
        # Nobody takes the parameters of what is in flight any more; the receipts come with the next flush.
        self._broken_off = True
        self.session.pull(self.binding.out(), incremental)
        self._num_unsettled = 0
        self._broken_off = False
        self.version = self.session.version
        self.binding.landed()

    def _forget(self) -> None:
        """Let what was broken off end, whose parameters nobody takes any more."""
        self._orphans += self.session.flush(None)
        self._num_unsettled = 0
        self._broken_off = False

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Whatever breaks off in here (Ctrl-C comes at any line), the module then holds what was read."""
        self._astray = True
        try:
            yield
        except BaseException:
            self.mend()
            raise
        self._astray = False
