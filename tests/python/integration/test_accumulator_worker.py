"""Inside a worker an accumulator's windows are the worker's pushes."""

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.errors import ClosedError, ConfigError, NonFiniteError
from support.small_net import net, same, values

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1)
IGNORED = -100


def micro_batch(number):
    random = torch.Generator().manual_seed(number)
    size = 2 + number % 3
    targets = torch.randint(2, (size,), generator=random)
    targets[0] = IGNORED
    return torch.randn(size, 4, generator=random), targets


def counted(_, targets):
    return int((targets != IGNORED).sum())


def train(ours, numbers, loss_fn=LOSS, **keywords):
    for number in numbers:
        inputs, targets = micro_batch(number)
        ours.train_step(inputs=inputs, targets=targets, loss_fn=loss_fn, **keywords)


def large_batches(num_batches, num_micro, lateness=0):
    """Train in one loop of torch's, by the gradients at what was there `lateness` updates before."""
    trained, waiting = net(), []
    live = torch.optim.SGD(trained.parameters(), lr=0.1)

    def step():
        for parameter, gradient in zip(trained.parameters(), waiting.pop(0), strict=True):
            parameter.grad = gradient
        live.step()

    for first in range(0, num_batches, num_micro):
        batches = [micro_batch(number) for number in range(first, min(first + num_micro, num_batches))]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        waiting.append(torch.autograd.grad(LOSS(trained(inputs), targets), list(trained.parameters())))
        if len(waiting) > lateness:
            step()
    while waiting:
        step()
    return trained.parameters()


def close(ours, theirs):
    return all((a - b).abs().max() <= 1e-6 * b.abs().max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_worker_that_waits_makes_large_batches(serve, join, reduction):
    server = serve(net())
    worker = join(server, net(1), optimizer=SPEC)
    ours = offbeat.AsyncGradientAccumulator(
        worker=worker, accumulation_steps=3, overlap=False, loss_reduction=reduction, normalizer=counted
    )
    train(ours, range(12), nn.CrossEntropyLoss(reduction=reduction))
    assert close(worker.model.parameters(), large_batches(12, 3))
    assert same(values(worker.model), server.state_dict().values())
    assert (server.status()["version"], ours.updates) == (4, 4)
    assert server.status()["samples"] == sum(len(micro_batch(number)[1]) for number in range(12))
    assert (ours.receipt.version, ours.is_update_step()) == (4, True)


def test_with_two_in_flight_pushes_are_behind_the_next_windows_work(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC, in_flight=2)
    ours = offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=2, normalizer=counted)
    train(ours, range(2))
    assert ours.updates == 1
    assert ours.receipt is None, "nobody has waited for it"
    train(ours, range(2, 11))
    ours.flush()  # the window that is not full, and what is in flight
    assert (ours.updates, ours.receipt.version, ours.receipt.staleness) == (6, 6, 1)
    assert close(worker.model.parameters(), large_batches(11, 2, lateness=1))


def test_a_live_optimizer_of_the_worker_steps_once_per_window(serve, join):
    server, trained = serve(net()), net()
    worker = join(server, trained, optimizer=torch.optim.SGD(trained.parameters(), lr=0.1))
    ours = offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=3, normalizer=counted)
    train(ours, range(12), optimizer=worker.optimizer)
    assert server.status()["version"] == 4
    assert close(worker.model.parameters(), large_batches(12, 3))


def test_one_that_is_closed_pushes_no_more_and_leaves_its_worker_open(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    with offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=1, normalizer=counted) as ours:
        train(ours, range(1))
    for call in (lambda: train(ours, range(1)), ours.flush):
        with pytest.raises(ClosedError, match=r"AsyncGradientAccumulator was closed, .*: make a new one"):
            call()
    assert server.status()["version"] == 1
    again = offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=1, normalizer=counted)
    train(again, range(1))
    assert server.status()["version"] == 2


def test_a_window_in_which_nothing_counts_is_not_pushed(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    ours = offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=1, normalizer=counted)
    ours.train_step(inputs=torch.ones(2, 4), targets=torch.full((2,), IGNORED), loss_fn=LOSS)
    assert (ours.updates, ours.skipped_updates, server.status()["version"]) == (0, 0, 0)
    train(ours, range(2))
    assert (ours.updates, server.status()["version"]) == (2, 2)


def test_a_batch_without_a_sample_is_refused_and_no_window_is_pushed(serve, join):
    server = serve(net())
    ours = offbeat.AsyncGradientAccumulator(
        worker=join(server, net(), optimizer=SPEC), accumulation_steps=2, normalizer=counted
    )
    train(ours, range(1))
    with pytest.raises(ConfigError, match="the batch has no sample"):
        ours.train_step(inputs=torch.empty(0, 4), targets=torch.empty(0).long(), loss_fn=LOSS)
    assert (ours.updates, server.status()["version"]) == (0, 0)
    train(ours, range(1, 2))
    assert (ours.updates, server.status()["version"]) == (1, 1)


