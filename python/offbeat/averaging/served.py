"""Members that meet at an Offbeat server: they come, go and die without stopping the others."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from offbeat import process
from offbeat.averaging.members import Heard, Said
from offbeat.client import Client
from offbeat.errors import ConfigError, OffbeatError, OffbeatTimeoutError, UnsupportedTensorError
from offbeat.local.flat import Flat, empty, slices

__all__ = ["Served"]

Arrays = dict[str, np.ndarray[Any, Any]]

BEGIN_S = 60.0
"""Longest wait for those who are started together; as long as a client tries to reach its server."""
AGAIN_S = 5.0
"""How long a round tries to reach a server that was lost."""
LOOK_S = 0.02
"""Between two looks at who has come."""

LOST = (ConnectionError, OffbeatTimeoutError)
"""By what a server is known to be gone, or to take connections and be silent; our own errors are such."""

_log = logging.getLogger("offbeat")


class Served:
    """A server that holds the members' mean, to which each adds its share of the way it has come.

    In a round a member enters with what it weighs, is told its share when all who are there have entered,
    pushes its way since the mean it had last, times that share, waits until the others have pushed theirs,
    and pulls the new mean. The way of one that dies in between is not in it; one that comes later begins with
    the mean. All of that is done on a thread, behind training. Where the server is lost, averaging pauses.

    The server holds float32. What members agree upon in a process group they need not agree upon here.

    Attributes:
        size: Members in the newest round.
        has_gone_on: The mean was others' when this member came.
    """

    is_alone = False
    is_waited_for = False

    def __init__(
        self,
        connect: Callable[[float], Client],
        parameters: Sequence[tuple[str, nn.Parameter]],
        statistics: Sequence[torch.Tensor],
        *,
        num_expected: int,
    ) -> None:
        """Begin with the server's mean; bring this model where it has none.

        Args:
            connect: Makes a client whose pushes are differences, and tries for so many seconds.
            parameters: Each once, with its name.
            statistics: Of the model's BatchNorm layers.
            num_expected: Where the run begins here, how many are waited for, up to a minute.

        Raises:
            UnsupportedTensorError: If a parameter is wider than float32.
            ModelMismatchError: If the server has another model.
            ConfigError: If the server weighs pushes by their staleness.
            ConnectError: If it cannot be reached.
        """
        self.size = 1
        self._connect = connect
        self._names = {id(parameter): name for name, parameter in parameters}
        self._tensors: dict[str, torch.Tensor] = dict(parameters)
        self._statistics = [f"BatchNorm statistics {number}" for number in range(len(statistics))]
        self._tensors |= dict(zip(self._statistics, statistics, strict=True))
        for name, tensor in self._tensors.items():
            if torch.promote_types(tensor.dtype, torch.float32) != torch.float32:
                raise UnsupportedTensorError(
                    f"{name!r} is of {tensor.dtype}, and a server holds float32: cast the model, or take "
                    f"communication_backend='gloo'"
                )
        self._client: Client | None = None
        self._mean: Arrays = {}
        self._version = -1
        self._future: Future[Heard] | None = None
        self._is_paused = False
        self._meet(BEGIN_S)
        assert self._client is not None  # noqa: S101  it has met
        self.has_gone_on = bool(self._client.status()["version"])
        self._begin_together(num_expected, is_new=not self.has_gone_on)
        self._take_over()

    def begin(self, said: Said) -> None:
        """Do a round on a thread of its own."""
        self._future = future = Future[Heard]()

        def do() -> None:
            try:
                future.set_result(self._round(said))
            except BaseException as error:  # noqa: BLE001  told where the round is waited for
                future.set_exception(error)

        # A daemon: where the process ends in mid-round, it does not wait for the other members.
        threading.Thread(target=do, name="offbeat-averaging", daemon=True).start()

    def is_there(self) -> bool:
        """Look whether the thread has ended."""
        return self._future is None or self._future.done()

    def finish(self) -> Heard:
        """Wait for the thread."""
        assert self._future is not None  # noqa: S101  something was begun
        heard = self._future.result()
        self._future = None
        return heard

    def is_alike(self, value: object) -> bool:
        """Nobody asks: members are on their own."""
        del value
        return True

    def make_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all who are there the mean of what they have, one as the other; each has to call this."""
        del tensors  # they are those that it was made of
        own = {name: _array(tensor) for name, tensor in self._tensors.items()}
        try:
            if self._client is None:
                self._meet()
            self._exchange(own, weight=1.0, samples=0, is_at_work=False)
        except LOST as error:
            self._pause(error)
            return
        self._take_over()

    def close(self) -> None:
        """Say goodbye."""
        if self.is_there():
            self._drop(finished=True)

    # ------------------------------------------------------------------ on the thread

    def _round(self, said: Said) -> Heard:
        try:
            if self._client is None:
                self._meet()
            heard = self._averaged(said)
        except LOST as error:
            self._pause(error)
            nobody = int(said.is_at_work)
            return Heard(said.values, 0.0, 0.0, nobody, said.metric, said.rate, said.statistics)
        if self._is_paused:
            self._is_paused = False
            process.warn("the server is there again: averaging goes on")
        return heard

    def _averaged(self, said: Said) -> Heard:
        own: Arrays = {}
        names = [self._names[id(parameter)] for parameter in said.parameters]
        if said.weight:
            parts = slices(said.parameters, said.values)
            own = {name: _array(part) for name, part in zip(names, parts, strict=True)}
            start = 1
            for name in self._statistics:
                end = start + self._tensors[name].numel()
                own[name] = _array(said.statistics[start:end].view(self._tensors[name].shape))
                start = end
        before = self._version
        num_at_work = self._exchange(
            own, weight=said.weight, samples=round(said.samples), is_at_work=said.is_at_work
        )
        means: Flat = empty(said.parameters) if said.parameters else {}
        for name, part in zip(names, slices(said.parameters, means), strict=True):
            part.copy_(torch.from_numpy(self._mean[name]))
        statistics = said.statistics.clone()
        start = 1
        for name in self._statistics:
            end = start + self._mean[name].size
            statistics[start:end].copy_(torch.from_numpy(self._mean[name]).flatten())
            start = end
        # Where nobody had anything to add, there is no step to be made of it.
        weight = float(self.size) if self._version != before else 0.0
        return Heard(means, weight, weight, num_at_work, said.metric, said.rate, statistics)

    def _exchange(
        self, own: Mapping[str, np.ndarray[Any, Any]], *, weight: float, samples: int, is_at_work: bool
    ) -> int:
        """Enter, push, gather and pull; give how many members have not ended."""
        client = self._client
        assert client is not None  # noqa: S101  who calls this has met
        entered = client.enter(weight, at_work=is_at_work)
        if entered.share > 0.0:
            share = np.float32(entered.share)
            receipt = client.push(
                {n: (v - self._mean[n]) * share for n, v in own.items()}, samples=max(samples, 1)
            )
            if not receipt.applied:
                _log.warning("the way of this member is not in round %d: %s", entered.round, receipt.detail)
        gathered = client.gather(entered.round)
        client.pull(out=self._mean)
        self._version = gathered.version
        self.size = max(entered.members, 1)
        return entered.at_work

    def _meet(self, tries_s: float | None = None) -> None:
        """Connect, and bring this model if the server has none.

        Raises:
            ConfigError: If the server weighs pushes by their staleness.
        """
        client = self._connect(AGAIN_S if tries_s is None else tries_s)
        try:
            arrays = {name: _array(tensor) for name, tensor in self._tensors.items()}
            client.init(arrays)
            staleness = client.run["staleness"]
            if any(weight["name"] != "constant" for weight in staleness["weights"]):
                raise ConfigError(  # noqa: TRY301  there is no other to be raised here
                    f"the server weighs what comes late by {staleness['weights']}, and shares of a mean are "
                    f"worth the same whenever they come: start it with staleness_policy='constant'"
                )
            self._mean = client.pull(out=arrays)
        except BaseException:
            client.close(finished=False)
            raise
        self._client = client
        self._version = -1

    def _begin_together(self, num_expected: int, *, is_new: bool) -> None:
        """Wait for those who are started with this member; of a run that goes on already nobody is."""
        assert self._client is not None  # noqa: S101  it has met
        if num_expected <= 1 or not is_new:
            return
        until_s, pause = time.monotonic() + BEGIN_S, threading.Event()
        while (entered := self._client.enter(0.0)).members < num_expected and time.monotonic() < until_s:
            self._client.gather(entered.round)
            pause.wait(LOOK_S)  # a round closes at once when all who are there have entered
        self._client.gather(entered.round)
        self.size = entered.members
        if entered.members < num_expected:
            process.warn(
                f"{entered.members} of {num_expected} members have come, and begin without the "
                f"others, who may "
                f"come later"
            )

    def _pause(self, error: Exception) -> None:
        if not self._is_paused:
            process.warn(f"averaging pauses, and training goes on: {error}; it is tried again at each round")
        self._is_paused = True
        self._drop(finished=False)

    def _drop(self, *, finished: bool) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(OffbeatError):  # of a session that is over there is nothing to say goodbye to
                client.close(finished=finished)

    def _take_over(self) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(torch.from_numpy(self._mean[name]))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Give a copy, float32."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
