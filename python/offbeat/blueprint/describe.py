"""From a module to its blueprint, and the proof that the blueprint is that module.

Whatever is written down is also built again, on the meta device, and compared with the original module by
module: exact types, attributes, child names, what is one object, requires_grad, dtypes. (Comparing the names
and shapes of two `state_dict`s instead let 24 of 25 wrong pairs pass.) So a model that only looks like a
described one is found out where it is given, and never trains as something else on a worker.
"""

import json
from collections.abc import Iterable

import torch
from torch import nn

from offbeat.blueprint.build import from_blueprint
from offbeat.blueprint.layers import LAYERS
from offbeat.blueprint.text import FORMAT, MAX_DEPTH, Blueprint, Node, is_value

__all__ = ["describe"]

_CONTENTS = frozenset({"_parameters", "_buffers", "_modules"})
# What nn.Module keeps for itself; `_compiled_call_impl` is there where `module.compile()` was called.
_MACHINERY = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}


class _NotDescribableError(Exception):
    """The module at a path is not what a blueprint can say."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"module {path!r} {reason}" if path else f"the model itself {reason}")


def describe(module: nn.Module) -> str:
    """Write a model's blueprint, or why it has none.

    Args:
        module: Any module. It is not changed, and no random number is drawn.

    Returns:
        JSON text. `offbeat.blueprint.build` makes the module from it, or raises with the reason it carries.
    """
    try:
        blueprint = _blueprint(module)
        _check_same(module, from_blueprint(blueprint), "")
        _check_sharing(module)
    except _NotDescribableError as reason:
        return json.dumps({"format": FORMAT, "not_describable": str(reason)})
    return json.dumps(blueprint)


def _blueprint(root: nn.Module) -> Blueprint:
    node = _node(root, "", {}, 0)
    names_of: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return {
        "format": FORMAT,
        "module": node,
        "tied": [names for names in names_of.values() if len(names) > 1],
        "frozen": [name for name, parameter in root.named_parameters() if not parameter.requires_grad],
        "dtypes": {
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in (*root.named_parameters(), *root.named_buffers())
            if tensor.is_floating_point() and tensor.dtype is not torch.float32
        },
    }


def _node(module: nn.Module, path: str, first_path: dict[int, str], depth: int) -> Node:
    """Describe one module and what is below it; one met before is named by its first path."""
    if id(module) in first_path:
        return {"same_as": first_path[id(module)]}
    first_path[id(module)] = path
    if depth > MAX_DEPTH:
        raise _NotDescribableError(path, f"is nested more than {MAX_DEPTH} levels deep")
    name = type(module).__name__
    if type(module) is nn.Sequential:
        children: dict[str, Node] = {
            key: _node(child, f"{path}.{key}" if path else key, first_path, depth + 1)
            for key, child in vars(module)["_modules"].items()
        }
        return {"class": name, "children": children}
    if name not in LAYERS or type(module) is not LAYERS[name].cls:
        raise _NotDescribableError(
            path, f"is a {_class_name(module)}, not a torch.nn layer from tensor to tensor"
        )
    try:
        arguments = LAYERS[name].read(module)
    except AttributeError as error:
        raise _NotDescribableError(path, f"is a {name} that lost an attribute: {error}") from error
    for key, value in arguments.items():
        if not is_value(value):
            raise _NotDescribableError(
                path,
                f"has {key}={value!r}, a {type(value).__name__}: only None, bool, int, float, str and tuples",
            )
    return {"class": name, "arguments": arguments}


def _check_same(module: nn.Module, built: nn.Module, path: str) -> None:
    """Compare a module with the one its blueprint builds, and everything below."""
    mine, theirs = vars(module), vars(built)
    if type(module) is not type(built):
        raise _NotDescribableError(
            path, f"is a {_class_name(module)}, and {_class_name(built)} would be built"
        )
    if not module.training:
        raise _NotDescribableError(path, "is in eval mode, and would be built in training mode")
    for key in mine.keys() & _MACHINERY - _CONTENTS:
        if "hook" in key and mine[key]:
            raise _NotDescribableError(path, f"has a hook ({key.strip('_')})")
    _check_same_attributes(mine, theirs, path)
    if mine["_non_persistent_buffers_set"] != theirs["_non_persistent_buffers_set"]:
        raise _NotDescribableError(path, "keeps other buffers out of its state_dict than its class does")
    for kind in ("parameter", "buffer"):
        _check_same_tensors(kind, mine[f"_{kind}s"], theirs[f"_{kind}s"], path)
    _check_same_names("child", mine["_modules"], theirs["_modules"], path)
    for key, child in mine["_modules"].items():
        _check_same(child, theirs["_modules"][key], f"{path}.{key}" if path else key)


def _check_same_attributes(mine: dict[str, object], theirs: dict[str, object], path: str) -> None:
    attributes = mine.keys() - _MACHINERY
    if added := sorted(attributes - theirs.keys()):
        raise _NotDescribableError(path, f"has an attribute of its own, {added[0]!r}")
    if removed := sorted(theirs.keys() - _MACHINERY - attributes):
        raise _NotDescribableError(path, f"has no attribute {removed[0]!r} any more")
    for key in sorted(attributes):
        if not _same_value(mine[key], theirs[key]):
            raise _NotDescribableError(
                path, f"has {key}={mine[key]!r}, and {theirs[key]!r} would be built with the same arguments"
            )


def _check_same_tensors(
    kind: str, mine: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None], path: str
) -> None:
    _check_same_names(kind, mine, theirs, path)
    for key, tensor in mine.items():
        built = theirs[key]
        if tensor is None or built is None:
            if tensor is not built:
                raise _NotDescribableError(path, f"has {key}={tensor!r}, and {built!r} would be built")
            continue
        for what in ("shape", "dtype", "requires_grad"):
            if getattr(tensor, what) != getattr(built, what):
                raise _NotDescribableError(
                    path,
                    f"has a {kind} {key!r} of {what} {getattr(tensor, what)}, not {getattr(built, what)}",
                )
        if type(tensor) is not type(built):
            raise _NotDescribableError(path, f"has a {kind} {key!r} that is a {type(tensor).__name__}")
        if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise _NotDescribableError(path, f"has a hook on its {kind} {key!r}")


def _check_same_names(kind: str, mine: Iterable[str], theirs: Iterable[str], path: str) -> None:
    if list(mine) != list(theirs):
        raise _NotDescribableError(
            path, f"has the {kind} names {list(mine)}, and a new one has {list(theirs)}"
        )


def _check_sharing(root: nn.Module) -> None:
    """Two names of one buffer that do not come from one module: nothing in a blueprint says so."""
    seen: dict[int, str] = {}
    for path, module in root.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if (other := seen.setdefault(id(buffer), path)) != path:
                raise _NotDescribableError(path, f"shares its buffer {key!r} with module {other!r}")


def _same_value(mine: object, theirs: object) -> bool:
    """Equal, of the same type at every level, and of a kind for which that can be told."""
    if type(mine) is list and type(theirs) is list:  # torch itself keeps some in private attributes
        return _same_value(tuple(mine), tuple(theirs))
    return is_value(mine) and type(mine) is type(theirs) and repr(mine) == repr(theirs)


def _class_name(module: nn.Module) -> str:
    cls = type(module)
    return (
        f"torch.nn.{cls.__name__}"
        if cls.__module__.startswith("torch.nn.")
        else f"{cls.__module__}.{cls.__qualname__}"
    )
