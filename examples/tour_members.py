"""Averaging in a few lines: eight processes, each with a model and data of its own.

    offbeat launch --workers 8 examples/tour_members.py

or with torchrun in the place of offbeat launch. The data is random numbers.

The code between the lines drawn across the page is a program of yours as it stands; imports, model, data,
device and backend are this example's.
"""

import logging

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat import AsyncModelAverager, init_distributed, optim

logging.basicConfig(level=logging.INFO)
rank, _ = init_distributed(backend="gloo")

features = torch.randn(2048, 20, generator=torch.Generator().manual_seed(rank))
train_dataset = TensorDataset(features, (features.sum(1) > 0).long())
dataloader = DataLoader(train_dataset, batch_size=32, shuffle=True)
optimizer = optim.SGD(lr=0.1)
loss_fn = nn.CrossEntropyLoss()

# -------------------------------------------------------------------- to be taken over as it stands
# Create an asynchronous model averager
averager = AsyncModelAverager(
    model=nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)),
    world_size=8,  # Number of workers
    averaging_frequency=100,  # Average every 100 iterations
    communication_backend="gloo",
    device="cpu",
)

# Train with periodic averaging
for epoch in range(10):
    for batch in dataloader:
        inputs, targets = batch
        loss = averager.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=loss_fn)
        print(f"Epoch {epoch}, Loss: {loss}")
# -------------------------------------------------------------------- to here
averager.flush()  # until all have ended, with the same model
if rank == 0:
    print(f"averaged: {averager.averaging_round} times, accuracy {averager.evaluate(train_dataset):.3f}")
