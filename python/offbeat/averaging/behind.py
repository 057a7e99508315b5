"""A member's round on a thread of its own, behind training."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

import torch

from offbeat.averaging.members import Heard

__all__ = ["Behind"]


class Behind:
    """One round at a time, begun and then waited for; or given up, and done to its end all the same."""

    def __init__(self) -> None:
        """Begin with nothing under way."""
        self._future: Future[Heard] | None = None
        self._stream: torch.cuda.Stream | None = None  # on which the round under way was begun

    @property
    def is_begun(self) -> bool:
        """Whether a round was begun that nobody has waited for yet."""
        return self._future is not None

    def is_there(self) -> bool:
        """Look whether the thread has ended."""
        return self._future is None or self._future.done()

    def begin(self, round_of: Callable[[], Heard], device: torch.device) -> None:
        """Do a round, after one under way of which nobody takes notice any more.

        Args:
            round_of: Does it.
            device: Where what it reads is; on CUDA it works behind what has been begun there by now.
        """
        before, future = self._future, Future[Heard]()
        self._stream = stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def do() -> None:
            try:
                if before is not None:
                    before.exception()
                with _on(stream):
                    heard = round_of()
                future.set_result(heard)
            except BaseException as error:  # noqa: BLE001  told where the round is waited for
                future.set_exception(error)

        # A daemon: where the process ends in mid-round, it does not wait for the other members.
        threading.Thread(target=do, name="offbeat-averaging", daemon=True).start()
        self._future = future  # not before: where no thread can be had, nobody would ever end it

    def finish(self) -> Heard:
        """Wait for the round that was begun, and give what it heard, or raise what it raised.

        What breaks off the wait, as Ctrl-C does, leaves it under way: the next call waits on.
        """
        assert self._future is not None  # noqa: S101  something was begun
        heard = self._future.result()
        self._future = None
        if self._stream is not None:  # on which what was heard may still be on its way to the device
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return heard

    def end(self) -> None:
        """Wait for a round of which nobody takes notice any more, if there is one."""
        if self._future is not None:
            self._future.exception()
            self._future = None

    def after(self, call: Callable[[], None]) -> None:
        """Call something once the round under way has ended, on its thread; now, where there is none."""
        if self._future is None:
            call()
        else:
            self._future.add_done_callback(lambda _: call())


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    """Have a thread do its work on a device behind what its maker has begun there, and in that one's memory.

    A thread begins with the first device's default stream, which waits for no other: it would read what has
    not been written yet.
    """
    return nullcontext() if stream is None else torch.cuda.stream(stream)
