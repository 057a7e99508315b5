"""One module bound to the server's table: gradients out, parameters in, at a few lookups per tensor and step.

What the module's owner may do between two steps is met here: `load_state_dict` with and without assign,
`.to()`, freezing, channels_last, replaced buffers. A tensor is known by the place where its module keeps it;
its identity, its address and autograd's version counter tell what happened to it since the last pull.
"""

import json
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.autograd.graph import increment_version

from offbeat.errors import ModelMismatchError, UnsupportedTensorError
from offbeat.module.match import match, words
from offbeat.module.staging import HostCopies, host_like, is_direct
from offbeat.module.table import Found, TensorSpec, find, spec_of

__all__ = ["Binding", "Memory", "Slot"]

#: (owner, address, bytes): memory in C order that `owner` keeps alive.
Memory = tuple[object, int, int]


class Slot:
    """One tensor of the table and where it is now.

    Attributes:
        spec: Its entry in the server's table.
        tensor: The module's tensor, as of the last `refresh`.
        spare: Host memory that pulls write to in its stead; None where they write into the tensor itself. Of
            a buffer it holds what the next push is compared with: what was read, or pushed since.
        dirty: Whether, as of the last `refresh`, a parameter's memory for pulls may hold something else than
            what the last pull wrote. (Buffers change all the time; the client keeps them as they were
            pulled.)
    """

    __slots__ = (
        *(
            "address",
            "dirty",
            "dtype",
            "is_parameter",
            "key",
            "nbytes",
            "other_places",
            "owner",
            "shape",
            "spare",
            "spec",
            "stride",
        ),
        *("tensor", "version"),
    )

    def __init__(self, spec: TensorSpec, found: Found) -> None:
        self.spec = spec
        self.is_parameter = spec["role"] == "parameter"
        self.nbytes = found.tensor.numel() * found.tensor.element_size()
        self.spare: torch.Tensor | None = None
        self.dirty = False
        self.hold(found.tensor)
        self.place(found)

    def place(self, found: Found) -> None:
        """Take another tensor for this entry, at the places where the module keeps it."""
        (self.owner, self.key), *self.other_places = found.places
        if not self.holds(found.tensor):
            self.hold(found.tensor)

    def hold(self, tensor: torch.Tensor) -> None:
        """Take another tensor for this entry, at the same place."""
        self.tensor = tensor
        self.dtype = tensor.dtype
        self.address = tensor.data_ptr()
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.version = -1

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """Whether this is the tensor still, as it was: `p.data = p.data[:8]` keeps object and address."""
        return (
            tensor is self.tensor
            and tensor.data_ptr() == self.address
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.dtype is self.dtype
        )


