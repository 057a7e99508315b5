"""Members that come from a parameter server to a process group, or go back to it, together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import distributed

from offbeat.errors import StateError
from offbeat.local.group import check_device, is_alike, take_first
from offbeat.local.sums import Sums
from offbeat.trainer.next import check_next
from offbeat.trainer.strategies import Workshop

__all__ = ["Unbrought", "first_brings", "has_first_left"]

TO_CHANGE = (
    "have the same epochs and max_steps, and call stop, or set strategy, after the same batch of its own"
)
"""What each member is to do, where they wait for one another before they meet: a trainer has no `flush`."""
FAILED = -1.0


@dataclass(frozen=True, slots=True)
class Unbrought:
    """What was trained here, which a strategy that has not begun yet may begin without.

    Attributes:
        by: The strategy that it was trained by, as it is shown.
        how: "alone"; "together" with the members of a process group; "served": with those at a server.
        is_due: The members are to bring it, if what begins is at a server.
    """

    by: str
    how: Literal["alone", "together", "served"]
    is_due: bool = False


def has_first_left(workshop: Workshop, then: str, *, has_left: bool) -> bool:
    """Wait until all members have pushed what they had, before they meet in a process group.

    Args:
        workshop: This member's.
        then: What it does next, in words.
        has_left: It has left the server already, without what others had still to push then.

    Returns:
        Whether the first one has, from whose model all go on.

    Raises:
        StateError: If they do not all do the same next.
        ConnectionLostError: If a member is lost.
    """
    group = _group(workshop)
    if group is None:
        return False
    has = torch.full([1], float(has_left), device=workshop.device)
    members = Sums.among(group, of="what is next", each=TO_CHANGE)
    try:
        with members.together() as own:
            are_alike = is_alike(own, then, workshop.device)
            take_first(own, has)
    finally:
        members.close()
    check_next(then, are_alike=are_alike)
    return bool(has.item())


def first_brings(workshop: Workshop, bring: Callable[[], bool]) -> bool:
    """Let the first member bring to a server what all have made in a process group; the others wait for that.

    Args:
        workshop: This member's.
        bring: Joins the server, and tells whether its model is this one now.

    Returns:
        What it told.

    Raises:
        StateError: If the first member could not; its own error is raised there.
        ConnectionLostError: If a member is lost.
    """
    group = _group(workshop)
    if group is None:
        return bring()
    told = torch.full([1], FAILED, device=workshop.device)
    members = Sums.among(group, of="what is brought to the server", each=TO_CHANGE)
    try:
        try:
            if distributed.get_rank(group) == 0:
                told.fill_(float(bring()))
        finally:  # the others wait, also where it could not
            with members.together() as own:
                take_first(own, told)
    finally:
        members.close()
    if (is_brought := told.item()) == FAILED:
        raise StateError(
            "the first member could not bring to the server what all have made in their process group, and "
            "its own error says why: call train() again, in all members, once that is mended"
        )
    return bool(is_brought)


def _group(workshop: Workshop) -> distributed.ProcessGroup | None:
    """Give the members that there are besides this one, with it; None: this one is alone."""
    group = workshop.places.group_of_members()
    if group is None or distributed.get_world_size(group) == 1:
        return None
    check_device(group, workshop.device)
    return group
