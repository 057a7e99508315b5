"""From a blueprint to a module: built on the meta device, so nothing is allocated twice or drawn at all."""

import torch
from torch import nn

from offbeat.blueprint.layers import LAYERS
from offbeat.blueprint.text import Blueprint, Node, parse
from offbeat.errors import ProtocolError

__all__ = ["build", "from_blueprint"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def build(text: str, device: torch.device | str = "cpu") -> nn.Module:
    """Build a model from its blueprint. Its tensors are allocated but not set: a pull sets them.

    Args:
        text: What `describe` wrote, perhaps on another machine.
        device: Where its tensors shall be.

    Returns:
        The module, in training mode.

    Raises:
        ConfigError: If the model has no blueprint, with the reason.
        ProtocolError: If the text is no blueprint that this version can read.
    """
    blueprint = parse(text)
    module = from_blueprint(blueprint)
    _materialize(module, torch.device(device))
    return module


def from_blueprint(blueprint: Blueprint) -> nn.Module:
    """Build the module on the meta device: everything is there but the numbers. Uses no random numbers."""
    built: dict[str, nn.Module] = {}
    with torch.device("meta"):
        module = _module(blueprint["module"], "", built)
    try:
        for names in blueprint["tied"]:
            shared = module.get_parameter(names[0])
            for name in names[1:]:
                owner, _, key = name.rpartition(".")
                module.get_submodule(owner).register_parameter(key, shared)
        _set_dtypes(module, blueprint["dtypes"])
        for name in blueprint["frozen"]:
            module.get_parameter(name).requires_grad_(False)  # noqa: FBT003  torch takes it by position
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ProtocolError(
            f"the server's blueprint names a tensor that its modules do not have: {error}"
        ) from error
    return module


def _module(node: Node, path: str, built: dict[str, nn.Module]) -> nn.Module:
    if "same_as" in node:
        if node["same_as"] not in built:
            raise ProtocolError(
                f"the server's blueprint says that {path!r} is {node['same_as']!r}, which is not"
            )
        return built[node["same_as"]]
    module: nn.Module
    if node["class"] == "Sequential":
        module = nn.Sequential()
        for name, child in node["children"].items():
            module.add_module(name, _module(child, f"{path}.{name}" if path else name, built))
    else:
        try:
            module = LAYERS[node["class"]].cls(**node["arguments"])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ProtocolError(
                f"the server's blueprint has a {node['class']} at {path!r} that torch {torch.__version__} "
                f"cannot build: {error}"
            ) from error
    built[path] = module
    return module


def _set_dtypes(module: nn.Module, dtypes: dict[str, str]) -> None:
    """Give every floating tensor its recorded dtype, whatever this process's default is."""
    for name, parameter in list(module.named_parameters()):
        parameter.data = parameter.data.to(_DTYPES.get(dtypes.get(name, ""), torch.float32))
    for name, buffer in list(module.named_buffers()):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(_DTYPES.get(dtypes.get(name, ""), torch.float32))


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Put allocated tensors in the place of meta ones. What was one object stays one."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for key, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                )
            owner.register_parameter(key, made[id(parameter)])
        for key, buffer in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(key, torch.empty_like(buffer, device=device))
