"""What a module's buffers were, to be given back: after a validation, or a batch that is dropped."""

import math
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offbeat.local.buffers import few, fits, has_values, put_values, with_values

__all__ = ["BufferSnapshot", "same_buffers"]


class BufferSnapshot:
    """Which tensors a module has as buffers, and what they hold, to be put back.

    Where one is assigned, as in `self.scale = 0.9 * self.scale + ...`, the buffer is another tensor
    afterwards; where it began as None, as the state of a recurrent net may, it is None again. What was not
    there before stays, as what made it does not know that it would be gone.

    A part of the module is known again under another name, as when it was wrapped since, or by its tensors,
    as when it was fused; another one under the same name, as a copy, gets the values. Of what is new there
    is nothing to be put back, and what was taken out is left alone.
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
        self._kept: list[_Kept] = []
        self._began_as_none: set[tuple[str, str]] = set()
        self.renew()

    def renew(self) -> None:
        """Take it once more, in the same memory as far as that fits."""
        places = list(_places(self._module))
        names = dict[int, str]()  # one table that many parts share is one
        tensors = dict[str, torch.Tensor]()
        for prefix, place, _ in places:
            for key, buffer in place.items():
                if buffer is not None and id(buffer) not in names:
                    names[id(buffer)] = name = f"{prefix}.{key}"
                    tensors[name] = buffer
        there = with_values(tensors)
        copied = few(self._module, there) if self._are_few else there
        memory, self._values = self._values, {}
        with torch.inference_mode(mode=False), torch.no_grad():  # it may be taken once more in neither
            for name, buffer in copied.items():
                value = memory.get(name)
                self._values[name] = value.copy_(buffer) if fits(value, buffer) else buffer.clone()
        self._kept = [
            _Kept(prefix, place, key, buffer, self._values.get(names.get(id(buffer), "")), key in caches)
            for prefix, place, caches in places
            for key, buffer in place.items()
        ]
        self._began_as_none.update((one.prefix, one.key) for one in self._kept if one.tensor is None)

    def put_back(self) -> None:
        """Let the module have all again.

        But for one that is no part of its state (``persistent=False``) and got a size, or another one: a
        cache that was made or grew, of which the module may have noted elsewhere how far. So may be any of a
        scripted or traced part, which does not tell.
        """
        kept = self._found()
        for one in kept:
            if not one.is_cache or not _has_resized(one.tensor, one.now):
                one.put(one.tensor)
        _write(kept)

    def put_back_broken(self) -> None:
        """Let it have those again that hold NaN or an infinity in the place of another number, or of none.

        But for -infinity in what may be a mask: where all that is finite is 0, where there was -infinity
        before, or where a cache, or a matrix out of nothing, was made. Who has assigned is not known: what a
        user has given such numbers may go back as well.

        What belongs together goes back together: see `_with_related`. One that has been None, and has another
        size than it had, is None again: a state that was reset since, for batches of another size.
        """
        kept = self._found()
        broken = _with_related(kept, [one for one in kept if one.is_broken()])
        for one in broken:
            if (now := one.now) is not None:
                may_be_none = _has_resized(one.tensor, now) and (one.prefix, one.key) in self._began_as_none
                one.put(None if may_be_none else _as_is(one.tensor, now))
        _write(broken)

    def put_back_written(self) -> None:
        """Let those that are the same tensors hold what they held.

        What has been assigned in their place stays, as a user may have done that, or converted the module.
        """
        _write([one for one in self._found() if one.now is one.tensor])

    def _found(self) -> "list[_Kept]":
        now = list(_places(self._module))
        there, known = {id(place) for _, place, _ in now}, {id(one.place) for one in self._kept}
        new = [(prefix, place) for prefix, place, _ in now if id(place) not in known]
        by_name = dict(new)
        by_tensor = {id(b): (place, key) for _, place in new for key, b in place.items() if b is not None}
        found = []
        for one in self._kept:
            if id(one.place) in there:
                found.append(one)
            elif id(one.tensor) in by_tensor:
                place, key = by_tensor[id(one.tensor)]
                found.append(replace(one, place=place, key=key, is_swapped=True))
            elif one.prefix in by_name:
                found.append(replace(one, place=by_name[one.prefix], is_swapped=True))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What one buffer was.

    Attributes:
        prefix: Which part of the module has it.
        place: Where that keeps its buffers.
        key: Under which name.
        tensor: Which it was, if any.
        value: What it held; None: nothing that is kept.
        is_cache: Whether it is no part of the state.
        is_swapped: Whether that place is of a part that came instead, and gets no tensors, only values.
    """

    prefix: str
    place: "_Place"
    key: str
    tensor: torch.Tensor | None
    value: torch.Tensor | None
    is_cache: bool
    is_swapped: bool = False

    @property
    def now(self) -> torch.Tensor | None:
        return self.place[self.key] if self.key in self.place else None  # noqa: SIM401  a scripted one has no get

    def put(self, tensor: torch.Tensor | None) -> None:
        if self.key in self.place and self.now is not tensor and not self.is_swapped:
            self.place[self.key] = tensor

    def held_nothing(self) -> bool:
        """Whether there was no finite number in it."""
        return self.tensor is None or (self.value is not None and not bool(self.value.isfinite().any()))

    def is_broken(self) -> bool:
        now, then = self.now, self.value
        if now is None or not has_values(now) or (now is self.tensor and then is None):
            return False
        values = now.detach()
        broken = _no_more_finite(then, values)
        if bool(broken.any()) and not values.is_complex() and self._may_be_mask(values):
            broken &= values != -math.inf
        return bool(broken.any())

    def _may_be_mask(self, values: torch.Tensor) -> bool:
        then, finite = self.value, values.isfinite()
        if then is not None and bool((then == -math.inf).any()):
            return True
        if bool(finite.any()) and not bool((finite & (values != 0)).any()):
            return True
        if self.now is self.tensor or (then is not None and then.shape == values.shape):
            return False
        # One that was made just now, as with slopes; a statistic of units has one dimension.
        return self.is_cache or (values.dim() > 1 and (then is None or then.numel() <= 1))


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


