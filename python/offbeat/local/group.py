"""Members that are a process group of torch's: which group, and that they begin, and stay, alike."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from offbeat.errors import ConfigError, ModelMismatchError, StateError
from offbeat.launchers import find
from offbeat.local.buffers import write

__all__ = [
    "MAKE_A_GROUP",
    "begin_alike",
    "carries",
    "check_alike",
    "check_device",
    "check_made",
    "check_settings",
    "destroy",
    "differing",
    "digest",
    "gathered",
    "group_of",
    "held_by_all",
    "is_alike",
    "is_gloo",
    "is_other",
    "is_plain",
    "listed",
    "own_group",
    "take_first",
    "timeout_of",
    "words_of_apart",
]

T = TypeVar("T")

ROUNDING = 1e-12
"""Relative; beyond what float64 rounds in sums over thousands of members."""

MAKE_A_GROUP = "make a group by offbeat.init_distributed('gloo') (or 'nccl'; 'tcp' makes none)"
"""What to do where several processes have no group of torch's, and are to have one."""

COMPRESSED = torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
"""Sparse layouts whose rows or columns are counted."""

MOST_DIFFERENCES = 3
"""Settings named where members differ; of the others it is said how many there are."""


def group_of(
    given: object, *, remedies: Callable[[], Sequence[str]] = lambda: [MAKE_A_GROUP]
) -> "distributed.ProcessGroup | None":
    """Choose the members; None is this process alone.

    Args:
        given: A group; None: torch's default group where there is one; False: alone, whatever there is.
        remedies: Gives what to do where there is none and has to be, the nearest first.

    Raises:
        ConfigError: If it is no group, or this is one of several processes that have none.
    """
    if given is False:
        return None
    is_there = distributed.is_available() and distributed.is_initialized()
    if given is None and is_there:
        return distributed.group.WORLD
    if given is None:
        place = find(os.environ)
        if place.world_size > 1:
            raise ConfigError(
                f"this is process {place.rank} of {place.world_size}, by {place.told_by}, and there is no "
                f"process group of them: {', or '.join(remedies())}, or give process_group=False to train "
                f"alone"
            )
        return None
    if not is_there or not isinstance(given, distributed.ProcessGroup):
        raise ConfigError(f"process_group is {given!r}: give a torch.distributed.ProcessGroup, None or False")
    return given


def own_group(
    group: "distributed.ProcessGroup", *, more: timedelta = timedelta(0), backend: str | None = None
) -> "distributed.ProcessGroup":
    """Make a group of the same members, for messages that nobody else's may be taken for.

    Members that work at different speeds send theirs between whatever else they do: on the user's own group a
    barrier in one member would meet a sum in another. Every member has to call this, in the same order.

    Args:
        group: The members.
        more: How much longer than there an operation waits for others.
        backend: Another one than the group's.
    """
    made = distributed.new_group(
        distributed.get_process_group_ranks(group),
        timeout=timeout_of(group) + more,
        backend=distributed.get_backend_config(group) if backend is None else backend,
        use_local_synchronization=True,  # members outside the group need not take part
    )
    assert isinstance(made, distributed.ProcessGroup)  # noqa: S101  else this process would be no member
    return made


def destroy(group: "distributed.ProcessGroup") -> None:
    """Let go of a group of one's own: its threads and connections; of one that is gone already, nothing."""
    if not distributed.is_initialized():
        return
    try:
        distributed.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return  # it went with a default group that was destroyed; there is another one now
    if is_gloo(group):  # others wait for one another there, and may wait for ever
        distributed.destroy_process_group(group)


def is_gloo(group: "distributed.ProcessGroup") -> bool:
    """Tell whether all that a group carries goes over gloo."""
    return {part.rpartition(":")[2] for part in distributed.get_backend_config(group).split(",")} == {"gloo"}


