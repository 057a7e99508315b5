"""Sums over the members of a process group, added up on other threads while this one goes on."""

import atexit
import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch
from torch import distributed

from offbeat import log, process
from offbeat.errors import ClosedError, ConnectionLostError, OffbeatError
from offbeat.local.behind import LEAVING_S, Behind, is_behind
from offbeat.local.group import carries, destroy, gathered, is_alike, is_gloo, own_group, timeout_of
from offbeat.local.shared_memory import GoneError, SharedMemory, machine, switch, why_apart
from offbeat.telling import Waits

__all__ = ["Sums", "reduce"]

TO_FLUSH = "call flush() at the end of its data, as train() of a trainer does"
"""What each member is to do, where sums are of what it trains on, as people are told who wait for another."""

HURRY_S = 0.5
"""Longest wait, at the end, where it was broken off, as by Ctrl-C."""
LOOK_S = 0.05
"""From one look whether what is under way in a closed group has ended to the next."""

_open: "weakref.WeakSet[Sums]" = weakref.WeakSet()
"""Of this process. A group that Python's end finds alive still has threads, which end the process with it."""
_closing: "set[_Closing]" = set()
"""Groups of this process that were closed while something was under way in them, which is still."""


class Sums:
    """All-reduces, of which one set may be under way at a time.

    They go over the group, on its own threads. Between members that are all on one machine what is large goes
    through its memory instead, on a thread of ours; see `SharedMemory`.

    A member that is gone is an error here, and in each call from then on: what other members have added to
    the sums under way is lost, and torch's group cannot go on.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        *,
        of: str,
        each: str = TO_FLUSH,
        memory: SharedMemory | None = None,
    ) -> None:
        """Begin with nothing under way.

        Args:
            group: One's own, which is destroyed at the end.
            of: What is added up, for people.
            each: What each member is to do, so that nobody waits in vain, for them, too.
            memory: That all members have, as all know.
        """
        self._pid = os.getpid()
        self._of, self._each = of, each
        self._memory = memory
        self._behind = Behind[str | None]("offbeat-sums")
        self._threads: list[Behind[Any]] = [self._behind]
        self._works: list[distributed.Work] = []
        self._started = weakref.WeakSet[distributed.Work]()  # of all, for as long as somebody holds them
        self._collective = weakref.WeakSet[distributed.Work]()
        self._lost: str | None = None
        self._waits = Waits()
        self._timeout_s = timeout_of(group).total_seconds()  # now: Python 3.13.0 falls over that at its end
        self._is_gloo = is_gloo(group)
        self._group: distributed.ProcessGroup | None = group
        _open.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # last of all, so that it comes before the default group is left
        process.at_end_of_forked(_close_all, turn=1)

    @classmethod
    def among(
        cls,
        group: distributed.ProcessGroup,
        *,
        of: str,
        each: str = TO_FLUSH,
        more: timedelta = timedelta(0),
        backend: str | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """Make a group of the same members for it; see `own_group`. All call this in the same order.

        Args:
            group: The members.
            of: As in `__init__`, as is `each`.
            each: What each member is to do.
            more: How much longer than in the group an operation waits for others.
            backend: Another one than the group's.
            device: Where this member has what is added up, if much is; all members give one, or none does.

        Raises:
            ConnectionLostError: If a member is lost.
            ConfigError: If a member's environment has a switch of shared memory that is none; in all members.
        """
        try:
            most_s = (timeout_of(group) + more).total_seconds()
            with Waits().telling(lambda waited_s: _waiting(group, of, each, waited_s, most_s)):
                own = own_group(group, more=more, backend=backend)
                try:
                    memory = None if device is None else _memory_of(own, device)
                except BaseException:
                    destroy(own)
                    raise
                return cls(own, of=of, each=each, memory=memory)
        except RuntimeError as error:  # torch's store has waited for a member that did not come
            raise ConnectionLostError(_lost(of, each, error)) from None

    @property
    def group(self) -> distributed.ProcessGroup:
        """The members.

        Raises:
            ConnectionLostError: If a member is lost.
            ClosedError: If this is closed.
        """
        if self._lost is not None:
            raise ConnectionLostError(self._lost)
        if self._group is None:
            raise ClosedError("it was closed, and takes part no more: make a new one")
        return self._group

    def close(self) -> None:
        """Add up no more, and destroy the group.

        What is under way is taken no notice of here, and others may still come to it: until they do, or the
        group's time for it is over, the connections to them stay, on a thread. In a child that was forked,
        which has none of the group's threads, nothing is destroyed.
        """
        closing = self._end()
        if closing is not None and not is_behind():  # as where Python's collector closes it there
            closing.wait(LEAVING_S)  # what is under way goes on after that

    def __del__(self) -> None:
        """Close it: nobody holds it any more."""
        self.close()

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start to add up tensors, in place; they are nobody's until `finish`.

        Those of before are made first, also if nobody takes notice of them any more.

        Raises:
            ConnectionLostError: If a member is lost.
            ClosedError: If this is closed.
        """
        every, memory = list(tensors), self._memory

        def begin(group: distributed.ProcessGroup) -> list[distributed.Work]:
            if memory is None or not memory.takes(every):
                return [reduce(tensor, group) for tensor in every]
            through = functools.partial(_through, memory, every, group, self._of, self._each)
            try:
                self._behind.begin(through)
            except RuntimeError:  # no thread is to be had: it is done here, as the others count on it
                self._lost = through()
            return []

        self._works = self.start(begin)

    def is_there(self) -> bool:
        """Tell whether the sums are, without waiting; of what has failed `finish` tells."""
        return all(work.is_completed() for work in self._works) and self._behind.has_ended()

    def finish(self) -> None:
        """Wait until the tensors that were given are the sums over all members.

        What breaks off the wait, as Ctrl-C does, leaves them under way: the next call waits on.

        Raises:
            ConnectionLostError: If a member is lost.
            ClosedError: If this is closed.
        """
        _ = self.group  # once it is closed there is nothing to wait for, and no sum either
        with self.telling(is_there=self.is_there()):
            self.wait(self._works)
            self._wait_behind()
        self._works = []

    def start(
        self,
        begin: Callable[[distributed.ProcessGroup], list[distributed.Work]],
        *,
        are_between_two: bool = False,
    ) -> list[distributed.Work]:
        """Start something else over the same group, to `wait` for; it comes after sums that are under way.

        Args:
            begin: Starts it without waiting.
            are_between_two: They are messages, of which torch tells that they have come to nobody but who
                waits for them.

        Raises:
            ConnectionLostError: If a member is lost.
            ClosedError: If this is closed.
        """
        group = self.group
        try:
            with self.telling(is_there=self._behind.has_ended()):
                self._wait_behind()
            works = begin(group)
        except OffbeatError:  # which says itself what is wrong
            raise
        except RuntimeError as error:
            self._lose(error)
        except BaseException as error:  # as Ctrl-C: other members wait for all of them, or none
            self._lost = f"the sums of {self._of} were broken off while they began ({type(error).__name__})"
            raise
        self._started.update(works)
        if self._is_gloo and not are_between_two:  # NCCL's stay with torch, and asking for them may take long
            self._collective.update(works)
        return works

    @contextmanager
    def together(self) -> Iterator[distributed.ProcessGroup]:
        """Give the group for calls in which all members wait for one another; one that is gone is told of.

        Who breaks them off, as by Ctrl-C, takes part no more: the others are in them still, and would be
        given what comes next.

        Raises:
            ConnectionLostError: If a member is lost.
            ClosedError: If this is closed.
        """
        try:
            group = self.group
            with self.telling():
                self._wait_behind()
                yield group
        except OffbeatError:  # some are RuntimeErrors, too, and say themselves what is wrong
            raise
        except RuntimeError as error:
            self._lose(error)
        except BaseException as error:
            if not isinstance(error, Exception):
                name = type(error).__name__
                self._lost = (
                    f"the sums of {self._of} were broken off here ({name}), and others may wait in them: "
                    f"close this in all members, and make it anew (a trainer goes on by close(), and train())"
                )
            raise

    def wait(self, works: Sequence[distributed.Work]) -> None:
        """Wait for what was started, also on another thread; again as well, but for messages between two.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        if self._lost is not None:
            raise ConnectionLostError(self._lost)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._lose(error)

    def waits_on(self, thread: Behind[Any]) -> None:
        """Keep the group until a thread that calls `wait` has ended, also where this is closed before."""
        self._threads.append(thread)

    @contextmanager
    def telling(self, *, is_there: bool = False) -> Iterator[None]:
        """Say for whom this waits, if it does for long.

        Args:
            is_there: What is waited for is there, and no watch is kept.
        """
        group, most_s = self._group, self._timeout_s
        if is_there or group is None:
            yield
            return
        with self._waits.telling(lambda waited_s: _waiting(group, self._of, self._each, waited_s, most_s)):
            yield

    def _wait_behind(self) -> None:
        """Wait for what goes through memory, also of sums that nobody takes notice of any more.

        It asks the group, too, and all members have to ask it for the same in the same order.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        if self._lost is None and (under_way := self._behind.under_way) is not None:
            self._lost = under_way.result()
            self._behind.take()
        if self._lost is not None:
            raise ConnectionLostError(self._lost)

    def _end(self) -> "_Closing | None":
        """Close it, and wait for nothing; give what is to be waited for."""
        held = [] if self._group is None else [self._group]
        works, self._works, self._group = list(self._started), [], None
        self._memory = None  # which goes with what is under way
        if self._pid != os.getpid():
            _keep(*held, *works)
        elif held:
            under_way = [future for one in self._threads if (future := one.under_way) is not None]
            closing = _Closing(
                held,
                works,
                collective=list(self._collective),
                under_way=under_way,
                most_s=self._timeout_s,
            )
            try:
                destroy(held[0])
            finally:
                closing.begin()
            return closing
        return None

    def _lose(self, error: RuntimeError) -> NoReturn:
        self._lost = _lost(self._of, self._each, error)
        raise ConnectionLostError(self._lost) from None  # whose cause is in the text


