"""Whether a member is at its server, and under which name."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from offbeat import log
from offbeat.averaging.waiting import missed_of
from offbeat.client import Client
from offbeat.errors import OffbeatError, OffbeatTimeoutError

__all__ = ["LOST", "Connect", "Presence"]

Connect = Callable[[float, str | None], Client]

AGAIN_S = 5.0
"""How long a round tries to reach a server that was lost."""

LOST = (ConnectionError, OffbeatTimeoutError)
"""By what a server is known to be gone, or to take connections and be silent; our own errors are such."""


class Presence:
    """A member's client, which is made anew where the server was lost, perhaps under another name.

    Attributes:
        client: None while the member is not there.
        name: What it is called there; the client itself, while it is in a call, does not say it.
        names: All that it was called in the server's run.
        is_back: It has met the server anew, and not taken part since.
        away: How the newest try to reach the server has failed; None: it has not.
        has_just_lost_it: It was there until then; what is there by now is to be met still.
    """

    def __init__(self, connect: Connect) -> None:
        """`connect`: makes a client, in so many seconds, under a name if one is given."""
        self._connect = connect
        self._run_id: str | None = None
        self.client: Client | None = None
        self.name: str | None = None
        self.names: set[str] = set()
        self.is_back = False
        self.away: str | None = None
        self.has_just_lost_it = False

    @property
    def is_there(self) -> bool:
        """Whether the member has a client, as far as is known."""
        return self.client is not None

    def met(self) -> Client:
        """Give the client; who calls this has met the server."""
        assert self.client is not None  # noqa: S101  as is said
        return self.client

    def meet(self, agree: Callable[[Client, bool], None], *, tries_s: float | None = None) -> None:
        """Connect.

        Args:
            agree: Looks whether this member can take part there; told whether that is another run than the
                one before. It stays away where this raises.
            tries_s: How long it is tried; None: as long as a round does.
        """
        client = self._connect(AGAIN_S if tries_s is None else tries_s, None)
        is_another_run = self._run_id not in {None, client.run_id}
        if is_another_run:
            self.names.clear()  # there, names that are the same are others'
        try:
            agree(client, is_another_run)
        except BaseException:
            client.close(finished=False)
            raise
        self.is_back = self._run_id is not None
        self.client, self.name, self._run_id = client, client.worker_id, client.run_id
        self.names.add(self.name)

    def former_names(self) -> list[str]:
        """Give names that this member had, for which a server waits that was started again."""
        if self.names <= {self.name}:
            return []
        return [name for name in missed_of(self.met().status()["workers"]) if name in self.names]

    def leave_as(self, names: Sequence[str]) -> None:
        """Say goodbye under names that this member had."""
        for name in names:
            try:
                self._connect(AGAIN_S, name).close(finished=False)
            except OffbeatError as error:
                self.names.discard(name)  # else it would be at work for ever
                log.warn(
                    f"this member is {self.name} at the server now, which waits for {name}, as it was "
                    f"before: it could not be told that they are one: {error}"
                )

    def pause(self, error: Exception) -> None:
        """Be away, since the server was lost, or is still; the first time that is told."""
        if self.away is None:
            log.warn(f"averaging pauses, and training goes on: {error}; it is tried again at each round")
        self.away, self.has_just_lost_it = str(error), self.client is not None
        self.drop(finished=False)

    def go_on(self) -> None:
        """Take note that the server has done what it was asked for."""
        if self.away is not None:
            log.warn("the server is there again: averaging goes on")
        self.away, self.has_just_lost_it = None, False

    def drop(self, *, finished: bool) -> None:
        """Leave, if this member is there."""
        client, self.client = self.client, None
        if client is not None:
            with suppress(OffbeatError):  # of a session that is over there is nothing to say goodbye to
                client.close(finished=finished)
