"""Sums over members that are processes of one machine, through memory that all of them have mapped.

Over a socket the kernel copies each byte as it is sent and as it is received, also where both ends are on one
machine, and that time is taken from training. Here each member writes what others need of its own once, and
they read it there; `benches/overlap.py` has both ways.

The process group is asked only whether all are there: so a member that is lost is noticed as in any of its
operations, and for as long waited for.
"""

import fcntl
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed

from offbeat import log
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SWITCH", "GoneError", "SharedMemory", "machine", "switch", "why_apart"]

SWITCH: Final = "OFFBEAT_SHARED_MEMORY"
"""In the environment: "0" has sums go through the process group on one machine, too, as between machines."""

LEAST: Final = 1 << 20
"""Bytes from which a sum is worth the three times that all ask whether the others are there."""

LINE: Final = 64
"""Bytes at whose multiples parts begin, so that no two members write to one line of a cache."""

PIECE: Final = 1 << 20
"""Bytes that are added up before they are put where the others see them: they are in a core's cache still."""

KINDS: Final = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
"""That are added up here; of other dtypes numpy has not all."""

ADD_SEALS: Final = 1033
SEALS: Final = 1 | 2 | 4
"""On Linux, against more seals, shrinking and growing: who has mapped what is taken away ends by SIGBUS.

By number, as a Python that was built for an old system has no names for them.
"""


def machine() -> str | None:
    """Name the machine that this process can share memory on, alike in all processes there; None: none."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):  # which some Pythons are built without
        return None
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def switch() -> str:
    """Read the environment's switch; one that is empty is as one that is not there."""
    return os.environ.get(SWITCH) or "1"


def why_apart(everybody: Sequence[tuple[str | None, str]]) -> str | None:
    """Say, alike in all members, why they do not share memory; None: they do.

    Args:
        everybody: What each member said, by rank: its `machine`, and its `switch`. Or once, what all said.

    Raises:
        ConfigError: If a member's environment has a switch that is none.
    """
    for rank, (_, said) in enumerate(everybody):
        if said not in {"0", "1"}:
            raise ConfigError(
                f"{SWITCH} is {said!r} in the environment of member {rank}: give 1, which is as if it was "
                f"not there, or 0 for sums that go through the process group also where all members are on "
                f"one machine"
            )
    machines = [name for name, _ in everybody]
    if None in machines:
        return f"on the device, or system, of {_whose(machines, None)} there is no memory to share"
    if (num := len(set(machines))) > 1:
        return f"members are on {num} machines"
    switches = [said for _, said in everybody]
    return f"{SWITCH} is 0 in the environment of {_whose(switches, '0')}" if "0" in switches else None


class GoneError(Exception):
    """A member is lost, or was waited for too long; in torch's words."""


