"""What a module holds: compared with a checkpoint's, and brought back as it was."""

from typing import Any, TypeGuard

import torch
from torch import nn

__all__ = [
    "WithMetadata",
    "fill",
    "is_overlapping",
    "is_plain",
    "of_tensors",
    "unlisted",
]


def unlisted(module: nn.Module) -> dict[str, torch.Tensor]:
    """Give the buffers that a module's `state_dict` leaves out; they are part of its state all the same."""
    listed = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name not in listed}


def fill(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Bring tensors into a module's parameters and buffers, in place, or in their stead."""
    own = dict(module.named_buffers()) | dict(module.named_parameters())
    for name, tensor in tensors.items():
        held = own.get(name)
        owner, _, key = name.rpartition(".")
        if held is None:
            part = dict(module.named_modules(remove_duplicate=False)).get(owner)
            device = next((t.device for t in own.values()), tensor.device)
            if part is not None and key in vars(part).get("_buffers", {}):  # which began as None
                setattr(part, key, tensor.to(device, copy=True))
            elif is_plain(part) and not hasattr(part, key):  # which a forward registers
                part.register_buffer(key, tensor.to(device, copy=True), persistent=False)
        elif held.shape == tensor.shape and held.dtype == tensor.dtype and not is_overlapping(held):
            with torch.no_grad():
                held.copy_(tensor)
        else:  # as of a table that has grown
            setattr(module.get_submodule(owner), key, tensor.to(held.device))


def is_plain(part: nn.Module | None) -> TypeGuard[nn.Module]:
    """Whether it is a module that takes another buffer beside its state, as a scripted one does not."""
    return part is not None and not isinstance(part, torch.jit.ScriptModule)


def is_overlapping(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as an expanded tensor's do, so that none can be written."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class WithMetadata(dict[str, Any]):
    """A state with the versions of its modules' formats, as torch looks for them."""

    _metadata: dict[str, Any]

    @classmethod
    def of(cls, state: dict[str, Any], metadata: dict[str, Any]) -> "WithMetadata":
        """Make it of the two."""
        made = cls(state)
        made._metadata = metadata  # torch's own name for it
        return made

    def copy(self) -> "WithMetadata":
        """Copy it with them, as a module does that loads it."""
        return self.of(self, self._metadata)


SHOWN = 3
"""So many of each kind of difference are named: two models may differ in a thousand tensors."""


def of_tensors(own: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Word how a checkpoint's tensors differ from a model's: which are missing, or of another shape."""
    lacking = [f"the checkpoint has no {name!r}, which the model has" for name in own if name not in theirs]
    besides = [
        f"the checkpoint has a {name!r}, which the model has not" for name in theirs if name not in own
    ]
    others = []
    for name, tensor in own.items():
        other = theirs.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor):
            ours, told = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (tensor, other))
            if ours != told:
                others.append(f"{name!r} is {ours}, and the checkpoint's is {told}")
    return [text for found in (lacking, besides, others) for text in _first(found)]


def _first(found: list[str]) -> list[str]:
    if len(found) <= SHOWN:
        return found
    return [*found[: SHOWN - 1], f"{found[SHOWN - 1]} (and so {len(found) - SHOWN} more)"]
