"""Members that come from a parameter server to a process group, or go back to it, together."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import distributed

from offbeat.errors import StateError
from offbeat.local.group import check_device, is_alike, take_first
from offbeat.local.sums import Sums
from offbeat.trainer.next import check_next
from offbeat.trainer.strategies import Workshop

__all__ = ["First", "Unbrought", "first_brings", "first_goes_on"]

TO_CHANGE = (
    "have the same epochs and max_steps, and call stop, set strategy, or close the trainer, after the same "
    "batch of its own"
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


class First(IntEnum):
    """What the first member goes on with, from a server, and all with it."""

    NEWEST = 0  # what all have pushed
    STALE = 1  # what it had as it left before they had
    ITS_OWN = 2  # it never joined


def first_goes_on(workshop: Workshop, then: str, *, has_left: bool, pull: Callable[[], bool] | None) -> First:
    """Wait until all members have pushed what they had, before they meet in a process group.

    Args:
        workshop: This member's.
        then: What it does next, in words.
        has_left: It has left the server already, without what others had still to push then.
        pull: Takes the server's model, if it is at one: what the first one does when all have pushed, for all
            go on from its. None: it is at none any more.

    Returns:
        With what the first one goes on.

    Raises:
        StateError: If they do not all do the same next, or the first could not pull; its own error is raised
            there.
        ConnectionLostError: If a member is lost.
    """
    group = _group(workshop)
    if group is None:
        if pull is not None:
            pull()
        return First.NEWEST  # of those that go on together there are no others

    def taken() -> First:
        if has_left:
            return First.STALE
        return First.NEWEST if pull is not None and pull() else First.ITS_OWN

    members = Sums.among(group, of="what is next", each=TO_CHANGE)
    try:
        with members.together() as own:
            are_alike = is_alike(own, then, workshop.device)
        check_next(then, are_alike=are_alike)
        told = _told_by_first(members, workshop, taken)
    finally:
        members.close()
    if told == FAILED:
        raise StateError(
            "the first member could not take what all have pushed to the server, and its own error says why: "
            "call train() again, in all members, once that is mended"
        )
    return First(int(told))


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
    members = Sums.among(group, of="what is brought to the server", each=TO_CHANGE)
    try:
        told = _told_by_first(members, workshop, bring)
    finally:
        members.close()
    if told == FAILED:
        raise StateError(
            "the first member could not bring to the server what all have made in their process group, and "
            "its own error says why: call train() again, in all members, once that is mended"
        )
    return bool(told)


def _told_by_first(members: Sums, workshop: Workshop, act: Callable[[], float]) -> float:
    """Give all members what comes of it in the first one; `FAILED`, where it raises there."""
    told = torch.full([1], FAILED, device=workshop.device)
    try:
        if distributed.get_rank(members.group) == 0:
            told.fill_(act())
    finally:  # the others wait, also where it could not
        with members.together() as own:
            take_first(own, told)
    return told.item()


def _group(workshop: Workshop) -> distributed.ProcessGroup | None:
    """Give the members that there are besides this one, with it; None: this one is alone."""
    group = workshop.places.group_of_members()
    if group is None or distributed.get_world_size(group) == 1:
        return None
    check_device(group, workshop.device)
    return group