def _memory_of(group: distributed.ProcessGroup, device: torch.device) -> SharedMemory | None:
    """Have members tell one another what machine each can share memory on; give some, where all can on one.

    Where they cannot, the log says why.

    Raises:
        ConfigError: If a member's environment has a switch that is none.
    """
    if not carries(group, "cpu"):
        return None
    cpu = torch.device("cpu")
    here = (machine() if device.type == "cpu" else None, switch())
    everybody = [here] if is_alike(group, here, cpu) else gathered(group, here)
    if (why := why_apart(everybody)) is None:
        return SharedMemory()
    log.info("sums go through the process group, as between machines: %s", why)
    return None


def _through(
    memory: SharedMemory, tensors: Sequence[torch.Tensor], group: distributed.ProcessGroup, of: str, each: str
) -> str | None:
    """Add up through memory; tell what went wrong in words, for an error would hold all of these.

    Of what went wrong in this process alone the others hear as it closes this, or ends.
    """
    try:
        memory.add_up(tensors, group)
    except GoneError as error:
        return _lost(of, each, error)
    except Exception as error:  # noqa: BLE001  said where it is waited for
        return (
            f"{of} of all members could not be put together, for this one could not go on with its part "
            f"({type(error).__name__}: {error}): start all of them again"
        )
    return None


