"""What of Offbeat is alive in this process, and what the process's own doings mean for it.

- Exit: what is open says goodbye, so that the other side hears "left" and not "lost".
- Fork: always allowed. The child closes what it inherited without a word; the objects are not for it.
- Log: Rust's events become records of `logging`, on a thread that lives while something is open.
- Copies: of a live object there are none.

Nothing happens at import: the first object that registers sets it up.
"""

import atexit
import logging
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, NoReturn, SupportsIndex

__all__ = ["Live", "announce", "at_end", "cause_of", "failure_in", "register", "release", "warn"]

LOGGER = logging.getLogger("offbeat")
MAX_CAUSE_CHARS = 1000
PUMP_INTERVAL_S = 0.2
"""How often the log's thread looks whether it is still needed; a record itself wakes it at once."""
LOG_PATIENCE_S = 5.0
"""How long one waits for another thread that is logging: what its handler waits for may be this one."""


class Live:
    """Something with sockets: it cannot be copied or pickled, and closes when the process ends."""

    _instead: ClassVar[str]
    """What to do instead of copying or pickling it."""

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refuse copy, deepcopy and pickle alike."""
        raise TypeError(f"{type(self).__name__} objects cannot be copied or pickled: {self._instead}")

    def _at_exit(self, failure: BaseException | None) -> None:
        """Close, as the process ends, by an exception perhaps."""
        raise NotImplementedError


_lock = threading.Lock()
_logging = threading.RLock()  # a handler may close something, and so log what else there is
_following = threading.RLock()  # a level that was read before another was set is not to come after it
_taken: deque[tuple[int, str, str]] = deque()  # records that are to be logged by who has that lock
_num_logged = 0
_waited_for = -1  # the record, by its number, for whose handler somebody has waited in vain
_live: weakref.WeakSet[Live] = weakref.WeakSet()
_at_end: list[Callable[[BaseException | None], None]] = []
_pump: threading.Thread | None = None
_hooked = False
_hooked_into_multiprocessing = False


def register(thing: Live) -> None:
    """From now on look after an object that has been opened."""
    global _pump  # noqa: PLW0603  there is one process
    with _lock:
        _hook()
        _live.add(thing)
        if _pump is None:
            _pump = threading.Thread(target=_run_pump, name="offbeat-log")
            _pump.start()
    _follow_level()  # a thread that was there before looks only now and then
    _hook_multiprocessing()


def at_end(call: Callable[[BaseException | None], None]) -> None:
    """Have a function called as the process ends, once, with the exception by which it does, perhaps."""
    if call in _at_end:
        return
    with _lock:
        _hook()
        _at_end.append(call)
    _hook_multiprocessing()


def _hook() -> None:
    global _hooked  # noqa: PLW0603  there is one process
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_say_goodbye)


def release(thing: Live) -> None:
    """Look no longer after an object: it is closed.

    What it had to log is logged when this returns; or after a handler that keeps another thread for longer
    than `LOG_PATIENCE_S`.
    """
    _live.discard(thing)
    _log_waiting(0.0 if _waited_for == _num_logged else LOG_PATIENCE_S)


def announce(message: str) -> None:
    """Tell the user something that should be seen: to `logging` where that is configured, else to stderr."""
    if LOGGER.hasHandlers():
        LOGGER.info(message)
    else:
        # The line's end in the same write: processes that share a stderr would write between the two.
        print(f"{message}\n", end="", file=sys.stderr, flush=True)  # noqa: T201  that is its purpose


def warn(message: str) -> None:
    """Warn through `logging`; on a bare terminal the line says from whom it is."""
    LOGGER.warning("%s%s", _prefix(), message)


def _prefix() -> str:
    """Begin a line where nobody has set `logging` up, whose last resort prints the bare message."""
    return "" if LOGGER.hasHandlers() else "offbeat: "


def _run_pump() -> None:
    # Not a daemon, which would be killed inside the extension: it ends by itself with the last object or with
    # the main thread, whichever is first.
    global _pump  # noqa: PLW0603
    from offbeat import _offbeat

    main = threading.main_thread()
    while True:
        _offbeat.wait_for_log_records(PUMP_INTERVAL_S)
        _log_waiting(LOG_PATIENCE_S)
        with _lock:
            is_at_end = not _live or not main.is_alive()
            if is_at_end:
                _pump = None
        if is_at_end:
            # What somebody has left who closed the last, and would wait no longer for a handler.
            _log_waiting(LOG_PATIENCE_S)
            return


def _follow_level() -> None:
    """Let Rust make the records that `logging` wants now, and no others."""
    from offbeat import _offbeat

    with _following:
        _offbeat.set_log_level(min(LOGGER.getEffectiveLevel(), 255))


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


def _say_goodbye() -> None:
    failure = _failure()
    interrupt: BaseException | None = None
    for call in _at_end:
        call(failure)
    for thing in list(_live):
        # Another thread may be in a call of it, say, or a second Ctrl-C come: the others are to be heard.
        try:
            thing._at_exit(failure)  # noqa: SLF001  for this module alone
        except Exception:  # noqa: BLE001, S112  there is nobody left to tell
            continue
        except BaseException as error:  # noqa: BLE001  raised below
            interrupt = interrupt or error
            with suppress(BaseException):
                thing._at_exit(failure)  # noqa: SLF001  it may have come before a word was said
    if interrupt is not None:
        raise interrupt


def _failure() -> BaseException | None:
    """What the process ends by: an exception on its way, or one that the interpreter has printed.

    A SystemExit that has reached the top is neither: Python forgets it, code and all, before it gets here.
    """
    on_its_way = sys.exc_info()[1]
    return getattr(sys, "last_value", None) if on_its_way is None else failure_in(on_its_way)


def failure_in(error: BaseException | None) -> BaseException | None:
    """Give what something ends by, but for an end without failure: `sys.exit()`, or `sys.exit(0)`."""
    return None if isinstance(error, SystemExit) and error.code in (None, 0) else error


def cause_of(error: BaseException) -> str:
    """Word an exception as the server shows it: who looks there does not see this process's output."""
    try:
        line = str(error).strip().partition("\n")[0][:MAX_CAUSE_CHARS]
    except Exception:  # noqa: BLE001  a `__str__` of the user's: no reason not to leave
        line = ""
    # An undecodable file name has surrogates in it, which no wire takes.
    text = line.encode(errors="replace").decode()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _hook_multiprocessing() -> None:
    """A forked `multiprocessing.Process` ends without `atexit`, by finalizers of its own."""
    global _hooked_into_multiprocessing  # noqa: PLW0603
    util = sys.modules.get("multiprocessing.util")
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", None)
    if util is None or parent is None or parent() is None:
        return  # not one of these
    if not _hooked_into_multiprocessing:
        _hooked_into_multiprocessing = True
        util.Finalize(None, _say_goodbye, exitpriority=100)


def _after_fork() -> None:
    global _lock, _logging, _following, _live, _pump, _hooked_into_multiprocessing  # noqa: PLW0603
    from offbeat import _offbeat

    _at_end.clear()  # what it is about is the parent's
    _taken.clear()
    _offbeat.forget_after_fork()
    _lock, _logging, _following = threading.Lock(), threading.RLock(), threading.RLock()
    _live, _pump = weakref.WeakSet(), None
    _hooked_into_multiprocessing = False  # the child's finalizers begin empty
