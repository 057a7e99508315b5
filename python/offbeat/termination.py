"""SIGTERM, as schedulers and containers send it: what is waited for stops, and the process ends well."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["stopping_on_sigterm"]


class _Terminated(SystemExit):
    """SIGTERM came while something was being waited for."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise _Terminated(0)


@contextmanager
def stopping_on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM stop what is waited for and end the process with code 0, unless it has another handler."""
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except _Terminated:
        stop()
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
