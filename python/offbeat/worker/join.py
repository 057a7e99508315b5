"""Joining a server: reach it, agree on the model, fill the module."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from offbeat import blueprint
from offbeat.errors import ConfigError
from offbeat.module import Binding, describe
from offbeat.naming import unknown
from offbeat.worker.link import Link

if TYPE_CHECKING:
    from offbeat._offbeat import Session

__all__ = ["Buffers", "JoinConfig", "join"]

Buffers = Literal["sync", "local"]

_log = logging.getLogger("offbeat")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinConfig:
    """What a worker needs to join."""

    address: str
    token: str | None
    worker_id: str | None
    device: torch.device
    in_flight: int
    buffers: Buffers
    connect_timeout_s: float

    def __post_init__(self) -> None:
        faults = []
        if self.in_flight not in (1, 2):
            faults.append(f"in_flight is {self.in_flight!r}: one push or two can be under way")
        if self.buffers not in ("sync", "local"):
            faults.append(unknown("way to treat buffers", self.buffers, ("sync", "local")))
        if not self.connect_timeout_s >= 0:
            faults.append(f"connect_timeout_s is {self.connect_timeout_s!r}: give seconds, 0 or more")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            faults.append(f"device is {self.device}, and torch sees no CUDA device here")
        if faults:
            raise ConfigError("; ".join(faults))


def join(config: JoinConfig, model: nn.Module | None) -> Link:
    """Connect, and give a module that holds the server's newest parameters.

    A given model is moved to the device and filled in place. Where the server has no model yet, this one is
    brought to it, unless another worker's is there first. Without a model it is built from the server's
    blueprint.

    Raises:
        ConnectError, AuthenticationError: If the server cannot be reached, or does not let us in.
        ConfigError: If there is no model and the server's has no blueprint.
        ModelMismatchError: If the model is not the server's.
        UnsupportedTensorError: If the model has tensors that the server cannot hold.
    """
    from offbeat._offbeat import Session

    if model is not None:
        describe(model)  # what cannot be trained is told before anything is sent
        model.to(config.device)
    session = Session(
        config.address,
        config.worker_id,
        config.token,
        None,
        config.in_flight,
        config.connect_timeout_s,
        None,
    )
    try:
        table = _agree(session, model)
        if model is None:
            model = blueprint.build(session.blueprint or "null", config.device)
        binding = Binding(model, table, local_buffers=config.buffers == "local")
        link = Link(session, binding, in_flight=config.in_flight)
        link.pull()
    except BaseException:
        session.close(False)  # noqa: FBT003  not finished: it never began
        raise
    _log.info("worker %s joined run %s at %s", session.worker_id, session.run_id, config.address)
    return link


def _agree(session: "Session", model: nn.Module | None) -> str:
    """Give the server's tensor table; bring it our model if it has none."""
    if session.table is None and model is not None:
        description = describe(model)
        memories = [(b, b.ctypes.data, b.nbytes) for b in description.buffers()]
        session.init(description.table, memories, blueprint.describe(model))
    return session.wait_for_model()
