"""A parameter server and a worker, in two processes.

    python examples/tour_parameter_server.py server 5000
    python examples/tour_parameter_server.py worker 127.0.0.1:5000

The code between the lines drawn across the page is a program of yours as it stands; imports, model, data,
address and device are this example's.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from offbeat import AsyncWorker, ParameterServer, optim


def run_server(port: int) -> None:
    # ---------------------------------------------------------------- to be taken over as it stands
    # Create a parameter server
    server = ParameterServer(
        model=nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)),
        port=port,
        update_rule="async_sgd",
        staleness_policy="adaptive_lr",
        max_staleness=10,
    )

    # Start the server
    server.start()
    # ---------------------------------------------------------------- to here
    server.wait_for_workers()
    server.stop()


def run_worker(address: str) -> None:
    features = torch.randn(640, 20)
    train_dataset = TensorDataset(features, (features.sum(1) > 0).long())
    # ---------------------------------------------------------------- to be taken over as it stands
    # On worker nodes
    worker = AsyncWorker(
        server_address=address,
        local_batch_size=32,
        update_frequency=1,  # Update after every batch
        device="cuda" if torch.cuda.is_available() else "cpu",
    )

    # Train asynchronously
    worker.train(
        dataset=train_dataset,
        epochs=10,
        optimizer=optim.SGD(lr=0.01),
        loss_fn=nn.CrossEntropyLoss(),
    )
    # ---------------------------------------------------------------- to here
    print(worker.history.to_json())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server", port] if port.isdecimal():
            run_server(int(port))
        case ["worker", address]:
            run_worker(address)
        case _:
            sys.exit("usage: tour_parameter_server.py server PORT | worker HOST:PORT")