class SharedMemory:
    """Adds up tensors over the members of a process group, all of which are on one machine.

    Each member has one segment, which the others have mapped to read it. A tensor is cut in as many chunks as
    there are members, and each adds up one of them: a reduce-scatter and an all-gather, as of a ring. So each
    chunk's sum is one member's, and is the same in all, bit for bit.

    The memory has no name in any directory: it is gone with the last process that holds it, however it ends.
    What was forked from a member after the first sum, as a loader's worker, holds it as well.
    """

    def __init__(self) -> None:
        """Begin with no memory: how much is wanted is known with the first sum."""
        self._segments: list[np.ndarray[Any, Any]] = []
        self._is_there = True

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell, alike in all members, whether tensors are to be added up here."""
        are_fit = all(tensor.dtype in KINDS for tensor in tensors)
        return self._is_there and are_fit and sum(tensor.nbytes for tensor in tensors) >= LEAST

    def add_up(self, tensors: Sequence[torch.Tensor], group: distributed.ProcessGroup) -> None:
        """Make each tensor the sum over all members, in place. Waits for them.

        Nothing is asked of torch's registry, where a group may be forgotten by now that others wait in still.

        Args:
            tensors: Contiguous, of the same shapes and dtypes in all members.
            group: The members.

        Raises:
            GoneError: If a member is lost.
        """
        rank = group.rank()
        own = [tensor.detach().view(-1).numpy() for tensor in tensors]
        if not self._has_room(sum(_room(array.nbytes) for array in own), group):
            for tensor in tensors:  # a complex one as its parts, as torch's own calls give it to a group
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                _asked(functools.partial(group.allreduce, [real]))
            return
        every = [list(_parts(segment, own)) for segment in self._segments]
        by_array = [_Shared(*one, rank) for one in zip(own, zip(*every, strict=True), strict=True)]
        _are_there(group)  # and have read the sums before, which may be where this one's parts go
        for shared in by_array:
            shared.show()
        _are_there(group)
        for shared in by_array:
            shared.reduce()
        _are_there(group)
        for shared in by_array:
            shared.gather()

    def _has_room(self, num_bytes: int, group: distributed.ProcessGroup) -> bool:
        """Have all members make segments of a size, and map one another's; if one cannot, none does."""
        if self._segments and self._segments[0].nbytes >= num_bytes:
            return True
        self._segments = []  # what is too small goes first
        self._segments = _segments(num_bytes, group)
        self._is_there = bool(self._segments)
        return self._is_there


class _Shared:
    """One array, and the part of each member's segment that is for it."""

    def __init__(
        self, own: "np.ndarray[Any, Any]", parts: "Sequence[np.ndarray[Any, Any]]", rank: int
    ) -> None:
        self._own = own
        self._part = parts[rank]
        chunks = _chunks(own.size, len(parts))
        self._chunk = chunks[rank]
        self._others = [
            (chunk, part)
            for other, (chunk, part) in enumerate(zip(chunks, parts, strict=True))
            if other != rank
        ]

    def show(self) -> None:
        """Put what others add up where they see it."""
        for chunk, _ in self._others:
            self._part[chunk] = self._own[chunk]

    def reduce(self) -> None:
        """Add up this member's chunk, and put it where the others see it."""
        import numpy as np

        # What is not finite is judged by whoever asked for the sum, in all members alike.
        with np.errstate(all="ignore"):
            for piece in _pieces(self._chunk, self._own.itemsize):
                for _, part in self._others:
                    self._own[piece] += part[piece]
                self._part[piece] = self._own[piece]

    def gather(self) -> None:
        """Take what others have added up."""
        for chunk, part in self._others:
            self._own[chunk] = part[chunk]


def _segments(num_bytes: int, group: distributed.ProcessGroup) -> list["np.ndarray[Any, Any]"]:
    """Give all members' segments by rank, or nothing, in all of them.

    Whatever goes wrong here, the others hear of it: they wait in what comes next.
    """
    token = int.from_bytes(os.urandom(6), "little")
    own: np.ndarray[Any, Any] | None = None
    parts: list[np.ndarray[Any, Any]] = []
    file, why = -1, "another member could not have it, or map it, as its log says"
    try:
        file = _made(token, num_bytes)
        own = _mapped(file, num_bytes, is_own=True)
    except Exception as error:  # noqa: BLE001
        why = f"none could be had: {error}"
    try:
        said = torch.tensor([os.getpid(), -1 if own is None else file, token], device="cpu")
        everybody = [torch.empty_like(said) for _ in range(group.size())]
        _asked(functools.partial(group.allgather, [everybody], [said]))
        places = [tuple(map(int, one.tolist())) for one in everybody]
        if own is not None and all(number >= 0 for _, number, _ in places):
            rank = group.rank()
            try:
                parts = [
                    own if other == rank else _opened(place, num_bytes) for other, place in enumerate(places)
                ]
            except Exception as error:  # noqa: BLE001
                why = f"another member's cannot be mapped: {error}"
        if not _are_there(group, is_well=bool(parts)):
            parts = []
    finally:
        if file >= 0:
            os.close(file)  # what has mapped it has a descriptor of its own
    size = f"{num_bytes / 1e6:.4g} MB a member"
    if parts:
        log.debug("sums of %d members go through this machine's memory, %s", group.size(), size)
    else:
        log.info(
            "sums go through the process group, as between machines, since members do not share memory (%s): "
            "%s; with %s=0 in the environment none is asked for",
            size, why, SWITCH,
        )  # fmt: skip
    return parts


