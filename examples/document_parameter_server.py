"""A parameter server and a worker, in two processes.

    python examples/document_parameter_server.py server 5000
    python examples/document_parameter_server.py worker 127.0.0.1:5000

Where the page is divided by lines, the code between them is the interface as it was first described, and
keeps running as it stands; only imports, model, data, address and device are this example's.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from offbeat import AsyncWorker, ParameterServer, optim


def run_server(port: int) -> None:
    # ---------------------------------------------------------------- as the interface was first described
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
    # ---------------------------------------------------------------- as the interface was first described
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
            sys.exit("usage: document_parameter_server.py server PORT | worker HOST:PORT")
