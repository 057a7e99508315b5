"""Arrays and the server's tensor table: what its tensors are in numpy, and what users may give for them.

Anything with the buffer protocol or `__dlpack__` will do. torch tensors are detached for the caller; torch is
never imported here, since whoever has a tensor has torch.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat.dtypes import CODES, NAMES, TRAINABLE, Role
from offbeat.errors import ConfigError, ModelMismatchError, UnsupportedTensorError
from offbeat.naming import a_class, nearest

__all__ = [
    "Array",
    "Entry",
    "as_array",
    "as_dict",
    "as_state",
    "by_name",
    "contiguous",
    "describe",
    "from_bytes",
    "is_tensor",
    "no_such_tensor",
    "read_table",
    "writable",
]

Array = npt.NDArray[Any]

_STATISTICS = frozenset({"running_mean", "running_var"})
"""BatchNorm's names of what the forward pass moves; a dict does not say it otherwise."""


@cache
def dtype_of(code: str) -> np.dtype[Any]:
    """Give numpy's dtype; bfloat16 is `ml_dtypes`' own or, without it, its bits as uint16."""
    if code != "bf16":
        return np.dtype(NAMES[code])
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the server's table."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    code: str
    role: Role
    dtype: np.dtype[Any] = field(repr=False)

    def __str__(self) -> str:
        """Name it with everything a user can get wrong."""
        return f"{self.role} {self.name!r} of shape {self.shape} and dtype {NAMES[self.code]}"

    def json(self) -> dict[str, Any]:
        """Write it as the tensor table has it."""
        head = {"name": self.name, "aliases": list(self.aliases), "shape": list(self.shape)}
        return {**head, "dtype": self.code, "role": self.role}

    def check(self, array: Array, code: str, what: str) -> Array:
        """Return the array if it has this tensor's shape and dtype.

        Raises:
            ModelMismatchError: If not, with both.
        """
        bits_given = code == "u16" and self.code == "bf16"
        if array.shape != self.shape or not (code == self.code or bits_given):
            given, wanted = NAMES.get(code, array.dtype.name), NAMES[self.code]
            cast = f"astype(np.{wanted})" if self.code != "bf16" else "astype(ml_dtypes.bfloat16)"
            remedy = f": cast it with .{cast}" if array.shape == self.shape else ""
            raise ModelMismatchError(
                f"{what} for {self.name!r} has shape {array.shape} and dtype {given}; the model has "
                f"{self}{remedy}"
            )
        return array


def read_table(table: str) -> list[Entry]:
    """Read a tensor table, JSON."""
    return [
        Entry(t["name"], tuple(t["aliases"]), tuple(t["shape"]), t["dtype"], t["role"], dtype_of(t["dtype"]))
        for t in json.loads(table)
    ]


def as_array(name: str, value: object) -> tuple[Array, str]:
    """Take whatever holds a tensor as an array, without a copy where that is possible.

    Args:
        name: For the error.
        value: An array, a torch tensor, or anything with the buffer protocol or `__dlpack__`.

    Returns:
        The array, of any strides, and the table's name of its dtype ("u16" for plain uint16). bfloat16 comes
        as its bits, uint16.

    Raises:
        UnsupportedTensorError: If it is none of these, or of a kind that Offbeat does not carry.
    """
    if is_tensor(value):
        return _from_torch(name, value)
    array: Array = value if isinstance(value, np.ndarray) else _from_protocol(name, value)
    kind = array.dtype.name
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if kind == "bfloat16":
        return array.view(np.uint16), "bf16"
    if kind == "uint16":
        return array, "u16"
    if kind not in CODES:
        raise UnsupportedTensorError(
            f"{name!r} has dtype {kind}: tensors are {', '.join(CODES)}; cast it with .astype(np.float32)"
        )
    return array, CODES[kind]


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor, told without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def contiguous(array: Array) -> Array:
    """Give the array in C order, copied once if it is not."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)


def as_dict(tensors: object, what: str) -> dict[str, Any]:
    """Take named arrays.

    Raises:
        ConfigError: If they have no names, as those of a list.
    """
    if type(tensors) is dict:
        return tensors
    if isinstance(tensors, Mapping):
        return dict(tensors)
    raise ConfigError(
        f"{what} is {a_class(tensors)}: give a dict of arrays by the model's names, as client.pull() "
        f"gives one"
    )


def describe(tensors: Mapping[str, object]) -> tuple[str, list[Array]]:
    """Make a tensor table of named arrays, in their order, and give the arrays in C order.

    float32, float16 and bfloat16 are parameters; integers, booleans and BatchNorm's statistics, known by
    their names, are buffers.

    Raises:
        UnsupportedTensorError: For each tensor that cannot be held; float64 among them.
        ConfigError: If a name is no string.
    """
    table, arrays, faults = [], [], []
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise ConfigError(f"{name!r} is no name of a tensor: names are strings")
        try:
            array, code = as_array(name, value)
        except UnsupportedTensorError as error:
            faults.append(str(error))
            continue
        if code == "f64":
            known = ", ".join(NAMES[c] for c in TRAINABLE)
            faults.append(
                f"{name!r} has dtype float64: parameters are {known}; cast it with .astype(np.float32)"
            )
        elif code == "u16":
            faults.append(f"{name!r} has dtype uint16, which no tensor has; for bfloat16 install ml_dtypes")
        else:
            is_statistic = name.rpartition(".")[2] in _STATISTICS
            role: Role = "parameter" if code in TRAINABLE and not is_statistic else "buffer"
            table.append(Entry(name, (), array.shape, code, role, dtype_of(code)).json())
            arrays.append(contiguous(array))
    if faults:
        raise UnsupportedTensorError("; ".join(faults))
    return json.dumps(table), arrays


def by_name(table: Iterable[Entry]) -> dict[str, Entry]:
    """Index a table by name, aliases included."""
    return {name: entry for entry in table for name in (entry.name, *entry.aliases)}


def from_bytes(entry: Entry, data: bytearray, *, tensor: bool) -> Any:  # noqa: ANN401  array or tensor
    """Make an array of a tensor's bytes, or a torch tensor; it shares their memory."""
    if not tensor:
        return np.frombuffer(data, entry.dtype).reshape(entry.shape)
    import torch

    dtype = getattr(torch, NAMES[entry.code])
    if not data:  # torch.frombuffer wants at least one element
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def as_state(table: str, values: Sequence[bytearray], *, tensor: bool) -> dict[str, Any]:
    """Name what a table's tensors hold, under each of a tensor's names; as `from_bytes` of each."""
    entries = read_table(table)
    arrays = {e: from_bytes(e, data, tensor=tensor) for e, data in zip(entries, values, strict=True)}
    return {name: array for e, array in arrays.items() for name in (e.name, *e.aliases)}


