"""Offbeat through its public parts: a `ParameterServer` in a process of its own, a `Client` per worker.

One tensor, SGD, checksums on, as always. Variants: two pushes in flight; Adam on the server; whole pushes as
one transaction. The last two cost memory, which `status()` tells and memory.py compares.
"""

import logging
from functools import partial
from multiprocessing.synchronize import Event

import numpy as np

import offbeat
from harness import LEARNING_RATE, Announce, BenchError, Line, Load, System, Worker

TENSOR = "parameters"


def serve(
    load: Load, announce: Announce, stop: Event, *, optimizer: str = "SGD", transaction: str = "fragment"
) -> None:
    """Run a server with the model given to it, as most users would."""
    logging.basicConfig(level=logging.WARNING)
    rule = getattr(offbeat.optim, optimizer)(lr=LEARNING_RATE)
    server = offbeat.ParameterServer(
        {TENSOR: np.zeros(load.num_params, np.float32)}, optimizer=rule, transaction=transaction
    )
    with server:
        announce(server.address)
        stop.wait()


class ClientWorker(Worker):
    """Pushes from one array and pulls into another, in one call."""

    def __init__(self, load: Load, address: str, rank: int, *, in_flight: int = 1) -> None:
        self._client = offbeat.Client(address, worker_id=f"worker-{rank}", in_flight=in_flight)
        self._parameters = self._client.pull()
        self._gradients = {TENSOR: np.ones(load.num_params, np.float32)}

    def step(self) -> None:
        """Push and pull."""
        self._client.push_pull(self._gradients, out=self._parameters)

    def report(self) -> Line:
        """Add what the server says of itself, once it is sure that it took every push.

        Raises:
            BenchError: If a push had no effect: rejections would be fast.
        """
        self._client.flush()
        status = self._client.status()
        tickets = status["tickets"]
        if status["rejected"] or tickets["dropped"] or tickets["partial"]:
            raise BenchError(f"not every push was applied: {tickets}, rejected {status['rejected']}")
        return {
            "applied": tickets["applied"],
            "memory": status["memory"],
            "longest_poll_ms": status["longest_poll_ms"],
        }

    def close(self) -> None:
        """Say goodbye."""
        self._client.close()


SYSTEMS = (
    System(name="offbeat", serve=serve, worker=ClientWorker),
    System(name="offbeat:2", serve=serve, worker=partial(ClientWorker, in_flight=2)),
    System(name="offbeat:adam", serve=partial(serve, optimizer="Adam"), worker=ClientWorker),
    System(name="offbeat:model", serve=partial(serve, transaction="model"), worker=ClientWorker),
    System(
        name="offbeat:adam+model",
        serve=partial(serve, optimizer="Adam", transaction="model"),
        worker=ClientWorker,
    ),
)
