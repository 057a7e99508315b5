"""Train an MLP 784-256-128-10 on made-up data, batch 32, plain SGD: what a step through each system costs.

"single" is a process alone. "hogwild" shares the parameters' memory and has no wire: the ceiling. "ddp" is
the synchronous baseline. A step is forward, backward, push and pull; all workers' steps are counted together.
"""

import logging
import os
from functools import partial
from multiprocessing.synchronize import Event

import torch
from torch import nn
from torch.nn import functional

import offbeat
from harness import Announce, Load, System, Worker
from peers import peer_gloo, peer_pysock

BATCH_SIZE = 32
NUM_SAMPLES = 4096
LEARNING_RATE = 0.01
NUM_PARAMS = sum(out * (into + 1) for into, out in ((784, 256), (256, 128), (128, 10)))


def make_model() -> nn.Sequential:
    """Build the model, with the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def view_parameters(model: nn.Module, flat: torch.Tensor) -> None:
    """Make the parameters views of one vector, their values kept."""
    flat[:] = nn.utils.parameters_to_vector(model.parameters()).detach()
    for parameter, part in zip(model.parameters(), _split(model, flat), strict=True):
        parameter.data = part


def view_gradients(model: nn.Module, flat: torch.Tensor) -> None:
    """Make the gradients views of one vector."""
    for parameter, part in zip(model.parameters(), _split(model, flat), strict=True):
        parameter.grad = part


def _split(model: nn.Module, flat: torch.Tensor) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


class Trainer(Worker):
    """Goes through the data batch by batch."""

    num_warm_ups = 20

    def __init__(self, model: nn.Module) -> None:
        torch.set_num_threads(1)
        self.model = model
        self._inputs = torch.randn(NUM_SAMPLES, 784)
        self._targets = torch.randint(0, 10, (NUM_SAMPLES,))
        self._at = 0

    def backward(self) -> None:
        """Add the next batch's gradients."""
        batch = slice(self._at, self._at + BATCH_SIZE)
        self._at = (self._at + BATCH_SIZE) % (NUM_SAMPLES - BATCH_SIZE)
        functional.cross_entropy(self.model(self._inputs[batch]), self._targets[batch]).backward()


class LocalTrainer(Trainer):
    """A plain torch loop."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step(self) -> None:
        """Train on a batch."""
        self._optimizer.zero_grad()
        self.backward()
        self._optimizer.step()


class SingleTrainer(LocalTrainer):
    """One process alone."""

    def __init__(self, load: Load, address: str, rank: int) -> None:
        del load, address, rank
        super().__init__(make_model())


class HogwildTrainer(LocalTrainer):
    """The parameters lie in memory that all workers share."""

    def __init__(self, load: Load, address: str, rank: int) -> None:
        del rank
        model = make_model()
        view_parameters(model, torch.from_file(address, shared=True, size=load.num_params))
        super().__init__(model)


class DdpTrainer(LocalTrainer):
    """Gradients are averaged over all workers at each step."""

    def __init__(self, load: Load, address: str, rank: int) -> None:
        peer_gloo.join(address, rank, load.num_workers)
        super().__init__(nn.parallel.DistributedDataParallel(make_model()))

    def num_steps(self, seconds: float) -> int:
        """Agree on a number."""
        return peer_gloo.agreed_num_steps(self, seconds, num_trials=50)


class SocketTrainer(Trainer):
    """Plain Python sockets, from and into one flat vector."""

    def __init__(self, load: Load, address: str, rank: int) -> None:
        model = make_model()
        parameters, self._gradient = torch.zeros(load.num_params), torch.zeros(load.num_params)
        view_parameters(model, parameters)
        view_gradients(model, self._gradient)
        super().__init__(model)
        self._link = peer_pysock.SocketWorker(load, address, rank)
        self._link.use(self._gradient.numpy(), parameters.numpy())

    def step(self) -> None:
        """Train on a batch."""
        self._gradient.zero_()
        self.backward()
        self._link.step()

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


class OffbeatTrainer(Trainer):
    """A loop of one's own around `AsyncWorker.step`, the model as it is."""

    def __init__(self, load: Load, address: str, rank: int, *, in_flight: int) -> None:
        del load
        logging.basicConfig(level=logging.WARNING)
        self._worker = offbeat.AsyncWorker(
            address, make_model(), BATCH_SIZE, in_flight=in_flight, worker_id=f"worker-{rank}"
        )
        super().__init__(self._worker.model)

    def step(self) -> None:
        """Train on a batch."""
        self.backward()
        self._worker.step()

    def close(self) -> None:
        """Say goodbye."""
        self._worker.close()


def share_memory(load: Load, announce: Announce, stop: Event) -> None:
    """Serve nothing but a file in memory, which workers map."""
    memory = os.memfd_create("parameters")
    os.ftruncate(memory, 4 * load.num_params)
    announce(f"/proc/{os.getpid()}/fd/{memory}")
    stop.wait()


def serve_nothing(load: Load, announce: Announce, stop: Event) -> None:
    """Be there."""
    del load
    announce("")
    stop.wait()


def serve_offbeat(load: Load, announce: Announce, stop: Event) -> None:
    """Run a parameter server."""
    del load
    logging.basicConfig(level=logging.WARNING)
    with offbeat.ParameterServer(make_model(), optimizer=offbeat.optim.SGD(lr=LEARNING_RATE)) as server:
        announce(server.address)
        stop.wait()


_Mlp = partial(System, num_params=NUM_PARAMS)

SYSTEMS = (
    _Mlp(name="mlp:single", has_server=False, serve=serve_nothing, worker=SingleTrainer),
    _Mlp(name="mlp:hogwild", has_server=False, serve=share_memory, worker=HogwildTrainer),
    _Mlp(name="mlp:ddp", has_server=False, serve=peer_gloo.meet, worker=DdpTrainer),
    _Mlp(name="mlp:pysock", serve=peer_pysock.serve, worker=SocketTrainer),
    _Mlp(name="mlp:offbeat", serve=serve_offbeat, worker=partial(OffbeatTrainer, in_flight=1)),
    _Mlp(name="mlp:offbeat:2", serve=serve_offbeat, worker=partial(OffbeatTrainer, in_flight=2)),
)
