"""Which of how many processes this one is, as whoever started it says in the environment.

Pure: an environment comes in, a `Place` goes out. Looked for in this order, and the first that says it is
taken: torchrun and whoever else sets RANK and WORLD_SIZE (`offbeat launch`, Kubeflow's PyTorchJob), Slurm's
srun, Kubeflow Trainer's PET_* of a process that is not started by torchrun. A process of which nobody says
anything is the only one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from offbeat.checks import is_count, refuse
from offbeat.errors import ConfigError

__all__ = ["MASTER_PORT", "Place", "find"]

MASTER_PORT = 29500
"""Where processes meet that are told a host and no port: torchrun's own default."""

SLURM_PORTS = range(20_000, 32_000)
"""Below those that systems give to whoever asks for any; jobs that share a node meet at different ones."""

ALONE = "nobody, so it is the only one"

_FIRST_HOST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
"""Of Slurm's list of hosts, in which commas stand in brackets, too: ``rack[0-1]gpu[01-04,7],login1``."""
_RANGE_OF_HOSTS = re.compile(r"\[([^\],-]+)[^\]]*\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process among those that were started together.

    Attributes:
        rank: Which, 0 to ``world_size - 1``.
        world_size: How many there are.
        told_by: Who says so, in words.
        local_rank: Which of those on its machine; None where nobody says.
        master_addr: Host at which they meet; None where nobody says.
        master_port: The port there.
    """

    rank: int
    world_size: int
    told_by: str
    local_rank: int | None = None
    master_addr: str | None = None
    master_port: int = MASTER_PORT


def find(environ: Mapping[str, str], *, rank: int | None = None, world_size: int | None = None) -> Place:
    """Find out which process this is.

    Args:
        environ: The process's environment.
        rank: Wins over what the environment says.
        world_size: As `rank`.

    Raises:
        ConfigError: If a number is none or out of its range, or of two that belong together one is missing.
    """
    refuse(
        f"{name} is {value!r}: give a whole number, {least} or more, or None"
        for name, value, least in (("rank", rank, 0), ("world_size", world_size, 1))
        if value is not None and not is_count(value, least=least)
    )
    place = _place(environ, rank, world_size)
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(
            f"rank is {place.rank} and world_size is {place.world_size}, by {place.told_by}: "
            f"ranks are 0 to world_size - 1"
        )
    host, port = _meeting_place(environ)
    local_rank = _number(environ, "LOCAL_RANK", "SLURM_LOCALID")
    return replace(place, local_rank=local_rank, master_addr=host, master_port=port)


def _place(environ: Mapping[str, str], rank: int | None, world_size: int | None) -> Place:
    if rank is not None and world_size is not None:
        return Place(rank=rank, world_size=world_size, told_by="the rank and world_size given")
    place = _told(environ)
    if rank is None and world_size is None:
        return place
    given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
    if place.told_by == ALONE and world_size != 1:
        raise ConfigError(
            f"{given} is given and {missing} is not, nor does the environment say it: give both"
        )
    told_by = f"the {given} given and {place.told_by}"
    return replace(
        place,
        rank=place.rank if rank is None else rank,
        world_size=place.world_size if world_size is None else world_size,
        told_by=told_by,
    )


def _told(environ: Mapping[str, str]) -> Place:
    """Give what the environment says, by the first of those that say anything."""
    pairs = (
        ("torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment", "RANK", "WORLD_SIZE"),
        # Of a step, and so of a process that srun has started; a batch script has the job's alone.
        ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES"),
    )
    for name, rank, world_size in pairs:
        if rank in environ and world_size in environ:
            ranks, sizes = _number(environ, rank), _number(environ, world_size)
            assert ranks is not None and sizes is not None  # noqa: PT018, S101  they are there
            return Place(rank=ranks, world_size=sizes, told_by=f"{name} ({rank}, {world_size})")
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if one in environ:
            raise ConfigError(
                f"{one} is {environ[one]!r} in the environment and {other} is not there: set both, or give "
                f"rank and world_size"
            )
    return Place(rank=0, world_size=1, told_by=ALONE)


def _meeting_place(environ: Mapping[str, str]) -> tuple[str | None, int]:
    hosts = (environ.get("MASTER_ADDR"), environ.get("PET_MASTER_ADDR"), _slurms_first_host(environ))
    port = _number(environ, "MASTER_PORT", "PET_MASTER_PORT")
    if port is None:
        job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
        port = MASTER_PORT if job is None else SLURM_PORTS[(job + (step or 0)) % len(SLURM_PORTS)]
    return next((host for host in hosts if host), None), port


def _slurms_first_host(environ: Mapping[str, str]) -> str | None:
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    first = _FIRST_HOST.match(names)
    return _RANGE_OF_HOSTS.sub(r"\1", first.group()) if first else None


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Give the first of these variables that is there.

    Raises:
        ConfigError: If it is no whole number.
    """
    for name in names:
        if name in environ:
            text = environ[name].strip()
            if not (text.isascii() and text.isdigit()):
                raise ConfigError(f"{name} is {environ[name]!r} in the environment: it is a whole number")
            return int(text)
    return None
