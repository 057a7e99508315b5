"""A tutorial of averaging models: a ResNet for 28 x 28, in several processes.

    offbeat launch --workers 2 examples/tour_averaging.py

or with torchrun in the place of offbeat launch, or alone: python examples/tour_averaging.py

The pictures are the digits that scikit-learn carries; TUTORIAL_PICTURES=fashion-mnist takes the 60,000 of
Debian's package dataset-fashion-mnist.

The code between the lines drawn across the page is a program of yours as it stands; imports, model, data,
device and backend are this example's.
"""

import logging
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from offbeat import AsyncModelAverager, init_distributed, optim
from offbeat.demo.data import DEBIAN_DIR, load, load_digits

logging.basicConfig(level=logging.INFO)
PICTURES = os.environ.get("TUTORIAL_PICTURES", "digits")


def pictures(*, train: bool) -> TensorDataset:
    if PICTURES not in ("digits", "fashion-mnist"):
        raise SystemExit(f"TUTORIAL_PICTURES is {PICTURES!r}; it may be digits or fashion-mnist")
    data = load(DEBIAN_DIR) if PICTURES == "fashion-mnist" else load_digits()
    images, labels = (data.train_images, data.train_labels) if train else (data.test_images, data.test_labels)
    return TensorDataset(torch.tensor(images), torch.tensor(labels))


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.through = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.around = nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add both."""
        return nn.functional.relu(self.through(inputs) + self.around(inputs))


def resnet() -> nn.Module:
    return nn.Sequential(
        Block(1, 8, 2),
        Block(8, 16, 2),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


# -------------------------------------------------------------------- to be taken over as it stands
# Initialize distributed environment
rank, world_size = init_distributed(backend="gloo")

# Load data partition for this worker
train_dataset = pictures(train=True)
partition_size = len(train_dataset) // world_size
partition = Subset(train_dataset, range(rank * partition_size, (rank + 1) * partition_size))
dataloader = DataLoader(partition, batch_size=64, shuffle=True)

# Create model
model = resnet()
model = model.to("cpu")

# Create asynchronous model averager
averager = AsyncModelAverager(
    model=model,
    world_size=world_size,
    rank=rank,
    averaging_frequency=100,
    averaging_policy="adaptive",
    min_averaging_frequency=50,
    max_averaging_frequency=500,
    adaptation_metric="loss_variance",
    communication_backend="gloo",
    device="cpu",
)

# Configure optimizer and loss
optimizer = optim.SGD(  # type: ignore[misc]  # checkers know a spec's form alone
    model.parameters(),  # type: ignore[arg-type]
    lr=0.01,  # pyright: ignore[reportCallIssue]
    momentum=0.9,
    weight_decay=1e-4,
)
loss_fn = nn.CrossEntropyLoss()

# Training loop
for epoch in range(10):
    for batch_idx, (inputs, targets) in enumerate(dataloader):
        inputs = inputs.to(averager.device)  # noqa: PLW2901  a batch keeps its name on the device
        targets = targets.to(averager.device)  # noqa: PLW2901

        # Train step with automatic model averaging
        loss = averager.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=loss_fn)

        if batch_idx % 20 == 0:
            print(f"Rank {rank}, Epoch {epoch}, Batch {batch_idx}, Loss: {loss}")
            print(f"Last averaging: {averager.last_averaging_iteration} iterations ago")

    # Evaluate at the end of each epoch
    if rank == 0:  # Only evaluate on one worker
        test_dataset = pictures(train=False)
        test_loader = DataLoader(test_dataset, batch_size=100, shuffle=False)
        accuracy = averager.evaluate(test_loader)
        print(f"Epoch {epoch}, Accuracy: {accuracy}")
# -------------------------------------------------------------------- to here
averager.flush()  # until all have ended, with the same model
if rank == 0:
    print(f"Averaged, accuracy: {averager.evaluate(pictures(train=False))}")
