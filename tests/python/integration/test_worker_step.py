"""A loop of one's own: what `step`, `flush` and `worker.optimizer` do, and what they refuse."""

import gc
import logging
import os
import signal
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import offbeat
from offbeat.errors import ConfigError, NonFiniteError, StateError, UnknownAttributeError
from support.fault_plan import Bytes, Hold, plan
from support.fault_proxy import FaultProxy
from support.follow import follow
from support.small_net import backward, net, normed, same, values

SPEC = offbeat.optim.SGD(lr=0.1)


def test_step_returns_the_receipt_and_the_model_holds_the_newest_parameters(serve, join):
    server = serve(net())
    worker = join(server, net(1), optimizer=SPEC)
    before = values(worker.model)
    backward(worker.model)
    receipt = worker.step(samples=6)
    assert receipt.applied
    assert (receipt.version, receipt.staleness, receipt.weight) == (1, 0, 1.0)
    assert worker.version == 1
    assert not same(values(worker.model), before)
    assert same(values(worker.model), server.state_dict().values())


def test_samples_are_counted_and_default_to_the_batch_size(serve, join):
    server = serve(net())
    worker = join(server, net(), 20, optimizer=SPEC)
    for samples in (6, None):
        backward(worker.model)
        worker.step(samples)
    assert server.status()["samples"] == 26


def test_the_size_of_batches_can_be_set_and_is_what_the_next_step_counts(serve, join):
    server = serve(net())
    worker = join(server, net(), 20, optimizer=SPEC)
    with pytest.raises(UnknownAttributeError, match=r"model is given .*: local_batch_size$"):
        worker.model = net()
    with pytest.raises(ConfigError, match="local_batch_size is 0"):
        worker.local_batch_size = 0
    worker.local_batch_size = 8
    backward(worker.model)
    worker.step()
    assert server.status()["samples"] == 8


def test_samples_do_not_scale_a_gradient_push(serve, join):
    one, other = (join(serve(net()), net(), optimizer=SPEC) for _ in range(2))
    for worker, samples in ((one, 1), (other, 1000)):
        backward(worker.model)
        worker.step(samples)
    assert same(values(one.model), values(other.model))


def test_the_learning_rate_is_not_scaled_by_the_number_of_workers(serve, join):
    crowd = serve(net())
    others = [join(crowd, net(), optimizer=SPEC) for _ in range(3)]
    alone, one_of_four = join(serve(net()), net(), optimizer=SPEC), join(crowd, net(), optimizer=SPEC)
    for worker in (alone, one_of_four):
        backward(worker.model)
        worker.step()
    assert same(values(alone.model), values(one_of_four.model))
    assert len(others) == 3


def test_none_means_accumulating_until_update_frequency(serve, join):
    server = serve(net())
    worker = join(server, net(), update_frequency=3, optimizer=SPEC)
    for number in range(7):
        backward(worker.model, number)
        receipt = worker.step()
        assert (receipt is None) == (number % 3 != 2)
        assert all(p.grad is None for p in worker.model.parameters())
    assert server.status()["version"] == 2


def test_flush_pushes_the_rest(serve, join):
    server = serve(net())
    worker = join(server, net(), update_frequency=3, optimizer=SPEC)
    backward(worker.model)
    assert worker.step(samples=6) is None
    (receipt,) = worker.flush()
    assert receipt.applied
    assert (server.status()["version"], server.status()["samples"]) == (1, 6)
    assert worker.flush() == []


def test_loss_reduction_sum_pushes_the_sum(serve, join):
    mean, total = serve(net()), serve(net())
    one = join(mean, net(), optimizer=SPEC)
    other = join(
        total, net(), optimizer=offbeat.optim.SGD(lr=0.1 / 12), loss_reduction="sum", update_frequency=2
    )
    x, y = torch.randn(12, 4), torch.randint(0, 2, (12,))
    functional.cross_entropy(one.model(x), y).backward()
    one.step(samples=12)
    for part in (slice(0, 5), slice(5, 12)):
        functional.cross_entropy(other.model(x[part]), y[part], reduction="sum").backward()
        other.step(samples=len(x[part]))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_no_gradient_at_all_raises(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)
    with pytest.raises(StateError, match=r"call loss\.backward\(\)"):
        worker.step()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("samples", [0, -1, 6.0, True, "6", 2**32 + 1, 2**70])
