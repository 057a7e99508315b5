"""The demo's batches: every sample as often as every other, and a slow worker that is slow for real."""

import itertools
import time

import numpy as np
import torch

from offbeat.demo.data import ImageData
from offbeat.demo.samples import Samples, Shuffled, Slowed, accuracy


def numbered(num_train=10, num_test=4) -> Samples:
    """Samples whose picture tells their number."""
    numbers = np.arange(num_train + num_test, dtype=np.float32).reshape(-1, 1, 1, 1)
    labels = np.arange(num_train + num_test) % 10
    return Samples.of(
        ImageData(
            train_images=numbers[:num_train],
            train_labels=labels[:num_train],
            test_images=numbers[num_train:],
            test_labels=labels[num_train:],
            name="numbers",
            is_benchmark=False,
        )
    )


def test_no_batch_is_short_and_each_sample_comes_once_a_round():
    batches = list(itertools.islice(Shuffled(numbered(), 4, seed=1), 5))
    assert [len(labels) for _, labels in batches] == [4] * 5
    order = torch.cat([images.flatten() for images, _ in batches])
    assert sorted(order[:10].tolist()) == sorted(order[10:].tolist()) == list(range(10))
    assert order[:10].tolist() != order[10:].tolist()
    assert all(torch.equal(images.flatten().long() % 10, labels) for images, labels in batches)


def test_the_order_follows_from_the_seed():
    def first(seed):
        return next(iter(Shuffled(numbered(), 10, seed)))[1].tolist()

    state = torch.get_rng_state()
    assert first(1) == first(1) != first(2)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"


def test_a_slowed_loader_takes_so_many_times_as_long(monkeypatch):
    now = [0.0]
    waits = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slowed = Slowed([(torch.zeros(1), torch.zeros(1))] * 3, 5)
    monkeypatch.setattr(slowed._never, "wait", waits.append)
    for step in slowed:
        del step
        now[0] += 0.25
    assert waits == [1.0, 1.0, 1.0]


def test_accuracy_is_the_share_of_right_answers():
    samples = numbered(10, 4)  # labels 0, 1, 2, 3
    always_two = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 10))
    with torch.no_grad():
        always_two[1].weight.zero_()
        always_two[1].bias.copy_(torch.arange(10) == 2)
    assert accuracy(always_two, samples, batch_size=3) == 0.25