def reduce(tensor: torch.Tensor, group: distributed.ProcessGroup) -> distributed.Work:
    """Start to add up a tensor, in place."""
    work = distributed.all_reduce(tensor, group=group, async_op=True)
    assert work is not None  # noqa: S101  this process is a member
    return work


def _lost(of: str, each: str, error: Exception) -> str:
    """Word that a member is lost, and what to do; last torch's cause, which begins with its own paths."""
    cause = str(error).strip().partition("\n")[0]
    if "NCCL" in cause and "invalid usage" in cause:  # which tells the reason in its own log alone
        return (
            f"{of} of all members could not be put together: nccl refuses what it is used for, as two "
            f"members on one CUDA device: start as many processes on a machine as it has devices, each with "
            f"a device of its own (device=, or CUDA_VISIBLE_DEVICES), or take 'gloo'; the cause: {cause}"
        )
    return (
        f"{of} of all members could not be put together, for one is gone or was waited for too long: start "
        f"all of them again, for torch's process groups do not outlive a member, and let each {each}; the "
        f"cause: {cause}"
    )


def _waiting(group: distributed.ProcessGroup, of: str, each: str, waited_s: float, most_s: float) -> str:
    """Word that a member waits for others, and for how long it does.

    Nothing is asked of torch's registry, where the group may be forgotten by now.
    """
    rank, size = group.rank(), group.size()
    others = f"member {1 - rank}" if size == 2 else f"one or more of the other {size - 1} members"  # noqa: PLR2004
    return (
        f"member {rank} of {size} has waited {waited_s:g} s for {others}, to put {of} of all members "
        f"together: slower, stopped, or not that far; it waits up to {most_s:g} s (the process "
        f"group's timeout), and raises ConnectionLostError then. Each has to {each}"
    )


