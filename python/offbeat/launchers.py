"""Which of how many processes this one is and where they meet, as whoever started it says.

Pure: an environment comes in, facts go out. Looked for in this order, and the first that says it is taken:
RANK and WORLD_SIZE, which torchrun, `offbeat launch` and Kubeflow's PyTorchJob set; Open MPI and MPICH,
before Slurm, whose variables their processes inherit; Slurm's srun; Kubeflow Trainer's PET_*, of a process
that is not started by torchrun. A process of which nobody says anything is the only one. A variable that
is empty says nothing: compose files and charts set those that nobody has filled in.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from offbeat.checks import is_count, refuse
from offbeat.errors import ConfigError

__all__ = ["MASTER_PORT", "Place", "find", "has_agents_store", "meeting_place", "overlooked"]

MASTER_PORT = 29500
"""Where processes meet that are told a host and no port: torchrun's own default."""

SLURM_PORTS = range(20_000, 32_000)
"""Below those that systems give to whoever asks for any; jobs that share a machine meet at different ones."""

_FIRST_HOST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
"""Of Slurm's list of hosts, in which commas stand in brackets, too: ``rack[0-1]gpu[01-04,7],login1``."""
_RANGE_OF_HOSTS = re.compile(r"\[([^\],-]+)[^\]]*\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """Where a launcher writes down what.

    Attributes:
        name: For people.
        rank: Variable of the process's number.
        world_size: Variable of how many there are.
        local_rank: Variable of its number on its machine, if there is one.
        host: Variable of the machine where they meet, if there is one.
        port: Variable of the port there, if there is one.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str | None = None
    host: str | None = None
    port: str | None = None


_PLAIN = Launcher(name="the environment", rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK")
_SLURM = Launcher(
    # Of a step, and so of a process that srun has started; a batch script has the job's alone.
    name="Slurm", rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID"
)  # fmt: skip
_LAUNCHERS = (
    _PLAIN,
    Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    Launcher(name="MPI", rank="PMI_RANK", world_size="PMI_SIZE", local_rank="MPI_LOCALRANKID"),
    _SLURM,
    Launcher(
        name="Kubeflow Trainer",
        rank="PET_NODE_RANK",
        world_size="PET_NNODES",
        host="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
    ),
)
_GIVEN = Launcher(name="what is given", rank="", world_size="")
_NOBODY = Launcher(name="nobody, so it is the only one", rank="", world_size="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A process among those that were started together.

    Attributes:
        rank: Which, 0 to ``world_size - 1``.
        world_size: How many there are.
        local_rank: Which of those on its machine; None where who says the rank does not say that.
        told_by: Who says so, in words.
        launcher: Who says so.
    """

    rank: int
    world_size: int
    launcher: Launcher
    told_by: str
    local_rank: int | None = None


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
    return place


def meeting_place(environ: Mapping[str, str], place: Place) -> tuple[str | None, int]:
    """Say at which host and port the processes meet; None for the host where nobody says.

    ``MASTER_ADDR`` and ``MASTER_PORT`` win; else it is as the place's launcher has it. A step of Slurm meets
    at its first machine.

    Raises:
        ConfigError: If a port is no number.
    """
    launcher = place.launcher
    environ = _said(environ)
    host = environ.get("MASTER_ADDR") or environ.get(launcher.host or "")
    port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    if port is None and launcher.port is not None and launcher.port in environ:
        port = _number(environ, launcher.port)
    if launcher is _SLURM:
        host = host or _slurms_first_host(environ)
        if port is None and "SLURM_JOB_ID" in environ:
            job = _number(environ, "SLURM_JOB_ID")
            step = _number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
            port = SLURM_PORTS[(job + step) % len(SLURM_PORTS)]
    return host, MASTER_PORT if port is None else port


def has_agents_store(environ: Mapping[str, str]) -> bool:
    """Whether the launcher itself listens at ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun's agent."""
    is_there = environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")
    return bool(is_there) and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def overlooked(environ: Mapping[str, str], place: Place) -> str | None:
    """Say what may mean that a process which seems to be alone is not; None if nothing does."""
    if place.launcher is not _NOBODY:
        return None
    if (num_tasks := environ.get("SLURM_NTASKS") or "1") != "1":
        return (
            f"SLURM_NTASKS is {num_tasks}, and this process was not started by srun, so it is taken for "
            f"the only "
            f"one: start it with srun, or set RANK and WORLD_SIZE"
        )
    if (num_named := _tensorflows_tasks(environ.get("TF_CONFIG") or "{}")) > 1:
        return (
            f"TF_CONFIG names {num_named} tasks, and is not read here, for it is TensorFlow's, so this "
            f"process is taken for the only one: set RANK and WORLD_SIZE, or give rank= and world_size=; in "
            f"Kubeflow start it by a PyTorchJob, which sets them, in place of a TFJob"
        )
    return None


def _place(environ: Mapping[str, str], rank: int | None, world_size: int | None) -> Place:
    if rank is not None and world_size is not None:
        told_by = "the rank and world_size given"
        return Place(rank=rank, world_size=world_size, launcher=_GIVEN, told_by=told_by)
    place = _told(environ)
    if rank is None and world_size is None:
        return place
    given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
    if place.launcher is _NOBODY and world_size != 1:
        raise ConfigError(
            f"{given} is given and {missing} is not, nor does the environment say it: give both"
        )
    return replace(
        place,
        rank=place.rank if rank is None else rank,
        world_size=place.world_size if world_size is None else world_size,
        local_rank=place.local_rank if rank is None else None,
        told_by=f"the {given} given and {place.told_by}",
    )


def _told(environ: Mapping[str, str]) -> Place:
    """Give what the environment says, by the first of those that say anything."""
    said = _said(environ)
    for launcher in _LAUNCHERS:
        if launcher.rank in said and launcher.world_size in said:
            is_torchrun = launcher is _PLAIN and "TORCHELASTIC_RUN_ID" in said
            name = "torchrun" if is_torchrun else launcher.name
            local = launcher.local_rank
            return Place(
                rank=_number(said, launcher.rank),
                world_size=_number(said, launcher.world_size),
                local_rank=_number(said, local) if local is not None and local in said else None,
                launcher=launcher,
                told_by=f"{name} ({launcher.rank}, {launcher.world_size})",
            )
    for one, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if one in said:
            raise ConfigError(
                f"{one} is {said[one]!r} in the environment and {other} is "
                f"{'empty' if other in environ else 'not there'}: set both, or give rank and world_size"
            )
    return Place(rank=0, world_size=1, launcher=_NOBODY, told_by=_NOBODY.name)


def _said(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that say anything."""
    return {name: value for name, value in environ.items() if value}


def _tensorflows_tasks(config: str) -> int:
    """Count the processes of TensorFlow's cluster: ``{"cluster": {"worker": ["a:1", "b:1"]}, "task": …}``.

    What is no such text tells of nobody.
    """
    try:
        cluster = json.loads(config)["cluster"]
        return sum(len(tasks) for tasks in cluster.values() if isinstance(tasks, list | dict))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return 0


def _slurms_first_host(environ: Mapping[str, str]) -> str | None:
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    first = _FIRST_HOST.match(names)
    return _RANGE_OF_HOSTS.sub(r"\1", first.group()) if first else None


def _number(environ: Mapping[str, str], name: str) -> int:
    """Give a variable that is there.

    Raises:
        ConfigError: If it is no whole number.
    """
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {environ[name]!r} in the environment: it is a whole number")
    return int(text)
