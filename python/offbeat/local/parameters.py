"""The parameters of a model that is trained here: each once, and the same objects as long as it is."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offbeat import trained_by
from offbeat.errors import StateError
from offbeat.module import named_parameters
from offbeat.naming import a_class, brief

__all__ = [
    "check_back",
    "check_same",
    "each_once",
    "fingerprint",
    "is_as_it_was",
    "of_model",
    "of_puller",
    "other_shape",
    "other_values",
]

LOAD_IT = (
    "load the model's own state before this one; it is to be taken right after this one, and saved, or "
    "copied (copy.deepcopy), at once, as it refers to the model's own tensors. To make an averager, or an "
    "accumulator of a group, gives the first member's model to all: load both after that"
)
"""What to do where a model has not the values that it had when a state was taken."""

Named = Sequence[tuple[str, nn.Parameter]]

PIECE = 2**20
"""Of a tensor's values."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By bytes of a value: as what its bits are read."""


def each_once(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List a model's parameters, each once, by its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in named_parameters(model):
        found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def check_same(before: Named, model: nn.Module) -> None:
    """See that a model has the parameters it had.

    Raises:
        StateError: If one is another object, or there are more or fewer.
    """
    now = each_once(model)
    for (name, old), (_, new) in zip(before, now, strict=False):
        if old is not new:
            raise StateError(
                f"the model's parameter {name!r} is another object than when this was made: change the model "
                f"first, or load values without assign=True"
            )
    if len(before) != len(now):
        raise StateError(
            "the model has more or fewer parameters than when this was made: change a model first, and then "
            "make what trains it; make a new one now"
        )


def fingerprint(named: Named) -> list[list[Any]]:
    """Tell values from others by little.

    That is of each parameter its dtype, the sum of its bits as whole numbers, and its shape. The sum is the
    same on each device, and computed there: only the sums leave it. Of one whose bits cannot be read, as a
    sparse or a quantized one that is frozen, it is None; and so is the shape of a nested one.
    """
    sums = [_sum_of_bits(p) for _, p in named]
    there = [sum_ for sum_ in sums if sum_ is not None]
    told = iter(torch.stack(there).tolist() if there else ())
    return [
        [str(p.dtype), None if sum_ is None else next(told), _shape(p)]
        for (_, p), sum_ in zip(named, sums, strict=True)
    ]


def _shape(parameter: torch.Tensor) -> list[int] | None:
    return None if parameter.is_nested else list(parameter.shape)


def _sum_of_bits(parameter: torch.Tensor) -> torch.Tensor | None:
    if parameter.is_quantized or parameter.layout != torch.strided:  # some of torch's views of these crash
        return None
    try:
        bits = parameter.detach().reshape(-1).view(INTEGERS[parameter.element_size()])
        # In pieces, as torch makes int64 of all that it sums to one.
        return torch.stack([piece.sum(dtype=torch.int64) for piece in torch.split(bits, PIECE)]).sum()
    except RuntimeError:  # what one of another kind says to any of these
        return None


def check_back(named: Named, state: Mapping[str, Any], is_alike: Callable[[object], bool] = bool) -> None:
    """See that in all members the model has the values that it had when a state was taken.

    Args:
        named: The model's parameters.
        state: Whose "model" is a `fingerprint`, or that has none, as older states have not.
        is_alike: Tells whether a value is the same in all members; each has to ask. One alone has none.

    Raises:
        StateError: In all members, if one has other values.
    """
    kept = state.get("model")
    other = None if kept is None else other_shape(named, kept)
    if kept is not None and other is None and (name := other_values(named, kept)) is not None:
        other = f"parameter {name!r} has other values: {LOAD_IT}"
    are_back = is_alike(other is None)
    if other is not None:
        raise StateError(f"the model is not the one of the state: {other}")
    if not are_back:
        raise StateError(f"the model of another member is not the one of its state: {LOAD_IT}")


def other_shape(named: Named, kept: Sequence[Sequence[Any]]) -> str | None:
    """Word in what a model is built otherwise than when a `fingerprint` was taken; None: in nothing.

    Older ones tell of no shapes.
    """
    build_it = "build the model that was saved"
    if len(named) != len(kept):
        return f"it has {len(named)} parameters, and the state's had {len(kept)}: {build_it}"
    for (name, p), (_, _, *shapes) in zip(named, kept, strict=True):
        if shapes and shapes[0] != (shape := _shape(p)):
            return f"parameter {name!r} is of shape {shape}, and the state's was of {shapes[0]}: {build_it}"
    return None


def is_as_it_was(named: Named, kept: Sequence[Sequence[Any]]) -> bool:
    """Tell whether a model is as it was when a `fingerprint` was taken; older ones tell of no shapes."""
    now = fingerprint(named)
    are_like_them = (new[: len(old)] == list(old) for new, old in zip(now, kept, strict=False))
    return len(now) == len(kept) and all(are_like_them)


def other_values(named: Named, kept: Sequence[Sequence[Any]]) -> str | None:
    """Name the first parameter that has other values than when a `fingerprint` was taken; None: none has.

    Of one that was cast since then, or whose bits cannot be read, nothing can be said.
    """
    for (name, _), (dtype, sum_, _), (old_dtype, old, *_) in zip(
        named, fingerprint(named), kept, strict=False
    ):
        if dtype == old_dtype and None not in (sum_, old) and sum_ != old:
            return name
    return None


def of_model(model: object) -> list[str]:
    """Tell what is wrong with a model that is to be trained here together with others."""
    if not isinstance(model, nn.Module):
        return [f"model is {brief(model)}: give an nn.Module"]
    modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    found = {
        "is, or holds, a module in DDP, which reduces every batch: give what is inside": any(
            isinstance(part, nn.parallel.DistributedDataParallel) for part in modules
        ),
        "is, or holds, a module in FSDP, which shards parameters among members: give a plain one": any(
            map(_is_sharded, modules)
        ),
        "holds a SyncBatchNorm, whose forward waits for all processes in each batch: take BatchNorm": any(
            isinstance(part, nn.SyncBatchNorm) for part in modules
        ),
        "has parameters without a shape yet, of a lazy layer: run a batch through it first": any(
            map(is_lazy, tensors)
        ),
        f"is {a_class(model)} without parameters, so there is nothing to train": not any(
            True for _ in model.parameters()
        ),
        "is wholly frozen (requires_grad), so there is nothing to train: unfreeze some of it first": not any(
            parameter.requires_grad for parameter in model.parameters()
        ),
        "has tensors on the device 'meta', which hold no values: give them some first, as by "
        "model.to_empty(device=…) and load_state_dict": any(tensor.is_meta for tensor in tensors),
    }
    return [f"model {what}" for what, is_so in found.items() if is_so][:1] or of_puller(model)


def of_puller(model: nn.Module) -> list[str]:
    """Tell of an open worker of the model: it pushes nothing that another makes of it, and overwrites it."""
    return [
        f"model is that of {worker!r}, which pushes no steps but its own, and would overwrite what is "
        f"trained here: give the worker itself (AsyncGradientAccumulator(worker=...), "
        f"FaultTolerantTrainer(worker, ...)), train by worker.train(...), or close() it first"
        for worker in trained_by.pulled_by(model)
    ][:1]


def _is_sharded(part: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # what is not loaded has made no module
    kinds = tuple(
        getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name)
    )
    return isinstance(part, kinds)
