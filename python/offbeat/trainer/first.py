"""What the first of a group's members does for all, as they come from a parameter server or go to it."""

import math
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import torch
from torch import distributed

from offbeat.errors import ConnectionLostError, StateError
from offbeat.local.group import check_device, is_alike, take_first, timeout_of
from offbeat.local.sums import Sums
from offbeat.trainer.next import check_next
from offbeat.trainer.strategies import Workshop

__all__ = ["First", "first_brings", "first_goes_on"]

TO_CHANGE = (
    "have the same epochs and max_steps, and call stop, set strategy, or close the trainer, after the same "
    "batch of its own"
)
"""What each member is to do, where they wait for one another before they meet: a trainer has no `flush`."""
BY_FIRST = "member 0 asks the server, for which it may be waiting"
"""What else than a slow member may be waited for."""
OF_THE_TIMEOUT = 0.8
"""Part of a group's timeout for which the first member waits for a server: the others hear of its failure."""
FAILED = -1.0


class First(IntEnum):
    """What the first member goes on with, from a server, and all with it."""

    NEWEST = 0  # what all have pushed
    STALE = 1  # what it had as it left before they had
    ITS_OWN = 2  # it never joined
    OTHERS = 3  # what is at another server than they have pushed to, or at an older checkpoint of it


def first_goes_on(
    workshop: Workshop, then: str, take: Callable[[], tuple[First, float]]
) -> tuple[First, float]:
    """Wait until all members have pushed what they had to a server, if they were at one.

    To be called by all of them before they meet in a process group, whether this one was at a server or not,
    as where it could not join: who would ask only then might ask alone.

    Args:
        workshop: This member's.
        then: What it does next, in words.
        take: Takes the server's model, which the first one does when all have pushed, for all go on from its;
            and tells what that is, and by a number at which server.

    Returns:
        What the first one has told.

    Raises:
        StateError: If they do not all do the same next, or the first could not pull; its own error is raised
            there.
        ConnectionLostError: If a member is lost.
    """
    group = _group(workshop)
    if group is None:
        _, run = take()
        return First.NEWEST, run  # of those that go on together there are no others
    what, run = _told_by_first(
        workshop,
        group,
        take,
        of=f"what is next ({BY_FIRST})",
        failed="take what all have pushed to the server",
        then=then,
    )
    return First(int(what)), run


def first_brings(workshop: Workshop, bring: Callable[[float], tuple[bool, float]]) -> tuple[bool, float]:
    """Let the first member bring to a server what all have made in a process group; the others wait for that.

    Args:
        workshop: This member's.
        bring: Joins the server, for which it tries so many seconds at most, and tells whether its model is
            this one now, and by a number at which.

    Returns:
        What it told.

    Raises:
        StateError: If the first member could not; its own error is raised there.
        ConnectionLostError: If a member is lost.
    """
    group = _group(workshop)
    if group is None:
        return bring(math.inf)
    most_s = OF_THE_TIMEOUT * timeout_of(group).total_seconds()
    told, run = _told_by_first(
        workshop,
        group,
        lambda: bring(most_s),
        of=f"what is brought to the server ({BY_FIRST})",
        failed="bring to the server what all have made in their process group",
    )
    return bool(told), run


def _told_by_first(
    workshop: Workshop,
    group: distributed.ProcessGroup,
    act: Callable[[], tuple[float, float]],
    *,
    of: str,
    failed: str,
    then: str | None = None,
) -> tuple[float, float]:
    """Let the first member do something, for which the others wait, and tell all what comes of it.

    Args:
        workshop: This member's.
        group: The members.
        act: What the first one does.
        of: What is told, for who waits.
        failed: What it could not do where it raises, for the others.
        then: What this member does next, in words, which has to be the same in all; None: nobody asks.

    Raises:
        StateError: As `first_goes_on`.
        ConnectionLostError: As `first_goes_on`.
    """
    members = Sums.among(group, of=of, each=TO_CHANGE)
    try:
        if then is not None:
            with members.together() as own:
                are_alike = is_alike(own, then, workshop.device)
            check_next(then, are_alike=are_alike)
        told = torch.full([2], FAILED, dtype=torch.float64, device=workshop.device)
        try:
            if distributed.get_rank(members.group) == 0:
                told.copy_(torch.tensor(act(), dtype=torch.float64))
        except BaseException:
            with suppress(ConnectionLostError):  # the others wait, if they are there; its own error says more
                _tell(members, told)
            raise
        _tell(members, told)
        if told[0] != FAILED:
            _all_have_heard(members, workshop, of)
    finally:
        members.close()
    if told[0] == FAILED:
        raise StateError(
            f"the first member could not {failed}, and its own error says why: call train() again, in all "
            f"members, once that is mended"
        )
    return told[0].item(), told[1].item()


def _tell(members: Sums, told: torch.Tensor) -> None:
    with members.together() as own:
        take_first(own, told)


def _all_have_heard(members: Sums, workshop: Workshop, of: str) -> None:
    """Wait until all have: who was broken off as it waited is not there, and no other goes on without it."""
    try:
        with members.together() as own:
            is_alike(own, None, workshop.device)
    except ConnectionLostError as error:
        raise ConnectionLostError(
            f"not all members have heard {of}, for one was broken off, as by Ctrl-C, or is lost: call "
            f"train() again, in all members, which goes on from here; where one is lost, start all of them "
            f"again. The cause: {error}"
        ) from None


def _group(workshop: Workshop) -> distributed.ProcessGroup | None:
    """Give the members that there are besides this one, with it; None: this one is alone."""
    group = workshop.places.group_of_members()
    if group is None or distributed.get_world_size(group) == 1:
        return None
    check_device(group, workshop.device)
    return group
