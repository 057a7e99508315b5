"""A tutorial of the parameter server: pictures, in separate processes.

    export TUTORIAL_SERVER=127.0.0.1:5000
    python examples/tour_tutorial.py server
    python examples/tour_tutorial.py worker 0 2
    python examples/tour_tutorial.py worker 1 2

or all of them under `multiprocessing.Process`: python examples/tour_tutorial.py all 2

The pictures are the digits that scikit-learn carries; TUTORIAL_PICTURES=fashion-mnist takes the 60,000
of Debian's package dataset-fashion-mnist, as many and as large as MNIST's.

The code between the lines drawn across the page is a program of yours as it stands; imports, data, address,
device and the place of checkpoints are this example's. With TUTORIAL_CHECKPOINTS=DIRECTORY the server keeps
some there: killed and started again, it goes on from the newest, and so do the workers, by themselves.
"""

import functools
import multiprocessing
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset, TensorDataset

from offbeat import AsyncWorker, ParameterServer, optim
from offbeat.demo.data import DEBIAN_DIR, load, load_digits

ADDRESS = os.environ.get("TUTORIAL_SERVER", "127.0.0.1:5000")
PORT = int(ADDRESS.rpartition(":")[2])
CHECKPOINTS = os.environ.get("TUTORIAL_CHECKPOINTS")
FREQUENCY = int(os.environ.get("TUTORIAL_FREQUENCY", "1000")) if CHECKPOINTS else None

# How many processes read data, and how they are started, is this machine's affair.
NUM_WORKERS = int(os.environ.get("TUTORIAL_NUM_WORKERS", "0"))
DataLoader = functools.partial(
    TorchDataLoader[tuple[torch.Tensor, ...]],
    num_workers=NUM_WORKERS,
    persistent_workers=NUM_WORKERS > 0,
    multiprocessing_context=os.environ.get("TUTORIAL_START_METHOD"),
)


PICTURES = os.environ.get("TUTORIAL_PICTURES", "digits")


def pictures(*, train: bool) -> TensorDataset:
    if PICTURES not in ("digits", "fashion-mnist"):
        raise SystemExit(f"TUTORIAL_PICTURES is {PICTURES!r}; it may be digits or fashion-mnist")
    data = load(DEBIAN_DIR) if PICTURES == "fashion-mnist" else load_digits()
    images, labels = (data.train_images, data.train_labels) if train else (data.test_images, data.test_labels)
    return TensorDataset(torch.tensor(images).flatten(1), torch.tensor(labels))


# -------------------------------------------------------------------- to be taken over as it stands
# Define model
model = nn.Sequential(
    nn.Linear(784, 256),
    nn.ReLU(),
    nn.Linear(256, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
)


# Server setup (run on a dedicated machine)
def run_server() -> None:
    server = ParameterServer(
        model=model,
        port=PORT,
        update_rule="async_sgd",
        staleness_policy="adaptive_lr",
        staleness_lr_factor=0.9,
        max_staleness=10,
        checkpoint_dir=CHECKPOINTS,
        checkpoint_frequency=FREQUENCY,
    )
    server.start()
    server.wait_for_workers()


# Worker setup (run on multiple machines)
def run_worker(rank: int, world_size: int) -> None:
    # Load data partition for this worker
    train_dataset = pictures(train=True)
    partition_size = len(train_dataset) // world_size
    partition = Subset(
        train_dataset,
        range(rank * partition_size, (rank + 1) * partition_size),
    )
    dataloader = DataLoader(partition, batch_size=32, shuffle=True)

    # Create worker
    worker = AsyncWorker(
        server_address=ADDRESS,
        local_batch_size=32,
        update_frequency=1,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )

    # Configure optimizer and loss
    optimizer = optim.SGD(lr=0.01, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    # Train asynchronously
    worker.train(
        dataloader=dataloader,
        epochs=10,
        optimizer=optimizer,
        loss_fn=loss_fn,
        metrics=["accuracy", "loss"],
        log_frequency=100,
    )

    # Evaluate final model
    test_dataset = pictures(train=False)
    test_loader = DataLoader(test_dataset, batch_size=100)
    accuracy = worker.evaluate(test_loader)
    print(f"Worker {rank} final accuracy: {accuracy}")


# -------------------------------------------------------------------- to here


def run_all(world_size: int) -> int:
    processes = [multiprocessing.Process(target=run_server)]
    processes += [
        multiprocessing.Process(target=run_worker, args=(rank, world_size)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode or 0) for process in processes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["server"]:
            run_server()
        case ["worker", rank, world_size]:
            run_worker(int(rank), int(world_size))
        case ["all", world_size]:
            sys.exit(run_all(int(world_size)))
        case _:
            sys.exit("usage: tour_tutorial.py server | worker RANK WORLD_SIZE | all WORLD_SIZE")
