"""Which of a module's tensors is which of the server's, told by name; order is the server's."""

from collections.abc import Sequence

from offbeat.dtypes import NAMES
from offbeat.errors import ModelMismatchError
from offbeat.module.table import Found, TensorSpec

__all__ = ["match", "words"]


MAX_DIFFERENCES = 3
"""Named in a refusal: of a model of another size hundreds differ."""


def match(table: Sequence[TensorSpec], found: Sequence[Found]) -> list[Found]:
    """Bring a module's tensors into the server's order.

    Raises:
        ModelMismatchError: If the two differ, naming the first tensors that do, with both shapes and dtypes.
    """
    by_name = {name: entry for entry in found for name in (entry.spec["name"], *entry.spec["aliases"])}
    matched: list[Found] = []
    differences: list[str] = []
    seen = set()
    for position, theirs in enumerate(table):
        entry = by_name.get(theirs["name"])
        if entry is not None:
            seen.add(id(entry))
        if entry is None or not _same(entry.spec, theirs):
            ours = "no such tensor" if entry is None else words(entry.spec)
            differences.append(
                f"tensor number {position} is {words(theirs)} on the server, and this worker's model has "
                f"{ours}"
            )
        else:
            matched.append(entry)
    differences += [
        f"this worker's has {words(entry.spec)}, and the server's has no such tensor"
        for entry in found
        if id(entry) not in seen
    ]
    if differences:
        more = len(differences) - MAX_DIFFERENCES
        told = differences[:MAX_DIFFERENCES] + ([f"and {more} more differ"] if more > 0 else [])
        raise ModelMismatchError(f"this is not the server's model: {'; '.join(told)}")
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
