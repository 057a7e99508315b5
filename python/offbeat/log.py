"""What Offbeat tells the user: by `logging` where that is set up, else on stderr.

Rust's events become records of `logging`, on a thread that lives while something is open. What an object had
to log is logged when its close returns: `log_what_waits` sees to that.
"""

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable

__all__ = [
    "LOGGER",
    "announce",
    "debug",
    "forget_after_fork",
    "info",
    "keep_logging",
    "log_what_waits",
    "warn",
]

LOGGER = logging.getLogger("offbeat")
INTERVAL_S = 0.2
"""How often the log's thread looks whether it is still needed; a record itself wakes it at once."""
PATIENCE_S = 5.0
"""How long one waits for another thread that is logging: what its handler waits for may be this one."""

_lock = threading.Lock()
_thread: threading.Thread | None = None
_logging = threading.RLock()  # a handler may close something, and so log what else there is
_following = threading.RLock()  # a level that was read before another was set is not to come after it
_taken: deque[tuple[int, str, str]] = deque()  # records that are to be logged by who has `_logging`
_num_logged = 0
_waited_for = -1  # the record, by its number, for whose handler somebody has waited in vain


def announce(message: str) -> None:
    """Tell the user something that should be seen: to `logging` where that is configured, else to stderr."""
    if LOGGER.hasHandlers():
        LOGGER.info(message, stacklevel=2)
    else:
        # The line's end in the same write: processes that share a stderr would write between the two.
        print(f"{message}\n", end="", file=sys.stderr, flush=True)  # noqa: T201  that is its purpose


def debug(message: str, *values: object, exc_info: bool = False) -> None:
    """Say what helps to find out why something went as it did; formatted as `logging` does it."""
    LOGGER.debug(message, *values, exc_info=exc_info, stacklevel=2)


def info(message: str, *values: object) -> None:
    """Say what went as it should, to whom `logging` is configured for; formatted likewise."""
    LOGGER.info(message, *values, stacklevel=2)


def warn(message: str, *values: object, exc_info: bool = False) -> None:
    """Warn, formatted likewise; on a bare terminal the line says from whom it is."""
    text = _prefix() + message
    LOGGER.warning(text, *values, exc_info=exc_info, stacklevel=2)


def _prefix() -> str:
    """Begin a line where nobody has set `logging` up, whose last resort prints the bare message."""
    return "" if LOGGER.hasHandlers() else "offbeat: "


def keep_logging(is_needed: Callable[[], bool]) -> None:
    """Log what Rust has to say as it comes, on a thread of its own.

    Args:
        is_needed: Tells whether anything is left that may have something to say; asked now and then, and the
            thread ends when not. What made it true is to be in place before this is called, and it is the
            same one in each call: a thread that is there goes by what it was begun with.
    """
    global _thread  # noqa: PLW0603  there is one process
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_run, args=(is_needed,), name="offbeat-log")
            _thread.start()
    _follow_level()  # a thread that was there before looks only now and then


def _run(is_needed: Callable[[], bool]) -> None:
    # Not a daemon, which would be killed inside the extension: it ends by itself with the last object or with
    # the main thread, whichever is first.
    global _thread  # noqa: PLW0603
    from offbeat import _offbeat

    main = threading.main_thread()
    while True:
        _offbeat.wait_for_log_records(INTERVAL_S)
        _log_waiting(PATIENCE_S)
        with _lock:
            is_at_end = not is_needed() or not main.is_alive()
            if is_at_end:
                _thread = None
        if is_at_end:
            # What somebody has left who closed the last, and would wait no longer for a handler.
            _log_waiting(PATIENCE_S)
            return


def _follow_level() -> None:
    """Let Rust make the records that `logging` wants now, and no others."""
    from offbeat import _offbeat

    with _following:
        _offbeat.set_log_level(min(LOGGER.getEffectiveLevel(), 255))


def log_what_waits() -> None:
    """Log what Rust has to say, now; after a handler that keeps another thread for `PATIENCE_S`, later."""
    _log_waiting(0.0 if _waited_for == _num_logged else PATIENCE_S)


def _log_waiting(patience_s: float) -> None:
    """Log what Rust has to say, once another thread that is at it has logged what it took."""
    global _waited_for  # noqa: PLW0603  there is one process
    lock, record = _logging, _num_logged
    if not lock.acquire(timeout=patience_s):
        _waited_for = record
        return
    try:
        _log_taken()
    finally:
        lock.release()


def _log_taken() -> None:
    global _num_logged  # noqa: PLW0603  there is one process
    from offbeat import _offbeat

    _follow_level()
    prefix = _prefix()
    _taken.extend(_offbeat.take_log_records())
    while _taken:  # a handler may have logged some that came after its own
        level, target, text = _taken.popleft()
        _num_logged += 1
        name = target.replace("::", ".").replace("_", ".", 1)
        try:
            logging.getLogger(name).log(level, "%s%s", prefix, text)
        except Exception:  # noqa: BLE001  a filter of the user's; handlers look after their own
            # As logging does for handlers: there is nobody here to tell, and later records are to be heard.
            if logging.raiseExceptions:
                traceback.print_exc()


def forget_after_fork() -> None:
    """Begin anew in a forked child: records are the parent's to log, and its threads are not here."""
    global _lock, _thread, _logging, _following
    _taken.clear()
    _lock, _thread = threading.Lock(), None
    _logging, _following = threading.RLock(), threading.RLock()
