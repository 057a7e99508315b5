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
        name: What it is called there; the client itself, while it is in a call, does not say it.
        away: How the newest try to reach the server has failed; None: it has not.
        has_just_lost_it: It was there until then; what is there by now is to be met still.
    """

    def __init__(self, connect: Connect, *, on_another_run: Callable[[], None]) -> None:
        """Begin away.

        Args:
            connect: Makes a client, in so many seconds, under a name if one is given.
            on_another_run: Called where the server that is met has another run than the one before.
        """
        self._connect = connect
        self._on_another_run = on_another_run
        self._run_id: str | None = None
        self._client: Client | None = None
        self.name: str | None = None
        self._names: set[str] = set()
        self._is_back = False  # it has met the server anew, and not taken part since
        self.away: str | None = None
        self.has_just_lost_it = False

    @property
    def is_met(self) -> bool:
        """Whether the member has a client: it has met the server, and not found it gone."""
        return self._client is not None

    @property
    def names(self) -> set[str]:
        """All that the member was called in the server's run."""
        return set(self._names)

    def met(self) -> Client:
        """Give the client; who calls this has met the server."""
        assert self._client is not None  # noqa: S101  as is said
        return self._client

    def meet(self, agree: Callable[[Client], None], *, tries_s: float | None = None) -> None:
        """Connect.

        Args:
            agree: Looks whether this member can take part there, which stays away where this raises.
            tries_s: How long it is tried; None: as long as a round does.
        """
        client = self._connect(AGAIN_S if tries_s is None else tries_s, None)
        if self._run_id not in {None, client.run_id}:
            self._names.clear()  # there, names that are the same are others'
            self._on_another_run()
        try:
            agree(client)
        except BaseException:
            client.close(finished=False)
            raise
        self._is_back = self._run_id is not None
        self._client, self.name, self._run_id = client, client.worker_id, client.run_id
        self._names.add(self.name)

    def take_part(self) -> bool:
        """Take note that the member is in a round, and tell whether it has met the server anew for it."""
        was_back, self._is_back = self._is_back, False
        return was_back

    def note_progress(self, iterations: int) -> None:
        """Tell the server, if it is met, that the member trains; not while the client is in a call."""
        if (client := self._client) is not None:
            client.set_progress(iterations)

    def former_names(self) -> list[str]:
        """Give names that this member had, for which a server waits that was started again."""
        if self._names <= {self.name}:
            return []
        return [name for name in missed_of(self.met().status()["workers"]) if name in self._names]

    def leave_as(self, names: Sequence[str]) -> None:
        """Say goodbye under names that this member had."""
        for name in names:
            try:
                self._connect(AGAIN_S, name).close(finished=False, cause=f"it is {self.name} now")
            except OffbeatError as error:
                self._names.discard(name)  # else it would be at work for ever
                log.warn(
                    f"this member is {self.name} at the server now, which waits for {name}, as it was "
                    f"before: it could not be told that they are one: {error}"
                )

    def pause(self, error: Exception) -> None:
        """Be away, since the server was lost, or is still; the first time that is told."""
        if self.away is None:
            log.warn(f"averaging pauses, and training goes on: {error}; it is tried again at each round")
        self.away, self.has_just_lost_it = str(error), self.is_met
        self.drop()

    def go_on(self) -> None:
        """Take note that the server has done what it was asked for."""
        if self.away is not None:
            log.warn("the server is there again: averaging goes on")
        self.away, self.has_just_lost_it = None, False

    def drop(self, *, finished: bool = False, cause: str | None = None, is_at_exit: bool = False) -> None:
        """Say goodbye, if this member is there; unless it has finished, it may come again.

        Args:
            finished: It has.
            cause: Why it leaves, as the server then tells.
            is_at_exit: The process ends: a call that is under way is broken off.
        """
        client, self._client = self._client, None
        if client is not None:
            with suppress(OffbeatError):  # of a session that is over there is nothing to say goodbye to
                client._part(finished=finished, cause=cause, is_at_exit=is_at_exit)  # noqa: SLF001  no user's
