"""An optimizer's saved state: whether it fits the one that there is, and in what the two differ."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offbeat import log
from offbeat.checks import Faults

if TYPE_CHECKING:
    from offbeat.local.optimizer import LocalOptimizer

__all__ = [
    "bring_back",
    "bring_back_memory",
    "bring_back_told",
    "faults_of_kind",
    "faults_of_state",
    "of_classes",
    "of_groups",
    "of_settings",
    "settings_of",
]

_TO_PIECES = "<generator object"
"""How a string begins that torch has taken to pieces: its type, called with a generator."""

MOVED = ("lr", "momentum", "betas")
"""What schedulers set when they are made, as OneCycleLR does."""


def faults_of_state(state: Mapping[str, Any], chosen: "LocalOptimizer", given: object) -> list[str]:
    """Tell why the optimizer's part of a state cannot be taken up; nothing if it has none.

    Args:
        state: Has the optimizer's, or None, as "optimizer", and its class by that name in "classes", which
            older states do not have.
        chosen: Has the optimizer that there is, or is to have the one that is made of what was given.
        given: What the user gave for one.
    """
    if state["optimizer"] is None:
        return []
    if chosen.live is None and given is None:
        text = (
            "there is no optimizer here, and the state has one's: give load_state_dict(state, "
            "optimizer=...), such as offbeat.optim.SGD(lr=...), or a live one, of the kind that the state "
            "was saved with"
        )
        return [text]
    faults = Faults()
    found = faults.catch(lambda: chosen.use(given))
    if found is None:
        return faults
    return faults_of_kind("optimizer", found, state) or of_groups(found, state["optimizer"], of="state")


def faults_of_kind(part: str, own: object, state: Mapping[str, Any]) -> list[str]:
    """Tell if a part is of another class than a state's, which would take its numbers for its own."""
    if (classes := state.get("classes")) is None:  # which older states do not have
        return []
    others = of_classes({part: type(own).__name__}, {part: classes.get(part)}, of="state")
    return [f"{other}: give one of that class, or go on without the state" for other in others]


def bring_back_told(chosen: "LocalOptimizer", state: Mapping[str, Any], *, is_new: bool) -> None:
    """Load an optimizer's state, and warn of settings that were given otherwise.

    Args:
        chosen: Has the optimizer as it was given.
        state: Has the optimizer's as "optimizer", and as "settings" what it began with, which older states do
            not have: what they have may have been moved since, as by a scheduler, and nothing is said of it.
        is_new: It was given just now, for this state.
    """
    live, began = chosen.use(None), state.get("settings")
    if began is not None:
        if is_new and (others := of_settings(chosen.settings, began, state["optimizer"], of="state")):
            log.warn(
                f"{'; '.join(others)}: what the state has is taken. To go on with another, set it in the "
                f"optimizer's param_groups after load_state_dict"
            )
        chosen.settings = began
    bring_back(live, state["optimizer"])


class _Whole(np.ndarray[Any, Any]):
    """An array that torch does not take for something to iterate over, and so hands on as it is."""

    __iter__ = None  # type: ignore[assignment]


