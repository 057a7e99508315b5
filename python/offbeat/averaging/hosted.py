"""The server that one member has started for all: it stays until they have ended, also without that one."""

from typing import Self

from offbeat import log, process
from offbeat.averaging.waiting import telling
from offbeat.errors import ConnectionLostError
from offbeat.server import ParameterServer

__all__ = ["Hosted"]

GOODBYE_S = 30.0
"""Longest wait for members who have not said goodbye: they may still be ending, or were killed."""


class Hosted(process.Live):
    """A server in this process at which members meet.

    It is kept until it is stopped, or the process ends: where it went with the averager that has started it,
    a function that ends with `flush()` would take it from members who are still ending. The averager is not
    kept, and may go, with its model, before it.

    Attributes:
        address: Where it listens, "HOST:PORT".
    """

    _instead = "make an averager in the process that is to have one"
    _exit_turn = 1  # after this process's members, for which it waits

    def __init__(self, *, host: str, port: int, token: str | None) -> None:
        """Start it.

        Args:
            host: Of this machine.
            port: 0: any that is free.
            token: Likewise as for `ParameterServer`.

        Raises:
            AddressInUseError: If its place is taken.
        """
        server = ParameterServer(host=host, port=port, token=token, transaction="model", linger_s=0.5)
        server.start()
        self.address = server.address
        self._server: ParameterServer | None = server
        self._origin = process.Origin(type(self).__name__)
        _kept.add(self)
        process.register(self)

    @classmethod
    def started(cls, *, host: str, port: int, token: str | None) -> Self:
        """Start one, and stop the one that is left of a former averager of this process at the same place.

        Raises:
            AddressInUseError: If its place is taken.
        """
        for left in [one for one in _kept if one.is_at(port)]:
            left.stop()
        return cls(host=host, port=port, token=token)

    def is_at(self, port: int) -> bool:
        """Whether it is this process's, and no parent's, and has this port."""
        return self._origin.is_here and int(self.address.rpartition(":")[2]) == port

    def stop(self) -> None:
        """Stop it, once all members have said goodbye; stopping twice is fine."""
        with telling(
            f"the members' server, in this process, waits up to {GOODBYE_S:g} s before it stops for "
            f"those that have not said goodbye: they may still be ending, or were killed"
        ):
            try:
                if self._server is not None:
                    self._server.wait_for_workers(timeout_s=GOODBYE_S)
            except ConnectionLostError:  # nobody has finished: this one ends by a failure, and all others
                log.info("all members have left, and none has finished: their server stops")
            finally:
                self.stop_at_once()

    def stop_at_once(self) -> None:
        """Stop it, whoever is there; stopping twice is fine."""
        server, self._server = self._server, None
        _kept.discard(self)
        process.release(self)
        if server is not None:
            server.stop()

    def _at_exit(self, failure: BaseException | None) -> None:
        del failure  # the members' affair
        self.stop()


_kept: set[Hosted] = set()
