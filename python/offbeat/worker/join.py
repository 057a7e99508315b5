"""Joining a server: reach it, agree on the model, fill the module."""

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from offbeat import blueprint, log, process
from offbeat.checks import (
    Faults,
    at_least_one,
    objects,
    of_address,
    of_seed,
    of_worker_id,
    one_or_two,
    refuse,
    refuse_two_in_flight,
    seconds,
    strings,
)
from offbeat.errors import ConfigError
from offbeat.local.device import usable_device
from offbeat.local.loss import LossReduction
from offbeat.module import Binding, describe
from offbeat.naming import unknown
from offbeat.worker.link import Link

if TYPE_CHECKING:
    from offbeat._offbeat import Session

__all__ = ["Buffers", "JoinConfig", "join"]

Buffers = Literal["sync", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """What a worker is made with, as given, and what becomes of it.

    Attributes:
        address: Where the server is: `server_address`, or the environment's.
        torch_device: `device`, as torch has it.

    Raises:
        ConfigError: Naming every setting that cannot be used.
    """

    server_address: str | None
    token: str | None
    worker_id: str | None
    local_batch_size: int
    update_frequency: int
    device: str | torch.device
    loss_reduction: LossReduction
    in_flight: int
    buffers: Buffers
    connect_timeout_s: float
    reconnect_timeout_s: float | None
    seed: int | None
    address: str = field(init=False)
    torch_device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        faults = Faults()
        address = faults.catch(lambda: _address(self.server_address))
        faults += of_worker_id(self.worker_id) + strings(token=self.token)
        faults += at_least_one(local_batch_size=self.local_batch_size, update_frequency=self.update_frequency)
        device = faults.catch(lambda: usable_device(self.device))
        if self.loss_reduction not in ("mean", "sum"):
            faults.append(unknown("loss_reduction", self.loss_reduction, ("mean", "sum")))
        faults += one_or_two(in_flight=self.in_flight)
        if self.buffers not in ("sync", "local"):
            faults.append(unknown("buffers", self.buffers, ("sync", "local")))
        faults += seconds(connect_timeout_s=self.connect_timeout_s)
        if self.reconnect_timeout_s is not None:
            faults += seconds(reconnect_timeout_s=self.reconnect_timeout_s)
        faults += of_seed(self.seed)
        refuse(faults)
        object.__setattr__(self, "address", address)
        object.__setattr__(self, "torch_device", device)


def _address(given: str | None) -> str:
    refuse(strings('"HOST:PORT", a string', server_address=given) + of_address(given))
    if address := given or os.environ.get("OFFBEAT_SERVER"):
        return address
    raise ConfigError(
        "no server address: give AsyncWorker(server_address='HOST:PORT') or set OFFBEAT_SERVER; the server "
        "prints the line to use when it starts"
    )


def join(config: JoinConfig, model: nn.Module | None) -> Link:
    """Connect, and give a module that holds the server's newest parameters.

    A given model is moved to the device and filled in place, and its gradients are dropped. Where the server
    has no model yet, this one is brought to it, unless another worker's is there first. Without a model it is
    built from the server's blueprint.

    Raises:
        ConnectError, AuthenticationError: If the server cannot be reached, or does not let us in.
        ConfigError: If what is given is no module, if there is none and the server's has no blueprint, or if
            two pushes are to be in flight where the server takes no late one.
        ModelMismatchError: If the model is not the server's.
        UnsupportedTensorError: If the model has tensors that the server cannot hold.
    """
    from offbeat._offbeat import Session

    if model is not None:
        refuse(objects(model=model))
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is of type {type(model).__name__}: give an nn.Module, or None")
        describe(model)  # what cannot be trained is told before anything is sent
        model.to(config.torch_device)
    session = Session(
        config.address,
        config.worker_id,
        config.token or os.environ.get("OFFBEAT_TOKEN") or None,
        None,
        config.in_flight,
        float(config.connect_timeout_s),
        None if config.reconnect_timeout_s is None else float(config.reconnect_timeout_s),
        None,
    )
    try:
        if config.in_flight > 1:
            refuse_two_in_flight(json.loads(session.run))
        table = _agree(session, model)
        if model is None:
            model = _build(session.blueprint, config.torch_device)
        binding = Binding(model, table, local_buffers=config.buffers == "local")
        link = Link(session, binding, in_flight=config.in_flight)
        link.pull()
        binding.clear_gradients()  # of other parameters than these
    except BaseException as error:
        session.close("withdrawn", process.cause_of(error))
        raise
    log.info("worker %s joined run %s at %s", session.worker_id, session.run_id, config.address)
    return link


def _build(description: str | None, device: torch.device) -> nn.Module:
    if description is None:
        raise ConfigError(
            "the server's model was given as arrays, which do not say how it computes: give "
            "AsyncWorker(model=...) the module they belong to"
        )
    return blueprint.build(description, device)


def _agree(session: "Session", model: nn.Module | None) -> str:
    """Give the server's tensor table; bring it our model if it has none."""
    if session.table is None and model is not None:
        description = describe(model)
        memories = [(b, b.ctypes.data, b.nbytes) for b in description.arrays()]
        session.init(description.table, memories, blueprint.describe(model))
    elif session.table is None:
        log.warn(
            f"the server at {session.address} has no model yet, and worker {session.worker_id} brings none: "
            f"waiting for another to bring one (give model= to bring it here)"
        )
    return session.wait_for_model()