_Place = MutableMapping[str, torch.Tensor | None]


def _places(module: nn.Module) -> Iterator[tuple[str, _Place, Collection[str]]]:
    """Give where each part keeps its buffers, and which of them are no part of its state."""
    for prefix, part in module.named_modules():
        place = part._buffers  # noqa: SLF001  torch has no other way to assign one that may be None
        if isinstance(place, dict):
            yield prefix, place, part._non_persistent_buffers_set  # noqa: SLF001
        else:  # scripted and traced parts do not tell which those are
            yield prefix, place, {key for key, _ in place.items()}


def _with_related(kept: "Sequence[_Kept]", broken: "Sequence[_Kept]") -> "list[_Kept]":
    """Add to what is broken what would be wrong without it.

    Of the same part those that are the same tensors still, as a count is; where what broke had held no finite
    number yet, those of the part and of its size, caches aside, that had not: the two ends of a range are
    one. And of any part those that hold a tensor by now that goes back elsewhere, as the buffers of a ring
    do.
    """
    parts = {one.prefix for one in broken}
    begun = {(one.prefix, _shape(one.now)) for one in broken if one.held_nothing()}
    chosen = dict.fromkeys(broken)
    for one in kept:
        is_begun = not one.is_cache and (one.prefix, _shape(one.now)) in begun and one.held_nothing()
        if is_begun or (one.prefix in parts and one.now is one.tensor):
            chosen[one] = None
    holders = dict[int, list[_Kept]]()
    for one in kept:
        if (now := one.now) is not None and now is not one.tensor:
            holders.setdefault(id(now), []).append(one)
    to_follow = list(chosen)
    while to_follow:
        tensor = to_follow.pop().tensor
        for holder in () if tensor is None else holders.get(id(tensor), ()):
            if holder not in chosen:
                chosen[holder] = None
                to_follow.append(holder)
    return list(chosen)


def _write(kept: "Collection[_Kept]") -> None:
    """Write what they held to the buffers that there are; a size that has changed in place goes back, too."""
    values, buffers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for one in kept:
        if one.value is None or (now := one.now) is None:
            continue
        if now is one.tensor and not one.is_cache:
            _resize(now, one.value)
        each = f"{id(one.value)} {id(now)}"  # once, where many parts share it
        values[each], buffers[each] = one.value, now
    put_values(values, with_values(buffers))


def _resize(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.shape != value.shape:  # as an observer does with what it has seen of each channel
        with torch.inference_mode(buffer.is_inference()):  # not `resize_`: the storage may be another's
            buffer.data = torch.empty_like(value, device=buffer.device, dtype=buffer.dtype)


def _shape(buffer: torch.Tensor | None) -> torch.Size | None:
    return None if buffer is None or is_lazy(buffer) else buffer.shape


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


def _as_is(then: torch.Tensor | None, now: torch.Tensor) -> torch.Tensor | None:
    """Give what there was, on the device and in the dtype of what there is; its values are to be written."""
    if then is None or (then.device, then.dtype) == (now.device, now.dtype):
        return then
    return now if then.shape == now.shape else then.to(now.device, now.dtype, copy=True)
