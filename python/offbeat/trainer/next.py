"""What a member does next, which members of a process group tell one another as something ends together."""

from offbeat.errors import StateError
from offbeat.trainer.settings import Kind, Sync, shown_kind

__all__ = ["ENDINGS", "ENDS", "check_next", "meeting", "next_of"]

ENDS = "ends its train here"
"""What a member does next that has no more to train with the others."""


TO_SERVER = 'goes on with strategy "parameter_server"'
"""What a member does next that brings what the group has made to a parameter server, with the others."""

ENDINGS = (ENDS, TO_SERVER)
"""After these a member averages with nobody."""


def next_of(kind: Kind) -> str:
    """Say what a member does that goes on with a strategy: to a group, who trains alone then has ended."""
    if kind == "parameter_server":
        return TO_SERVER
    return ENDS if kind == "local" else f"goes on with strategy {shown_kind(kind)}"


def meeting(sync: Sync) -> str:
    """Say what a member does that meets the others so often."""
    return f"goes on with meetings every {sync.every} batches"


def check_next(then: str, *, are_alike: bool) -> None:
    """See that all members do the same next.

    Args:
        then: What this one does.
        are_alike: The others do, too.

    Raises:
        StateError: If they do not.
    """
    if not are_alike:
        raise StateError(
            f"this member {then}, and not all others do: give all of them the same epochs, max_steps "
            f"and frequencies, and call stop, or set strategy in all of them, after the same batch of theirs"
        )
