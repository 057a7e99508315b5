"""`init_distributed`: which of how many this process is, and torch's process group where one is asked for."""

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from offbeat import log
from offbeat.checks import Faults, refuse, seconds
from offbeat.errors import ConfigError, ConnectError, StateError
from offbeat.launchers import Place, find, has_agents_store, meeting_place, overlooked
from offbeat.naming import known_keywords
from offbeat.telling import LONG_S, telling

__all__ = ["BACKENDS", "init_distributed"]

BACKENDS = ("tcp", "gloo", "nccl")
"""Offbeat's own transport, and the process groups of torch that Offbeat can use."""

Store = Any
"""A `torch.distributed.Store`, which torch's own types do not tell of."""

HEARD_WITHIN_S = 5.0
"""How long rank 0 stays for the others to read in its store why there is no group."""
LOOK_S = 0.05
"""From one look whether they have to the next."""


@known_keywords
def init_distributed(
    backend: str = "tcp",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float | None = None,
) -> tuple[int, int]:
    """Tell which process of how many this one is, and join the others where the backend is torch's.

    What is given wins; else the environment says it, as torchrun, `offbeat launch`, MPI, Slurm's `srun` and
    Kubeflow set it, or plain ``RANK`` and ``WORLD_SIZE``; a process of which nobody says anything is the only
    one. A variable that is empty is as one that is not there. What was chosen, and who said so, is logged.

    With ``"tcp"``, Offbeat's own transport, nothing is opened: members meet when something is made that has
    them. With ``"gloo"`` and ``"nccl"`` torch's default process group is made, at ``MASTER_ADDR`` and
    ``MASTER_PORT``, or where the launcher says, unless there is one already; it is left when the process
    ends. With ``"nccl"`` each process of a machine gets a CUDA device of its own, by its local rank, unless
    its rank was given.

    Args:
        backend: ``"tcp"``, ``"gloo"`` or ``"nccl"``.
        rank: Which process this is, 0 to ``world_size - 1``.
        world_size: How many there are; with ``"tcp"`` a hint, for members may come and go.
        timeout_s: Seconds that torch's process group waits for others, now and in each operation. None: as
            long as torch does. With ``"tcp"``, where there is no such group, a warning says that it is for
            nothing.

    Returns:
        ``(rank, world_size)``.

    Raises:
        ConfigError: If a value cannot be used, if the environment says only half, or if ``"nccl"`` is asked
            for where torch has no CUDA device, or too few.
        StateError: If torch has a process group already that is another one than is asked for.
        ConnectError: If no process group came about: the others did not come, the port is taken, or
            processes say different world sizes. Rank 0 asks the ranks below its own world size: where one of
            these says another, all of them are told. Where one beyond them does, it alone is: they go on.

    Example:
        >>> rank, world_size = offbeat.init_distributed()
        >>> rank, world_size
        (0, 1)
    """
    faults = Faults([] if timeout_s is None else seconds(finite=True, timeout_s=timeout_s))
    if timeout_s == 0:
        faults.append("timeout_s is 0, in which nobody can be met: give more than 0 s, or None")
    if backend not in BACKENDS:
        faults.append(f"backend is {backend!r}: give one of {', '.join(map(repr, BACKENDS))}")
    elif backend != "tcp":
        faults += _of_torch(backend)
    place = faults.catch(lambda: find(os.environ, rank=rank, world_size=world_size))
    refuse(faults)
    assert place is not None  # noqa: S101  else there is a fault
    if (warning := overlooked(os.environ, place)) is not None:
        log.warn(warning)
    if backend == "tcp":
        if timeout_s is not None:
            log.warn(
                f"timeout_s is {timeout_s!r} and backend 'tcp', which makes no process group that would wait "
                f"so long: it has no effect"
            )
        log.info("this is process %d of %d, by %s", place.rank, place.world_size, place.told_by)
        return place.rank, place.world_size
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return _in_a_group(backend, place, timeout, is_given=rank is not None or world_size is not None)


