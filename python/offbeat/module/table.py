"""What a module is made of, as the server's tensor table has it: names, aliases, shapes, dtypes, roles.

Names are those of the plain module's `state_dict()`: the wrappers of `torch.compile` and DDP leave no trace.
A tensor under two names (tied weights) is one entry with an alias. What the server cannot hold is refused by
name.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from offbeat.dtypes import NAMES, TRAINABLE, Role
from offbeat.errors import ConfigError, UnsupportedTensorError
from offbeat.wrappers import inside

__all__ = [
    "Description",
    "Found",
    "TensorSpec",
    "describe",
    "find",
    "named_parameters",
    "shared_memory",
    "spec_of",
    "unwrap",
]

_CODES: dict[torch.dtype, str] = {getattr(torch, name): code for code, name in NAMES.items()}


class TensorSpec(TypedDict):
    """One entry of the tensor table, as JSON carries it."""

    name: str
    aliases: list[str]
    shape: list[int]
    dtype: str
    role: Role


@dataclass(slots=True)
class Found:
    """One tensor of a module: what the table says of it, and every place where the module keeps it."""

    spec: TensorSpec
    tensor: torch.Tensor
    places: list[tuple[dict[str, Any], str]]


@dataclass(frozen=True, slots=True)
class Description:
    """A module's tensors in order: their table as JSON text, and the tensors themselves, not copied."""

    table: str
    tensors: list[torch.Tensor]

    def arrays(self) -> list[npt.NDArray[np.uint8]]:
        """Give each tensor's bytes in logical (C) order; copied only where its own memory is not that."""
        return [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in self.tensors]


def describe(module: nn.Module) -> Description:
    """Describe a module to the server.

    Raises:
        UnsupportedTensorError: If it has tensors that the server cannot hold; names them.
        ConfigError: If it has no parameters.
    """
    found = find(module)
    if not any(f.spec["role"] == "parameter" for f in found):
        raise ConfigError(f"{type(module).__name__} has no parameters, so there is nothing to train")
    return Description(json.dumps([f.spec for f in found]), [f.tensor for f in found])


def find(module: nn.Module) -> list[Found]:
    """List a module's parameters and persistent buffers in the order of `state_dict()`.

    Raises:
        UnsupportedTensorError: If it has tensors that the server cannot hold; names them.
    """
    found: dict[int, Found] = {}
    faults: list[str] = []
    for name, owner, key, role in _walk(module, ""):
        tensor = cast(torch.Tensor, owner[key])
        if id(tensor) in found:
            found[id(tensor)].spec["aliases"].append(name)
            found[id(tensor)].places.append((owner, key))
        elif fault := _fault(tensor, role):
            faults.append(f"{role} {name!r} {fault}")
        else:
            found[id(tensor)] = Found(_spec(name, tensor, role), tensor, [(owner, key)])
    faults += shared_memory((entry.spec["name"], entry.tensor) for entry in found.values())
    if faults:
        raise UnsupportedTensorError("; ".join(faults))
    return list(found.values())


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Go through a module's parameters, of whatever kind; one that is tied comes under each of its names."""
    for name, owner, key, role in _walk(module, ""):
        if role == "parameter":
            yield name, owner[key]


def spec_of(name: str, tensor: torch.Tensor, role: Role) -> TensorSpec:
    """Describe one tensor.

    Raises:
        UnsupportedTensorError: If the server cannot hold it.
    """
    if fault := _fault(tensor, role):
        raise UnsupportedTensorError(f"{role} {name!r} {fault}")
    return _spec(name, tensor, role)


def unwrap(module: nn.Module) -> nn.Module:
    """Take off what `torch.compile`, DDP and DataParallel put around a module.

    Raises:
        UnsupportedTensorError: If FSDP is around it.
    """
    plain = inside(module)
    if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(plain).__mro__):
        raise UnsupportedTensorError(
            "the model is wrapped in FSDP, so no process has a whole parameter: give Offbeat the module "
            "before sharding"
        )
    return plain


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, dict[str, Any], str, Role]]:
    """Go through (name, owner, key, role) of every tensor that is in the plain module's `state_dict()`."""
    inside = vars(unwrap(module))
    for key, parameter in inside["_parameters"].items():
        if parameter is not None:
            yield prefix + key, inside["_parameters"], key, "parameter"
    for key, buffer in inside["_buffers"].items():
        if buffer is not None and key not in inside["_non_persistent_buffers_set"]:
            yield prefix + key, inside["_buffers"], key, "buffer"
    for key, child in inside["_modules"].items():
        if child is not None:
            yield from _walk(child, f"{prefix}{key}.")


def _spec(name: str, tensor: torch.Tensor, role: Role) -> TensorSpec:
    shape, dtype = list(tensor.shape), _CODES[tensor.dtype]
    return {"name": name, "aliases": [], "shape": shape, "dtype": dtype, "role": role}


def _fault(tensor: torch.Tensor, role: Role) -> str | None:
    """Say why the server cannot hold a tensor; None if it can."""
    return next(_kind_faults(tensor), None) or next(_dtype_faults(tensor, role), None)


def _kind_faults(tensor: torch.Tensor) -> Iterator[str]:
    """Say what is wrong with a tensor's kind; the first is the one to tell, later ones may not make sense."""
    if nn.parameter.is_lazy(tensor):
        yield "has no shape yet: run one batch through the model first"
    if any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__):
        yield "is a DTensor (FSDP or tensor parallel), so no process has all of it: give plain tensors"
    if tensor.is_meta:
        yield "is a meta tensor, which has no values: materialize it first (to_empty, then initialize)"
    if tensor.layout is not torch.strided:
        yield "is sparse: give a dense tensor"
    if tensor.is_quantized:
        yield "is quantized: train the float model"
    if tensor.is_inference():
        yield "is an inference tensor: build the model outside of torch.inference_mode()"
    if type(tensor.data) is not torch.Tensor:
        yield f"is a {type(tensor.data).__name__}: only plain tensors can be written in place"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        yield "is expanded, so that several elements share one memory: replace it by its .clone()"


def _dtype_faults(tensor: torch.Tensor, role: Role) -> Iterator[str]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex():
        yield f"is {dtype}: hold its real and imaginary parts in two tensors"
    if role == "parameter" and _CODES.get(tensor.dtype) not in TRAINABLE:
        known = ", ".join(NAMES[code] for code in TRAINABLE)
        yield f"is {dtype}: parameters are {known} (cast it, or make it a buffer)"
    if tensor.dtype not in _CODES:
        yield f"is {dtype}: buffers are {', '.join(NAMES.values())}"


def shared_memory(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Find tensors that are several objects in one memory, such as `a.data = b.data` leaves behind.

    Of those that are strided with gaps only the same beginning tells.
    """
    faults = []
    last: dict[torch.device, tuple[str, int]] = {}  # the tensor before, and where its memory ends
    plain = [(name, t) for name, t in named if _has_memory(t)]
    for name, tensor in sorted(plain, key=lambda entry: entry[1].data_ptr()):
        begin = tensor.data_ptr()
        other, end = last.get(tensor.device, (name, begin))
        if begin < end:
            faults.append(
                f"{name!r} and {other!r} are two tensors in one memory: tie weights by assigning the same "
                f"Parameter to both"
            )
        num = tensor.numel() if tensor.is_contiguous() else 1
        last[tensor.device] = max(
            (other, end), (name, begin + num * tensor.element_size()), key=itemgetter(1)
        )
    return faults


def _has_memory(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not tensor.is_meta and tensor.numel() > 0
