"""A loop by hand around a small model: its batches, its optimizer, and what it has left of both."""

import torch
from torch.nn import functional


def batch(number, samples=16):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def loss_of(model, number):
    x, y = batch(number)
    return functional.cross_entropy(model(x), y)


def sgd(model, **keywords):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **keywords)


def state_of(model, optimizer):
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return [t.clone() for t in tensors if isinstance(t, torch.Tensor)]


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) and torch.equal(a.isnan(), b.isnan()) for a, b in zip(one, other, strict=True)
    )
