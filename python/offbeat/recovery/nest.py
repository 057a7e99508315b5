"""State as files can hold it: a nest of plain values and tensors becomes JSON and tensors by name, and back.

Nothing is pickled, so that reading a checkpoint runs no code. What is put in comes out equal to the bit and
of the same type; whatever is of another type is refused by its place in the nest.
"""

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from offbeat.checks import Faults
from offbeat.errors import CheckpointError, UnsupportedTensorError
from offbeat.recovery.tensor_file import DTYPES

__all__ = ["Flat", "Skeleton", "flatten", "unflatten"]

Skeleton: TypeAlias = Any
"""JSON. An object has one key, which says what it stands for: a tuple, a dict, a tensor, …"""

_ARRAYS = frozenset(
    (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64"),
    )
)
"""numpy's types that torch has as well."""

_LARGEST_PLAIN = 2**63
"""Larger whole numbers are written in hexadecimal: Python limits the length of decimal ones that it reads."""

MOST_NAMED = 8
"""Of what is refused, in one error: an optimizer has the same of each parameter."""

_RESERVED = "__metadata__"
"""What no tensor of a .safetensors file may be called."""

_MAPPINGS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "items": dict,
    "ordered": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}


@dataclass(slots=True)
class Flat:
    """A nest, taken apart.

    Attributes:
        skeleton: What is left where its tensors are taken out, as JSON.
        tensors: They, by name; not copied.
    """

    skeleton: Skeleton
    tensors: dict[str, torch.Tensor]


def flatten(state: object, *, what: str) -> Flat:
    """Take a nest apart.

    Args:
        state: None, booleans, numbers, strings, bytes, tensors, numpy's arrays and numbers, and tuples,
            lists, dicts, `OrderedDict`s and `Counter`s of these; for keys whatever of that has no tensor in
            it. A parameter counts as a tensor.
        what: What the nest is, for refusals.

    Returns:
        Its parts. A tensor is named by its keys, joined with dots.

    Raises:
        UnsupportedTensorError: Naming what is something else, each by its place.
    """
    taken = _Taken(what)
    skeleton = taken.part(state, ())
    if taken.faults:
        raise UnsupportedTensorError(_words(taken.faults))
    return Flat(skeleton, taken.tensors)


@dataclass(slots=True)
class _Taken:
    """What was taken so far."""

    what: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    inside: set[int] = field(default_factory=set)

    def part(self, value: object, path: tuple[object, ...]) -> Skeleton:  # noqa: PLR0911  one for each type
        kind = type(value)
        if value is None or isinstance(value, bool | str):
            return value if kind in (bool, str) or value is None else self.refuse(value, path)
        if kind is int or kind is float:
            return _number(value)  # type: ignore[arg-type]  # of just these two
        if kind is bytes:
            return {"bytes": value.hex()}  # type: ignore[attr-defined]
        if kind in (torch.Tensor, nn.Parameter):
            return self.tensor(value, path)  # type: ignore[arg-type]
        if kind is np.ndarray or isinstance(value, np.generic):
            return self.array(value, path)  # type: ignore[arg-type]
        if kind in (tuple, list, dict, OrderedDict, Counter):
            return self.container(value, path)
        return self.refuse(value, path)

    def container(self, value: Any, path: tuple[object, ...]) -> Skeleton:  # noqa: ANN401  one of five
        if id(value) in self.inside:
            self.faults.append(f"{self.place(path)} holds itself, which no checkpoint can")
            return None
        self.inside.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self.mapping(value, path)
            parts = [self.part(item, (*path, i)) for i, item in enumerate(value)]
            return parts if isinstance(value, list) else {"tuple": parts}
        finally:
            self.inside.discard(id(value))

    def mapping(self, value: Mapping[Any, Any], path: tuple[object, ...]) -> Skeleton:
        if type(value) is dict and all(type(key) is str for key in value):
            return {"dict": {key: self.part(item, (*path, key)) for key, item in value.items()}}
        tag = {OrderedDict: "ordered", Counter: "counter"}.get(type(value), "items")
        pairs = []
        for key, item in value.items():
            num_before = len(self.tensors)
            own = self.part(key, (*path, "a key"))
            if len(self.tensors) > num_before:
                self.faults.append(f"{self.place(path)} has a tensor for a key, which no checkpoint can hold")
            pairs.append([own, self.part(item, (*path, key))])
        return {tag: pairs}

    def tensor(self, value: torch.Tensor, path: tuple[object, ...]) -> Skeleton:
        if fault := _fault(value) or _fault_of_name(path):
            self.faults.append(f"{self.place(path)} {fault}")
            return None
        return {"tensor": self.named(value.detach(), path)}

    def array(self, value: "np.ndarray[Any, Any] | np.generic", path: tuple[object, ...]) -> Skeleton:
        is_known = value.dtype.name in _ARRAYS and value.dtype.isnative
        fault = _fault_of_name(path) if is_known else f"is of numpy's type {value.dtype}, which torch has not"
        if fault:
            self.faults.append(f"{self.place(path)} {fault}")
            return None
        name = value.dtype.name  # C's two types of 64 bits have one
        copied = torch.from_numpy(np.array(value, dtype=name, order="C"))
        tag = "array" if isinstance(value, np.ndarray) else "number"
        return {tag: [self.named(copied, path), name]}

    def named(self, value: torch.Tensor, path: tuple[object, ...]) -> str:
        """Keep a tensor under a name of its own: keys may have dots in them, and 1 is not "1"."""
        name = wanted = _name(path)
        number = 1
        while name in self.tensors or name in (_RESERVED, ""):
            number += 1
            name = f"{wanted}~{number}"
        self.tensors[name] = value
        return name

    def refuse(self, value: object, path: tuple[object, ...]) -> None:
        self.faults.append(
            f"{self.place(path)} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint "
            f"holds plain values, numpy's arrays and tensors, in dicts, lists and tuples"
        )

    def place(self, path: tuple[object, ...]) -> str:
        return self.what + "".join(f"[{key!r}]" for key in path)


