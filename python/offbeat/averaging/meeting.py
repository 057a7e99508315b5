"""Which process group of torch's the members are."""

import os
from typing import Literal

import torch
from torch import distributed

from offbeat.averaging.settings import BACKENDS
from offbeat.distributed import init_distributed
from offbeat.errors import ConfigError, StateError
from offbeat.launchers import find
from offbeat.local.group import group_of
from offbeat.naming import unknown

__all__ = ["meet"]


def meet(
    backend: str | None,
    given: "distributed.ProcessGroup | Literal[False] | None",
    rank: int | None,
    world_size: int | None,
    *,
    is_tried: bool,
) -> "distributed.ProcessGroup | None":
    """Give the group; make torch's default one where a backend is named and there is none.

    Args:
        backend: As given.
        given: `process_group`, as given.
        rank: As given.
        world_size: As given.
        is_tried: Only look for what is wrong; make nothing.

    Returns:
        None for this process alone.

    Raises:
        ConfigError: If what is given cannot be used.
        StateError: If the group is another one than is asked for.
        ConnectError: If the others did not come.
    """
    _check_backend(backend)
    place = find(os.environ, rank=rank, world_size=world_size)  # also sees that these are numbers
    is_there = distributed.is_available() and distributed.is_initialized()
    is_wanted = given is None and backend is not None and (place.world_size > 1 or is_there)
    if is_tried:
        return None if is_wanted and not is_there else group_of(given)
    if is_wanted:
        assert backend is not None  # noqa: S101  as `is_wanted` says
        init_distributed(backend, rank=rank, world_size=world_size)
    group = None if given is None and backend is not None and not is_wanted else group_of(given)
    _check_place(group, rank, world_size)
    return group


def _check_backend(backend: str | None) -> None:
    if backend is None:
        return
    if backend == "tcp":
        raise ConfigError(
            'communication_backend is "tcp", which this averager does not have yet: take "gloo", or "nccl" '
            "on CUDA devices"
        )
    if backend not in BACKENDS:
        raise ConfigError(unknown("communication_backend", backend, BACKENDS))
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            'communication_backend is "nccl", and torch finds no CUDA device here: take "gloo", which is for '
            "CPUs"
        )


def _check_place(group: "distributed.ProcessGroup | None", rank: int | None, world_size: int | None) -> None:
    size = 1 if group is None else distributed.get_world_size(group)
    own = 0 if group is None else distributed.get_rank(group)
    if (world_size is not None and world_size != size) or (rank is not None and rank != own):
        where = (
            "in torch's process group"
            if group is not None
            else "alone, for no communication_backend is named"
        )
        raise StateError(
            f"rank {rank} of world_size {world_size} is asked for, and this is process {own} of "
            f"{size} {where}: "
            f"leave rank and world_size out, or name a backend (communication_backend='gloo'), and start all "
            f"processes"
        )
