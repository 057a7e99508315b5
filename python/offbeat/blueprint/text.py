"""The blueprint as data: its keys, its limits, and the one way to read its text, which comes from outside."""

import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from offbeat.blueprint.layers import LAYERS, Value
from offbeat.errors import ConfigError, ProtocolError

__all__ = ["FORMAT", "MAX_DEPTH", "Blueprint", "Node", "is_value", "parse"]

#: Grows with every change that an older worker would misread.
FORMAT = 1
#: Levels of Sequential in Sequential; far above any real model, far below Python's recursion limit.
MAX_DEPTH = 64
#: Modules in one blueprint: bounds what a hostile server can make a worker build.
MAX_MODULES = 100_000


#: One module: a Sequential with children, a layer with arguments, or the path at which it stood before.
Node = TypedDict(
    "Node",
    {
        "class": NotRequired[str],
        "arguments": NotRequired[dict[str, Any]],
        "children": NotRequired[dict[str, Any]],
        "same_as": NotRequired[str],
    },
)


class Blueprint(TypedDict):
    """A whole model.

    `tied` lists the names of each parameter that has several, `frozen` the parameters that need no gradient,
    `dtypes` the floating tensors that are not float32.
    """

    format: int
    module: Node
    tied: list[list[str]]
    frozen: list[str]
    dtypes: dict[str, str]


def is_value(value: object) -> bool:
    """Tell whether a value can be written down: None, bool, int, float, str, or a tuple of them."""
    if type(value) is tuple:
        return all(is_value(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def parse(text: str) -> Blueprint:
    """Read a blueprint's text and check every part of it; sequences become the tuples they were.

    Raises:
        ConfigError: If the text says that the model has no blueprint, with the reason.
        ProtocolError: If it is anything but a blueprint.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server's blueprint is no JSON: {error}") from error
    found = _mapping(found, "the blueprint")
    if found.get("format") != FORMAT:
        raise ProtocolError(
            f"the server's blueprint has format {found.get('format')!r} and this version of Offbeat reads "
            f"format {FORMAT}: install the server's version here, or give AsyncWorker model="
        )
    if "not_describable" in found:
        raise ConfigError(
            f"the server's model cannot be built here from its description: {found['not_describable']}. "
            f"Give AsyncWorker the model: AsyncWorker(..., model=YourModel())"
        )
    budget = [MAX_MODULES]
    return {
        "format": FORMAT,
        "module": _node(found.get("module"), "", 0, budget),
        "tied": [_names(names, "tied") for names in _list(found.get("tied"), "tied")],
        "frozen": _names(found.get("frozen"), "frozen"),
        "dtypes": {str(k): str(v) for k, v in _mapping(found.get("dtypes"), "dtypes").items()},
    }


def _node(found: object, path: str, depth: int, budget: list[int]) -> Node:
    node = _mapping(found, f"module {path!r}")
    budget[0] -= 1
    if depth > MAX_DEPTH or budget[0] < 0:
        raise ProtocolError(
            f"the server's blueprint has more than {MAX_DEPTH} levels or {MAX_MODULES} modules"
        )
    if "same_as" in node:
        return {"same_as": str(node["same_as"])}
    name = node.get("class")
    if name == "Sequential":
        children = _mapping(node.get("children"), f"the children of {path!r}")
        return {
            "class": "Sequential",
            "children": {
                key: _node(child, f"{path}.{key}" if path else key, depth + 1, budget)
                for key, child in children.items()
            },
        }
    if not isinstance(name, str) or name not in LAYERS:
        raise ProtocolError(
            f"the server's blueprint names {name!r} as module {path!r}, which this version of Offbeat "
            f"does not know: install the server's version here, or give AsyncWorker model="
        )
    arguments = _mapping(node.get("arguments"), f"the arguments of {path!r}")
    return {"class": name, "arguments": {key: _value(value) for key, value in arguments.items()}}


def _value(found: object) -> Value:
    if isinstance(found, list):
        return tuple(_value(item) for item in found)
    if found is None or isinstance(found, bool | int | float | str):
        return found
    raise ProtocolError(f"the server's blueprint has {found!r} for an argument")


def _mapping(found: object, what: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ProtocolError(f"the server's blueprint is damaged: {what} is {found!r}, not an object")
    return found


def _list(found: object, what: str) -> list[Any]:
    if not isinstance(found, list):
        raise ProtocolError(f"the server's blueprint is damaged: {what} is {found!r}, not a list")
    return found


def _names(found: object, what: str) -> list[str]:
    names = _list(found, what)
    if not all(isinstance(name, str) for name in names):
        raise ProtocolError(f"the server's blueprint is damaged: {what} holds something that is no name")
    return names
