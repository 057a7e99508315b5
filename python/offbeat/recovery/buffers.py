"""Buffers that training makes others than they were built: a bank that grows, a state that begins as None.

A model that is built anew has them as they were at first, and is the checkpoint's model all the same.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offbeat import log
from offbeat.module.table import unwrap
from offbeat.recovery.values import is_overlapping, is_plain, of_tensors

__all__ = ["Holder", "holder_of_loss"]


class Holder:
    """A module, whose parameters are to be a checkpoint's, and whose buffers may have changed in training.

    Args:
        module: It, wrapped perhaps.
        is_whole: What its `state_dict` leaves out is meant as well.
        is_fixed: Buffers are to be the checkpoint's, too: others have the same ones.
    """

    def __init__(self, module: nn.Module, *, is_whole: bool = False, is_fixed: bool = False) -> None:
        self._module = module
        self._is_whole = is_whole
        self._is_fixed = is_fixed
        self._at_first = {name: held is not None for name, _, _, held in self._places()}

    def tensors(self) -> dict[str, Any]:
        """Give what a checkpoint has of it, by name; not copied."""
        plain = unwrap(self._module)
        if self._is_whole:
            return dict(plain.named_parameters()) | dict(plain.named_buffers())
        return dict(plain.state_dict())

    def registered(self) -> list[str]:
        """Name its buffers, also those that are None: a checkpoint tells by that what was a buffer."""
        return [name for name, *_ in self._places()]

    def differences(self, theirs: Mapping[str, Any], told: Collection[str] | None) -> list[str]:
        """Word what a checkpoint has otherwise and training cannot have changed.

        Args:
            theirs: What `tensors` gave then.
            told: What `registered` gave then; None in older checkpoints.
        """
        own, then = self.tensors(), dict(theirs)
        if not self._is_fixed:
            here = {name for name, *_ in self._places()}
            may = {name for name in own | then if self._may_differ(name, here, own, then, told)}
            own, then = ({k: v for k, v in side.items() if k not in may} for side in (own, then))
        return of_tensors(own, then)

    def take(self, theirs: Mapping[str, Any], told: Collection[str] | None) -> None:
        """Let buffers that are others than a checkpoint's be as there, in new tensors; all else stays.

        Args:
            theirs: As for `differences`, which has none to tell.
            told: Likewise.
        """
        if self._is_fixed:
            return
        own, changed = self.tensors(), []
        for name, part, key, held in list(self._places()):
            tensor = theirs.get(name)
            if tensor is None:
                # One that was made since then stays: whoever made it may not make it once more.
                if held is not None and (name in (told or ()) or self._at_first.get(name) is False):
                    setattr(part, key, None)
                    changed.append(f"{name!r} is None again")
            elif not _fits(held, tensor):
                setattr(part, key, tensor.to(self._device(part, held), copy=True))
                was = "None" if held is None else list(held.shape)
                changed.append(f"{name!r} is {list(tensor.shape)}, and was {was} here")
        here = {name for name, *_ in self._places()}
        for name, tensor in theirs.items():
            if name not in here and name not in own:
                owner, _, key = name.rpartition(".")
                part = unwrap(self._module).get_submodule(owner)
                part.register_buffer(key, tensor.to(self._device(part, None), copy=True))
                changed.append(f"{name!r} is {list(tensor.shape)}, and the model had no such buffer yet")
        if changed:
            log.info(
                "buffers that training has changed are as the checkpoint has them: %s; were the model built "
                "otherwise in these alone, nothing could tell",
                "; ".join(changed),
            )

    def fitting(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Give a checkpoint's values with the module's own ones in place of those that it cannot hold yet."""
        if self._is_fixed:
            return dict(theirs)
        here = {name for name, *_ in self._places()}

        def is_theirs(name: str, value: object) -> bool:
            return name in theirs and (name not in here or _fits(value, theirs[name]))

        return {n: theirs[n] if is_theirs(n, value) else value for n, value in self.tensors().items()}

    def _may_differ(
        self,
        name: str,
        here: Collection[str],
        own: Mapping[str, Any],
        theirs: Mapping[str, Any],
        told: Collection[str] | None,
    ) -> bool:
        """Whether a tensor may be another one, or on one side alone, since training can have made it so."""
        if name not in here:
            return told is not None and name in told and name not in own and self._may_be_made(name)
        if name in theirs:
            return told is None or name in told  # else it was a parameter
        return name in (told or ()) or not self._at_first.get(name, False)

    def _may_be_made(self, name: str) -> bool:
        """Whether a forward could register a buffer of this name."""
        owner, _, key = name.rpartition(".")
        try:
            part = unwrap(self._module).get_submodule(owner)
        except AttributeError:
            return False
        return is_plain(part) and not hasattr(part, key)

    def _places(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
        """Go through (name, module, key, buffer); a traced module shows none here."""
        for prefix, part in unwrap(self._module).named_modules(remove_duplicate=False):
            inside = vars(part)
            for key, held in inside.get("_buffers", {}).items():
                if self._is_whole or key not in inside["_non_persistent_buffers_set"]:
                    yield f"{prefix}.{key}" if prefix else key, part, key, held

    def _device(self, part: nn.Module, held: torch.Tensor | None) -> torch.device:
        if held is not None:
            return held.device
        for module in (part, unwrap(self._module)):
            for tensor in (*module.parameters(), *module.buffers()):
                return tensor.device
        return torch.device("cpu")


def holder_of_loss(loss_fn: object) -> Holder:
    """Make that of a loss; one that is no module holds nothing."""
    return Holder(loss_fn if isinstance(loss_fn, nn.Module) else nn.Module(), is_whole=True)


def _fits(held: object, tensor: object) -> bool:
    """Whether values can be copied into what is held."""
    if not isinstance(held, torch.Tensor) or not isinstance(tensor, torch.Tensor):
        return held is not None
    is_writable = held.layout is torch.strided and not held.is_inference() and not is_overlapping(held)
    return is_writable and held.shape == tensor.shape and held.dtype == tensor.dtype
