"""The demo's batches: every sample as often as every other, and a slow worker that is slow for real."""

import itertools
import time

import numpy as np
import pytest
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


@pytest.mark.parametrize("own_s", [0.25, 0.5, 1.0])
def test_a_slowed_loader_takes_so_many_times_as_long_as_the_others_whatever_its_own_time(monkeypatch, own_s):
    now, pushed = [0.0], [0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slowed = Slowed(
        [(torch.zeros(1), torch.zeros(1))] * 8,
        5,
        version=lambda: 70 + pushed[0] + 3 * int(now[0] / 0.25),  # three others, each of 0.25 s a batch
        num_others=3,
    )

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(slowed._never, "wait", wait)
    ends = []
    for step in slowed:
        del step
        ends.append(now[0])
        now[0] += own_s
        pushed[0] += 1
    assert np.diff(ends) == pytest.approx([1.25] * 7)


def test_a_slowed_loader_without_others_goes_by_its_own_time(monkeypatch):
    now, waits = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    version = itertools.count().__next__  # asked before the first batch and after each
    slowed = Slowed([(torch.zeros(1), torch.zeros(1))] * 3, 5, version=version, num_others=0)

    def wait(seconds):
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(slowed._never, "wait", wait)
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