def timeout_of(group: "distributed.ProcessGroup") -> timedelta:
    """Give how long a group's operations wait; torch tells it nowhere else than with each backend."""
    devices = [part.partition(":")[0] for part in distributed.get_backend_config(group).split(",")]
    times: list[timedelta] = [group._get_backend(torch.device(d)).options._timeout for d in devices]  # noqa: SLF001
    return min(times)


def carries(group: "distributed.ProcessGroup", device: str) -> bool:
    """Tell whether a group carries tensors of a kind of device."""
    config = distributed.get_backend_config(group)  # as in "cpu:gloo,cuda:nccl"
    return device in {part.partition(":")[0] for part in config.split(",")}


def check_device(group: "distributed.ProcessGroup", device: torch.device) -> None:
    """See that a group carries tensors of a device.

    Raises:
        ConfigError: If it does not.
    """
    if not carries(group, device.type):
        config = distributed.get_backend_config(group)
        raise ConfigError(
            f"device is {device}, and the process group is of {config}: give a device of these, or make the "
            f"group for this one"
        )


def check_alike(
    group: "distributed.ProcessGroup", named: Sequence[tuple[str, torch.Tensor]], device: torch.device
) -> None:
    """See that all members have tensors of the same names, shapes and dtypes, in the same order.

    Raises:
        ModelMismatchError: In all members, naming the first that differs.
    """
    rows = [_described(name, tensor) for name, tensor in named]
    if is_alike(group, rows, device):
        return
    for other, theirs in enumerate(gathered(group, rows)):
        for one, two in zip([*rows, None], [*theirs, None], strict=False):
            if one != two:
                raise ModelMismatchError(
                    f"members hold different models: here comes {_row(one)}, and in member {other} "
                    f"{_row(two)}"
                )


def held_by_all(
    group: "distributed.ProcessGroup", named: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Choose the tensors that all members hold in one shape, dtype and layout; in the same order in all.

    Returns:
        These, by name; and the names of those that only some hold so, in all members.
    """
    rows = {name: (*_described(name, tensor), str(tensor.layout)) for name, tensor in named.items()}
    if is_alike(group, list(rows.values()), device):
        return dict(named), []
    everybody = gathered(group, rows)
    names = dict.fromkeys(name for one in everybody for name in one)
    are_held = {name: all(one.get(name) == everybody[0].get(name) for one in everybody) for name in names}
    chosen = {name: named[name] for name, is_held in are_held.items() if is_held}
    return chosen, [name for name, is_held in are_held.items() if not is_held]


def words_of_apart(names: Sequence[str]) -> str:
    """Say which buffers are not `held_by_all`."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"members hold buffers in different shapes or dtypes, or some members alone have them ({names[0]!r}"
        f"{more}): these stay each member's own, as there is no mean of them"
    )


def check_made(group: "distributed.ProcessGroup", made: str, device: torch.device) -> None:
    """See that all members make an object of the same class: others would not be understood from here on.

    Raises:
        StateError: In all members, with what two of them make.
    """
    if not is_alike(group, made, device):
        everybody = gathered(group, made)
        first = everybody[0]
        rank, other = next((rank, one) for rank, one in enumerate(everybody) if one != first)
        raise StateError(
            f"member 0 makes an {first} and member {rank} an {other}, in one process group: make the same in "
            f"all of them"
        )


def check_settings(
    group: "distributed.ProcessGroup",
    settings: Mapping[str, object],
    device: torch.device,
    *,
    how: str,
    show: Callable[[str, object], str] = lambda _, value: repr(value),
) -> None:
    """See that all members are set alike.

    Args:
        group: The members.
        settings: As JSON can have them, by names for people.
        device: Of the tensors that the group carries.
        how: Say what members do who are not, such as "members average differently".
        show: Gives a setting's value for people, of its name and value.

    Raises:
        StateError: In all members, with the same words.
    """
    if not is_alike(group, settings, device):
        raise StateError(
            f"{how}: {listed(differing(gathered(group, settings), show))}: give the same to all of them"
        )


def differing(
    everybody: Sequence[Mapping[str, object]],
    show: Callable[[str, object], str] = lambda _, value: repr(value),
) -> dict[str, str]:
    """Word each setting in which members differ, in the same words in all of them.

    Args:
        everybody: Each member's settings, by name; what one has no name for it has nothing to say of.
        show: As in `check_settings`.
    """
    told = {}
    for name in dict.fromkeys(name for one in everybody for name in one):
        (first, value), *others = ((rank, one[name]) for rank, one in enumerate(everybody) if name in one)
        own = json.dumps(value)  # by which they were compared: there 1 is not True
        if (found := next((one for one in others if json.dumps(one[1]) != own), None)) is not None:
            rank, other = found
            told[name] = (
                f"{name} is {show(name, value)} in member {first} and {show(name, other)} in member {rank}"
            )
    return told


def listed(differences: Mapping[str, str]) -> str:
    """Name the first of what `differing` gave, and count the others."""
    told = list(differences.values())
    more = f", and {len(told) - MOST_DIFFERENCES} more" if len(told) > MOST_DIFFERENCES else ""
    return f"{'; '.join(told[:MOST_DIFFERENCES])}{more}"


def gathered(group: "distributed.ProcessGroup", value: T) -> list[T]:
    """Give what each member has, in all of them, by rank."""
    everybody: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everybody, value, group=group)
    return everybody


