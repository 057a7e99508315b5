"""An optimizer's state is loaded as it was saved, and not cast."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import numpy as np
import torch

__all__ = ["bring_back"]

_RULE = "_process_value_according_to_param_policy"
"""By which torch casts what is loaded, and says on which device it is to be."""
_HOOKS = "_optimizer_load_state_dict_pre_hooks"
"""What an optimizer runs before it loads a state; torch goes through the values."""
_SET = "__setstate__"
"""What torch gives to an optimizer all that it has loaded by."""


def bring_back(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state as it was saved.

    Of what it remembers of a parameter torch casts all tensors to the parameter's dtype, as float32 averages
    to bfloat16: inside this they are not, whichever optimizer loads them, as one inside another; but what an
    optimizer or a hook has made anew in a dtype of its own is, and a step that a fused or capturable one
    counts is as torch wants it. Torch makes an OrderedDict and a Counter plain dicts as well, takes a string
    to pieces, forgets how long a deque may be, and fails at numpy's arrays: that is undone between torch's
    loading and what the optimizer itself makes of its state (its hooks and `__setstate__`), where it uses
    torch's own.
    """
    with _rule.over(saved), _Undoing().at(optimizer):
        optimizer.load_state_dict(saved)


class _Loading:
    """One load: what was saved, and what was copied of it."""

    def __init__(self, saved: object) -> None:
        # By dtype and shape: an optimizer may have copied them before torch gets them.
        self._kinds = {(tensor.dtype, tensor.shape) for tensor in _tensors(saved, set())}
        self._copies: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def kept(self, value: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        """Give what is to be had of a tensor: itself, on another device, or what torch has cast it to."""
        if cast.dtype == value.dtype or (value.dtype, value.shape) not in self._kinds:
            return cast
        found = (id(value), cast.device)  # what parameters share they share again
        if found not in self._copies:
            own = value.detach().to(cast.device, copy=True).requires_grad_(value.requires_grad)
            self._copies[found] = value, own
        return self._copies[found][1]


_loading: ContextVar[_Loading | None] = ContextVar("_loading", default=None)
"""What this thread loads."""


class _Rule:
    """Torch's rule, but for the threads that load here; in force while one of them does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_loading = 0
        self._torchs: Any = None

    def __call__(self, param: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401
        cast: torch.Tensor = self._torchs(param, value, *others, **named)
        loading, is_step = _loading.get(), "step" in (*others[2:], named.get("key"))
        return cast if loading is None or is_step else loading.kept(value, cast)

    @contextmanager
    def over(self, saved: object) -> Iterator[None]:
        """Let what this thread loads keep its dtypes. Others may load meanwhile, and be waited for."""
        before = _loading.set(_Loading(saved))
        self._count(1)
        try:
            yield
        finally:
            _loading.reset(before)
            self._count(-1)

    def _count(self, change: int) -> None:
        kind = torch.optim.Optimizer
        with self._lock:
            if not self._num_loading:
                self._torchs = getattr(kind, _RULE)
                setattr(kind, _RULE, staticmethod(self))
            self._num_loading += change
            if not self._num_loading:
                setattr(kind, _RULE, staticmethod(self._torchs))


_rule = _Rule()


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Go through the tensors of a state, which may hold itself."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | deque) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)


class _Undoing:
    """What torch's loading does to a state besides, undone before the optimizer gets it."""

    def __init__(self) -> None:
        self._groups: list[dict[str, Any]] = []
        self._entries: dict[Any, Any] = {}
        self._loading: torch.optim.Optimizer | None = None
        self._its_own: Any = None  # should the optimizer itself have one that is not its class's

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
            hooks.last = ()
            vars(optimizer)[_HOOKS] = own

    def _begin(self, loading: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Note what torch is given, with arrays that it does not fail at."""
        self._let_go()
        self._loading, self._groups, self._entries = loading, state["param_groups"], state["state"]
        self._its_own = vars(loading).get(_SET)
        vars(loading)[_SET] = self._end  # which torch calls with all that it has cast
        indices = {index for group in self._groups for index in group["params"]}
        whole = {i: _whole(entry) if i in indices else entry for i, entry in self._entries.items()}
        return state | {"state": whole}

    def _end(self, state: dict[str, Any]) -> None:
        loading = self._loading
        assert loading is not None  # noqa: S101  `_begin` was before
        self._let_go()
        indices = [group["params"] for group in self._groups]
        parameters = [group["params"] for group in state.get("param_groups", ())]
        # Else the optimizer calls this itself, as torch has refused what it was given.
        is_torchs = [*map(len, indices)] == [*map(len, parameters)]
        for index, parameter in zip(chain(*indices), chain(*parameters), strict=False):
            if is_torchs and index in self._entries and parameter in state["state"]:
                now = state["state"][parameter]
                state["state"][parameter] = _as_saved(self._entries[index], now)
        loading.__setstate__(state)

    def _let_go(self) -> None:
        if self._loading is not None:
            vars(self._loading).pop(_SET, None)
            if self._its_own is not None:
                vars(self._loading)[_SET] = self._its_own
            self._loading = None


class _Hooks(OrderedDict[Any, Any]):
    """A table of an optimizer's hooks as it is at one load, in which ours comes last, behind the user's.

    The user's own table has none of it, so that a hook may remove itself there, as with torch alone. What is
    added or removed meanwhile is so in the user's, too, and later on, by the handles that torch gives.

    Attributes:
        last: Ours; none after the load.
    """

    def __init__(self, own: dict[Any, Any], last: Callable[..., Any]) -> None:
        self._own: dict[Any, Any] = {}
        super().__init__(own)
        self._own = own
        self.last: tuple[Callable[..., Any], ...] = (last,)

    def values(self) -> Any:  # noqa: ANN401  a list, where torch goes through a view
        return [*super().values(), *self.last]

    def __setitem__(self, key: Any, hook: Any) -> None:  # noqa: ANN401  as torch has them
        super().__setitem__(key, hook)
        self._own[key] = hook
        if isinstance(self._own, OrderedDict):  # a handle knows this table alone, and does not keep it
            vars(self._own)[_HOOKS] = self

    def __reduce__(self) -> Any:  # noqa: ANN401  a copy is a plain table
        return OrderedDict, (list(self.items()),)

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401
        super().__delitem__(key)
        self._own.pop(key, None)


class _Whole(np.ndarray[Any, Any]):
    """An array that torch does not take for something to iterate over, and so hands on as it is."""

    __iter__ = None  # type: ignore[assignment]


def _whole(value: Any) -> Any:  # noqa: ANN401  a part of a state
    """Give a part of a state in which numpy's arrays come through torch's loading."""
    if type(value) is np.ndarray:
        return value.view(_Whole)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return type(value)(map(_whole, value)) if type(value) in (list, tuple, deque) else value


def _as_saved(value: Any, now: Any) -> Any:  # noqa: ANN401  a part of a state
    """Give a part of a state as it was saved, with the tensors that torch has made of it."""
    kind = type(value)
    if isinstance(now, _Whole):
        return np.array(now)
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        whole = {key: _as_saved(value[key], item) for key, item in now.items()}
        return kind(whole) if kind in (OrderedDict, Counter) else whole
    if isinstance(value, deque):
        return deque(map(_as_saved, value, now), maxlen=value.maxlen)
    return kind(map(_as_saved, value, now)) if kind in (list, tuple) else now
