"""A small model for tests of the worker, a batch for it, and ways to compare."""

import torch
from torch import nn
from torch.nn import functional


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def normed():
    return nn.Sequential(*net(), nn.BatchNorm1d(2))


def backward(model, number=0, samples=6):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 4, generator=generator)
    functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
