"""An optimizer's saved state: whether it fits the one that there is, and in what the two differ."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from offbeat import process
from offbeat.checks import Faults

__all__ = [
    "bring_back",
    "bring_back_told",
    "faults_of_kind",
    "faults_of_state",
    "of_classes",
    "of_groups",
    "of_settings",
    "settings_of",
]

MOVED = ("momentum", "betas")
"""What some schedulers move besides the learning rate, as OneCycleLR does."""


def faults_of_state(
    state: Mapping[str, Any],
    live: torch.optim.Optimizer | None,
    given: object,
    look: Callable[[object], torch.optim.Optimizer],
) -> list[str]:
    """Tell why the optimizer's part of a state cannot be taken up; nothing if it has none.

    Args:
        state: Has the optimizer's, or None, as "optimizer", and its class by that name in "classes".
        live: The optimizer that there is.
        given: What the user gave for one.
        look: Gives the optimizer that is made of what was given, or is there.
    """
    if state["optimizer"] is None:
        return []
    if live is None and given is None:
        text = (
            "there is no optimizer here, and the state has one's: give load_state_dict(state, "
            "optimizer=...), such as offbeat.optim.SGD(lr=...), or a live one, of the kind that the state "
            "was saved with"
        )
        return [text]
    faults = Faults()
    found = faults.catch(lambda: look(given))
    if found is None:
        return faults
    return faults_of_kind("optimizer", found, state) or of_groups(found, state["optimizer"], of="state")


def faults_of_kind(part: str, own: object, state: Mapping[str, Any]) -> list[str]:
    """Tell if a part is of another class than a state's, which would take its numbers for its own."""
    others = of_classes({part: type(own).__name__}, {part: state["classes"].get(part)}, of="state")
    return [f"{other}: give one of that class, or go on without the state" for other in others]


def bring_back_told(optimizer: torch.optim.Optimizer, saved: dict[str, Any], *, is_new: bool) -> None:
    """Load an optimizer's state, and warn of settings that were given otherwise.

    Args:
        optimizer: As it was given.
        saved: Its state.
        is_new: It was given just now, for this state.
    """
    if is_new and (others := _other_settings(optimizer, saved)):
        process.warn(
            f"{'; '.join(others)}: what the state has is taken. To go on with another, set it in the "
            f"optimizer's param_groups after load_state_dict"
        )
    bring_back(optimizer, saved)


def bring_back(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state, in the dtypes that it had.

    torch casts it to its parameter's, as float32 averages to bfloat16.
    """
    optimizer.load_state_dict(saved)
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entry in saved["state"].items():
        if not isinstance(index, int) or not isinstance(entry, dict):
            continue
        held = optimizer.state[parameters[index]]
        for name, value in entry.items():
            now = held.get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                held[name] = value.to(now.device)


def _other_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> list[str]:
    """Word which settings of an optimizer are not a state's, nor what that began with under a scheduler."""
    return [
        f"the optimizer's {name} is {value!r}, and the state's is {group[name]!r}"
        for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True)
        for name, value in settings_of(own).items()
        if name in group
        and name != "initial_lr"
        and value not in (None, group[name], settings_of(group).get(name))
        and not (name in MOVED and "initial_lr" in group)
    ]


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
    if own is None or theirs is None:
        return []
    here = [len(group["params"]) for group in own.param_groups]
    then = [len(group["params"]) for group in theirs["param_groups"]]
    if here == then:
        return []
    return [f"the optimizer's groups have {here} parameters, and the {of}'s {then}"]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Give a group's plain numbers as the run begins with them: a scheduler keeps the learning rate's."""
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | tuple)}
    return plain | {"lr": plain.get("initial_lr", plain.get("lr"))}
