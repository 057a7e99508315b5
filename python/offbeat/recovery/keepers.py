"""What goes with a run and keeps a state of its own: monitors of its model, and callbacks that have one."""

from collections.abc import Sequence
from typing import Any

from offbeat import log
from offbeat.errors import ConfigError
from offbeat.recovery.nest import flatten
from offbeat.trained_by import Keeper

__all__ = ["bring_back", "states_of"]


def states_of(keepers: Sequence[Keeper]) -> list[dict[str, Any]]:
    """Give their states, each with its class's name."""
    return [{"class": _class_of(keeper), "state": keeper.state_dict()} for keeper in keepers]


def bring_back(keepers: Sequence[Keeper], states: Sequence[dict[str, Any]]) -> None:
    """Give each the first state of its class that it takes; who is new begins anew.

    What it takes for the first is what all are made in: a script makes them in the same order each time.
    """
    left = list(states)
    for keeper in keepers:
        for kept in [one for one in left if one["class"] == _class_of(keeper)]:
            if _takes(keeper, kept["state"]):
                left.remove(kept)
                break
    if left:
        log.warn(
            f"the checkpoint has the state of {len(left)} that is not here, or set otherwise "
            f"({', '.join(one['class'] for one in left)}): what guards this run begins anew; make monitors "
            f"with the metrics and remedies they had, before train, and give the callbacks that there were"
        )


def _class_of(keeper: Keeper) -> str:
    """Name the class that a user knows: one may keep a state for another, as hooks do for a monitor."""
    return str(getattr(keeper, "keeps_for", type(keeper).__name__))


def _takes(keeper: Keeper, state: Any) -> bool:  # noqa: ANN401  its own
    if _is_at(keeper, state):  # as where one `train` follows the other: nothing is to be let go of
        return True
    try:
        keeper.load_state_dict(state)
    except ConfigError:  # of a monitor of other metrics or remedies, and changes nothing
        return False
    return True


def _is_at(keeper: Keeper, state: Any) -> bool:  # noqa: ANN401  its own
    """Tell whether it is where a state of plain values is; NaN is NaN here, and bits are compared."""
    now, then = flatten(keeper.state_dict(), what="state"), flatten(state, what="state")
    return not now.tensors and now.skeleton == then.skeleton
