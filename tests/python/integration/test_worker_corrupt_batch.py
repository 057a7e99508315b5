"""A batch that made NaN of gradients or buffers: nothing of it stays, whoever notices it and when."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import offbeat
from offbeat.errors import NonFiniteError
from support.small_net import backward, net, normed, same

SPEC = offbeat.optim.SGD(lr=0.1)


def entered():
    """Inputs go into BatchNorm as they are, so that an infinite one makes its mean infinite."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4, eps=0.5), nn.Linear(4, 2))


def measured_batch(model, number, bad=0.0):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
    x[2, 1] += bad
    loss = functional.cross_entropy(model(x), torch.tensor([0, 1] * 3))
    loss.backward()
    return loss


@pytest.fixture
def buffers_after(serve, join):
    """Give the server's buffers after 8 batches, number `at` of them as `corrupt` has it.

    The learning rate is 0: of each batch that is not corrupt, the buffers are all that remains. Those
    `unmeasured` leave nothing there either.
    """

    def run(corrupt, *, at=3, num_workers=1, unmeasured=(), live=False, **keywords):
        server = serve(entered())
        workers = []
        for _ in range(num_workers):
            model = entered()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if live else offbeat.optim.SGD(lr=0.0)
            workers.append(join(server, model, optimizer=optimizer, **keywords))
        for number in range(8):
            worker = workers[number % num_workers]
            if number == at:
                corrupt(worker)
                continue
            worker.model.train(number not in unmeasured)
            measured_batch(worker.model, number)
            worker.step()
        for worker in workers:
            worker.flush()
        return {name: value for name, value in server.state_dict().items() if name.startswith("0.")}

    return run


def never_seen(worker):
    """Skip the batch before its forward pass."""


