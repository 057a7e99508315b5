"""Several processes that accumulate together are one that has all their samples."""

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1, momentum=0.9)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def micro_batch(rank, window, number):
    """Of one member, as large as nobody else's."""
    random = torch.Generator().manual_seed(1000 * rank + 100 * window + number)
    size = 1 + (3 * rank + 2 * window + number) % 5
    return torch.randn(size, 6, generator=random), torch.randint(5, (size,), generator=random)


def member(rank, windows, num_micro, overlap):
    trained = model(seed=rank)  # all start from the first one's
    ours = offbeat.AsyncGradientAccumulator(trained, num_micro, overlap=overlap)
    updates, samples = [], []
    for window in range(windows[rank]):
        for number in range(num_micro):
            inputs, targets = micro_batch(rank, window, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
            updates.append(ours.is_update_step())
            samples.append(ours.effective_batch_size)
    ours.flush()
    return [p.detach().numpy() for p in trained.parameters()], updates, ours.updates, samples


def alone(windows, num_micro, lateness):
    """Make the same updates in one process, by the gradients at what was there `lateness` updates before."""
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    waiting = []
    for window in range(max(windows)):
        batches = [
            micro_batch(rank, window, number)
            for rank, num in enumerate(windows)
            if window < num
            for number in range(num_micro)
        ]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        live.zero_grad()
        LOSS(trained(inputs), targets).backward()
        waiting.append([p.grad for p in trained.parameters()])
        if len(waiting) > lateness:
            apply(live, trained, waiting.pop(0))
    for gradients in waiting:
        apply(live, trained, gradients)
    return [p.detach().numpy() for p in trained.parameters()]


def apply(live, trained, gradients):
    for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
        parameter.grad = gradient
    live.step()
    trained.zero_grad()


@pytest.mark.parametrize("windows", [(4, 4), (5, 2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_members_make_the_updates_of_one_process_with_all_samples(windows, overlap):
    first, second = together(member, 2, windows, 3, overlap)
    assert all(map(np.array_equal, first[0], second[0])), "they stay equal"
    assert first[2] == second[2] == max(windows), "an update for each window that anybody had"
    last_of_a_window = [number == 2 for _ in range(windows[0]) for number in range(3)]
    late = [False] * 3 * int(overlap)
    assert first[1] == late + last_of_a_window[: len(last_of_a_window) - len(late)]
    for a, b in zip(first[0], alone(windows, 3, lateness=int(overlap)), strict=True):
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()
    all_samples = [sum(len(micro_batch(r, 0, n)[0]) for r in range(2) for n in range(3))]
    assert [n for n in first[3] if n][:1] == all_samples


def unused(rank):
    both = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])
    nn.init.ones_(both[2].weight)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = both

        def forward(self, inputs):
            return self.both[rank](inputs)

    ours = offbeat.AsyncGradientAccumulator(Own(), 1, overlap=False)
    before = [p.detach().clone() for p in both.parameters()]
    ours.train_step(
        inputs=torch.ones(1, 2),
        targets=torch.zeros(1),
        optimizer=optim.AdamW(lr=0.1, weight_decay=0.5),
        loss_fn=lambda out, _: out.sum(),
    )
    return [not torch.equal(a, b) for a, b in zip(before, both.parameters(), strict=True)]


def test_what_one_member_used_moves_in_all_and_what_nobody_used_in_none():
    assert together(unused, 2) == [[True, True, True, True, False, False]] * 2
