"""Which of a module's tensors is which of the server's, told by name; order is the server's."""

from collections.abc import Sequence

from offbeat.dtypes import NAMES
from offbeat.errors import ModelMismatchError
from offbeat.module.table import Found, TensorSpec

__all__ = ["match", "words"]


def match(table: Sequence[TensorSpec], found: Sequence[Found]) -> list[Found]:
    """Bring a module's tensors into the server's order.

    Raises:
        ModelMismatchError: If the two differ, naming the first tensor that does, with both shapes and dtypes.
    """
    by_name = {name: entry for entry in found for name in (entry.spec["name"], *entry.spec["aliases"])}
    matched: list[Found] = []
    for position, theirs in enumerate(table):
        entry = by_name.get(theirs["name"])
        if entry is None or not _same(entry.spec, theirs):
            ours = "no such tensor" if entry is None else words(entry.spec)
            raise ModelMismatchError(
                f"this is not the server's model: tensor number {position} is {words(theirs)} on the server, "
                f"and this worker's model has {ours}"
            )
        matched.append(entry)
    known = {id(entry) for entry in matched}
    for entry in found:
        if id(entry) not in known:
            raise ModelMismatchError(
                f"this is not the server's model: this worker's has {words(entry.spec)}, and the server's "
                f"has no such tensor"
            )
    return matched


def words(spec: TensorSpec) -> str:
    """Name a tensor with everything two models may differ in."""
    tied = f", tied with {', '.join(map(repr, spec['aliases']))}" if spec["aliases"] else ""
    shape, dtype = spec["shape"], NAMES.get(spec["dtype"], spec["dtype"])
    return f"{spec['role']} {spec['name']!r} of shape {shape} and dtype {dtype}{tied}"


def _same(ours: TensorSpec, theirs: TensorSpec) -> bool:
    """Equal, whichever of a tied tensor's names comes first."""
    keys = ("shape", "dtype", "role")
    names = [{spec["name"], *spec["aliases"]} for spec in (ours, theirs)]
    return names[0] == names[1] and all(ours[key] == theirs[key] for key in keys)  # type: ignore[literal-required]