def is_alike(group: "distributed.ProcessGroup", value: object, device: torch.device) -> bool:
    """Tell in all members whether a value, as JSON can have it, is the same in all of them."""
    number = digest(value)
    both = torch.tensor([-number, number], dtype=torch.float64, device=device)
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX, group=group)
    return -both[0].item() == both[1].item()


def begin_alike(group: "distributed.ProcessGroup", tensors: Iterable[torch.Tensor]) -> None:
    """Give all members the first one's values, in place."""
    for tensor in tensors:
        take_first(group, tensor)


def take_first(group: "distributed.ProcessGroup", tensor: torch.Tensor) -> None:
    """Give all members the first one's values of a tensor, in place; it is of one shape and dtype in all."""
    with torch.no_grad():
        if not is_plain(tensor):
            told: list[Any] = [tensor.detach().cpu()]
            distributed.broadcast_object_list(told, group=group, group_src=0)
            first = told[0].to(tensor.device)
            if tensor.layout in COMPRESSED and tensor.values().shape != first.values().shape:
                # Torch copies as many values as there are, and no others.
                torch.utils.swap_tensors(tensor, first)  # type: ignore[no-untyped-call]
            else:
                write(first, tensor)
            return
        # What is strided otherwise would travel with its gaps, and what is lazily conjugate without that.
        first = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if first.numel():  # as bytes: backends know few dtypes
            distributed.broadcast(first.reshape(-1).view(torch.uint8), group=group, group_src=0)
            write(first, tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's values are all in memory of its own, one behind the other or by strides."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def digest(value: object) -> float:
    """Give a number that is another one for another value: 24 bits, whose squares float64 adds up exactly."""
    return float(int.from_bytes(hashlib.sha256(json.dumps(value).encode()).digest()[:3], "little"))


def is_other(mark: float, square: float, num_members: float) -> bool:
    """Tell by the sums over members of a digest and of its square whether one member's is another."""
    # n² times the variance of what is the same for all, or random.
    return square * num_members - mark**2 > ROUNDING * mark**2


def _described(name: str, tensor: torch.Tensor) -> tuple[str, list[Any], str]:
    """Give a tensor's name, shape and dtype, as JSON can have them."""
    shape = [list(part.shape) for part in tensor.unbind()] if tensor.is_nested else list(tensor.shape)
    return name, shape, str(tensor.dtype)


def _row(row: object) -> str:
    return "nothing more" if row is None else f"{row[0]!r} of shape {row[1]} and dtype {row[2]}"  # type: ignore[index]
