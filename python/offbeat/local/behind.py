"""What a member does on a thread of its own, behind training."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch

__all__ = ["LEAVING_S", "Behind", "is_behind"]

LEAVING_S = 5.0
"""Longest wait, at the end, for others to come to what is under way."""

Result = TypeVar("Result")

_here = threading.local()


def is_behind() -> bool:
    """Tell whether this is one of these threads: what waits for what they do would wait for itself."""
    return getattr(_here, "is_behind", False)


class Behind(Generic[Result]):
    """One thing at a time, which is begun, waited for and taken; or given up, and yet done to its end."""

    def __init__(self, name: str) -> None:
        """Begin with nothing under way; `name`: of threads."""
        self._name = name
        self._future: Future[Result] | None = None
        self._stream: torch.cuda.Stream | None = None  # on which what is under way was begun

    @property
    def under_way(self) -> "Future[Result] | None":
        """What ends with the newest; None: there was none since `take`."""
        return self._future

    def has_ended(self) -> bool:
        """Look whether nothing is to be waited for."""
        return self._future is None or self._future.done()

    def begin(self, do: Callable[[], Result], *, device: torch.device | None = None) -> None:
        """Do something, after what is under way still, of which nobody takes notice any more.

        Args:
            do: Does it.
            device: Where what it reads is; on CUDA it works behind what has been begun there by now.
        """
        before, future = self._future, Future[Result]()
        is_far = device is not None and device.type == "cuda"
        self._stream = stream = torch.cuda.current_stream(device) if is_far else None
        # The thread outlasts what it does a little, and is not to be the last to hold it: a process group
        # that it let go of, while Python ends, would end the process with SIGABRT.
        held = [do]

        def run() -> None:
            _here.is_behind = True
            try:
                if before is not None:
                    before.exception()
                with _on(stream):
                    result = held.pop()()
                future.set_result(result)
            except BaseException as error:  # noqa: BLE001  told where it is waited for
                future.set_exception(error)

        # A daemon: where the process ends in mid-round, it does not wait for the other members for long.
        threading.Thread(target=run, name=self._name, daemon=True).start()
        self._future = future  # not before: where no thread can be had, nobody would ever end it

    def wait(self) -> None:
        """Wait until it has ended, and raise what it raised; it is there still, to be taken.

        What breaks off the wait, as Ctrl-C does, leaves it under way: the next call waits on.
        """
        if self._future is not None:
            self._future.result()

    def take(self) -> Result:
        """Give the result of what has ended."""
        assert self._future is not None  # noqa: S101  something was begun
        result = self._future.result()
        self._future = None
        if self._stream is not None:  # on which the result may still be on its way to the device
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return result

    def end(self) -> None:
        """Wait for what nobody takes notice of any more, if there is anything."""
        if self._future is not None:
            self._future.exception()
            self._future = None

    def after(self, call: Callable[[], None]) -> None:
        """Call something once what is under way has ended, on its thread; now, where there is nothing."""
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
