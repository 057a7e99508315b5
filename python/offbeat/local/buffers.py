"""A module's buffers: which of them are worth copies, and how they get back what they held."""

import math
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
        # A scripted or traced part has none that can be assigned from here.
        self._held = [
            _Held(prefix, place, dict(place), vars(part)[_CACHES])
            for prefix, part in self._module.named_modules()
            if (place := vars(part).get("_buffers")) and isinstance(place, dict)
        ]
        self._tensors = dict(self._module.named_buffers())
        buffers = _with_values(self._tensors)
        copied = few(self._module, buffers) if self._are_few else buffers
        memory, self._values = self._values, {}
        with torch.inference_mode():
            for name, buffer in copied.items():
                value = memory.get(name)
                self._values[name] = value.copy_(buffer) if fits(value, buffer) else buffer.clone()

    def put_back(self) -> None:
        """Let the module have all again.

        But for one that is no part of its state (``persistent=False``) and got a size, or another one: a
        cache that was made or grew, of which the module may have noted elsewhere how far.
        """
        for held in self._held:
            for key, buffer in held.buffers.items():
                if key not in held.caches or not _has_resized(buffer, held.place.get(key)):
                    held.place[key] = buffer
        self._write(self._values, resized=self._values.keys() - self._caches())

    def put_back_broken(self) -> None:
        """Let it have those again that are broken: with numbers not finite that were finite, or not there.

        But for -infinity in what may be a mask: where all that is finite is 0, where there was -infinity
        before, and in a cache (``persistent=False``) that was made or got another size. With one that is
        broken those of the same part go back that held no number yet: the two ends of a range are one.
        """
        now = dict(self._module.named_buffers())
        caches = self._caches()
        broken = {
            name
            for name, values in _with_values(now).items()
            if self._is_broken(name, now[name], values, is_cache=name in caches)
        }
        parts = {_part(name) for name in broken}
        others = {n: then for n, then in self._values.items() if _part(n) in parts and n not in caches}
        broken |= {name for name, then in others.items() if not bool(then.isfinite().any())}
        for held in self._held:
            for key, buffer in held.buffers.items():
                if held.name(key) in broken and held.name(key) in now:
                    held.place[key] = _as_is(buffer, now[held.name(key)])
        self._write(broken, resized=broken)

    def put_back_written(self) -> None:
        """Let those that are the same tensors hold what they held.

        What has been assigned in their place stays, as a user may have done that, or converted the module.
        """
        now = dict(self._module.named_buffers())
        written = {name for name, buffer in now.items() if buffer is self._tensors.get(name)}
        self._write(written, resized=written - self._caches())

    def _caches(self) -> set[str]:
        return {held.name(key) for held in self._held for key in held.caches}

    def _is_broken(self, name: str, now: torch.Tensor, values: torch.Tensor, *, is_cache: bool) -> bool:
        then, is_same = self._values.get(name), now is self._tensors.get(name)
        if then is None and is_same:
            return False  # too many numbers to be kept (`few`)
        broken = _no_more_finite(then, values)
        if values.is_complex() or not bool(broken.any()):
            return bool(broken.any())
        is_made = is_cache and not is_same and (then is None or then.shape != values.shape)
        if is_made or _may_be_mask(then, values):
            broken &= values != -math.inf
        return bool(broken.any())

    def _write(self, names: Collection[str], *, resized: Collection[str]) -> None:
        """Write what they held to these; to those of `resized` that were resized in place as well."""
        now = dict(self._module.named_buffers())
        values = {name: value for name, value in self._values.items() if name in names}
        for name, value in values.items():
            buffer = now.get(name)
            if name in resized and buffer is self._tensors[name] and buffer.shape != value.shape:
                buffer.resize_(value.shape)  # as an observer does with what it has seen of each channel
        put_values(values, _with_values(now))


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


def _with_values(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give those that have numbers of their own to be copied, one after another."""
    return {name: buffer.detach() for name, buffer in buffers.items() if _has_values(buffer)}


def _has_values(buffer: torch.Tensor) -> bool:
    is_plain = buffer.layout is torch.strided and not buffer.is_nested and not buffer.is_quantized
    return not is_lazy(buffer) and is_plain and not buffer.is_meta


def _part(name: str) -> str:
    return name.rpartition(".")[0]


def _has_resized(then: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if now is None or now is then or is_lazy(now):
        return False
    return then is None or (not is_lazy(then) and now.shape != then.shape)


def _no_more_finite(then: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Mark the numbers that are NaN or infinite, but for those that were the same before."""
    broken = ~values.isfinite()
    if then is None or then.shape != values.shape:
        return broken
    there = then.to(values.device, values.dtype)
    return broken & ~((values == there) | (values.isnan() & there.isnan()))


def _may_be_mask(then: torch.Tensor | None, values: torch.Tensor) -> bool:
    """Tell whether there was -infinity before, or all that is finite is 0."""
    if then is not None and bool((then == -math.inf).any()):
        return True
    finite = values[values.isfinite()]
    return finite.numel() > 0 and not bool(finite.any())


def _as_is(then: torch.Tensor | None, now: torch.Tensor) -> torch.Tensor | None:
    """Give what there was, on the device and in the dtype of what there is; its values are to be written."""
    if then is None or (then.device, then.dtype) == (now.device, now.dtype):
        return then
    return now if then.shape == now.shape else then.to(now.device, now.dtype, copy=True)


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
            if bool((buffer == there).all()):  # torch.equal knows no float8
                continue
            # An expanded one has fewer numbers than its shape says, and torch writes to none of them twice.
            each_once = tuple(slice(1) if stride == 0 else slice(None) for stride in buffer.stride())
            buffer[each_once].copy_(there[each_once])
