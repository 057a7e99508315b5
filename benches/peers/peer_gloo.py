"""torch.distributed with gloo: send and recv to a server with a thread per worker, or all-reduce without one.

"gloo:allreduce" is the synchronous baseline, what DistributedDataParallel does; its updates_per_s is steps
times workers.
"""

import os
import threading
import time
from multiprocessing.synchronize import Event

import torch
import torch.distributed as dist

from harness import LEARNING_RATE, Announce, Load, System, Worker, free_port

END = -1.0
"""As a gradient's first element: this worker sends no more."""


def join(address: str, rank: int, world_size: int) -> None:
    """Take part in the group that meets at the address."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world_size)


def agreed_num_steps(worker: Worker, seconds: float, num_trials: int) -> int:
    """Time some steps and let the first rank say how many fill the time."""
    start_s = time.monotonic()
    for _ in range(num_trials):
        worker.step()
    step_s = (time.monotonic() - start_s) / num_trials
    num_steps = torch.tensor([max(3, int(seconds / step_s))])
    dist.broadcast(num_steps, 0)
    dist.barrier()
    return int(num_steps)


def serve(load: Load, announce: Announce, stop: Event) -> None:
    """Take each worker's gradients in a thread of its own, and send the parameters back."""
    address = f"127.0.0.1:{free_port()}"
    announce(address)  # before joining, which waits for the workers
    join(address, 0, load.num_workers + 1)
    parameters = torch.zeros(load.num_params)

    def attend(worker: int) -> None:
        gradient = torch.empty(load.num_params)
        while True:
            dist.recv(gradient, src=worker)
            if gradient[0].item() == END:
                return
            parameters.sub_(gradient, alpha=LEARNING_RATE)
            dist.send(parameters, dst=worker)

    threads = [threading.Thread(target=attend, args=(rank + 1,)) for rank in range(load.num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.wait()


def meet(load: Load, announce: Announce, stop: Event) -> None:
    """Name a place where workers find one another; serve nothing."""
    del load
    announce(f"127.0.0.1:{free_port()}")
    stop.wait()


class SendWorker(Worker):
    """Sends gradients to the server, rank 0 of the group, and receives the parameters."""

    def __init__(self, load: Load, address: str, rank: int) -> None:
        self._gradient = torch.ones(load.num_params)
        self._parameters = torch.zeros(load.num_params)
        join(address, rank + 1, load.num_workers + 1)

    def step(self) -> None:
        """Push and pull."""
        dist.send(self._gradient, dst=0)
        dist.recv(self._parameters, src=0)

    def close(self) -> None:
        """Tell the server's thread to end."""
        self._gradient[0] = END
        dist.send(self._gradient, dst=0)


class AllReduceWorker(Worker):
    """Sums the gradients of all workers, and applies them itself."""

    num_warm_ups = 2

    def __init__(self, load: Load, address: str, rank: int) -> None:
        self._gradient = torch.ones(load.num_params)
        self._parameters = torch.zeros(load.num_params)
        join(address, rank, load.num_workers)

    def step(self) -> None:
        """Reduce and apply."""
        dist.all_reduce(self._gradient)
        self._parameters.sub_(self._gradient, alpha=LEARNING_RATE)
        self._gradient.fill_(1.0)

    def num_steps(self, seconds: float) -> int:
        """Agree on a number."""
        return agreed_num_steps(self, seconds, num_trials=2)


SYSTEMS = (
    System(name="gloo:ps", serve=serve, worker=SendWorker),
    System(name="gloo:allreduce", has_server=False, serve=meet, worker=AllReduceWorker),
)