def _of_torch(backend: str) -> list[str]:
    """Tell why torch cannot make a process group of a kind here."""
    import torch
    from torch import distributed

    if not distributed.is_available():
        return [f"backend is {backend!r}, and this torch has no process groups: take 'tcp'"]
    if backend == "nccl" and not torch.cuda.is_available():
        text = (
            "backend is 'nccl', and torch finds no CUDA device here: take 'tcp', or 'gloo' for torch's own "
            "process group on CPUs"
        )
        return [text]
    return []


def _in_a_group(backend: str, place: Place, timeout: timedelta | None, *, is_given: bool) -> tuple[int, int]:
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return _in_the_group_there_is(backend, place if is_given else None)
    # Functions in there keep, as a default, the group that stands as they are first imported, which else an
    # optimizer's first step does. It would outlive `destroy_process_group`, and a thread of gloo's that lets
    # go of a tensor while Python is torn down aborts the process. (For a group that there is it is too late.)
    import torch.distributed.nn.functional

    if backend == "nccl" and place.local_rank is not None:
        torch.cuda.set_device(_device_of(place.local_rank, torch.cuda.device_count()))
    if place.world_size == 1:
        store = distributed.HashStore()  # type: ignore[attr-defined]  # public, and not in its __all__
        distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        _meet(backend, place, timeout)
    atexit.register(_leave, os.getpid())
    log.info(
        "this is process %d of %d in torch's %s group, by %s",
        place.rank, place.world_size, backend, place.told_by,
    )  # fmt: skip
    return place.rank, place.world_size


def _device_of(local_rank: int, num_devices: int) -> int:
    """Choose a device for a process; where it sees one alone, its launcher has chosen.

    Raises:
        ConfigError: If there are fewer devices than processes.
    """
    if num_devices == 1:
        return 0
    if local_rank >= num_devices:
        raise ConfigError(
            f"this is process {local_rank} of its machine, counted from 0, and torch sees {num_devices} CUDA "
            f"devices there: start as many processes on a machine as it has devices, or take 'tcp' or 'gloo'"
        )
    return local_rank


