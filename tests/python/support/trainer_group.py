"""Members that train by an `AsyncTrainer`, at a parameter server or in a process group."""

import torch
from torch import nn

import offbeat

LOSS = nn.CrossEntropyLoss()
BATCHES = 12
EVERY = 4


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))


def data_of(seed, length=BATCHES):
    """Give batches that all are of one task, whoever has them."""
    rule = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
    random = torch.Generator().manual_seed(100 + seed)
    inputs = [torch.randn(8, 6, generator=random) for _ in range(length)]
    return [(one, (one @ rule).argmax(1)) for one in inputs]


def values_of(trained):
    return [parameter.detach().numpy().copy() for parameter in trained.parameters()]


def member_of(ours, address, strategy, **settings):
    return offbeat.AsyncTrainer(
        ours, strategy=strategy, regular_sync_frequency=EVERY, server_address=address, **settings
    )


class Begins:
    """A loss that takes down what the model was as each batch began."""

    def __init__(self, trained):
        self.trained, self.values = trained, []

    def __call__(self, outputs, targets):
        self.values.append(values_of(self.trained))
        return LOSS(outputs, targets)
