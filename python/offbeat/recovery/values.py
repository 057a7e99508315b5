"""What a module and an optimizer hold: compared with a checkpoint's, and brought back as it was."""

from typing import Any

import torch
from torch import nn

__all__ = [
    "WithMetadata",
    "fill",
    "is_overlapping",
    "of_classes",
    "of_groups",
    "of_settings",
    "of_tensors",
    "settings_of",
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
        if held is None:
            continue
        if held.shape == tensor.shape and held.dtype == tensor.dtype and not is_overlapping(held):
            with torch.no_grad():
                held.copy_(tensor)
        else:  # as of a table that has grown
            owner, _, key = name.rpartition(".")
            setattr(module.get_submodule(owner), key, tensor.to(held.device))


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


def of_settings(
    own: list[dict[str, Any]], theirs: list[dict[str, Any]], optimizer: dict[str, Any] | None
) -> list[str]:
    """Word which settings of an optimizer's groups are neither what a run began with nor what it has now.

    Of groups that were added in mid-run it says nothing: nobody has given what they began with.

    Args:
        own: Of the groups as given, by `settings_of`.
        theirs: As the checkpoint's run began.
        optimizer: Its state in the checkpoint, whose settings come into effect; None where there is none.
    """
    now = theirs if optimizer is None else [settings_of(group) for group in optimizer["param_groups"]]
    return [
        f"the optimizer's {name} is {ours[name]!r}, and the checkpoint's run began with {then[name]!r}"
        for ours, then, held in zip(own, theirs, now, strict=False)
        for name in ours
        if name in then and ours[name] not in (then[name], held.get(name))
    ]


def of_classes(own: dict[str, str | None], theirs: dict[str, str | None]) -> list[str]:
    """Word which classes are others than a checkpoint's."""
    return [
        f"the {name} is {own.get(name) or 'none'}, and the checkpoint's is {theirs.get(name) or 'none'}"
        for name in own | theirs
        if own.get(name) != theirs.get(name)
    ]


def of_groups(own: torch.optim.Optimizer | None, theirs: dict[str, Any] | None) -> list[str]:
    """Word whether an optimizer's groups are others than a checkpoint's; of one that is not here, nothing."""
    if own is None or theirs is None:
        return []
    here = [len(group["params"]) for group in own.param_groups]
    then = [len(group["params"]) for group in theirs["param_groups"]]
    if here == then:
        return []
    return [f"the optimizer's groups have {here} parameters, and the checkpoint's {then}"]


def of_tensors(own: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Word how a checkpoint's tensors differ from a model's: which are missing, or of another shape."""
    found = [f"the checkpoint has no {name!r}, which the model has" for name in own if name not in theirs]
    found += [f"the checkpoint has a {name!r}, which the model has not" for name in theirs if name not in own]
    for name, tensor in own.items():
        other = theirs.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor):
            ours, told = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (tensor, other))
            if ours != told:
                found.append(f"{name!r} is {ours}, and the checkpoint's is {told}")
    return found


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Give a group's plain numbers as the run begins with them: a scheduler keeps the learning rate's."""
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | tuple)}
    return plain | {"lr": plain.get("initial_lr", plain.get("lr"))}