def test_what_is_no_number_of_samples_is_refused_before_anything_changes(serve, join, samples, live):
    server, model = serve(net()), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = join(server, model, optimizer=optimizer if live else SPEC)
    before = values(model)
    backward(model)
    with pytest.raises(ConfigError, match=f"samples is {samples!r}"):
        worker.step(samples)
    assert all(p.grad is not None for p in model.parameters())
    assert same(values(model), before)
    assert not optimizer.state
    assert worker.step(np.int64(6)).applied
    assert server.status()["samples"] == 6


def test_a_live_optimizer_s_steps_of_more_samples_than_a_push_has_are_taken_back(serve, join):
    server, model = serve(net()), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = join(server, model, update_frequency=2, optimizer=optimizer)
    before = values(model)
    backward(model)
    assert worker.step(samples=2**32) is None
    backward(model)
    with pytest.raises(ConfigError, match="samples is 8589934592"):
        worker.step(samples=2**32)
    assert same(values(model), before)
    assert not optimizer.state
    assert server.status()["version"] == 0


@pytest.mark.parametrize("update_frequency", [1, 2])
def test_a_nan_gradient_raises_by_name_and_nothing_changes(serve, join, update_frequency):
    server = serve(net())
    worker = join(server, net(), update_frequency=update_frequency, optimizer=SPEC)
    for number in range(update_frequency):
        backward(worker.model, number)
    worker.model[2].weight.grad[1, 3] = float("nan")
    before = values(worker.model)
    for _ in range(update_frequency - 1):
        worker.step()
        backward(worker.model)
    with pytest.raises(NonFiniteError, match=r"2\.weight"):
        worker.step()
    assert server.status()["version"] == 0
    assert same(values(worker.model), before)
    for number in range(update_frequency):
        backward(worker.model, number)
        receipt = worker.step()
    assert receipt.applied


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_nan_gradient_leaves_the_buffers_to_the_next_push(serve, join, in_flight):
    server, twin = serve(normed()), normed()
    worker = join(server, normed(), optimizer=offbeat.optim.SGD(lr=0.0), in_flight=in_flight)
    receipts = []
    for number in range(4):
        for model in (worker.model, twin):
            backward(model, number)
        if number == 1:
            worker.model[2].bias.grad[0] = float("nan")
            with pytest.raises(NonFiniteError, match=r"2\.bias"):
                worker.step()
        else:
            receipts.append(worker.step())
    receipts = [r for r in (*receipts, *worker.flush()) if r is not None]
    assert [r.version for r in receipts] == [1, 2, 3]
    held = server.state_dict()
    assert held["3.num_batches_tracked"] == 4
    for name, buffer in twin.named_buffers():
        if in_flight == 1:
            torch.testing.assert_close(held[name], buffer)


def test_a_push_before_any_optimizer_is_set_is_refused(serve, join):
    server = serve(net())
    worker = join(server, net())
    backward(worker.model)
    receipt = worker.step()
    assert (receipt.applied, receipt.reason) == (False, "no_optimizer")
    assert server.status()["version"] == 0
    with pytest.raises(ConfigError, match="no optimizer"):
        worker.train(dataloader=[], loss_fn=nn.CrossEntropyLoss())
    worker.train(dataloader=[], loss_fn=nn.CrossEntropyLoss(), optimizer=SPEC)
    backward(worker.model)
    assert worker.step().applied


def test_the_server_s_optimizer_is_used_where_the_worker_brings_none(serve, join):
    worker = join(serve(net(), optimizer=SPEC), net())
    backward(worker.model)
    assert worker.step().applied


# ---------------------------------------------------------------------------------------- two in flight


def test_with_two_in_flight_each_step_brings_the_receipt_of_the_one_before(serve, join):
    server = serve(net())
    worker = join(server, net(), in_flight=2, optimizer=SPEC)
    receipts = []
    for number in range(4):
        backward(worker.model, number)
        receipts.append(worker.step())
    assert receipts[0] is None
    receipts = [*receipts[1:], *worker.flush()]
    assert [r.version for r in receipts] == [1, 2, 3, 4]
    assert [r.staleness for r in receipts] == [0, 1, 1, 1]
    assert same(values(worker.model), server.state_dict().values())


