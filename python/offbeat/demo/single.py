"""The single process that the workers are measured beside: a plain torch loop, nothing of Offbeat in it."""

import time
from collections.abc import Callable

import torch
from torch import nn

from offbeat.demo.models import Task
from offbeat.demo.result import Point, Run
from offbeat.demo.samples import Samples, Shuffled, accuracy

__all__ = ["train", "warm_up"]

Report = Callable[[int], None]


def warm_up() -> None:
    """Make torch load what it loads at its first optimizer, which takes seconds and is not training."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


def train(task: Task, model: nn.Module, samples: Samples, *, seed: int, report: Report) -> Run:
    """Train a model in place, for as many samples as the task says.

    Args:
        task: What to train and how.
        model: Its module, with initial values.
        samples: What to train on and to judge by.
        seed: Of the order of the samples.
        report: Called after each step with the number of samples so far.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    loss_fn = nn.CrossEntropyLoss()
    curve: list[Point] = []
    losses: list[torch.Tensor] = []
    seen = 0
    model.train()
    began = time.monotonic()
    for inputs, targets in Shuffled(samples, task.batch_size, seed):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * (1 - seen / task.num_samples)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        seen += len(targets)
        losses.append(loss.detach())
        if len(losses) == task.log_frequency or seen >= task.num_samples:
            curve.append(Point(time.monotonic() - began, seen, float(torch.stack(losses).mean())))
            losses.clear()
        report(seen)
        if seen >= task.num_samples:
            break
    seconds = time.monotonic() - began
    return Run(accuracy=accuracy(model, samples), seconds=seconds, samples=seen, curve=curve)