def no_such_tensor(name: object, known: Mapping[str, Entry], what: str) -> ModelMismatchError:
    """Word the refusal of a name that the model does not have."""
    near = nearest(name, known) if isinstance(name, str) else None
    hint = f"did you mean {known[near]}?" if near is not None else f"its tensors are {', '.join(known)}"
    return ModelMismatchError(f"{what} has {name!r}, and the model has no such tensor; {hint}")


def writable(name: str, value: object, entry: Entry) -> Array:
    """Take an array to be written in place.

    Raises:
        ModelMismatchError: If its shape or dtype is not the tensor's.
        ConfigError: If it is not an array, not C-contiguous, read-only, of foreign byte order, negated lazily
            or not in the host's memory: what would be written is a copy.
    """
    if is_tensor(value):
        # no torch for the type checker here
        device, is_negated = str(getattr(value, "device", "cpu")), getattr(value, "is_neg", bool)()
        if device != "cpu" or is_negated:
            what = f"on {device}" if device != "cpu" else "negated lazily by torch"
            raise ConfigError(
                f"out[{name!r}] is {what}, so it cannot be written in place; give a plain tensor on the CPU, "
                "and copy from it"
            )
    elif not isinstance(value, np.ndarray):
        value = _from_protocol(name, value)
    array, code = as_array(name, value)
    entry.check(array, code, "out")
    faults = {
        "not C-contiguous": not array.flags.c_contiguous,
        "of foreign byte order": isinstance(value, np.ndarray) and not value.dtype.isnative,
        "read-only": not array.flags.writeable,
    }
    if fault := next((fault for fault, is_so in faults.items() if is_so), None):
        raise ConfigError(
            f"out[{name!r}] is {fault}, so it cannot be written in place; give "
            f"np.empty({entry.shape}, {entry.dtype.name!r})"
        )
    return array


def _from_torch(name: str, tensor: Any) -> tuple[Array, str]:  # noqa: ANN401  no torch for the type checker here
    import torch

    from offbeat.module.table import spec_of

    role: Role = "parameter" if tensor.is_floating_point() and tensor.dtype != torch.float64 else "buffer"
    code = spec_of(name, tensor, role)["dtype"]
    plain = tensor.detach().cpu().resolve_neg()  # numpy knows no lazy negation
    if code == "bf16":
        return plain.view(torch.int16).numpy().view(np.uint16), code
    return plain.numpy(), code


def _from_protocol(name: str, value: object) -> Array:
    try:
        return np.asarray(memoryview(value))  # type: ignore[arg-type]  # asked, not known
    except (TypeError, ValueError):
        pass
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise UnsupportedTensorError(f"{name!r} cannot be read as an array: {error}") from error
    raise UnsupportedTensorError(
        f"{name!r} is {a_class(value)}: give an array, a tensor, or anything with the buffer "
        "protocol or __dlpack__"
    )
