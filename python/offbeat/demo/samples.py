"""The demo's samples for torch: tensors that processes share, and endless batches in a random order."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from offbeat.demo.data import ImageData

__all__ = ["Batch", "Samples", "Shuffled", "Slowed", "accuracy"]

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """The parts to train on and to judge by, as tensors in memory that other processes can be given.

    Attributes:
        train_images: float32, shape ``[N, 1, 28, 28]``.
        train_labels: int64, shape ``[N]``.
        test_images: float32, shape ``[M, 1, 28, 28]``.
        test_labels: int64, shape ``[M]``.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def of(cls, data: ImageData) -> "Samples":
        """Move arrays to shared memory."""
        return cls(**{name: _shared(getattr(data, name)) for name in cls.__slots__})


class Shuffled:
    """Batches without an end: all samples in a random order, then all again in another; no batch is short."""

    def __init__(self, samples: Samples, batch_size: int, seed: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Batch]:
        images, labels = self._samples.train_images, self._samples.train_labels
        order = torch.empty(0, dtype=torch.int64)
        while True:
            while len(order) < self._batch_size:
                order = torch.cat([order, torch.randperm(len(labels), generator=self._generator)])
            chosen, order = order[: self._batch_size], order[self._batch_size :]
            yield images[chosen], labels[chosen]


UNSEEN_S = 0.01
"""Longest time that a batch of others is taken for, as long as none of theirs has come."""


class Slowed:
    """A loader as a slower machine would have it: each batch takes `factor` times as long as it takes others.

    How long that is, is told by the model's version, which moves with each of their pushes. One's own time
    would not do: who sleeps between batches finds cores taken and caches cold, and the factor would multiply
    that too. The next batch is waited for after the parameters were read, so that they age meanwhile.
    """

    def __init__(
        self, batches: Iterable[Batch], factor: float, *, version: Callable[[], int], num_others: int
    ) -> None:
        """`version` tells how many pushes were applied, one's own among them."""
        self._batches = batches
        self._factor = factor
        self._version = version
        self._num_others = num_others
        self._never = threading.Event()

    def __iter__(self) -> Iterator[Batch]:
        began = due = time.monotonic()
        first = self._version()
        for own, batch in enumerate(self._batches, 1):
            yield batch
            now = time.monotonic()
            theirs = self._version() - first - own
            # Until a push of theirs is seen, one's own first batch says little: it may be a cold start's.
            one_of_theirs = (
                (now - began) * self._num_others / theirs
                if theirs > 0
                else min(now - due, UNSEEN_S if self._num_others else math.inf)
            )
            due = max(now, due + self._factor * one_of_theirs)
            self._never.wait(due - now)


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples, batch_size: int = 1000) -> float:
    """Compute the share of right answers on the test part, 0..1; leaves the model in eval mode."""
    model.eval()
    batches = zip(samples.test_images.split(batch_size), samples.test_labels.split(batch_size), strict=True)  # type: ignore[no-untyped-call]
    guesses = [model(images).argmax(dim=1) == labels for images, labels in batches]
    return float(torch.cat(guesses).double().mean())


def _shared(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).share_memory_()  # type: ignore[no-any-return,no-untyped-call]
