"""Looking at a server now and then, beside whatever else is done: for trackers, and for a picture."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast, runtime_checkable

from offbeat import log
from offbeat.address import is_address
from offbeat.checks import Faults, is_number, refuse, seconds, strings
from offbeat.process import cause_of
from offbeat.tracking.base import Tracker, trackers_of
from offbeat.tracking.fanout import Fanout
from offbeat.tracking.registry import Status, scalars
from offbeat.tracking.run import Run

__all__ = ["StatusSource", "watch"]

MAIN_LOOK_S = 1.0
"""How often it is seen to whether the process ends, however far apart the looks at the server are."""


@runtime_checkable
class StatusSource(Protocol):
    """What can be asked for a server's status by a thread of its own, as a `ParameterServer` can."""

    def status(self) -> Status:
        """Tell how it goes."""


@contextmanager
def watch(
    server: StatusSource | str,
    *,
    trackers: Tracker | Iterable[Tracker] = (),
    interval_s: float = 1.0,
    token: str | None = None,
    timeout_s: float = 2.0,
) -> Iterator[Run]:
    """Look at a server now and then until the block ends, and once more then.

    Where nobody answers at an address, the block does not begin. A later look that fails, as where the server
    has gone, is warned of once and tried again.

    Args:
        server: A `ParameterServer` of this process, or the "HOST:PORT" of any.
        trackers: Who is handed each status's numbers (`offbeat/model_version`, `offbeat/samples_total`, …) at
            the model's version as the step; yours to finish.
        interval_s: Between two looks, above 0.
        token: The server's, where it is named by its address; None means the environment's OFFBEAT_TOKEN.
        timeout_s: How long each look at an address waits for an answer.

    Yields:
        What was seen, as far as it is.

    Raises:
        ConfigError: If an argument cannot be used.
        AuthenticationError: If the token is another one than the server's.
        ConnectError: If there is no server at the address.
        OffbeatTimeoutError: If it does not answer in time.
        ProtocolError: If what is there is no Offbeat server.

    Example:
        >>> with offbeat.tracking.watch(server, trackers=offbeat.tracking.JSONL("server.jsonl")) as run:
        ...     server.wait_for_workers()
        >>> run.plot("run.png")
    """
    faults = Faults([*strings(token=token), *seconds(timeout_s=timeout_s)])
    if not (is_address(server) if isinstance(server, str) else isinstance(server, StatusSource)):
        faults.append(f'server is {server!r:.100}: give a ParameterServer, or its "HOST:PORT"')
    if not is_number(interval_s) or interval_s <= 0:
        faults.append(f"interval_s is {interval_s!r}: give a number of seconds above 0")
    known = faults.catch(lambda: trackers_of(trackers)) or []
    refuse(faults)
    run, ended = Run(), threading.Event()
    look = _Look(run, _asking(server, token, timeout_s), Fanout(known, "the watched server"))
    watching = threading.Thread(target=_watch, args=(look, ended, interval_s), name="offbeat-watch")
    look.first(must_answer=isinstance(server, str))
    watching.start()
    try:
        yield run
    finally:
        ended.set()
        watching.join()
        look()


class _Look:
    """One look after the other."""

    def __init__(self, run: Run, ask: Callable[[], Status], trackers: Fanout) -> None:
        self._run, self._ask, self._trackers = run, ask, trackers
        self._has_warned = False

    def first(self, *, must_answer: bool) -> None:
        """Look for the first time.

        Args:
            must_answer: Whether nobody's answering is an error. An address at which there has never been a
                server is most likely a wrong one; one that was there may come back.

        Raises:
            OffbeatError: If it is, and nobody answers.
        """
        if must_answer:
            status = self._ask()
            self._see(lambda: status)
        else:
            self()

    def __call__(self) -> None:
        self._see(self._ask)

    def _see(self, ask: Callable[[], Status]) -> None:
        try:
            status = ask()
            told = scalars(status)
            self._run.observe(status, time.monotonic())
        except Exception as error:  # noqa: BLE001  a server that has gone, in any of its ways, or is another version's
            if not self._has_warned:
                self._has_warned = True
                log.warn(f"the server cannot be watched, which is tried again: {cause_of(error)}")
            return
        self._has_warned = False
        self._trackers.log(told, status["version"])


def _watch(look: _Look, ended: threading.Event, interval_s: float) -> None:
    main = threading.main_thread()  # Python waits for this thread before it ends, and the block may never
    due = time.monotonic() + interval_s
    while not ended.wait(min(max(due - time.monotonic(), 0.0), MAIN_LOOK_S)) and main.is_alive():
        if time.monotonic() >= due:
            look()
            due = time.monotonic() + interval_s


def _asking(server: StatusSource | str, token: str | None, timeout_s: float) -> Callable[[], Status]:
    if not isinstance(server, str):
        return server.status
    from offbeat._offbeat import fetch_status

    secret = token or os.environ.get("OFFBEAT_TOKEN") or None
    return lambda: cast(Status, json.loads(fetch_status(server, secret, timeout_s)))
