"""A module's buffers: which of them are worth copies, and how they get back what they held."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["BufferSnapshot", "few", "fits", "put_values", "same_buffers"]

FEW = 2**22
"""Numbers whose copies cost next to nothing: of float32, 16 MiB. The statistics of large nets are fewer."""


def few(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Choose the smallest buffers, with no more numbers than the parameters in training have, or `FEW`.

    Which of them forwards write to is not known before: torch's version counters count neither BatchNorm's
    writes nor those of a user's own kernel, and what stays for a while may be written to later. So this goes
    by size. Statistics have a few numbers for each of a layer's units, whoever wrote the layer, and a memory
    bank or a codebook mostly has fewer than what is trained; a table, or frozen weights that are held as
    buffers, may have any number, and their copies would cost more time and memory than training does.

    Args:
        module: Whose they are.
        buffers: By name.
    """
    left = sum(buffer.numel() for buffer in buffers.values())
    if left <= FEW:
        return dict(buffers)
    most = max(FEW, sum(p.numel() for p in module.parameters() if p.requires_grad))
    chosen = dict(sorted(buffers.items(), key=lambda named: named[1].numel()))
    while left > most:
        left -= chosen.popitem()[1].numel()
    return chosen


class BufferSnapshot:
    """Which tensors a module has as buffers, and what they hold, to be put back.

    Where one is assigned, as in `self.scale = 0.9 * self.scale + ...`, the buffer is another tensor
    afterwards; where it began as None, as the state of a recurrent net may, it is None again. What was not
    there before stays, as what made it does not know that it would be gone.
    """

    def __init__(self, module: nn.Module, *, are_few: bool = False) -> None:
        """Take it.

        Args:
            module: Whose.
            are_few: Only as many values as are worth copies (`few`).
        """
        self._module = module
        self._are_few = are_few
        self._values: dict[str, torch.Tensor] = {}
        self.renew()

    def renew(self) -> None:
        """Take it once more, in the same memory as far as that fits."""
        parts = self._module.named_modules()
        # A traced one has none here.
        self._held = [
            _Held(prefix, place, dict(place), vars(part)[_CACHES])
            for prefix, part in parts
            if (place := vars(part).get("_buffers"))
        ]
        buffers = self._now()
        copied = few(self._module, buffers) if self._are_few else buffers
        memory, self._values = self._values, {}
        with torch.inference_mode():
            for name, buffer in copied.items():
                value = memory.get(name)
                self._values[name] = value.copy_(buffer) if fits(value, buffer) else buffer.clone()

    def put_back(self) -> None:
        """Let the module have all again, where nobody else has assigned any since.

        But for one that is no part of its state (``persistent=False``) and got a size, or another one: a
        cache that was made or grew, of which the module may have noted elsewhere how far.
        """
        for held in self._held:
            for key, buffer in held.buffers.items():
                if key not in held.caches or not _has_resized(buffer, held.place.get(key)):
                    held.place[key] = buffer
        put_values(self._values, self._now())

    def put_back_broken(self) -> None:
        """Let it have those again that are not finite, and were, or were None."""
        now = self._now()
        broken = {n for n, b in now.items() if not bool(b.isfinite().all()) and self._was_finite(n)}
        for held in self._held:
            for key, buffer in held.buffers.items():
                # What has gone to another device or dtype, as a whole module may, stays, and gets values.
                if held.name(key) in broken and not _has_moved(buffer, held.place[key]):
                    held.place[key] = buffer
        put_values({name: value for name, value in self._values.items() if name in broken}, self._now())

    def put_back_in_place(self) -> None:
        """Let those that are the same tensors hold what they held: what was assigned may be a user's."""
        same = {
            held.name(key)
            for held in self._held
            for key, buffer in held.buffers.items()
            if buffer is not None and held.place.get(key) is buffer
        }
        put_values({name: value for name, value in self._values.items() if name in same}, self._now())

    def _was_finite(self, name: str) -> bool:
        value = self._values.get(name)
        return value is None or bool(value.isfinite().all())

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: b.detach() for name, b in self._module.named_buffers() if _has_values(b)}


class _Held(NamedTuple):
    """What a part of a module has, where it keeps that, and of which it is no part of the state."""

    prefix: str
    place: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor | None]
    caches: Collection[str]

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key


@contextmanager
def same_buffers(module: nn.Module, *, are_few: bool = False) -> Iterator[None]:
    """Give a module its buffers back, with their values: a running scale is one that moves in eval mode, too.

    Args:
        module: The module.
        are_few: As for `BufferSnapshot`, which says what comes back.
    """
    before = BufferSnapshot(module, are_few=are_few)
    try:
        yield
    finally:
        before.put_back()


_CACHES = "_non_persistent_buffers_set"
"""Where torch keeps the names of a module's buffers that are no part of its state."""


def _has_values(buffer: torch.Tensor) -> bool:
    """Whether it has numbers of its own to be copied, one after another."""
    is_plain = buffer.layout is torch.strided and not buffer.is_nested
    return not is_lazy(buffer) and is_plain and not buffer.is_meta


def _has_resized(then: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if now is None or now is then or is_lazy(now):
        return False
    return then is None or (not is_lazy(then) and now.shape != then.shape)


def _has_moved(then: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    return then is not None and now is not None and (then.device, then.dtype) != (now.device, now.dtype)


def fits(memory: torch.Tensor | None, buffer: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Tell whether a buffer's values can be copied to memory that there is, if there is any."""
    return memory is not None and (memory.shape, memory.dtype, memory.device) == (
        buffer.shape,
        buffer.dtype,
        buffer.device,
    )


def put_values(values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Write values to strided buffers that have their shapes still, and changed.

    Args:
        values: By the buffer's name.
        buffers: Likewise; others are left alone.
    """
    with torch.inference_mode():  # in which those can be written to as well that were made in it
        for name, value in values.items():
            buffer = buffers.get(name)
            if buffer is None or buffer.shape != value.shape:
                continue
            there = value.to(buffer.device, buffer.dtype)
            if torch.equal(buffer, there):
                continue
            # An expanded one has fewer numbers than its shape says, and torch writes to none of them twice.
            each_once = tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())
            buffer[each_once].copy_(there[each_once])
