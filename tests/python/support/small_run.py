"""A run of a small net with BatchNorm, whose batches are the same each time."""

import torch
from torch import nn

LOSS = nn.CrossEntropyLoss()
STEPS = 30


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(steps)
    ]
