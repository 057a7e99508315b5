"""What tests start in processes of their own: importable there by name, also under the spawn method."""

import torch

import offbeat

kept = []


def train_in_a_process(address, fail):
    """Join, step once, and end: with the worker still there, or by an exception."""
    worker = offbeat.AsyncWorker(address, optimizer=offbeat.optim.SGD(lr=0.1))
    worker.model(torch.ones(3, 4)).sum().backward()
    worker.step(samples=3)
    if fail:
        raise ZeroDivisionError
    kept.append(worker)