def test_receipts_that_evaluate_waited_for_are_given_by_the_next_step_or_flush(serve, join):
    worker = join(serve(net(), max_samples=12), net(), in_flight=2, optimizer=SPEC)
    receipts = []
    for number in range(4):
        backward(worker.model, number)
        receipts.append(worker.step(samples=6))
        follow(worker)
    assert receipts[0] is None
    receipts = [*receipts[1:], *worker.flush()]
    assert [r.reason or r.version for r in receipts] == [1, 2, "budget", "budget"]
    assert worker.flush() == []


def test_none_still_means_gathering_while_a_receipt_waits(serve, join):
    worker = join(serve(net()), net(), update_frequency=2, in_flight=2, optimizer=SPEC)
    versions = []
    for number in range(4):
        backward(worker.model, number)
        receipt = worker.step()
        versions.append(receipt and receipt.version)
        follow(worker)
    assert versions == [None, None, None, 1]
    assert [r.version for r in worker.flush()] == [2]


def test_the_receipt_of_the_rest_that_a_new_optimizer_pushes_is_not_lost(serve, join):
    server, model = serve(net()), net()
    live = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    worker = join(server, model, update_frequency=2, optimizer=live[0])
    backward(model)
    assert worker.step() is None
    history = worker.train(dataloader=[], optimizer=live[1], loss_fn=functional.cross_entropy, progress=False)
    assert server.status()["version"] == 1
    assert history.receipts == {"applied": 1}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_train_notes_the_receipts_of_what_was_pushed_before_it(serve, join, in_flight):
    worker = join(serve(net(), max_samples=6), net(), update_frequency=2, in_flight=in_flight, optimizer=SPEC)
    for number in range(3):
        backward(worker.model, number)
        worker.step(samples=6)
    history = worker.train(
        dataloader=[(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))],
        loss_fn=functional.cross_entropy,
        progress=False,
    )
    assert history.receipts == {"budget": 1} | ({"applied": 1} if in_flight == 2 else {})
    assert (history.stopped, history.steps) == ("budget", 0)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_nothing_holds_the_gradients_of_a_push_when_the_step_has_returned(serve, join, in_flight):
    worker = join(serve(net()), net(), in_flight=in_flight, optimizer=SPEC)
    backward(worker.model)
    gradients = [weakref.ref(p.grad) for p in worker.model.parameters()]
    worker.step()
    gc.collect()
    assert all(gradient() is None for gradient in gradients)


def test_gradients_may_be_written_to_while_their_push_is_in_flight(serve, join):
    server = serve(net())
    worker = join(server, net(), in_flight=2, optimizer=SPEC)
    backward(worker.model)
    gradients = [p.grad for p in worker.model.parameters()]
    wanted = [p - 0.1 * g for p, g in zip(values(worker.model), gradients, strict=True)]
    assert worker.step() is None
    for gradient in gradients:
        gradient.fill_(1e9)
    worker.flush()
    torch.testing.assert_close(values(worker.model), wanted)


def test_a_live_optimizer_with_two_in_flight_ends_at_the_server_s_model(serve, join):
    server = serve(net())
    model = net()
    worker = join(server, model, in_flight=2, optimizer=None)
    worker._steps.use(torch.optim.Adam(model.parameters(), lr=0.01))
    for number in range(5):
        backward(worker.model, number)
        worker.step()
    worker.flush()
    assert server.status()["version"] == 5
    assert same(values(worker.model), server.state_dict().values())


# ---------------------------------------------------------------------------------------- live optimizers


