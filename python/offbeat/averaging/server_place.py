"""The server at which members meet: one that is there, or one that rank 0 starts for all of them."""

import itertools
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from offbeat.averaging.hosted import Hosted
from offbeat.checks import of_address, refuse
from offbeat.errors import ConfigError, ConnectError
from offbeat.launchers import Place, find, has_agents_store, meeting_place

__all__ = ["ServerPlace", "reached", "server_at_hand", "server_place"]

Store = Any
"""A `torch.distributed.TCPStore`, which torch's own types do not tell of."""

TOLD_WITHIN_S = 60.0
"""Longest wait for rank 0 to say where its server is; as long as a client tries to reach one."""
LOOK_S = 0.05
"""From one look at torch's store to the next: where that waits itself, it does not answer Ctrl-C."""

_numbers = itertools.count()
"""Of the servers of this process's averagers, which all members make in the same order."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """Where members meet that have a server.

    Attributes:
        address: "HOST:PORT".
        rank: Which member this is, as far as anybody says.
        world_size: How many there are at first; likewise.
        is_ours: This process is to start the server there.
        is_told: What listens at `address` is the launcher's store, through which rank 0 says at which other
            port of that host its server is.
    """

    address: str
    rank: int
    world_size: int
    is_ours: bool
    is_told: bool = False


def server_place(given: str | None, rank: int | None, world_size: int | None) -> ServerPlace:
    """Find the server: the one given, that of ``OFFBEAT_SERVER``, or one that rank 0 starts.

    The last is at ``MASTER_ADDR`` and ``MASTER_PORT``, or where the launcher says; where the launcher itself
    listens there, as torchrun does, at a free port of that host.

    Raises:
        ConfigError: If nobody says where it is.
    """
    place = find(os.environ, rank=rank, world_size=world_size)
    if address := given or os.environ.get("OFFBEAT_SERVER"):
        refuse(of_address(given))
        return ServerPlace(address, place.rank, place.world_size, is_ours=False)
    host, port = meeting_place(os.environ, place)
    if host is None:
        raise ConfigError(
            "communication_backend is 'tcp', and there is no server: give server_address='HOST:PORT' of an "
            "`offbeat server`, or set OFFBEAT_SERVER; or set MASTER_ADDR and MASTER_PORT, where rank "
            "0 starts one"
        )
    is_told = has_agents_store(os.environ)
    return ServerPlace(_joined(host, port), place.rank, place.world_size, place.rank == 0, is_told)


def server_at_hand(environ: Mapping[str, str], place: Place) -> str | None:
    """Word the server that `server_place` finds where none is given; None if it finds none."""
    if address := environ.get("OFFBEAT_SERVER"):
        return f"the server at {address} (OFFBEAT_SERVER)"
    host, _ = meeting_place(environ, place)
    return None if host is None else f"a server that rank 0 starts at {host}"


def reached(place: ServerPlace, token: str | None) -> tuple[Hosted | None, str]:
    """Start the server where that is this process's part, and give it with the address at which it is.

    Raises:
        ConnectError: If the launcher's store cannot be reached, or rank 0 did not say in time where its
            server is.
        AddressInUseError: If its place is taken.
    """
    host, _, port = place.address.rpartition(":")
    if not place.is_told:
        return (_started(host, int(port), token) if place.is_ours else None), place.address
    key = f"offbeat/averager/{os.environ.get('TORCHELASTIC_RESTART_COUNT') or '0'}/{next(_numbers)}"
    store = _launchers_store(place, host.strip("[]"), int(port))
    if not place.is_ours:
        return None, f"{host}:{_told(store, key, place)}"
    server = _started(host, 0, token)
    try:
        own_port = server.address.rpartition(":")[2]
        store.set(key, own_port)
    except BaseException:
        server.stop_at_once()
        raise
    return server, f"{host}:{own_port}"


def _launchers_store(place: ServerPlace, host: str, port: int) -> Store:
    try:
        return distributed.TCPStore(  # type: ignore[attr-defined]  # public, and not in its __all__
            host, port, is_master=False, timeout=timedelta(seconds=TOLD_WITHIN_S), wait_for_workers=False
        )
    except distributed.DistError as error:
        cause = str(error).partition("\n")[0]
        raise ConnectError(
            f"the launcher's store, in which rank 0 is to say where its server is, cannot be reached at "
            f"{place.address} (MASTER_ADDR, MASTER_PORT): {cause}; give server_address"
        ) from error


def _told(store: Store, key: str, place: ServerPlace) -> str:
    """Give the port that rank 0 says.

    Raises:
        ConnectError: If it does not in time.
    """
    until_s, never = time.monotonic() + TOLD_WITHIN_S, threading.Event()
    while not store.check([key]):
        if time.monotonic() >= until_s:
            raise ConnectError(
                f"process {place.rank} of {place.world_size} was not told within {TOLD_WITHIN_S:g} s where "
                f"rank 0's server is, through the launcher's store at {place.address}: make as many "
                f"averagers in every process, in the same order, or give server_address"
            )
        never.wait(LOOK_S)
    return str(store.get(key), "ascii")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _started(host: str, port: int, token: str | None) -> Hosted:
    return Hosted.started(host=host.strip("[]"), port=port, token=token)