def bring_back(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state as it was saved.

    Of what it remembers of a parameter torch casts all tensors to the parameter's dtype, as float32 averages
    to bfloat16, makes dicts of any type plain ones, takes a string to pieces, and fails at numpy's arrays.
    What an optimizer itself makes of its state when it is loaded stays.
    """
    groups, entries = _groups_in(saved), saved.get("state", {})
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    # One around another may lay its state out otherwise.
    indices = range(len(parameters)) if groups is None else [i for g in groups for i in g.get("params", ())]
    named = {i: p for i, p in zip(indices, parameters, strict=False) if i in entries}
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        whole = {index: _whole(entry) if index in named else entry for index, entry in entries.items()}
        optimizer.load_state_dict(saved | {"state": whole})
    else:
        optimizer.load_state_dict(saved)
    for index, parameter in named.items():
        if parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(entries[index], optimizer.state[parameter])


def _whole(value: Any) -> Any:  # noqa: ANN401  a part of a state
    """Give a part of a state in which numpy's arrays come through torch's loading."""
    if type(value) is np.ndarray:
        return value.copy().view(_Whole)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return type(value)(map(_whole, value)) if type(value) in (list, tuple) else value


def _as_saved(value: Any, now: Any) -> Any:  # noqa: ANN401  a part of a state
    """Give a part of a state as it was saved, on the devices where torch has put its tensors.

    Args:
        value: As it was saved; None where the optimizer has made a part of its own.
        now: What has come of it: torch's doing is undone, and the optimizer's own stays.
    """
    kind = type(value)
    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
        is_cast = now.dtype != value.dtype and now.shape == value.shape
        return value.to(now.device, copy=True) if is_cast else now
    if isinstance(now, _Whole):
        return np.array(now)
    if kind is str and type(now) is str and now.startswith(_TO_PIECES):
        return value
    if isinstance(now, dict):
        before = value if isinstance(value, dict) else {}
        now.update({key: _as_saved(before.get(key), item) for key, item in now.items()})
        return kind(now) if kind in (OrderedDict, Counter) and type(now) is dict else now
    if type(now) in (list, tuple):
        known = value if kind in (list, tuple) and len(value) == len(now) else [None] * len(now)
        return type(now)(map(_as_saved, known, now))
    return now


def bring_back_memory(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load what an optimizer remembered, as its moments; what its groups are set to now stays."""
    now = _groups_in(optimizer.state_dict())
    own = {} if now is None or _groups_in(saved) is None else {"param_groups": now}
    bring_back(optimizer, saved | own)


def of_settings(
    own: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    optimizer: dict[str, Any] | None,
    *,
    of: str = "checkpoint",
) -> list[str]:
    """Word which settings of an optimizer's groups are neither what a run began with nor what it has now.

    Of groups that were added in mid-run it says nothing: nobody has given what they began with. Nor of what a
    scheduler sets where one was there at one of both beginnings alone.

    Args:
        own: Of the groups as given, by `settings_of`.
        theirs: As the checkpoint's run began.
        optimizer: Its state in the checkpoint, whose settings come into effect; None where there is none.
        of: What these are of.
    """
    now = (None if optimizer is None else _groups_in(optimizer)) or theirs
    return [
        f"the optimizer's {name} is {ours[name]!r}, and the {of}'s run began with {then[name]!r}"
        for ours, then, held in zip(own, theirs, now, strict=False)
        for name in ours
        if name in then
        and name != "initial_lr"  # which is the lr in here
        and None not in (ours[name], then[name])  # it is a tensor
        and ours[name] not in (then[name], held.get(name), settings_of(held).get(name))
        and not (name in MOVED and ("initial_lr" in ours) != ("initial_lr" in then))
    ]


def of_classes(
    own: dict[str, str | None], theirs: dict[str, str | None], *, of: str = "checkpoint"
) -> list[str]:
    """Word which classes are others than a checkpoint's, or of whatever `theirs` are."""
    return [
        f"the {name} is {own.get(name) or 'none'}, and the {of}'s is {theirs.get(name) or 'none'}"
        for name in own | theirs
        if own.get(name) != theirs.get(name)
    ]


def of_groups(
    own: torch.optim.Optimizer | None, theirs: dict[str, Any] | None, *, of: str = "checkpoint"
) -> list[str]:
    """Word whether an optimizer's groups are others than a checkpoint's; of one that is not here, nothing."""
    if own is None or theirs is None or (groups := _groups_in(theirs)) is None:
        return []
    here = [len(group["params"]) for group in own.param_groups]
    then = [len(group["params"]) for group in groups]
    if here == then:
        return []
    return [f"the optimizer's groups have {here} parameters, and the {of}'s {then}"]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Give a group's plain numbers as the run begins with them: a scheduler keeps the learning rate's."""
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | tuple)}
    return plain | {"lr": plain.get("initial_lr", plain.get("lr"))}


def _groups_in(saved: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Give the groups in an optimizer's state; None where it has none, as one around another may."""
    groups: list[dict[str, Any]] | None = saved.get("param_groups")
    return groups
