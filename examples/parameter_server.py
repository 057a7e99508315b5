"""One server and several workers on this machine train on Fashion-MNIST, or on digits where that is not here.

    python examples/parameter_server.py              # four workers
    python examples/parameter_server.py 2

On several machines, run the server on one and `work` on the others; with the same OFFBEAT_TOKEN everywhere
the server listens on every interface, and its first line says how a worker joins.
"""

import multiprocessing
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.demo.data import load

EPOCHS = 1
BATCH_SIZE = 32


def build_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def images(*, train: bool) -> TensorDataset:
    data = load()
    pictures, labels = (
        (data.train_images, data.train_labels) if train else (data.test_images, data.test_labels)
    )
    return TensorDataset(torch.tensor(pictures), torch.tensor(labels))


def work(address: str, rank: int, num_workers: int) -> None:
    """Train on a share of the data until the run's samples are used up. The model comes from the server."""
    torch.set_num_threads(1)
    with offbeat.AsyncWorker(address, worker_id=f"worker-{rank}", local_batch_size=BATCH_SIZE) as worker:
        history = worker.train(
            dataset=offbeat.partition(images(train=True), rank, num_workers),
            epochs=10 * EPOCHS,  # the budget ends it before
            loss_fn=nn.CrossEntropyLoss(),
            metrics=["loss", "accuracy"],
            log_frequency=500,
        )
        accuracy = worker.evaluate(DataLoader(images(train=False), batch_size=500))
        print(f"{worker.id}: {history.steps} steps, stopped by {history.stopped}, accuracy {accuracy:.4f}")


def main(num_workers: int) -> None:
    """Hold the model here. The learning rate falls to zero while the samples of all workers are used up."""
    server = offbeat.ParameterServer(
        build_model(),
        optimizer=offbeat.optim.SGD(lr=0.05, momentum=0.9),
        staleness_policy="adaptive_lr",
        lr_schedule="linear",
        max_samples=EPOCHS * len(images(train=True)),
    )
    context = multiprocessing.get_context("spawn")
    with server:
        workers = [
            context.Process(target=work, args=(server.address, rank, num_workers))
            for rank in range(num_workers)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"the model is trained, after {server.status()['version']} updates")
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