def test_with_a_scaler_what_is_infinite_is_not_pushed_and_without_one_it_is_an_error(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ours = offbeat.AsyncGradientAccumulator(
        worker=worker, accumulation_steps=3, normalizer=counted, grad_scaler=scaler
    )
    train(ours, range(3))
    before = values(worker.model)
    wrong = {"inputs": torch.full((2, 4), float("inf")), "targets": torch.zeros(2, dtype=torch.long)}
    for _ in range(3):
        ours.train_step(**wrong, loss_fn=LOSS)
    assert same(values(worker.model), before)
    assert (ours.updates, ours.skipped_updates, scaler.get_scale()) == (1, 1, 512.0)
    train(ours, range(3, 6))
    assert server.status()["version"] == 2
    assert close(worker.model.parameters(), large_batches(6, 3))
    plain = offbeat.AsyncGradientAccumulator(worker=worker, accumulation_steps=1)
    with pytest.raises(NonFiniteError):
        plain.train_step(**wrong, loss_fn=LOSS)
    assert server.status()["version"] == 2
    plain.train_step(inputs=torch.ones(2, 4), targets=torch.zeros(2, dtype=torch.long), loss_fn=LOSS)
    assert server.status()["version"] == 3


def test_what_a_window_has_gathered_is_in_the_state(serve, join):
    whole, parted = (join(serve(net()), net(), optimizer=SPEC) for _ in range(2))
    train(offbeat.AsyncGradientAccumulator(worker=whole, accumulation_steps=4), range(8))
    first = offbeat.AsyncGradientAccumulator(worker=parted, accumulation_steps=4)
    train(first, range(6))
    second = offbeat.AsyncGradientAccumulator(worker=parted, accumulation_steps=4)
    second.load_state_dict(first.state_dict())
    train(second, range(6, 8))
    assert same(values(parted.model), values(whole.model))
    with pytest.raises(ConfigError, match="the state is of one with worker"):
        offbeat.AsyncGradientAccumulator(net(), 4).load_state_dict(first.state_dict())


def test_who_owns_accumulation_is_told_with_all_else_that_does_not_go_together(serve, join):
    worker = join(serve(net()), net(), update_frequency=3, in_flight=2)
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncGradientAccumulator(
            net(),
            4,
            worker=worker,
            overlap=False,
            adaptive_accumulation=True,
            process_group=3,
            loss_reduction="none",
            normalizer=3,
            grad_scaler=2.0,
        )
    for what in (
        'loss_reduction is \'none\': give "mean" or "sum"',
        "normalizer is 3: give a function of (inputs, targets)",
        "grad_scaler is 2.0: give a torch.amp.GradScaler, or None",
        "the worker's update_frequency is 3, and the accumulator gathers batches itself",
        "overlap is False and the worker's in_flight 2",
        "the worker has another model: leave model out",
        "adaptive_accumulation and worker are given",
        "process_group and worker are given",
    ):
        assert what in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncGradientAccumulator(worker="me", accumulation_steps=0, overlap="no")
    assert str(caught.value) == (
        "accumulation_steps is 0: give a whole number, 1 or more; worker is 'me': give an "
        "offbeat.AsyncWorker, or None; overlap is 'no': give True or False"
    )


def test_the_optimizer_is_the_workers(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)
    ours = offbeat.AsyncGradientAccumulator(worker.model, 1, worker=worker)
    before = [value.numpy() for value in values(worker.model)]
    with pytest.raises(ConfigError, match=r"the worker has its own: give AsyncWorker\(optimizer"):
        train(ours, range(1), optimizer=SPEC)
    assert all(map(np.array_equal, before, [value.numpy() for value in values(worker.model)]))
    assert ours.optimizer is worker.optimizer
    train(ours, range(1), optimizer=worker.optimizer)
    assert ours.updates == 1


OTHERS = {
    "an accumulator": lambda trained, _: offbeat.AsyncGradientAccumulator(trained, accumulation_steps=2),
    "an averager": lambda trained, _: offbeat.AsyncModelAverager(trained),
    "a trainer": lambda trained, _: offbeat.AsyncTrainer(trained),
    "a fault-tolerant trainer": offbeat.FaultTolerantTrainer,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_worker_s_model_is_trained_by_nothing_else_until_it_is_closed(make, serve, join, tmp_path):
    """What it makes of the model would never be pushed, and be overwritten by the next pull."""
    worker = join(serve(net()), net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match=r"model is that of <offbeat\.AsyncWorker .*give the worker itself"):
        make(worker.model, tmp_path)
    worker.close()
    make(worker.model, tmp_path)
