"""A monitor in members of a process group: what they have made of buffers together, and DTensors."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module

import offbeat
from offbeat import optim
from offbeat.history import History
from offbeat.local.finite import Finiteness
from support.group import together
from support.small_net import normed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def batch(rank, number, factor=1.0):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * number + rank))
    return factor * (inputs + 10 * rank), torch.zeros(8, dtype=torch.long)


def statistics_of(model):
    return [float(number) for number in model[-1].running_mean]


def averaged(rank, method, overlap):
    """Give the statistics after two steps and a round, and after a batch that is dropped in the second."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = offbeat.AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject")
    with offbeat.AsyncModelAverager(model, averaging_frequency=2, method=method, overlap=overlap) as averager:
        for number in range(2):
            inputs, targets = batch(rank, number)
            averager.train_step(
                inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss()
            )
        averager.flush()
        before = statistics_of(model)
        inputs, targets = batch(rank, 2, factor=math.nan if rank == 1 else 1.0)
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return monitor.report().num_dropped, before, statistics_of(model)


def accumulated(rank):
    """Likewise, of an accumulator; all members drop the batch."""
    model = normed()
    optimizer = optim.SGD(lr=0.1)
    monitor = offbeat.AsyncTrainingMonitor(model, ["non_finite"], remediation_strategy="reject")
    loss_fn = nn.CrossEntropyLoss()
    with offbeat.AsyncGradientAccumulator(model, accumulation_steps=1) as accumulator:
        inputs, targets = batch(rank, 0)
        accumulator.train_step(inputs=inputs, targets=targets, optimizer=optimizer, loss_fn=loss_fn)
        accumulator.flush()
        before = statistics_of(model)
        live = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, targets = batch(rank, 1, factor=math.nan)
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        live.step()
    return monitor.report().num_dropped, before, statistics_of(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", ["average", "gossip"])
def test_a_batch_that_is_dropped_after_a_round_leaves_the_statistics_that_the_round_has_made(method, overlap):
    (none, first, trained), (num_dropped, second, kept) = together(averaged, 2, method, overlap)
    assert (none, num_dropped) == (0, 1)
    assert trained != first == second == kept


def test_a_batch_that_is_dropped_after_a_flush_leaves_the_statistics_of_all_members():
    (_, first, kept), (num_dropped, second, also) = together(accumulated, 2)
    assert num_dropped == 1
    assert first == second == kept == also != [0.0, 0.0]


class Scaled(nn.Module):
    """Divides by what it has seen: of infinity all that is left is 0, which is finite."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs):
        self.scale.mul_(0.9).add_(0.1 * inputs.detach().abs().mean())
        return inputs / self.scale


def averaged_with_a_scaler(rank, frequency):
    """Skip a step in one member, with or without a round right after it; give the buffer in all."""
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with (
        offbeat.AsyncTrainingMonitor(
            model, ["loss"], remediation_strategy="reject", grad_scaler=scaler
        ) as monitor,
        offbeat.AsyncModelAverager(model, averaging_frequency=frequency, overlap=False) as averager,
    ):
        for number in range(6):
            inputs, targets = batch(rank, number, factor=math.inf if (rank, number) == (1, 3) else 1.0)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            monitor.observe(number, loss=loss.detach())
            scaler.step(optimizer)
            scaler.update()
            averager.step(len(inputs), optimizer=optimizer)
        averager.flush()
    return float(scaler.get_scale()), float(model[0].scale)


@pytest.mark.parametrize("frequency", [1, 3, 4])
def test_a_round_takes_nothing_for_good_that_a_skipped_step_has_broken(frequency):
    (one, scale), (other, also) = together(averaged_with_a_scaler, 2, frequency)
    assert (one, other) == (8.0, 4.0)
    assert 0 < scale < 100
    assert 0 < also < 100


def distributed(rank):
    """Train a model of DTensors, with a batch that is dropped."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 2))
    model.register_buffer("seen", torch.zeros(2))
    distribute_module(model, mesh)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    with offbeat.AsyncTrainingMonitor(model, ["loss"], remediation_strategy="reject") as monitor:
        for number, factor in enumerate((1.0, math.nan, 1.0)):
            inputs, _ = batch(rank, number, factor)
            outputs = model(DTensor.from_local(inputs, mesh, [Replicate()]))
            model.seen += outputs.detach().mean(0)
            loss = outputs.square().mean()
            monitor.observe(number, loss=loss.detach().full_tensor())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(model.seen.full_tensor().tolist())
    return monitor.report().num_dropped, seen


def test_buffers_that_are_dtensors_go_back_as_well():
    for num_dropped, seen in together(distributed, 2):
        assert num_dropped == 1
        assert seen[0] == seen[1] != seen[2]
        assert all(math.isfinite(number) for number in seen[2])


def normed_by_dtensors(rank):
    """Look, as a log line does, at a model whose statistics are DTensors."""
    del rank
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (2,))
    distribute_module(model[0], mesh)
    inputs = DTensor.from_local(torch.randn(8, 4), mesh, [Replicate()])
    finiteness = Finiteness(model, History(), remedy="none")
    model[0](inputs)
    finiteness.add(torch.zeros(()), 1)
    finiteness.look()
    return type(model[0].running_mean) is DTensor


def test_statistics_that_are_dtensors_are_left_alone():
    assert together(normed_by_dtensors, 2) == [True, True]
