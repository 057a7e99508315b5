"""A member's place at a server that it is to come back to, while it trains otherwise."""

import json
import os
import threading
import weakref
from contextlib import suppress

from offbeat import log, process
from offbeat._offbeat import fetch_status
from offbeat.client import Client
from offbeat.errors import (
    AuthenticationError,
    ClosedError,
    FencedError,
    ForkedError,
    OffbeatError,
)
from offbeat.trainer.places import Places

__all__ = ["Away"]

ASK_S = 3.0
"""How often the place is used, so that it is seen to be lost; the server calls one stalled after 10 s."""

TRY_S = 2.0
"""How long the server is tried to be reached at a time, and so the least time to wait for this to end."""

END_S = 10.0
"""How long the end of the thread is waited for: it is in a call to a server that is silent else."""

PRESENT = frozenset({"joined", "stalled"})
"""States of workers that are heard."""


class _End:
    """What ends the thread: it holds this, and not the place, which so can be dropped."""

    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.failure: BaseException | None = None


class Away:
    """Somebody who is there in a member's name, so that the server does not end since all have left.

    It works on a thread, as the connection may break, and the server be started again, while the member makes
    no call by which it would notice. Of a run that is another by then it stays away: that is not waited for.
    """

    def __init__(self, places: Places, name: str | None, run: str) -> None:
        """Begin to join.

        Args:
            places: Where the server is.
            name: Of the member, which has said goodbye; None: the server chooses one.
            run: Of the server.
        """
        self._end = _End()
        self._thread = threading.Thread(
            target=_keep, args=(places.address, places.token, name, run, self._end), daemon=True
        )
        self._thread.name = "offbeat-away"
        self._thread.start()
        weakref.finalize(self, self._end.has_come.set).atexit = False  # a client closes there by itself

    def end(self, failure: BaseException | None) -> None:
        """Say goodbye, and wait for that; `failure`: by which the member ends, if it does."""
        self._end.failure = process.failure_in(failure)
        self._end.has_come.set()
        self._thread.join(END_S)

    def __deepcopy__(self, memo: object) -> None:
        """Give none: a copy of a member has no place, and takes one of its own."""


class _NotAgain(Exception):  # noqa: N818  it is an end
    """The place is not to be had any more."""


class _NotYet(OffbeatError):  # noqa: N818  it is no end
    """The place is somebody's, who may be this member's process of before."""


def _keep(address: str | None, token: str | None, name: str | None, run: str, end: _End) -> None:
    place = _Place(address, token, name, run)
    is_lost = False
    while True:
        try:
            place.use()
            if is_lost:
                log.announce("the place at the server that this member comes back to is held again")
            is_lost = False
        except _NotAgain as error:
            log.warn(f"no place is kept at the server until this member comes back: {error}")
            return
        except ClosedError:  # this process ends: what is open says goodbye by itself
            return
        except OffbeatError as error:
            if not is_lost:
                log.announce(
                    f"the place at the server that this member comes back to is tried again every "
                    f"{ASK_S:g} s: {error}"
                )
            is_lost = True
        if end.has_come.wait(ASK_S):
            break
    with suppress(OffbeatError):  # it may have gone, and needs no goodbye then
        place.close(end.failure)


class _Place:
    """A client in a member's name, which it does not take from a newer process."""

    def __init__(self, address: str | None, token: str | None, name: str | None, run: str) -> None:
        self._address = address or os.environ.get("OFFBEAT_SERVER", "")
        self._token = token or os.environ.get("OFFBEAT_TOKEN") or None
        self._name, self._run = name, run
        self._incarnation: int | None = None  # the newest of this one's; None: not known
        self._client: Client | None = None

    def use(self) -> None:
        """Ask the server for its status, so that it hears that somebody is there; join before, where none is.

        Raises:
            _NotAgain: If a newer process has the name, or the server is of another run, or has another token.
            ClosedError: If the client was closed, as this process ends.
            OffbeatError: If it is lost; it is joined again the next time, if it is there by then.
        """
        try:
            if self._client is None:
                self._client = self._join()
            self._client.status()
        except (AuthenticationError, FencedError, ForkedError) as error:
            raise _NotAgain(str(error)) from error
        except OffbeatError:  # whatever it is: the session of a client is over behind most of them
            self._client = None
            raise

    def close(self, failure: BaseException | None) -> None:
        """Say goodbye."""
        if self._client is not None:
            cause = None if failure is None else process.cause_of(failure)
            self._client.close(finished=failure is None, cause=cause)

    def _join(self) -> Client:
        """Join, unless that would take the name from somebody: who joins replaces whoever has it."""
        status = json.loads(fetch_status(self._address, self._token, TRY_S))
        self._check_run(status["run_id"])
        for worker in status["workers"]:
            if worker["id"] == self._name:
                self._check_may_replace(worker["incarnation"], is_there=worker["state"] in PRESENT)
        self._incarnation = None  # should the answer be lost
        client = Client(
            self._address, self._name, self._token, connect_timeout_s=TRY_S, reconnect_timeout_s=TRY_S
        )
        try:
            self._check_run(client.run_id)  # which may have begun since
        except _NotAgain:
            client.close(finished=False)
            raise
        self._name, self._incarnation = client.worker_id, client.incarnation
        return client

    def _check_run(self, run: str) -> None:
        if run != self._run:
            raise _NotAgain(f"its run is {run!r}, and members left {self._run!r}")

    def _check_may_replace(self, incarnation: int, *, is_there: bool) -> None:
        own = self._incarnation
        if own is not None and incarnation > own:
            raise _NotAgain(f"a newer process has the name {self._name!r} by now")
        if is_there and incarnation != own:  # of a server that began anew, say, or this member's of before
            raise _NotYet(f"another process is there by the name {self._name!r}")