def _meet(backend: str, place: Place, timeout: timedelta | None) -> None:
    from torch import distributed
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
    from torch.distributed.rendezvous import rendezvous

    host, port = meeting_place(os.environ, place)
    if host is None:
        raise ConfigError(
            f"world_size is {place.world_size}, by {place.told_by}, and nobody says where they meet: set "
            f"MASTER_ADDR (and MASTER_PORT, else {port}) to an address of rank 0's machine, the same for all"
        )
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # Of what torchrun sets torch knows more than the address: whether its agent listens there already.
    is_environs = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) == (host, str(port))
    usual = (default_pg_nccl_timeout if backend == "nccl" else None) or default_pg_timeout
    most = usual if timeout is None else timeout
    text = (
        f"process {place.rank} of {place.world_size} has waited {LONG_S:g} s at {where} for the others of "
        f"the process group, and does so up to {most.total_seconds():g} s (timeout_s): is every "
        f"rank started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
    )
    try:
        with telling(text, after_s=LONG_S):
            # Of 1: rank 0 would wait there for as many as it says, and not hear that others say otherwise.
            url = "env://" if is_environs else f"tcp://{where}"
            store, _, _ = next(rendezvous(url, place.rank, 1, timeout=most))
            store.set_timeout(most)
            _see_that_all_say_the_same(store, place, most)
            distributed.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.world_size, timeout=most
            )
    except (RuntimeError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise ConnectError(
            f"process {place.rank} of {place.world_size} did not meet the others at {where}: {cause}; "
            f"is every "
            f"rank started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, is the port free, "
            f"and does "
            f"rank 0's machine take connections there?"
        ) from error


def _see_that_all_say_the_same(store: Store, place: Place, timeout: timedelta) -> None:
    """See that all processes say that there are as many: torch would wait for ever for one that never comes.

    Rank 0 reads what each below its own world size says, and writes what it found: all that say the same as
    it wait for that, as they would for the group. It does not know of others: they find out from its number.

    Raises:
        ConnectError: If one that rank 0 asks says otherwise, in all of these; if this one says otherwise.
        RuntimeError: If one has not said it in time.
    """
    own, until_s = place.world_size, time.monotonic() + timeout.total_seconds()
    prefix = f"offbeat/init/{os.environ.get('TORCHELASTIC_RESTART_COUNT') or '0'}"

    def said(key: object) -> list[int]:
        store.wait([f"{prefix}/{key}"], timedelta(seconds=max(until_s - time.monotonic(), LOOK_S)))
        return [int(word) for word in store.get(f"{prefix}/{key}").split()]

    key, value = f"{prefix}/{place.rank}", f"{own} {os.getpid()}"
    before = store.compare_set(key, "", value).decode().split()[1]
    if before != str(os.getpid()):
        log.warn(
            f"there has been another process {place.rank}, of pid {before}: if it has not ended, give each "
            f"process a RANK of its own"
        )
    store.set(key, value)  # also over what is of a process that has ended
    if place.rank == 0:
        other, theirs = _odd_one(own, lambda rank: said(rank)[0])
        store.set(f"{prefix}/found", f"{other} {theirs}")
    else:
        other, theirs = 0, said(0)[0]
        if theirs == own:
            other, theirs = said("found")
    if theirs == own:
        # A launcher's store outlasts the group: the next one is not to read what was said for this one.
        if has_agents_store(os.environ) and store.add(f"{prefix}/heard", 1) == own:
            for name in ("found", "heard", *range(own)):
                store.delete_key(f"{prefix}/{name}")
        return
    _let_others_hear(store, f"{prefix}/heard", min(own, theirs), stays=place.rank == 0)
    raise ConnectError(
        f"process {other} says WORLD_SIZE {theirs}, and this one {own}: this is process {place.rank}, by "
        f"{place.told_by}; start all with the same"
    )


def _odd_one(own: int, said: Callable[[int], int]) -> tuple[int, int]:
    """Give the first that says another size than rank 0, and that size; rank 0, where nobody does.

    Raises:
        RuntimeError: If one does not come in time.
    """
    for rank in range(own):
        try:
            theirs = said(rank)
        except RuntimeError as error:
            raise RuntimeError(f"process {rank} has not come") from error
        if theirs != own:
            return rank, theirs
    return 0, own


def _let_others_hear(store: Store, key: str, num: int, *, stays: bool) -> None:
    """Count this process among those that know; who `stays` has the store, which others are to read first."""
    until_s, never = time.monotonic() + HEARD_WITHIN_S, threading.Event()
    with suppress(RuntimeError):  # rank 0 may be gone by now
        store.add(key, 1)
        while stays and store.add(key, 0) < num and time.monotonic() < until_s:
            never.wait(LOOK_S)


def _in_the_group_there_is(backend: str, place: Place | None) -> tuple[int, int]:
    from torch import distributed

    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    found = distributed.get_backend_config()  # as in "cpu:gloo,cuda:nccl"
    if backend not in {part.rpartition(":")[2] for part in found.split(",")}:
        raise StateError(
            f"backend is {backend!r}, and torch has a process group of {found} in this process already: "
            f"ask for that, or destroy it first (torch.distributed.destroy_process_group())"
        )
    if place is not None and (place.rank, place.world_size) != (rank, world_size):
        raise StateError(
            f"process {place.rank} of {place.world_size} is asked for, and in torch's process group, which "
            f"is there already, this is process {rank} of {world_size}"
        )
    log.info("this is process %d of %d in the %s group that torch has already", rank, world_size, found)
    return rank, world_size


def _leave(pid: int) -> None:
    """Leave the group, in the process that has made it: a child that was forked has none of its threads."""
    from torch import distributed

    if pid == os.getpid() and distributed.is_initialized():
        distributed.destroy_process_group()
