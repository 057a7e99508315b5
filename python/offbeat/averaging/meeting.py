"""Where members meet: in a process group of torch's, or at an Offbeat server; and this process among them."""

import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed, nn

from offbeat._offbeat import fetch_status
from offbeat.averaging import one_model
from offbeat.averaging.arrivals import NAMED, Arrivals
from offbeat.averaging.hosted import Hosted
from offbeat.averaging.members import Alone, Group, Members, terms_of
from offbeat.averaging.methods import DiLoCo, Method, shown
from offbeat.averaging.pace import Pace, Seconds
from offbeat.averaging.served import Served
from offbeat.averaging.server_place import reached, server_at_hand, server_place
from offbeat.averaging.settings import BACKENDS, server_faults, settings_by_name
from offbeat.averaging.statistics import Statistics
from offbeat.checks import Faults, refuse, strings
from offbeat.client import Client
from offbeat.distributed import init_distributed
from offbeat.errors import ConfigError, StateError
from offbeat.launchers import find
from offbeat.local.group import MAKE_A_GROUP, group_of
from offbeat.naming import unknown

__all__ = ["Joined", "Meeting"]

RECONNECT_S: float | None = None
"""How long a round waits for a server that is lost; None: as long as a client does by itself."""

ASK_S = 5.0
"""How long a server is asked for its status while a round at it is waited for."""

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Joined:
    """This process among the members.

    Attributes:
        members: All of them.
        rank: Which it is, as far as anybody says.
        server: That it has started for all of them; else None.
    """

    members: Members
    rank: int
    server: Hosted | None = None


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where members meet, as a user says it.

    Attributes:
        backend: `communication_backend`.
        group: `process_group`.
        address: `server_address`.
        token: The server's.
        rank: As given.
        world_size: As given.
        is_asynchronous: Members arrive one by one.
        is_server_free: No other strategy pushes gradients to the server, which would take no models then.
    """

    backend: str | None
    group: "distributed.ProcessGroup | Literal[False] | None"
    address: str | None
    token: str | None
    rank: int | None
    world_size: int | None
    is_asynchronous: bool = False
    is_server_free: bool = True

    @property
    def is_at_a_server(self) -> bool:
        """Whether it is at a server."""
        return self.backend == "tcp" or (self.backend is None and self.address is not None)

    def faults(self, method: Method | None, *, has_others: bool) -> list[str]:
        """Tell what is wrong with it.

        Args:
            method: Of averaging, if it is one.
            has_others: Something else is wrong, so that members are not going to meet now: what they would
                be told is told already.
        """
        faults = Faults(strings(server_address=self.address, token=self.token))
        if self.is_at_a_server:
            if self.group is not None:
                faults.append("process_group given, and members meet at a server: leave one of them out")
            faults += [] if method is None else server_faults(method)
            place = faults.catch(lambda: server_place(self.address, self.rank, self.world_size))
            if method is not None and place is not None:
                faults.catch(lambda: method.check_for(place.world_size))
        else:
            if self.is_asynchronous:
                remedy = "give server_address, or take 'tcp'" if self.address is None else "take 'tcp'"
                faults.append(f"asynchronous is True and communication_backend {self.backend!r}: {remedy}")
            given = {"server_address": self.address, "token": self.token}
            if names := " and ".join(name for name, value in given.items() if value is not None):
                remedy = "give server_address, or take 'tcp'" if self.backend is None else "take 'tcp'"
                faults.append(
                    f"{names} given, and communication_backend is {self.backend!r}, so no members meet at a "
                    f"server: {remedy}"
                )
            if has_others or faults:
                faults.catch(lambda: self._group(method, is_tried=True))
        return faults

    def remedies(self, method: Method | None) -> list[str]:
        """Tell what to do where this is one of several processes that have no group, the nearest first."""
        if not self.is_server_free or method is None or server_faults(method):
            return [MAKE_A_GROUP]
        place = find(os.environ, rank=self.rank, world_size=self.world_size)
        if (server := server_at_hand(os.environ, place)) is not None:
            return [f"give communication_backend='tcp' to meet at {server}", MAKE_A_GROUP]
        return [MAKE_A_GROUP, "give server_address='HOST:PORT' of an `offbeat server`"]

    def join(
        self, model: nn.Module, named: Named, method: Method, pace: Pace, *, setting: list[object]
    ) -> Joined:
        """Be one of the members.

        Raises:
            ConfigError: If what is given cannot be used.
            ModelMismatchError: If members hold different models.
            StateError: If members are set differently, or the process group is another one than is asked for.
            ConnectError: If the others did not come, or the server cannot be reached.
        """
        if self.is_at_a_server:
            are_trained = [parameter.requires_grad for _, parameter in named]
            return self._at_a_server(model, named, method, terms_of(shown(method), setting, are_trained))
        group = self._group(method, is_tried=False)
        size = 1 if group is None else distributed.get_world_size(group)
        if group is None or size == 1:
            method.check_for(size)
            return Joined(Alone(), 0)
        buffers = dict(model.named_buffers())
        averaged = {id(part) for part in Statistics(model).buffers()}
        statistics = [(name, buffer) for name, buffer in buffers.items() if id(buffer) in averaged]
        # A member waits for the others' next round, which may be as far away as a round is long.
        more_time = timedelta(seconds=pace.every if isinstance(pace, Seconds) else 0.0)
        alike = settings_by_name(method, setting)
        alike |= {f"requires_grad of {name!r}": parameter.requires_grad for name, parameter in named}
        members = Group(
            group,
            [*named, *statistics],
            buffers={name: buffer for name, buffer in buffers.items() if id(buffer) not in averaged},
            setting=alike,
            more_time=more_time,
            check=lambda: method.check_for(size),
        )
        return Joined(members, distributed.get_rank(group))

    def group_of_members(self) -> "distributed.ProcessGroup | None":
        """Give the process group that `join` finds the members in, which makes torch's default one likewise.

        Raises:
            ConfigError, StateError, ConnectError: As `join`.
        """
        return self._group(None, is_tried=False)

    def _group(self, method: Method | None, *, is_tried: bool) -> "distributed.ProcessGroup | None":
        return _group(
            self.backend,
            self.group,
            self.rank,
            self.world_size,
            remedies=lambda: self.remedies(method),
            is_tried=is_tried,
        )

    def _at_a_server(self, model: nn.Module, named: Named, method: Method, terms: str) -> Joined:
        place = server_place(self.address, self.rank, self.world_size)
        if not place.is_told:  # else each averager has a server of its own
            one_model.check_free(place.address, place.rank)
        server, address = reached(place, self.token)
        # It comes back under the same name, by which the server counts its pushes. One that a server gives
        # out would not do: at another server, which knows nothing of this one's, it can be another member's.
        own_name = f"{NAMED}{secrets.token_hex(6)}" if self.is_asynchronous else None

        def connect(tries_s: float, name: str | None) -> Client:
            return Client(
                address,
                name or own_name,
                token=self.token,
                connect_timeout_s=tries_s,
                reconnect_timeout_s=RECONNECT_S,
                contribution="gradient" if self.is_asynchronous else "delta",
            )

        def ask(tries_s: float = ASK_S) -> dict[str, Any]:
            token = self.token or os.environ.get("OFFBEAT_TOKEN") or None
            status: dict[str, Any] = json.loads(fetch_status(address, token, tries_s))
            return status

        buffers, num = Statistics(model).buffers(), place.world_size
        members: Members
        try:
            if self.is_asynchronous:
                assert isinstance(method, DiLoCo)  # noqa: S101  else it was refused
                members = Arrivals(connect, named, buffers, num_expected=num, method=method, ask=ask)
            else:
                members = Served(connect, named, buffers, terms=terms, num_expected=num, ask=ask)
        except BaseException:
            if server is not None:
                server.stop_at_once()
            raise
        one_model.note(address, place.rank, members)
        return Joined(members, place.rank, server)


def _group(
    backend: str | None,
    given: "distributed.ProcessGroup | Literal[False] | None",
    rank: int | None,
    world_size: int | None,
    *,
    remedies: Callable[[], Sequence[str]],
    is_tried: bool,
) -> "distributed.ProcessGroup | None":
    """Give the group; make torch's default one where a backend is named and there is none.

    Args:
        backend: As given.
        given: `process_group`, as given.
        rank: As given.
        world_size: As given.
        remedies: As `group_of` has them.
        is_tried: Only look for what is wrong; make nothing.

    Returns:
        None for this process alone.

    Raises:
        ConfigError: If what is given cannot be used.
        StateError: If the group is another one than is asked for.
        ConnectError: If the others did not come.
    """
    faults = Faults()
    faults.catch(lambda: _check_backend(backend))
    place = faults.catch(lambda: find(os.environ, rank=rank, world_size=world_size))  # sees these are numbers
    refuse(faults)
    assert place is not None  # noqa: S101  else there is a fault
    is_there = distributed.is_available() and distributed.is_initialized()
    is_wanted = given is None and backend is not None and (place.world_size > 1 or is_there)
    if is_tried:
        return None if is_wanted and not is_there else group_of(given, remedies=remedies)
    if is_wanted:
        assert backend is not None  # noqa: S101  as `is_wanted` says
        init_distributed(backend, rank=rank, world_size=world_size)
    is_alone = given is None and backend is not None and not is_wanted
    group = None if is_alone else group_of(given, remedies=remedies)
    _check_place(group, rank, world_size)
    return group


def _check_backend(backend: str | None) -> None:
    if backend is None:
        return
    if backend not in BACKENDS:
        raise ConfigError(unknown("communication_backend", backend, BACKENDS))
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            'communication_backend is "nccl", and torch finds no CUDA device here: take "gloo", which is for '
            "CPUs"
        )


def _check_place(group: "distributed.ProcessGroup | None", rank: int | None, world_size: int | None) -> None:
    size = 1 if group is None else distributed.get_world_size(group)
    own = 0 if group is None else distributed.get_rank(group)
    if (world_size is not None and world_size != size) or (rank is not None and rank != own):
        where = (
            "in torch's process group"
            if group is not None
            else "alone, for no communication_backend is named"
        )
        raise StateError(
            f"rank {rank} of world_size {world_size} is asked for, and this is process {own} of "
            f"{size} {where}: "
            f"leave rank and world_size out, or name a backend (communication_backend='gloo'), and start all "
            f"processes"
        )
