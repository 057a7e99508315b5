"""Models, batches, the loop that a user would write, and a trainer's `train` in its place."""

import itertools

import numpy as np
import torch
from torch import nn

import offbeat
from offbeat import optim

LOSS = nn.CrossEntropyLoss()


OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    optim.Adam(lr=0.01),
    optim.AdamW(lr=0.01),
    optim.Adagrad(lr=0.1),
    optim.RMSprop(lr=0.01, momentum=0.5),
]


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 5))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def batch(number, size=7, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    return scale * torch.randn(size, 6, generator=generator), torch.randint(5, (size,), generator=generator)


DATA = [batch(number, size=3 + number % 5) for number in range(9)]


def live_of(spec, trained):
    return offbeat.local.LocalOptimizer(trained).use(spec)


def loop(
    trained, live, *, data=DATA, epochs=2, dtype=None, scaler=None, clip=None, each_step=None, each_epoch=None
):
    """The loop that a user would write; gives how many steps a scaler skipped."""
    skipped = 0
    torch.manual_seed(7)
    for _ in range(epochs):
        for inputs, targets in data:
            live.zero_grad()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = LOSS(trained(inputs), targets)
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(live)
            if clip is not None:
                nn.utils.clip_grad_norm_(trained.parameters(), clip)
            was_skipped = False
            if scaler is None:
                live.step()
            else:
                before = scaler.get_scale()
                scaler.step(live)
                scaler.update()
                was_skipped = scaler.get_scale() < before
                skipped += was_skipped
            if each_step is not None and not was_skipped:
                each_step.step()
        if each_epoch is not None:
            each_epoch.step()
    return skipped


def train(trainer, optimizer, *, data=DATA, epochs=2, **keywords):
    torch.manual_seed(7)
    return trainer.train(
        dataloader=data, epochs=epochs, optimizer=optimizer, loss_fn=LOSS, progress=False, **keywords
    )


def numpy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002  the global one is what is asked about


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


class Block(nn.Module):
    """Counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))
        self.computed = 0

    def forward(self, inputs):
        self.computed += 1
        return self.inner(inputs)


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 5))
