"""An optimizer's saved state: whether it fits the one that there is, and in what the two differ."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from offbeat import log
from offbeat.checks import Faults
from offbeat.local.loading import bring_back

if TYPE_CHECKING:
    from offbeat.local.optimizer import LocalOptimizer

__all__ = [
    "bring_back_memory",
    "bring_back_told",
    "faults_of_kind",
    "faults_of_state",
    "of_classes",
    "of_groups",
    "of_settings",
    "settings_of",
    "state_told",
]

MOVED = ("lr", "momentum", "betas")
"""What schedulers set when they are made, as OneCycleLR does."""


def state_told(chosen: "LocalOptimizer | None") -> dict[str, Any]:
    """Give an optimizer's state, and what `faults_of_state` and `bring_back_told` ask of it.

    Args:
        chosen: Has the optimizer, if there is one yet; None: it is kept elsewhere.
    """
    live = None if chosen is None else chosen.live
    return {
        "optimizer": None if live is None else live.state_dict(),
        "classes": {"optimizer": None if live is None else type(live).__name__},
        "settings": [] if chosen is None else chosen.settings,
        "dtypes": None if live is None else _dtypes(live),
    }


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
    found = faults.catch(lambda: chosen.use(given, steps_here=False))
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
    """Load an optimizer's state as it was saved, and warn of settings that were given otherwise.

    If parameters have other dtypes by now, the state is cast as well, as torch does.

    Args:
        chosen: Has the optimizer as it was given.
        state: Has the optimizer's as "optimizer"; as "settings" what it began with, which older states do
            not have: what they have may have been moved since, as by a scheduler, and nothing is said of it;
            and its parameters' "dtypes", which older ones do not have either: they are loaded as saved.
        is_new: It was given just now, for this state.
    """
    live, began = chosen.use(None, steps_here=False), state.get("settings")
    if began is not None:
        if is_new and (others := of_settings(chosen.settings, began, state["optimizer"], of="state")):
            log.warn(
                f"{'; '.join(others)}: what the state has is taken. To go on with another, set it in the "
                f"optimizer's param_groups after load_state_dict"
            )
        chosen.settings = began
    if state.get("dtypes") not in (None, _dtypes(live)):
        live.load_state_dict(state["optimizer"])
    else:
        bring_back(live, state["optimizer"])


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
    added = (
        " (one that was added in mid-run has to be there from the start now)"
        if here == then[: len(here)]
        else ""
    )
    return [f"the optimizer's groups have {here} parameters, and the {of}'s {then}{added}"]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Give a group's plain numbers as the run begins with them: a scheduler keeps the learning rate's."""
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | tuple)}
    return plain | {"lr": plain.get("initial_lr", plain.get("lr"))}


def _dtypes(optimizer: torch.optim.Optimizer) -> list[str]:
    """Name the dtypes of an optimizer's parameters."""
    return [str(parameter.dtype) for group in optimizer.param_groups for parameter in group["params"]]


def _groups_in(saved: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Give the groups in an optimizer's state; None where it has none, as one around another may."""
    groups: list[dict[str, Any]] | None = saved.get("param_groups")
    return groups
