"""A member's place at a server that it is to come back to, while it trains otherwise."""

import threading
import weakref
from contextlib import suppress

from offbeat import log, process
from offbeat.client import Client
from offbeat.errors import ClosedError, FencedError, ForkedError, OffbeatError
from offbeat.trainer.places import Places

__all__ = ["Away"]

ASK_S = 3.0
"""How often the place is used, so that it is seen to be lost; the server calls one stalled after 10 s."""

TRY_S = 2.0
"""How long the server is tried to be reached at a time, and so the least time to wait for this to end."""

END_S = 10.0
"""How long the end of the thread is waited for: it is in a call to a server that is silent else."""


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


def _keep(address: str | None, token: str | None, name: str | None, run: str, end: _End) -> None:
    client: Client | None = None
    is_lost = False
    while True:
        try:
            if client is None:
                client = Client(address, name, token, connect_timeout_s=TRY_S, reconnect_timeout_s=TRY_S)
                name = client.worker_id
                if client.run_id != run:
                    client.close(finished=False, cause=f"it is not of run {run!r}, to which it comes back")
                    return
            else:
                client.status()
            is_lost = False
        except (ClosedError, FencedError, ForkedError):  # this process ends, or another has the name
            return
        except OffbeatError as error:
            client = None
            if not is_lost:
                log.info(f"the place at the server that this member comes back to is tried again: {error}")
            is_lost = True
        if end.has_come.wait(ASK_S):
            break
    if client is not None:
        cause = None if end.failure is None else process.cause_of(end.failure)
        with suppress(OffbeatError):  # it may have gone, and needs no goodbye then
            client.close(finished=end.failure is None, cause=cause)