class Binding:
    """The tensors of one module, in the server's order.

    Attributes:
        module: The user's module.
        slots: One per tensor of the table.
        parameters: Those that gradients move.
        filled: Whether a pull has landed.
    """

    def __init__(self, module: nn.Module, table: str, *, local_buffers: bool = False) -> None:
        """Match a module with a table, by name.

        Args:
            module: The user's module; not changed here.
            table: The server's tensor table, JSON.
            local_buffers: Whether the module's buffers are its own affair: neither pushed nor, after the
                first pull, written.

        Raises:
            ModelMismatchError: If they differ, naming the first tensors that do.
            UnsupportedTensorError: If the module has tensors that the server cannot hold.
        """
        self.module = module
        self._table: list[TensorSpec] = json.loads(table)
        found = match(self._table, find(module))
        self.slots = [Slot(spec, entry) for spec, entry in zip(self._table, found, strict=True)]
        self.parameters = [slot for slot in self.slots if slot.is_parameter]
        self._local_buffers = local_buffers
        self._all_spare = False
        self._copies = HostCopies()
        self._broken = False
        self.filled = False
        self._note_places()
        self._arrange()

    def use_spares(self) -> None:
        """From now on let pulls write to spare memory only, from which `landed` copies."""
        if not self._all_spare:
            self._all_spare = True
            self._arrange()

    def rescan(self) -> None:
        """Look through the whole module again: submodules may have been replaced, tensors added.

        Raises:
            ModelMismatchError: If it is no longer the server's model.
        """
        for slot, found in zip(self.slots, match(self._table, find(self.module)), strict=True):
            slot.place(found)
        self._note_places()
        self._arrange()

    def refresh(self) -> None:
        """Look where each tensor is now and whether it was written to.

        Raises:
            ModelMismatchError: If a tensor is no longer what the table says.
        """
        if self._is_rebuilt():
            self.rescan()
        moved = False
        for slot in self.slots:
            tensor = cast(torch.Tensor, slot.owner.get(slot.key))  # None is met by _check_still
            if not slot.holds(tensor):
                _check_still(slot, tensor)
                slot.hold(tensor)
                moved = True
            for owner, key in slot.other_places:
                if owner.get(key) is not tensor:
                    raise _untied(slot)
            if tensor._version != slot.version and slot.is_parameter and slot.spare is None:  # noqa: SLF001  no other way
                slot.dirty = True
        if moved:
            self._arrange()

    def gradients(self) -> list[torch.Tensor | None]:
        """List the gradients by slot; None for buffers, for what is frozen, and where there is none."""
        return [s.tensor.grad if s.is_parameter and s.tensor.requires_grad else None for s in self.slots]

    def clear_gradients(self) -> None:
        """Set the gradients to None, as `zero_grad()` does."""
        for slot in self.parameters:
            slot.tensor.grad = None

    def buffers(self) -> list[torch.Tensor | None]:
        """List the buffers by slot; none if they are local. Which of them changed, the client knows.

        (torch's BatchNorm does not count its writes in autograd's version.) After a pull that broke off
        nobody knows who wrote what, so there are none.
        """
        if self._local_buffers or self._broken:
            return [None] * len(self.slots)
        return [None if slot.is_parameter else slot.tensor for slot in self.slots]

    def memories(self, tensors: Sequence[torch.Tensor | None]) -> list[Memory | None]:
        """Turn tensors, one or None per slot, into memory that the extension reads; copies where it must.

        Raises:
            UnsupportedTensorError: If one is sparse.
        """
        found: list[Memory | None] = [None] * len(self.slots)
        elsewhere: list[tuple[int, torch.Tensor]] = []
        for i, (slot, tensor) in enumerate(zip(self.slots, tensors, strict=True)):
            if tensor is None:
                continue
            if tensor.dtype is slot.dtype and is_direct(tensor):
                found[i] = (tensor, tensor.data_ptr(), tensor.nbytes)
            elif tensor.layout is torch.strided:
                elsewhere.append((i, tensor.to(slot.dtype)))
            else:
                raise UnsupportedTensorError(
                    f"the gradient of {slot.spec['name']!r} is {str(tensor.layout).removeprefix('torch.')}: "
                    f"build its layer without sparse=True"
                )
        if elsewhere:
            copies = self._copies.fetch([tensor for _, tensor in elsewhere])
            for (i, _), copy in zip(elsewhere, copies, strict=True):
                found[i] = (copy, copy.data_ptr(), copy.nbytes)
        return found

    def host_values(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """Give tensors' values on the host, in C order; not copied where they are so already."""
        return self._copies.fetch([slot.tensor for slot in slots])

    def out(self) -> list[Memory]:
        """List the memory that a pull may write to, one per slot; call `landed` or `lost` after it."""
        self._copies.wait()
        return self._out

    def landed(self, *, came: bool = True) -> None:
        """A pull has written to `out()`: bring it into the module, and let stale graphs know.

        If nothing `came`, because the first of two pushes in flight has no answer yet, the parameters are
        what was read all the same. The buffers stay: what they have become was pushed, and the next push
        carries what changes from there.
        """
        if self._direct:
            increment_version(self._direct)
        if not came and not self._broken:
            self.restore()
            self._copies.store([s.tensor for s in self._buffers], [_spare(s) for s in self._buffers])
        elif self._staged:
            slots = self._followers if self.filled else self._staged
            self._copies.store([_spare(s) for s in slots], [s.tensor for s in slots])
        self.filled = True
        self._broken = False
        for slot in self.slots:
            slot.dirty = False
            slot.version = slot.tensor._version  # noqa: SLF001  torch's own way to ask

    def lost(self) -> None:
        """A pull broke off: `out()` may hold some of it. What has to come again, the client knows.

        The next push is based on what came so far, and the parameters hold that from now on.
        """
        if self._direct:
            increment_version(self._direct)
        self.restore()
        for slot in self.slots:
            slot.version = slot.tensor._version  # noqa: SLF001  torch's own way to ask
        self._broken = True

    def restore(self) -> None:
        """Let parameters that were changed beside their spares hold what was read."""
        slots = [slot for slot in self._staged if slot.is_parameter] if self.filled else []
        if slots:
            self._copies.store([_spare(s) for s in slots], [s.tensor for s in slots])

    def restore_buffers(self) -> None:
        """Let buffers hold what the next push is compared with; local ones stay: they are the module's own.

        The parameters stay: of a live optimizer they hold the local steps since the last pull.
        """
        if self.filled:
            self._copies.store([_spare(s) for s in self._buffers], [s.tensor for s in self._buffers])

    def has_changed_buffers(self) -> bool:
        """Whether the next push has a buffer to change; a device is waited for to know."""
        pairs = zip(self._buffers, self.host_values(self._buffers), strict=True)
        return any(_differs(value, _spare(slot)) for slot, value in pairs)

    def put_back_corrupt(self) -> None:
        """Where a number in a buffer became NaN, give all buffers what the next push is compared with.

        That push then changes none of them. What such a batch left besides, infinities and counts, goes too;
        infinity alone may be a value. Local buffers stay: they are this module's own affair.
        """
        if _corrupt(self._floats, self.host_values(self._floats)) is not None:
            self.restore_buffers()

    def without_corrupt(self, memories: list[Memory | None]) -> tuple[list[Memory | None], str | None]:
        """Do so before a push, and leave out the buffers; looks at `memories`, so no device is waited for.

        Returns:
            What to push, and the name of the first corrupt buffer, if one is.
        """
        there = [
            (slot, cast(torch.Tensor, memory[0]))
            for slot, memory in zip(self.slots, memories, strict=True)
            if memory is not None and not slot.is_parameter and slot.dtype.is_floating_point
        ]
        corrupt = _corrupt([slot for slot, _ in there], [value for _, value in there])
        if corrupt is None:
            return memories, None
        self.restore_buffers()
        rest = [m if slot.is_parameter else None for slot, m in zip(self.slots, memories, strict=True)]
        return rest, corrupt.spec["name"]

    def _note_places(self) -> None:
        """Note what every module holds under which names.

        A submodule that was replaced still has its tensors where they were, and what was added has no slot.
        """
        inside = [vars(m) for m in self.module.modules()]
        children = [cast(dict[str, nn.Module | None], m["_modules"]) for m in inside]
        self._children = [(now, dict(now)) for now in children]
        kinds = ("_parameters", "_buffers")
        tensors = [cast(dict[str, torch.Tensor | None], m[kind]) for m in inside for kind in kinds]
        self._named = [*tensors, *(cast(set[str], m["_non_persistent_buffers_set"]) for m in inside)]
        self._names = [*map(tuple, self._named)]
        self._vacant = [(held, name) for held in tensors for name, value in held.items() if value is None]

    def _is_rebuilt(self) -> bool:
        """Whether submodules were replaced, or anything was added; of what is gone, its slot tells."""
        return (
            any(children != noted for children, noted in self._children)
            or [*map(tuple, self._named)] != self._names
            or any(held[name] is not None for held, name in self._vacant)
        )

    def _arrange(self) -> None:
        """Decide for each slot whether pulls write to its tensor or to a spare."""
        for slot in self.slots:
            if slot.is_parameter and is_direct(slot.tensor) and not self._all_spare:
                slot.dirty |= slot.spare is not None
                slot.spare = None
            elif slot.spare is None or slot.spare.is_pinned() != slot.tensor.is_cuda:
                slot.spare = host_like(slot.tensor)
                slot.spare.copy_(slot.tensor.detach())
                slot.dirty = True
        self._out: list[Memory] = [
            (slot.tensor, slot.address, slot.nbytes)
            if slot.spare is None
            else (slot.spare, slot.spare.data_ptr(), slot.nbytes)
            for slot in self.slots
        ]
        self._direct = [slot.tensor for slot in self.slots if slot.spare is None]
        self._staged = [slot for slot in self.slots if slot.spare is not None]
        self._followers = [slot for slot in self._staged if slot.is_parameter or not self._local_buffers]
        self._buffers = [slot for slot in self._followers if not slot.is_parameter]
        self._floats = [slot for slot in self._buffers if slot.dtype.is_floating_point]


def _spare(slot: Slot) -> torch.Tensor:
    return cast(torch.Tensor, slot.spare)


def _differs(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether a number is another one; NaN is the same as NaN."""
    return bool(((value != other) & ~(value.isnan() & other.isnan())).any())


def _corrupt(slots: list[Slot], values: list[torch.Tensor]) -> Slot | None:
    """Find the first buffer where a number of its spare is NaN in its value, which is on the host.

    A sum is NaN where a value is, and seldom else. Of what torch has it is quickest by far, and this is asked
    at each push.
    """
    if not slots:
        return None
    with torch.no_grad():
        if not torch.stack([value.sum() for value in values]).isnan().numpy().any():
            return None
        pairs = zip(slots, values, strict=True)
        return next((slot for slot, value in pairs if (value.isnan() & ~_spare(slot).isnan()).any()), None)


def _check_still(slot: Slot, tensor: object) -> None:
    """A tensor was replaced, moved or cast: it has to be what the table says all the same."""
    spec = slot.spec
    if not isinstance(tensor, torch.Tensor):
        raise ModelMismatchError(f"the model lost its {words(spec)}")
    now = spec_of(spec["name"], tensor, spec["role"])
    if (now["shape"], now["dtype"]) != (spec["shape"], spec["dtype"]):
        raise ModelMismatchError(
            f"{words(spec)} became {words(now)} after the worker was made: another model needs another worker"
        )


def _untied(slot: Slot) -> ModelMismatchError:
    names = ", ".join(map(repr, (slot.spec["name"], *slot.spec["aliases"])))
    return ModelMismatchError(
        f"{names} were one tensor when the worker was made and are several now: tie them again "
        f"(load_state_dict(assign=True) parts tied weights)"
    )