def test_update_frequency_k_is_k_local_steps_and_one_push(serve, join):
    server = serve(net())
    model = net()
    worker = join(server, model, update_frequency=4, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    twin = net()
    plain = torch.optim.Adam(twin.parameters(), lr=0.01)
    for number in range(4):
        for module in (worker.model, twin):
            backward(module, number)
        receipt = worker.step(samples=6)
        plain.step()
        plain.zero_grad()
    assert receipt.version == 1
    assert server.status()["samples"] == 24
    for a, b in zip(worker.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_after_a_rejection_a_live_optimizer_goes_on_as_if_the_push_had_not_been(serve, join):
    server = serve(net(), max_staleness=0)
    slow_model, fast_model = net(), net()
    slow = join(server, slow_model, optimizer=torch.optim.Adam(slow_model.parameters(), lr=0.01))
    fast = join(server, fast_model, optimizer=torch.optim.SGD(fast_model.parameters(), lr=0.01))
    backward(slow.model, 0)
    assert slow.step().applied
    state = [s["exp_avg"].clone() for s in slow.optimizer.state.values()]
    assert state
    follow(fast)
    backward(fast.model, 1)
    assert fast.step().applied
    backward(slow.model, 2)
    assert slow.step().reason is not None
    assert same([s["exp_avg"] for s in slow.optimizer.state.values()], state)
    assert same(values(slow.model), server.state_dict().values())


@pytest.mark.parametrize("in_flight", [1, 2])
def test_after_two_rejections_in_a_row_a_live_optimizer_is_as_before_both(serve, join, in_flight):
    tiny = offbeat.staleness.GradientFiltering(max_norm=1e-9)
    server, model = serve(net(), staleness_policy=tiny), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = join(server, model, optimizer=optimizer, in_flight=in_flight)
    receipts = []
    for number in range(2):
        backward(model, number)
        receipts.append(worker.step())
    receipts += worker.flush()
    assert [r.applied for r in receipts if r is not None] == [False, False]
    assert not optimizer.state
    assert same(values(model), server.state_dict().values())


@pytest.mark.parametrize("in_flight", [1, 2])
def test_local_steps_that_overflow_are_refused_and_taken_back(serve, join, in_flight):
    server, model = serve(normed()), normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38, momentum=0.9)
    worker = join(server, model, optimizer=optimizer, in_flight=in_flight)
    before = [t.clone() for t in model.state_dict().values()]
    backward(model)
    for p in model.parameters():
        p.grad.mul_(1e6)
    with pytest.raises(NonFiniteError):
        worker.step()
    assert same(model.state_dict().values(), before)
    assert not optimizer.state
    assert server.status()["version"] == 0
    optimizer.param_groups[0]["lr"] = 0.1
    backward(model)
    receipts = [worker.step(), *worker.flush()]
    assert [r.applied for r in receipts if r is not None] == [True]
    assert server.state_dict()["3.num_batches_tracked"] == 1
    assert same(model.state_dict().values(), server.state_dict().values())


@pytest.mark.parametrize("applied", [False, True])
def test_a_push_in_flight_stays_so_where_the_next_steps_overflow(serve, join, applied):
    tiny = offbeat.staleness.GradientFiltering(max_norm=1e9 if applied else 1e-9)
    server, model = serve(normed(), staleness_policy=tiny), normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = join(server, model, optimizer=optimizer, in_flight=2)
    backward(model)
    assert worker.step() is None
    optimizer.param_groups[0]["lr"] = 3e38
    backward(model)
    for p in model.parameters():
        p.grad.mul_(1e6)
    with pytest.raises(NonFiniteError):
        worker.step()
    assert len(optimizer.state) == 6
    assert [r.applied for r in worker.flush()] == [applied]
    assert len(optimizer.state) == (6 if applied else 0)
    held = server.state_dict()
    assert held["3.num_batches_tracked"] == int(applied)
    assert same(values(model), [held[name] for name, _ in model.named_parameters()])


def test_the_server_adds_weight_times_the_difference(serve, join):
    server = serve(net(), staleness_policy=offbeat.staleness.AdaptiveLR(0.5))
    models = [net(), net()]
    one, late = (join(server, m, optimizer=torch.optim.SGD(m.parameters(), lr=0.1)) for m in models)
    for number, worker in enumerate((one, late)):
        backward(worker.model, number)
    late_step = [-0.1 * p.grad for p in late.model.parameters()]
    one.step()
    before = values(one.model)
    receipt = late.step()
    assert (receipt.staleness, receipt.weight, receipt.verdict) == (1, 0.5, "damp")
    for now, then, step in zip(late.model.parameters(), before, late_step, strict=True):
        torch.testing.assert_close(now.detach(), then + 0.5 * step, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "setting",
    [
        {"optimizer": SPEC},
        {"lr_schedule": offbeat.schedule.Cosine(total=10)},
        {"momentum_correction": True},
        {"momentum_correction": False},
    ],
    ids=str,
)
def test_a_live_optimizer_is_refused_together_with_the_server_s(serve, join, setting):
    model = net()
    worker = join(serve(net(), **setting), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=next(iter(setting))):
        worker.train(dataloader=[], optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
    optimizer.step()  # it is the user's again


def test_with_live_optimizers_the_server_has_neither_a_learning_rate_nor_an_optimizer_to_set(serve, join):
    server, model = serve(net()), net()
    worker = join(server, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for use in (lambda: server.set_lr(0.5), lambda: server.set_optimizer(SPEC)):
        with pytest.raises(StateError, match="this run's optimizers are on the workers"):
            use()
    assert server.status()["optimizer"]["runs_on"] == "worker"
    backward(worker.model)
    assert worker.step().applied


def test_gradients_and_differences_do_not_mix_in_one_run(serve, join):
    server = serve(net())
    model = net()
    join(server, net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match="gradient"):
        join(server, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


# ---------------------------------------------------------------------------------------- broken off

WIDE = 1_000_000  # more than a socket holds
MIDDLE_OF_THE_PUSH = 300_000  # bytes, of 16 MB


def wide():
    return nn.Linear(4, WIDE, bias=False)


def broken_off_step(worker, proxy):
    """Press Ctrl-C while the push is under way; what is left of it goes on to the server afterwards."""

    def press():
        proxy.wait_for("holds")
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        worker.step()
    pressing.join()
    proxy.heal()


def square(model):
    """Gradients with which a learning rate of 0.25 halves all parameters."""
    (model.weight**2).sum().backward()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_live_optimizer_s_step_that_was_broken_off_is_applied_once(serve, join, in_flight):
    server, model = serve(wide()), wide()
    with FaultProxy(server.address, plan(Hold(Bytes(MIDDLE_OF_THE_PUSH)))) as proxy:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        worker = join(proxy.address, model, optimizer=optimizer, in_flight=in_flight, reconnect_timeout_s=0)
        read = values(model)[0]
        square(model)
        broken_off_step(worker, proxy)
        halved = values(model)[0] == read / 2  # where the server's answer had come
        assert torch.equal(values(model)[0][~halved], read[~halved])
        assert not halved.all()
        square(model)
        receipt = worker.step()
        receipts = worker.flush()
        assert [r.version for r in receipts] + ([receipt.version] if receipt else []) == [1, 2]
    assert torch.equal(values(model)[0], server.state_dict()["weight"])
    torch.testing.assert_close(values(model)[0], torch.where(halved, read / 4, 0.0))


def test_a_second_ctrl_c_while_the_first_is_met_changes_nothing_of_that(serve, join):
    server, model = serve(wide()), wide()

    def press_again(frame, event, _):
        if event == "call" and frame.f_code.co_name == "lost":
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGINT)

    with FaultProxy(server.address, plan(Hold(Bytes(MIDDLE_OF_THE_PUSH)))) as proxy:
        worker = join(
            proxy.address,
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.25),
            reconnect_timeout_s=0,
        )
        read = values(model)[0]
        square(model)
        sys.setprofile(press_again)
        broken_off_step(worker, proxy)
        assert torch.equal(values(model)[0], read / 2), "the second came too late for this test"
        square(model)  # a quarter of what was read is still to go
        worker.step()
        assert len(worker.flush()) == 1
    assert torch.equal(values(model)[0], server.state_dict()["weight"])
    torch.testing.assert_close(values(model)[0], read / 4)


def test_what_was_written_to_the_module_after_a_push_was_broken_off_is_undone_by_the_next_pull(serve, join):
    server, model = serve(nn.Linear(4, WIDE)), nn.Linear(4, WIDE)
    with FaultProxy(server.address, plan(Hold(Bytes(MIDDLE_OF_THE_PUSH)))) as proxy:
        worker = join(proxy.address, model, optimizer=SPEC, reconnect_timeout_s=0)
        square(model)  # of the weight alone: the bias stays what it is on the server
        broken_off_step(worker, proxy)
        with torch.no_grad():
            model.bias.zero_()
        assert [r.applied for r in worker.flush()] == [True]
        follow(worker)
    assert same(values(model), server.state_dict().values())


def test_what_was_written_to_the_module_is_undone_by_a_step_that_is_rejected_too(serve, join):
    server = serve(net())
    worker = join(server, net())
    backward(worker.model)
    with torch.no_grad():
        worker.model[0].weight.add_(1)
    assert worker.step().reason == "no_optimizer"
    assert same(values(worker.model), server.state_dict().values())


# ---------------------------------------------------------------------------------------- another term


@pytest.mark.parametrize("live", [False, True])
def test_what_was_computed_before_values_were_loaded_is_rejected_and_the_worker_goes_on(serve, join, live):
    server, model = serve(net()), net()
    worker = join(server, model, optimizer=torch.optim.Adam(model.parameters()) if live else SPEC)
    backward(worker.model)
    assert worker.step().applied
    server.load_state_dict(net(7).state_dict())
    backward(worker.model)
    receipt = worker.step()
    assert (receipt.applied, receipt.reason) == (False, "server_rolled_back")
    assert same(values(worker.model), values(net(7)))
    backward(worker.model)
    assert worker.step().applied
    assert not same(values(worker.model), values(net(7)))
    assert same(values(worker.model), server.state_dict().values())


# ---------------------------------------------------------------------------------------- specs


def test_an_equal_spec_of_another_worker_is_fine_and_another_lr_is_refused(serve, join):
    server = serve(net())
    join(server, net(), optimizer=offbeat.optim.SGD(lr=0.1, momentum=0.9))
    join(server, net(), optimizer=offbeat.optim.SGD(lr=0.1, momentum=0.9, dampening=0))
    with pytest.raises(ConfigError, match=r"server\.set_lr or lr_schedule"):
        join(server, net(), optimizer=offbeat.optim.SGD(lr=0.2, momentum=0.9))
    with pytest.raises(ConfigError, match=r"(?s)SGD.*Adam|Adam.*SGD"):
        join(server, net(), optimizer=offbeat.optim.Adam(lr=0.1))


ON_THE_SERVER = "SGD(lr=0.1, momentum=0.9) on the server, its momentum in the workers"
MOMENTUM = offbeat.optim.SGD(lr=0.1, momentum=0.9)


def stepped(worker):
    backward(worker.model)
    worker.step()


def trained(worker, optimizer=None):
    batch = (torch.ones(6, 4), torch.zeros(6, dtype=torch.long))
    worker.train(dataloader=[batch], optimizer=optimizer, loss_fn=functional.cross_entropy, progress=False)


@pytest.mark.parametrize(
    "case",
    [
        (None, lambda model: MOMENTUM, ON_THE_SERVER),
        (MOMENTUM, lambda model: MOMENTUM, ON_THE_SERVER),
        (MOMENTUM, lambda model: None, ON_THE_SERVER),
        (None, lambda model: torch.optim.Adam(model.parameters(), lr=0.5), "Adam(lr=0.5) on the worker"),
    ],
    ids=["the worker brings it", "both have it", "the server has it", "live"],
)
@pytest.mark.parametrize("loop", ["step", "train", "both"])
def test_which_optimizer_runs_where_is_one_info_line(serve, join, caplog, case, loop):
    of_server, of_worker, said = case
    caplog.set_level(logging.INFO, "offbeat")
    model = net()
    optimizer = of_worker(model)
    worker = join(serve(net(), optimizer=of_server), model, optimizer=None if loop == "train" else optimizer)
    for _ in range(2):
        if loop != "train":
            stepped(worker)
        if loop != "step":
            trained(worker, optimizer)
    lines = [r.getMessage() for r in caplog.records if " on the " in r.getMessage()]
    assert len(lines) == 1, lines
    assert said in lines[0]


def test_an_optimizer_that_comes_after_the_first_step_is_said_when_it_is_there(serve, join, caplog):
    caplog.set_level(logging.INFO, "offbeat")
    server = serve(net())
    worker = join(server, net())
    stepped(worker)  # and is rejected
    assert not [r for r in caplog.records if f"worker {worker.id}: optimizer" in r.getMessage()]
    server.set_optimizer(MOMENTUM)
    for _ in range(3):
        stepped(worker)
    said = [r.getMessage() for r in caplog.records if " on the " in r.getMessage()]
    assert said == [f"worker {worker.id}: optimizer {ON_THE_SERVER}"]
