"""One server is for one model: of several averagers in one process no two are the same member there."""

import gc
import os
import weakref
from typing import Protocol

from offbeat.address import THIS_MACHINE
from offbeat.errors import StateError

__all__ = ["Present", "check_free", "note"]

Place = tuple[int, str, str, int]
"""Of a member: its process, the server's host and port, and its rank."""


class Present(Protocol):
    """A member at a server.

    Attributes:
        is_closed: It takes part no more.
    """

    @property
    def is_closed(self) -> bool:
        """See there."""


_present: weakref.WeakValueDictionary[Place, Present] = weakref.WeakValueDictionary()


def check_free(address: str, rank: int) -> None:
    """See that this process is not that member at the server already.

    The others could not tell which of two models comes to a round: all would become the mean of both.

    Args:
        address: The server's, "HOST:PORT".
        rank: Of the member that is to join.

    Raises:
        StateError: If an averager that is open is.
    """
    if _is_present(address, rank):
        gc.collect()  # one that nobody holds, as of a try that has failed, may hold itself
    if _is_present(address, rank):
        raise StateError(
            f"this process averages at the server {address} already, as member {rank}, and one server is for "
            f"one model: close() the averager that is open before another one is made there, or let this one "
            f"meet elsewhere: at another `offbeat server` (server_address=), or in a process group "
            f"(communication_backend='gloo'). Several members of one model in one process each give their "
            f"rank= and world_size="
        )


def _is_present(address: str, rank: int) -> bool:
    other = _present.get(_place(address, rank))
    return other is not None and not other.is_closed


def note(address: str, rank: int, member: Present) -> None:
    """Take note that a member is there, as long as it lives and is not closed."""
    _present[_place(address, rank)] = member


def _place(address: str, rank: int) -> Place:
    host, _, port = address.rpartition(":")
    host = host.strip("[]").lower()
    return os.getpid(), "localhost" if host in THIS_MACHINE else host, port.lstrip("0"), rank