class _Closing:
    """A group whose last reference is let go of once nothing is under way in it: torch waits for that there.

    Not there, if it can be helped: a thread that comes back from torch while Python ends, ends the process
    with SIGABRT.
    """

    def __init__(
        self,
        held: list[distributed.ProcessGroup],
        works: list[distributed.Work],
        *,
        collective: list[distributed.Work],
        under_way: Sequence[futures.Future[Any]],
        most_s: float,
    ) -> None:
        """Do nothing yet.

        Args:
            held: The group.
            works: What torch's threads do in it still.
            collective: Those among them that tell by themselves that they have ended.
            under_way: What threads of ours do.
            most_s: Longest wait for `collective`, which have failed by then.
        """
        self._held, self._works, self._collective = held, works, collective
        self._under_way, self._most_s = under_way, most_s
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._let_go, name="offbeat-closing", daemon=True)

    def begin(self) -> None:
        """Wait on a thread; where none is to be had the group stays."""
        if sys.is_finalizing():  # one that is started never begins then, and Python 3.11 waits for it
            self.keep()
            return
        _closing.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # also where Python ends, in some versions
            self.keep()

    def wait(self, timeout_s: float) -> None:
        """Wait for it; at least for what threads of ours do."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        elif self in _closing and self._pid == os.getpid():
            futures.wait(self._under_way, timeout_s)

    def keep(self) -> None:
        """Never let go of what is held still."""
        _keep(*self._held, *self._works)

    def _let_go(self) -> None:
        futures.wait(self._under_way)
        until_s, never = time.monotonic() + self._most_s, threading.Event()
        while not all(work.is_completed() for work in self._collective) and time.monotonic() < until_s:
            never.wait(LOOK_S)
        self._collective.clear()
        self._works.clear()
        self._held.clear()
        _closing.discard(self)


def _keep(*things: object) -> None:
    """Never let go of things, at Python's end neither: what they would wait for then does not come."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _close_all() -> None:
    """Close all as the process ends, whatever one of them raises; wait for all as long as for one."""
    raised: BaseException | None = None
    until_s = time.monotonic() + LEAVING_S
    for sums in list(_open):
        try:
            sums._end()  # noqa: SLF001  of this module
        except BaseException as error:  # noqa: BLE001  raised below
            raised = raised or error
    for closing in list(_closing):
        if raised is not None:  # as by Ctrl-C: those in which nothing is under way take no longer
            until_s = min(until_s, time.monotonic() + HURRY_S)
        try:
            closing.wait(max(0.0, until_s - time.monotonic()))
        except BaseException as error:  # noqa: BLE001  raised below
            raised = raised or error
        closing.keep()
        _closing.discard(closing)  # the end may come twice: as multiprocessing's child's, and a process's
    if raised is not None:
        raise raised