def assert_same(found, wanted):
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("given_up", [False, True], ids=["refused by step()", "given up by zero_grad()"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_corrupt_batch_costs_no_local_step_that_was_made_before_it(serve, join, in_flight, given_up):
    def parameters_after(corrupt):
        server, model = serve(entered()), entered()
        live = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        worker = join(server, model, optimizer=live, update_frequency=3, in_flight=in_flight)
        for number in range(9):
            if number == 5:  # two steps since the last push
                corrupt(worker)
            measured_batch(model, number)
            worker.step()
        worker.flush()
        return {name: value for name, value in server.state_dict().items() if not name.startswith("0.")}

    def corrupt(worker):
        model = worker.model
        (model(torch.full((8, 4), float("nan"))) ** 2).mean().backward()
        if given_up:
            worker.optimizer.zero_grad()
        else:
            with pytest.raises(NonFiniteError):
                worker.step()

    assert_same(parameters_after(corrupt), parameters_after(never_seen))


BAD = pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
LIVE = pytest.mark.parametrize("live", [False, True])
RUNS = pytest.mark.parametrize(
    "run",
    [{"in_flight": 1}, {"in_flight": 2}, {"num_workers": 2}],
    ids=["one worker", "one with two in flight", "two workers"],
)


@pytest.mark.parametrize("at", [1, 3])  # with two in flight, before and after the first answer
@BAD
@LIVE
@RUNS
def test_a_corrupt_batch_that_is_refused_leaves_no_trace_in_buffers(buffers_after, run, live, bad, at):
    def refused(worker):
        measured_batch(worker.model, at, bad)
        with pytest.raises(NonFiniteError):
            worker.step()

    found, wanted = (buffers_after(c, at=at, live=live, **run) for c in (refused, never_seen))
    assert_same(found, wanted)


@BAD
@LIVE
@RUNS
def test_of_a_corrupt_batch_that_is_skipped_before_its_step_no_push_carries_the_statistics(
    buffers_after, run, live, bad
):
    def skipped(worker):
        assert not torch.isfinite(measured_batch(worker.model, 3, bad))
        worker.model.zero_grad()

    found = buffers_after(skipped, live=live, **run)
    next_one = 3 + run.get("num_workers", 1)
    wanted = buffers_after(never_seen, live=live, unmeasured=[next_one], **run)
    assert_same(found, wanted)


@BAD
@LIVE
@RUNS
def test_a_corrupt_batch_that_grad_scaler_skips_leaves_no_trace_in_buffers(buffers_after, run, live, bad):
    def skipped(worker):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(measured_batch(worker.model, 3, bad))
        scaler.unscale_(worker.optimizer)
        scaler.step(worker.optimizer)
        scaler.update()
        assert scaler.get_scale() == 0.5
        worker.optimizer.zero_grad()

    found, wanted = (buffers_after(c, live=live, **run) for c in (skipped, never_seen))
    assert_same(found, wanted)


def test_zero_grad_of_a_worker_that_is_closed_or_gone_is_torch_s(serve):
    server, model = serve(net()), net()
    worker = offbeat.AsyncWorker(server.address, model, optimizer=SPEC)
    optimizer = worker.optimizer
    worker.close()
    for _ in range(2):
        backward(model)
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        worker = None


@BAD
@LIVE
def test_of_two_workers_with_two_in_flight_a_corrupt_batch_leaves_neither_nan_nor_count(
    buffers_after, live, bad
):
    def refused(worker):
        measured_batch(worker.model, 3, bad)
        with pytest.raises(NonFiniteError):
            worker.step()

    found = buffers_after(refused, live=live, num_workers=2, in_flight=2)
    assert found["0.num_batches_tracked"] == 7
    assert all(torch.as_tensor(value).isfinite().all() for value in found.values())


@LIVE
@pytest.mark.parametrize("in_flight", [1, 2])
def test_of_gathered_batches_one_of_which_is_corrupt_no_statistics_are_pushed(serve, join, in_flight, live):
    server, model = serve(entered()), entered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if live else offbeat.optim.SGD(lr=0.0)
    worker = join(server, model, optimizer=optimizer, in_flight=in_flight, update_frequency=2)
    for number in range(2):
        measured_batch(model, number)
        worker.step()
    worker.flush()
    held = server.state_dict()
    for number in (2, 3, 4):
        measured_batch(model, number, float("inf") if number == 3 else 0.0)
        if number == 3:
            model.zero_grad()
        else:
            worker.step()
    worker.flush()
    assert server.status()["version"] == 2
    assert same(server.state_dict().values(), held.values())
    assert same(model.buffers(), [held[name] for name, _ in model.named_buffers()])


@LIVE
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_corrupt_batch_that_is_refused_takes_the_statistics_gathered_before_it_along(
    serve, join, in_flight, live
):
    server, model, twin = serve(entered()), entered(), entered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if live else offbeat.optim.SGD(lr=0.0)
    worker = join(server, model, optimizer=optimizer, in_flight=in_flight, update_frequency=2)
    for number in (0, 1, 2, 3, 4):
        measured_batch(model, number, float("inf") if number == 3 else 0.0)
        if number == 3:
            with pytest.raises(NonFiniteError):
                worker.step()
        else:
            worker.step()
        if number == 1:
            worker.flush()
        if number not in (2, 3):
            measured_batch(twin, number)
    worker.flush()
    held = server.state_dict()
    assert same([held[name] for name, _ in twin.named_buffers()], twin.buffers())


def test_a_buffer_that_always_holds_a_nan_keeps_no_other_from_being_pushed(serve, join):
    def model():
        made = entered()
        made.register_buffer("unknown", torch.tensor([float("nan"), 1.0]))
        made.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        return made

    server = serve(model())
    worker = join(server, model(), optimizer=SPEC)
    worker.model.unknown[1] = 2
    measured_batch(worker.model, 0)
    worker.step()
    held = server.state_dict()
    assert held["0.num_batches_tracked"] == 1
    assert held["unknown"][1] == 2


def test_a_buffer_in_which_nan_is_a_value_is_warned_of_once_by_name(serve, join, caplog):
    def model():
        made = entered()
        made.register_buffer("entropy", torch.tensor(0.0))
        return made

    server = serve(model())
    worker = join(server, model(), optimizer=SPEC, worker_id="me")
    for number in range(3):
        measured_batch(worker.model, number)
        worker.model.entropy.fill_(float("nan"))
        if number == 0:  # a push that is refused is no such push
            worker.model[1].bias.grad[0] = float("nan")
            with pytest.raises(NonFiniteError):
                worker.step()
            assert not caplog.records
        else:
            worker.step()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "worker me: a number in its buffer 'entropy' became NaN beside finite gradients" in line
    assert "persistent=False" in line
    assert server.state_dict()["0.num_batches_tracked"] == 0


def test_a_buffer_that_is_infinite_stays_so_where_a_batch_is_refused(serve, join):
    worker = join(serve(normed()), normed(), optimizer=SPEC)
    backward(worker.model)
    worker.model[3].running_mean[1] = float("inf")
    worker.model[2].bias.grad[0] = float("nan")
    with pytest.raises(NonFiniteError):
        worker.step()
    assert worker.model[3].running_mean[1] == float("inf")