def unflatten(skeleton: Skeleton, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401  as it was
    """Put a nest together again.

    Args:
        skeleton: As `flatten` gave it.
        tensors: Likewise, or equal ones.

    Raises:
        CheckpointError: If the two are of no nest.
    """
    if skeleton is None or isinstance(skeleton, bool | int | float | str):
        return skeleton
    if isinstance(skeleton, list):
        return [unflatten(part, tensors) for part in skeleton]
    try:
        ((tag, parts),) = skeleton.items()
        return _built(tag, parts, tensors)
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"no state has a part {str(skeleton)[:80]!r} ({error})") from error


def _built(tag: str, parts: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401, PLR0911  one for each tag
    match tag:
        case "float":
            return struct.unpack(">d", bytes.fromhex(parts))[0]
        case "int":
            return int(parts, 16)
        case "bytes":
            return bytes.fromhex(parts)
        case "tensor":
            return tensors[parts]
        case "array" | "number":
            name, dtype = parts
            array = tensors[name].numpy()
            if array.dtype.name != dtype:
                raise ValueError(f"it is {array.dtype}")
            return array if tag == "array" else array[()]
        case "tuple":
            return tuple(unflatten(part, tensors) for part in parts)
        case "dict":
            return {key: unflatten(part, tensors) for key, part in parts.items()}
        case _:
            pairs = [(unflatten(key, tensors), unflatten(part, tensors)) for key, part in parts]
            return _MAPPINGS[tag](pairs)


def _words(faults: Sequence[str]) -> str:
    told = "; ".join(faults[:MOST_NAMED])
    num_more = len(faults) - MOST_NAMED
    return f"{told}; and so of {num_more} more" if num_more > 0 else told


def _number(value: float) -> Skeleton:
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    return value if abs(value) < _LARGEST_PLAIN else {"int": hex(value)}


def _fault(tensor: torch.Tensor) -> str | None:
    """Say why a tensor cannot be held, if so."""
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.layout != torch.strided:
        return f"is {tensor.layout}: a checkpoint holds dense tensors"
    if tensor.dtype not in DTYPES:
        return f"is {tensor.dtype}, for which .safetensors has no name"
    return None


def _fault_of_name(path: tuple[object, ...]) -> str | None:
    """Say why a tensor's name can be in no file, if so."""
    try:
        _name(path).encode()
    except UnicodeEncodeError:
        return "has half a surrogate pair in its name, which .safetensors cannot hold: rename that key"
    return None


def _name(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))
