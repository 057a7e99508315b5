"""An accumulator's state: whether one fits, and totals as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offbeat import log
from offbeat.accumulator.members import Members, Total
from offbeat.accumulator.window import brought
from offbeat.checks import Faults, check_keys
from offbeat.local.parameters import check_back

__all__ = ["KEYS", "check_model", "check_state", "tell_of_steps", "total_of_state", "total_state"]

KEYS = (
    "updates",
    "skipped_updates",
    "was_update",
    "samples",
    "samples_since_end",
    "sizes",
    "size",
    "losses",
    "agreed",
    "window",
    "due",
    "optimizer",
    "meter",
    "grad_scaler",
    "worker",
)
"""What every state has."""


def check_model(
    named: Sequence[tuple[str, nn.Parameter]], state: Mapping[str, Any], members: Members
) -> None:
    """See that all members have their models back; a worker's has the server's, and its state tells none.

    Raises:
        StateError: In all members, if one has not.
        ConnectionLostError: If a member is lost.
    """
    check_back(named, state, members.is_alike)


def tell_of_steps(state: Mapping[str, Any], most: int, *, is_adaptive: bool) -> None:
    """Warn if windows are of another length here than when a state was taken."""
    if state.get("steps", most) != most:  # which older states do not have
        at_most = "at most " if is_adaptive else ""
        log.warn(
            f"updates are of {at_most}{most} micro-batches of a member, as this accumulator was made, and of "
            f"{at_most}{state['steps']} where the state was taken: to go on as before, make it with the same "
            f"accumulation_steps, or sizes"
        )


def check_state(
    state: Mapping[str, Any], parameters: Sequence[nn.Parameter], *, size: int, losses: list[object]
) -> Faults:
    """Tell what of a state does not fit an accumulator.

    Args:
        state: As `AsyncGradientAccumulator.state_dict` gives it.
        parameters: Those that are trained here.
        size: How many members there are here.
        losses: What losses are here.

    Raises:
        ConfigError: If it is no state of an accumulator at all.
    """
    check_keys(state, KEYS, owner="an accumulator")
    faults = Faults()
    if state["size"] != size:
        faults.append(
            f"the state is of one of {state['size']} members, and here are {size}: go on with as many"
        )
    if list(state["losses"]) != losses:
        faults.append(
            f"the state's losses are {list(state['losses'])} (loss_reduction, and whether there is a "
            f"normalizer), and here they are {losses}: make the accumulator with the same"
        )
    shapes = [list(p.shape) for p in parameters]
    parts = [state["window"], *([] if state["due"] is None else [state["due"]])]
    if not all(_fit(part["gradients"], shapes) for part in parts):
        faults.append(
            f"the state's gradients are not of the {len(shapes)} parameters of this model: it is of another"
        )
    return faults


def total_state(total: Total) -> dict[str, Any]:
    """Give a total as a nest of plain values and copies of its tensors."""
    return {
        "gradients": [None if g is None else g.detach().clone() for g in total.gradients],
        "samples": total.samples,
        "num_at_work": total.num_at_work,
        "told": list(total.told),
    }


def total_of_state(state: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Total:
    """Make the total of what `total_state` gave."""
    gradients = brought(state["gradients"], parameters)
    return Total(gradients, state["samples"], state["num_at_work"], state["told"])


def _fit(gradients: Sequence[torch.Tensor | None], shapes: list[list[int]]) -> bool:
    return len(gradients) == len(shapes) and all(
        gradient is None or list(gradient.shape) == shape
        for gradient, shape in zip(gradients, shapes, strict=True)
    )
