"""Where the members of each strategy meet, and what that cannot be used with, told before the first batch."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import distributed, nn

from offbeat.accumulator.settings import unscaled_faults
from offbeat.averaging.meeting import Meeting
from offbeat.averaging.methods import Method
from offbeat.averaging.pace import Iterations
from offbeat.averaging.settings import Backend, asynchronous_faults, fitting_faults
from offbeat.checks import Faults, of_address
from offbeat.launchers import find
from offbeat.local.group import group_of
from offbeat.local.parameters import each_once
from offbeat.trainer.settings import Kind, Syncs, shown_kind

__all__ = ["Places", "ProcessGroup"]

ProcessGroup: TypeAlias = distributed.ProcessGroup | Literal[False] | None

LATER = "or, where a later strategy is to have it, give all of them in a dict by epochs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What a user says of where members meet.

    Attributes:
        backend: Where those meet that average: as `AsyncModelAverager` has it; "tcp" also where that follows.
        group: The members, as a process group.
        address: Of a server, "HOST:PORT"; None: OFFBEAT_SERVER.
        token: Its token; None: OFFBEAT_TOKEN.
        worker_id: The name at a parameter server; None: that gives one.
        is_asynchronous: Those that average wait for nobody.
    """

    backend: Backend | None = None
    group: ProcessGroup = None
    address: str | None = None
    token: str | None = None
    worker_id: str | None = None
    is_asynchronous: bool = False

    def of(self, kinds: Sequence[Kind]) -> "Places":
        """Let strategies average at the server that is named, where nothing else is said or is to have it."""
        is_free = self.address is not None and "parameter_server" not in kinds
        if self.backend is None and self.group is None and is_free and any(map(_averages, kinds)):
            return replace(self, backend="tcp")
        return self

    @property
    def are_served(self) -> bool:
        """Whether those that average meet at a server."""
        return self.backend == "tcp"

    def need_group(self, kinds: Iterable[Kind]) -> bool:
        """Tell whether some strategy's members are a process group of torch's."""
        return any(kind == "accumulate" or (_averages(kind) and not self.are_served) for kind in kinds)

    def group_of_members(self) -> "distributed.ProcessGroup | None":
        """Give the process group in which strategies that need one meet; None: this process is alone.

        Raises:
            ConfigError, StateError, ConnectError: As `Meeting.join`.
        """
        if self.are_served:  # of those that average: "accumulate" meets where no backend is named
            return group_of(self.group)
        return self.meeting.group_of_members()

    @property
    def meeting(self) -> Meeting:
        """Where those meet that average."""
        if self.are_served:
            return Meeting(
                "tcp", None, self.address, self.token, None, None, is_asynchronous=bool(self.is_asynchronous)
            )
        return Meeting(
            self.backend, self.group, None, None, None, None, is_asynchronous=bool(self.is_asynchronous)
        )

    def faults(
        self,
        schedule: Mapping[int, Kind],
        *,
        amp: object,
        syncs: Syncs | None,
        model: nn.Module | None,
        first: int = 0,
    ) -> list[str]:
        """Tell what strategies lack, or cannot be used with; each as it is asked when its turn comes.

        Args:
            schedule: By the epochs that they begin with, in the order of these.
            amp: As given.
            syncs: How often members meet; None where that is not right by itself.
            model: None where there is none that is sound.
            first: The epoch to begin with.
        """
        faults = Faults()
        kinds = list(schedule.values())
        meeting = replace(self.meeting, is_server_free="parameter_server" not in kinds)
        num_members = Faults().catch(self._num_members) or 1  # who cannot be counted is told by the meeting
        if amp == "fp16" and "accumulate" in kinds and model is not None:
            faults += unscaled_faults(model, 'amp is "fp16"')
        if "parameter_server" in kinds and not self.address and not os.environ.get("OFFBEAT_SERVER"):
            faults.append(
                'strategy is "parameter_server", and nobody says where it is: give '
                'server_address="HOST:PORT", or set OFFBEAT_SERVER'
            )
        if "parameter_server" in kinds:
            faults += of_address(self.address)
        if "parameter_server" in kinds and self.are_served and any(map(_averages, kinds)):
            faults.append(
                f"strategies are {_shown(kinds)}, and those that average would meet at a server "
                f"(communication_backend is 'tcp'), which adds up either differences or gradients in one "
                f'run: take communication_backend="gloo" (or "nccl"), or leave "parameter_server" out'
            )
        if "accumulate" in kinds:
            faults.catch(lambda: group_of(self.group))
        num = None if model is None else len(each_once(model))
        ends = [*list(schedule)[1:], math.inf]
        for (begin, kind), end in zip(schedule.items(), ends, strict=True):
            if isinstance(kind, Method):
                faults += asynchronous_faults(self.is_asynchronous, kind)
                faults += meeting.faults(kind, has_others=True)
                faults.catch(lambda kind=kind: kind.check_for(num_members))  # type: ignore[misc]
                if syncs is None or num is None:
                    continue
                for sync in syncs.within(max(begin, first), end):
                    faults += fitting_faults(kind, Iterations(every=sync.every), sync.overlap, num)
        return list(dict.fromkeys(faults))

    def _num_members(self) -> int:
        """Count the members of those that average; at a server, those that are started together.

        Raises:
            ConfigError: If there is no group, and has to be.
        """
        is_there = distributed.is_available() and distributed.is_initialized()
        if self.are_served or (self.backend is not None and self.group is None and not is_there):
            return find(os.environ).world_size
        group = group_of(self.group)
        return 1 if group is None else distributed.get_world_size(group)

    def average_with_others(self) -> bool:
        """Whether those that average meet in rounds, and there is, or may come, somebody to meet."""
        if self.is_asynchronous or self.group is False:
            return False
        return self.are_served or (Faults().catch(self._num_members) or 1) > 1

    def share_updates(self, kinds: list[Kind]) -> bool:
        """Whether there are others who will make the same updates, by one of these strategies."""
        group = group_of(self.group) if "accumulate" in kinds else None
        return group is not None and distributed.get_world_size(group) > 1

    def idle_faults(self, kinds: list[Kind], overlap: object) -> list[str]:
        """Tell what none of the strategies has a use for."""
        averages, is_served = any(map(_averages, kinds)), "parameter_server" in kinds
        shown = _shown(kinds)
        has_server = is_served or (averages and self.are_served)
        faults = []

        def idle(what: str, why: str, remedy: str) -> None:
            faults.append(f"{what}, and {why} (strategy is {shown}): {remedy}, {LATER}")

        if self.group is not None and not self.need_group(kinds) and (self.group is not False or averages):
            idle("process_group is given", "no strategy's members meet in one", "leave it out")
        if not has_server:
            why = "no strategy is at a server"
            remedy = "leave it out"
            if averages:
                why = "those that average meet in a process group"
                remedy = "leave it out, or give communication_backend='tcp' and no process_group"
            if self.address is not None:
                idle(f"server_address is {self.address!r}", why, remedy)
            if self.token is not None:
                idle("token is given", why, remedy)
        if self.worker_id is not None and not is_served:
            idle(f"worker_id is {self.worker_id!r}", 'only "parameter_server" has names', "leave it out")
        if self.backend is not None and not averages:
            idle(f"communication_backend is {self.backend!r}", "no strategy averages", "leave it out")
        if self.is_asynchronous is not False and not averages:
            idle(f"asynchronous is {self.is_asynchronous!r}", "no strategy averages", "leave it out")
        return faults + _of_overlap(kinds, overlap)


def _of_overlap(kinds: Sequence[Kind], overlap: object) -> list[str]:
    if "accumulate" not in kinds or any(map(_averages, kinds)) or isinstance(overlap, bool):
        return []
    text = (
        f'overlap is {overlap!r}, and with "accumulate" an update is behind the next window, however many '
        f"batches that has: give True or False"
    )
    return [text]


def _averages(kind: Kind) -> bool:
    return isinstance(kind, Method)


def _shown(kinds: Iterable[Kind]) -> str:
    return ", then ".join(dict.fromkeys(map(shown_kind, kinds)))
