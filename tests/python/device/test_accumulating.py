"""Micro-batches are gathered on a device as they are on the CPU."""

import numpy as np
import pytest
import torch

import offbeat
from offbeat import optim
from support.averaging import LOSS, SPEC, arrays, batch, close, model
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def member(rank, device, overlap, windows):
    trained = model(seed=rank)  # all start from the first one's
    with offbeat.AsyncGradientAccumulator(trained, 3, overlap=overlap, device=device) as ours:
        for number in range(3 * windows + 1):  # the last window is no whole one
            inputs, targets = batch(rank, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
        ours.flush(optimizer=SPEC)
        assert {p.device.type for p in trained.parameters()} == {device}
    return arrays(trained), ours.updates


def alone(ranks, windows, lateness):
    """One process on the CPU with all samples, whose gradients are as old as those of the members."""
    trained = model()
    live = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    waiting = []

    def apply(gradients):
        for parameter, gradient in zip(trained.parameters(), gradients, strict=True):
            parameter.grad = gradient
        live.step()

    for window in range(windows + 1):
        numbers = range(3 * window, min(3 * window + 3, 3 * windows + 1))
        batches = [batch(rank, number) for rank in range(ranks) for number in numbers]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        live.zero_grad()
        LOSS(trained(inputs), targets).backward()
        waiting.append([p.grad for p in trained.parameters()])
        if len(waiting) > lateness:
            apply(waiting.pop(0))
    for gradients in waiting:
        apply(gradients)
    return arrays(trained)


@pytest.mark.parametrize("overlap", [False, True])
def test_members_are_one_that_has_all_their_samples(device, overlap):
    (first, updates), (second, _) = together(member, 2, device, overlap, 6)
    assert all(map(np.array_equal, first, second))
    assert updates == 7
    assert close(first, alone(2, 6, lateness=int(overlap)), within=1e-5)


def test_micro_batches_are_one_large_batch(device):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(trained, 3, overlap=False, device=device)
    for number in range(19):
        inputs, targets = batch(0, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    ours.flush(optimizer=SPEC)
    assert close(arrays(trained), alone(1, 6, lateness=0), within=1e-5)


def half_batch(number):
    """Every seventh has what becomes infinite in half precision."""
    random = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, 6, generator=random)
    if number % 7 == 5:
        inputs[0, 0] = float("inf")
    return inputs, torch.randint(5, (4,), generator=random)


@pytest.mark.parametrize("num_micro", [1, 2])
def test_a_scaled_loss_in_half_precision_is_that_of_a_plain_loop(device, num_micro):
    ours, theirs = model().to(device), model().to(device)
    scalers = [torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3) for _ in range(2)]
    lives = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
    accumulator = offbeat.AsyncGradientAccumulator(ours, num_micro, device=device, grad_scaler=scalers[0])
    for update in range(15):
        numbers = range(update * num_micro, (update + 1) * num_micro)
        for inputs, targets in map(half_batch, numbers):
            with torch.autocast(device, dtype=torch.float16):
                accumulator.train_step(inputs=inputs, targets=targets, optimizer=lives[0], loss_fn=LOSS)
        lives[1].zero_grad()
        for inputs, targets in map(half_batch, numbers):
            with torch.autocast(device, dtype=torch.float16):
                loss = LOSS(theirs(inputs.to(device)), targets.to(device)) / num_micro
            scalers[1].scale(loss).backward()
        scalers[1].step(lives[1])
        scalers[1].update()
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert accumulator.skipped_updates > 0
    assert close(arrays(ours), arrays(theirs), within=1e-6 if num_micro == 1 else 1e-3)


def test_a_worker_accumulates_and_pushes(device):
    with offbeat.ParameterServer(model(), optimizer=optim.SGD(lr=0.1), host="127.0.0.1", port=0) as server:
        with offbeat.AsyncWorker(server.address, model(1), device=device) as worker:
            ours = offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=3, overlap=False)
            for number in range(18):
                inputs, targets = batch(0, number)
                ours.train_step(inputs=inputs, targets=targets, loss_fn=LOSS)
            ours.flush()
            worker.flush()
        held = server.state_dict()
    expected = model()
    live = torch.optim.SGD(expected.parameters(), lr=0.1)
    for window in range(6):
        batches = [batch(0, number) for number in range(3 * window, 3 * window + 3)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        live.zero_grad()
        LOSS(expected(inputs), targets).backward()
        live.step()
    assert close([np.asarray(held[n]) for n, _ in expected.named_parameters()], arrays(expected), within=1e-5)


def test_what_adapts_measures_and_is_finite(device):
    trained = model()
    ours = offbeat.AsyncGradientAccumulator(
        trained, 2, adaptive_accumulation=True, overlap=False, device=device
    )
    for number in range(40):
        inputs, targets = batch(0, number)
        ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=LOSS)
    ours.flush(optimizer=SPEC)
    assert ours.updates > 1
    assert all(np.isfinite(value).all() for value in arrays(trained))