def _made(token: int, num_bytes: int) -> int:
    """Make memory, all of it, so that a system that has not as much says so now; give its descriptor."""
    file = os.memfd_create(_name(token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, num_bytes)
        fcntl.fcntl(file, ADD_SEALS, SEALS)
    except BaseException:
        os.close(file)
        raise
    return file


def _opened(place: tuple[int, ...], num_bytes: int) -> "np.ndarray[Any, Any]":
    """Map another member's memory.

    Raises:
        OSError: If that cannot be had, or is not its: in another container a process may have its number.
    """
    pid, number, token = place
    path = f"/proc/{pid}/fd/{number}"
    _check(path, path, token)  # first: opening what is another process's pipe or device may be felt there
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(f"/proc/self/fd/{file}", path, token)
        return _mapped(file, num_bytes, is_own=False)
    finally:
        os.close(file)


def _check(link: str, path: str, token: int) -> None:
    """Look whether a descriptor is of the memory of a token.

    Raises:
        OSError: If it is not, or nobody has such a descriptor.
    """
    if not str(Path(link).readlink()).startswith(f"/memfd:{_name(token)}"):
        raise OSError(f"{path} is not its memory, as where it is in another container")


def _mapped(file: int, num_bytes: int, *, is_own: bool) -> "np.ndarray[Any, Any]":
    """Map memory, as one's own or to read it; what maps it is what holds it."""
    import numpy as np

    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_own else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_own else 0)  # all of it is its member's to write
    memory = mmap.mmap(file, num_bytes, flags=flags, prot=protection)
    return np.frombuffer(memory, dtype=np.uint8)  # which holds the memory


def _whose(values: Sequence[object], wanted: object) -> str:
    """Name the members that said something, as people do."""
    ranks = [rank for rank, value in enumerate(values) if value == wanted]
    if len(ranks) == len(values):
        return "all members"
    return f"member{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _name(token: int) -> str:
    return f"offbeat-{token:012x}"


def _are_there(group: distributed.ProcessGroup, *, is_well: bool = True) -> bool:
    """Wait until all members have come to here, and tell whether all are well.

    Raises:
        GoneError: If one is lost.
    """
    flag = torch.tensor([int(is_well)], device="cpu")
    options = distributed.AllreduceOptions()
    options.reduceOp = distributed.ReduceOp.MIN
    _asked(functools.partial(group.allreduce, [flag], options))
    return bool(flag.item())


def _asked(ask: Callable[[], distributed.Work]) -> None:
    """Ask a group for something, and wait for it; its errors are told from those of this process alone.

    Raises:
        GoneError: If a member is lost.
    """
    try:
        ask().wait()
    except RuntimeError as error:
        raise GoneError(str(error)) from None


def _room(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


def _parts(
    segment: "np.ndarray[Any, Any]", like: Sequence["np.ndarray[Any, Any]"]
) -> Iterator["np.ndarray[Any, Any]"]:
    """Give the parts of a segment that are for arrays, one behind the other."""
    begin = 0
    for array in like:
        yield segment[begin : begin + array.nbytes].view(array.dtype)
        begin += _room(array.nbytes)


def _chunks(num: int, size: int) -> list[slice]:
    """Cut so many numbers in one chunk for each member; those of few numbers are empty but for the last."""
    each = num // size // LINE * LINE
    edges = [*(each * rank for rank in range(size)), num]
    return [slice(begin, end) for begin, end in pairwise(edges)]


def _pieces(chunk: slice, itemsize: int) -> Iterator[slice]:
    step = PIECE // itemsize
    for begin in range(chunk.start, chunk.stop, step):
        yield slice(begin, min(begin + step, chunk.stop))
