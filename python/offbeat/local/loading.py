"""An optimizer's state is loaded as it was saved: what torch's loading does to it is undone."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["bring_back"]

_HOOKS = "_optimizer_load_state_dict_pre_hooks"
"""What an optimizer runs before it loads a state; torch goes through the values."""
_TO_PIECES = "<generator object"
"""How a string begins that torch has taken to pieces: its type, called with a generator."""


def bring_back(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state as it was saved.

    Of what it remembers of a parameter torch casts all tensors to the parameter's dtype, as float32 averages
    to bfloat16, makes dicts of any type plain ones, takes a string to pieces, and fails at numpy's arrays.
    That is undone between torch's casts and what the optimizer itself makes of its state (its hooks and
    `__setstate__`), which stays.
    """
    undoing = _Undoing()
    with undoing.at(optimizer):
        optimizer.load_state_dict(saved)
    # One around another has it in a way of its own, and may show none.
    if getattr(optimizer, "state", None) is not undoing.loaded:
        _undo_afterwards(optimizer, saved)


class _Undoing:
    """What torch's loading does to a state, undone before the optimizer gets it.

    Attributes:
        loaded: The state that torch has given to an optimizer last; None where it has not come by.
    """

    def __init__(self) -> None:
        self.loaded: object = None
        self._groups: list[dict[str, Any]] = []
        self._entries: dict[Any, Any] = {}
        self._loading: torch.optim.Optimizer | None = None

    @contextmanager
    def at(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Do so with what is loaded inside."""
        own = vars(optimizer).get(_HOOKS)  # one around another may have none
        if own is None:
            yield
            return
        hooks = vars(optimizer)[_HOOKS] = _Hooks(own, self._begin)
        try:
            yield
        finally:
            self._let_go()
            own.update((key, hook) for key, hook in hooks.items() if key not in hooks.before)
            vars(optimizer)[_HOOKS] = own

    def _begin(self, loading: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Note what torch is given, with arrays that it does not fail at."""
        self._let_go()
        self._loading, self._groups, self._entries = loading, state["param_groups"], state["state"]
        loading.__dict__["__setstate__"] = self._end  # which torch calls with all that it has cast
        indices = {index for group in self._groups for index in group["params"]}
        whole = {i: _whole(entry) if i in indices else entry for i, entry in self._entries.items()}
        return state | {"state": whole}

    def _end(self, state: dict[str, Any]) -> None:
        loading = self._loading
        assert loading is not None  # noqa: S101  `_begin` was before
        self._let_go()
        indices = [index for group in self._groups for index in group["params"]]
        parameters = [p for group in state["param_groups"] for p in group["params"]]
        is_torchs = len(indices) == len(parameters)  # else the optimizer's own, where torch has refused
        for index, parameter in zip(indices, parameters, strict=False):
            if is_torchs and index in self._entries and parameter in state["state"]:
                now = state["state"][parameter]
                state["state"][parameter] = _as_saved(self._entries[index], now, _is_other)
        loading.__setstate__(state)
        self.loaded = loading.state

    def _let_go(self) -> None:
        if self._loading is not None:
            self._loading.__dict__.pop("__setstate__", None)
            self._loading = None


class _Hooks(OrderedDict[Any, Any]):
    """A table of an optimizer's hooks as it is at one load, in which ours comes last, behind the user's.

    The user's own table has none of it, so that a hook may remove itself there, as with torch alone.
    """

    def __init__(self, own: Mapping[Any, Any], last: Callable[..., Any]) -> None:
        super().__init__(own)
        self.before = frozenset(own)
        self._last = last

    def values(self) -> Any:  # noqa: ANN401  a list, where torch goes through a view
        return [*super().values(), self._last]


def _undo_afterwards(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Undo what can be told from the optimizer's own doing, where the state is laid out as torch's."""
    if not (hasattr(optimizer, "state") and isinstance(saved, dict)):
        return
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entry in saved.get("state", {}).items():
        if isinstance(index, int) and index < len(parameters) and parameters[index] in optimizer.state:
            now = optimizer.state[parameters[index]]
            if (undone := _as_saved(entry, now, _is_cast)) is not now:
                optimizer.state[parameters[index]] = undone


class _Whole(np.ndarray[Any, Any]):
    """An array that torch does not take for something to iterate over, and so hands on as it is."""

    __iter__ = None  # type: ignore[assignment]


def _whole(value: Any) -> Any:  # noqa: ANN401  a part of a state
    """Give a part of a state in which numpy's arrays come through torch's loading."""
    if type(value) is np.ndarray:
        return value.view(_Whole)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return type(value)(map(_whole, value)) if type(value) in (list, tuple) else value


def _as_saved(value: Any, now: Any, is_cast: Callable[[torch.Tensor, torch.Tensor], bool]) -> Any:  # noqa: ANN401
    """Give a part of a state as it was saved, on the devices where torch has put its tensors.

    Args:
        value: As it was saved.
        now: What has come of it; where that is laid out otherwise, the optimizer has done so, and it stays.
        is_cast: Tells of a tensor that was saved, and of what has come of it, whether torch has cast it.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
        return _copied(value, now.device) if is_cast(value, now) else now
    if isinstance(now, _Whole):
        return np.array(now)
    if isinstance(value, str) and isinstance(now, str) and now.startswith(_TO_PIECES):
        return value
    if isinstance(value, dict) and isinstance(now, dict):
        undone = {key: _as_saved(value[key], item, is_cast) for key, item in now.items() if key in value}
        now.update(undone)
        return kind(now) if kind in (OrderedDict, Counter) and type(now) is dict else now
    if kind in (list, tuple) and type(now) is kind and len(now) == len(value):
        return kind(_as_saved(*pair, is_cast) for pair in zip(value, now, strict=True))
    return now


def _copied(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor, which is a leaf again if it is to be trained."""
    return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)


def _is_other(value: torch.Tensor, now: torch.Tensor) -> bool:
    return now.dtype != value.dtype


def _is_cast(value: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether one is the other, cast, and not something that the optimizer has made of it."""
    if not _is_other(value, now) or now.shape != value.shape:
        return False
    if value.layout != torch.strided or now.layout != torch.strided:  # which cannot be compared
        return value.layout == now.layout
    cast = value.detach().to(now.device, now.dtype)
    return bool(((cast == now) | ((cast != cast) & (now != now))).all())  # noqa: PLR0124  NaN is not itself
