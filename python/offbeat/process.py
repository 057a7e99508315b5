"""What of Offbeat is alive in this process, and what the process's own doings mean for it.

- Exit: what is open says goodbye, so that the other side hears "left" and not "lost".
- Fork: always allowed. The child closes what it inherited without a word; the objects are not for it.
- Log: `offbeat.log` keeps its thread while something is open, and logs what that had to say as it closes.
- Copies: of a live object there are none.

Nothing happens at import: the first object that registers sets it up.
"""

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ClassVar, NoReturn, SupportsIndex

from offbeat import log
from offbeat.errors import ForkedError

__all__ = [
    "Live",
    "Origin",
    "at_end",
    "at_end_of_forked",
    "cause_of",
    "failure_in",
    "note_exit",
    "register",
    "release",
]

MAX_CAUSE_CHARS = 1000


class Live:
    """Something with sockets: it cannot be copied or pickled, and closes when the process ends."""

    _instead: ClassVar[str]
    """What to do instead of copying or pickling it."""
    _exit_turn: ClassVar[int] = 0
    """When it closes as the process ends: after all with a smaller one, which count on it."""

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refuse copy, deepcopy and pickle alike."""
        raise TypeError(f"{type(self).__name__} objects cannot be copied or pickled: {self._instead}")

    def _at_exit(self, failure: BaseException | None) -> None:
        """Close, as the process ends, by an exception perhaps."""
        raise NotImplementedError


class Origin:
    """The process in which something was made that has threads, or others who count on it: use it there."""

    def __init__(self, what: str) -> None:
        """Be this one; `what`: was made, for people."""
        self._what, self._pid = what, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is it, and no child that was forked since."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """See that this is it.

        Raises:
            ForkedError: If it is a child.
        """
        if not self.is_here:
            raise ForkedError(
                f"this {self._what} was made before a fork and is used in the child: make it after the fork, "
                f'or start processes with the "spawn" method'
            )


_lock = threading.Lock()
_live: weakref.WeakSet[Live] = weakref.WeakSet()
_ends_by: SystemExit | None = None
_at_end: list[Callable[[BaseException | None], None]] = []
_hooked = False
_finalizers: set[Callable[[], None]] = set()


def register(thing: Live) -> None:
    """From now on look after an object that has been opened."""
    with _lock:
        _hook()
        _live.add(thing)
    log.keep_logging(_is_something_live)
    at_end_of_forked(_say_goodbye)


def _is_something_live() -> bool:
    with _lock:
        return bool(_live)


def at_end(call: Callable[[BaseException | None], None]) -> None:
    """Have a function called as the process ends, once, with the exception by which it does, perhaps."""
    if call in _at_end:
        return
    with _lock:
        _hook()
        _at_end.append(call)
    at_end_of_forked(_say_goodbye)


def note_exit(leaving: SystemExit | None) -> None:
    """Know, as the process ends, of a `SystemExit` that is raised now, which Python has forgotten by then.

    Args:
        leaving: None: the one before was caught, and what it has ended is done after all.
    """
    global _ends_by  # noqa: PLW0603  there is one process
    _ends_by = leaving


def _hook() -> None:
    global _hooked  # noqa: PLW0603  there is one process
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_say_goodbye)


def release(thing: Live) -> None:
    """Look no longer after an object: it is closed.

    What it had to log is logged when this returns; or after a handler that keeps another thread for longer
    than `log.PATIENCE_S`.
    """
    _live.discard(thing)
    log.log_what_waits()


def _say_goodbye() -> None:
    failure = _failure()
    interrupt: BaseException | None = None
    with _lock:  # another thread may just open something
        live = list(_live)
    live.sort(key=lambda thing: thing._exit_turn)  # noqa: SLF001  for this module alone
    endings: list[Callable[[BaseException | None], None]] = [
        *_at_end,
        *(partial(_leave, one) for one in live),
    ]
    for end in endings:
        # Another thread may be at it, say, or a second Ctrl-C come: the others are to be heard.
        try:
            end(failure)
        except Exception:  # noqa: BLE001, S112  there is nobody left to tell
            continue
        except BaseException as error:  # noqa: BLE001  raised below
            interrupt = interrupt or error
            with suppress(BaseException):
                end(failure)  # it may have come before a word was said
    if interrupt is not None:
        raise interrupt


def _leave(thing: Live, failure: BaseException | None) -> None:
    thing._at_exit(failure)  # noqa: SLF001  for this module alone


def _failure() -> BaseException | None:
    """What the process ends by: an exception on its way, or one that the interpreter has printed.

    A SystemExit that has reached the top is neither: Python forgets it, code and all, before it gets here.
    One of our own is known all the same.
    """
    on_its_way = sys.exc_info()[1]
    return getattr(sys, "last_value", _ends_by) if on_its_way is None else failure_in(on_its_way)


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


def at_end_of_forked(call: Callable[[], None], *, turn: int = 0) -> None:
    """Have a `multiprocessing.Process`, which may end without `atexit`, call something as it ends.

    Args:
        call: What; Ctrl-C out of it keeps what comes after it from being called.
        turn: After all with a smaller one; 0 is the goodbye of what is open.
    """
    util = sys.modules.get("multiprocessing.util")
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", None)
    if util is None or parent is None or parent() is None:
        return  # not one of these
    if call not in _finalizers:
        with _lock:
            _hook()  # which forgets it in a child of this one
        _finalizers.add(call)
        util.Finalize(None, call, exitpriority=100 - turn)


def _after_fork() -> None:
    global _lock, _live, _ends_by
    from offbeat import _offbeat

    _at_end.clear()  # what it is about is the parent's
    _offbeat.forget_after_fork()
    log.forget_after_fork()
    _lock, _live, _ends_by = threading.Lock(), weakref.WeakSet(), None
    _finalizers.clear()  # the child's begin empty
