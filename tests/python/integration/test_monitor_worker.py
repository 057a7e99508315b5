"""A monitor of a worker's model: what it hears, and what the worker leaves out."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import AsyncTrainingMonitor, FaultTolerantTrainer, optim
from offbeat.errors import ConfigError
from offbeat.local.lr_scale import factor_of
from offbeat.monitor.going_back import Rollback
from support.small_net import backward, net, normed, same, values
from support.waiting import wait_for

SGD = optim.SGD(lr=0.1)


def data(num_samples=60, broken=()):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 4, generator=generator)
    inputs[list(broken)] = math.nan
    return TensorDataset(inputs, (torch.nan_to_num(inputs).sum(1) > 0).long())


def seen(monitor, metric):
    return monitor.report().series[metric].values


@pytest.mark.parametrize("live", [False, True])
def test_train_tells_of_losses_staleness_and_gradients(serve, join, live):
    worker = join(serve(net()), net(), local_batch_size=6)
    optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1) if live else SGD
    metrics = ["loss", "gradient_norm", "staleness"]
    with AsyncTrainingMonitor(worker.model, metrics) as monitor:
        worker.train(dataset=data(), optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
        assert [len(seen(monitor, metric)) for metric in metrics] == [10, 10, 10]
        assert all(0 < loss < 2 for loss in seen(monitor, "loss"))
        assert seen(monitor, "staleness") == [0.0] * 10


def test_of_a_push_that_came_too_late_no_staleness_is_told(serve, join):
    server = serve(net(), optimizer=SGD, max_staleness=1)
    ours, theirs = (join(server, net()) for _ in range(2))
    with AsyncTrainingMonitor(ours.model, ["staleness"]) as monitor:
        for num_between, is_applied in ((1, True), (2, False), (0, True)):
            for _ in range(num_between):
                backward(theirs.model)
                theirs.step()
            backward(ours.model)
            assert ours.step().applied is is_applied
        assert seen(monitor, "staleness") == [1.0, 0.0]


def test_a_bound_is_let_go_of_where_what_it_rejects_is_in_the_range_again(serve, join):
    server = serve(net(), optimizer=SGD)
    ours, theirs = (join(server, net()) for _ in range(2))

    def pushes(num, *, num_between):
        for _ in range(num):
            for _ in range(num_between):
                backward(theirs.model)
                theirs.step()
            backward(ours.model)
            yield ours.step()

    assert [receipt.staleness for receipt in pushes(1, num_between=200)] == [200]
    with AsyncTrainingMonitor(
        ours.model, ["staleness"], remediation_strategy="tighten_staleness", acts_on=server,
        warm_up=5, quiet_steps=3,
    ) as monitor:  # fmt: skip
        assert all(receipt.applied for receipt in pushes(10, num_between=10))
        assert [r.applied for r in pushes(5, num_between=40)] == [True, True, True, False, False]
        assert monitor.in_effect == ("tighten_staleness",)
        num_alerts = len(monitor.report().alerts)
        found = [receipt.applied for receipt in pushes(6, num_between=10)]
        assert server.max_staleness is None
        assert found[0] is False
        assert found[-1] is True
        assert len(monitor.report().alerts) == num_alerts, "what is rejected raises none"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("update_frequency", [1, 2])
def test_a_batch_that_is_rejected_is_not_pushed_and_no_step(serve, join, live, update_frequency):
    server = serve(normed())
    worker = join(server, normed(), local_batch_size=6, update_frequency=update_frequency)
    optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1) if live else SGD
    loader = [data().tensors] * 4 + [data(broken=[3]).tensors] + [data().tensors] * 5
    loader = [(inputs[:6], targets[:6]) for inputs, targets in loader]
    with AsyncTrainingMonitor(worker.model, ["non_finite"], remediation_strategy="reject") as monitor:
        history = worker.train(dataloader=loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
        assert monitor.report().num_dropped == 1
    assert history.steps == (9 if live else math.ceil(9 / update_frequency))
    assert history.receipts == {"applied": math.ceil(9 / update_frequency)}
    assert all(bool(value.isfinite().all()) for value in server.state_dict().values())
    assert int(server.state_dict()["3.num_batches_tracked"]) == 9


def test_a_batch_that_is_rejected_leaves_nothing_in_buffers_that_are_the_worker_s_own(serve, join):
    worker = join(serve(normed(), optimizer=SGD), normed(), local_batch_size=6, buffers="local")
    with AsyncTrainingMonitor(worker.model, ["non_finite"], remediation_strategy="reject"):
        for number in range(4):
            inputs = torch.full((6, 4), math.nan) if number == 2 else data().tensors[0][:6]
            worker.model(inputs).square().sum().backward()
            worker.step()
    assert all(bool(buffer.isfinite().all()) for buffer in worker.model.buffers())
    assert int(worker.model[3].num_batches_tracked) == 3


def test_in_a_loop_of_ones_own_a_rejected_batch_has_no_receipt_and_is_followed_by_the_newest_model(
    serve, join
):
    server = serve(net(), optimizer=SGD)
    ours, theirs = (join(server, net(), local_batch_size=6) for _ in range(2))
    with AsyncTrainingMonitor(ours.model, ["non_finite"], remediation_strategy="reject"):
        backward(theirs.model)
        theirs.step()
        backward(ours.model)
        for p in ours.model.parameters():
            p.grad.fill_(math.nan)
        assert ours.step() is None
        assert all(p.grad is None for p in ours.model.parameters())
        assert server.status()["version"] == 1
        assert same(values(ours.model), values(theirs.model))
        backward(ours.model)
        assert ours.step().staleness == 0


def test_clipping_reaches_what_is_pushed(serve, join):
    server = serve(net(), optimizer=optim.SGD(lr=1.0))
    worker = join(server, net(), local_batch_size=6)
    with AsyncTrainingMonitor(
        worker.model, ["gradient_norm"], remediation_strategy="clip", warm_up=10
    ) as monitor:
        for number in range(31):
            before = torch.cat([p.detach().flatten() for p in worker.model.parameters()]).clone()
            backward(worker.model, number % 5)
            if number == 30:
                for p in worker.model.parameters():
                    p.grad.mul_(1e6)
            worker.step()
        after = torch.cat([p.detach().flatten() for p in worker.model.parameters()])
        assert monitor.report().num_clipped == 1
        assert (after - before).norm() < 2 * max(seen(monitor, "gradient_norm")[:30])


def test_a_worker_in_quarantine_follows_and_pushes_nothing(serve, join):
    server = serve(net(), optimizer=SGD)
    ours, theirs = (join(server, net(), local_batch_size=6) for _ in range(2))
    ours.quarantine(ours.id)
    assert ours.is_quarantined
    for number in range(3):
        for worker in (ours, theirs):
            backward(worker.model, number)
            assert (worker.step() is None) == (worker is ours)
    assert server.status()["version"] == 3
    backward(ours.model)
    ours.step()
    assert same(values(ours.model), values(theirs.model))
    ours.release()
    backward(ours.model)
    assert ours.step().applied
    for call in (ours.quarantine, ours.release):
        with pytest.raises(ConfigError, match=r"'somebody', and this is worker"):
            call("somebody")


@pytest.mark.parametrize("is_around", [True, False])
def test_a_batch_that_is_left_out_counts_in_no_mean(is_around, serve, join, tmp_path):
    worker = join(serve(net(), optimizer=SGD), net(), local_batch_size=6)
    losses = []

    def loss_fn(outputs, targets):
        losses.append(outputs.square().mean() * (math.nan if len(losses) == 2 else 1.0))
        return losses[-1]

    run = {"dataloader": DataLoader(data(), batch_size=6), "loss_fn": loss_fn}
    with AsyncTrainingMonitor(worker.model, remediation_strategy="reject"):
        history = (FaultTolerantTrainer(worker, tmp_path) if is_around else worker).train(**run)
    others = [float(loss.detach()) for loss in losses if loss.isfinite()]
    assert (history.skipped, history.steps) == (1, len(others)) == (1, len(losses) - 1)
    assert history.records[-1].metrics["loss"] == pytest.approx(sum(others) / len(others), rel=1e-5)
    worker.quarantine()
    history = worker.train(**run)
    assert (history.skipped, history.steps, history.records) == (len(others) + 1, 0, [])


def test_batches_that_wait_are_not_lost_by_a_quarantine(serve, join):
    server = serve(net(), optimizer=SGD)
    worker = join(server, net(), local_batch_size=6, update_frequency=2)
    backward(worker.model)
    worker.step()
    worker.quarantine()
    backward(worker.model)
    assert worker.step() is None
    worker.release()
    backward(worker.model, 1)
    assert worker.step().applied
    assert server.status()["samples"] == 12


def test_with_two_in_flight_a_batch_is_left_out_and_the_others_settle(serve, join):
    server = serve(net(), optimizer=SGD)
    worker = join(server, net(), local_batch_size=6, in_flight=2)
    with AsyncTrainingMonitor(worker.model, ["non_finite"], remediation_strategy="reject"):
        receipts = []
        for number in range(6):
            backward(worker.model, number)
            if number == 3:
                next(worker.model.parameters()).grad.fill_(math.nan)
            receipts.append(worker.step())
        receipts += worker.flush()
    assert sum(receipt is not None and receipt.applied for receipt in receipts) == 5
    assert server.status()["version"] == 5


@pytest.mark.parametrize("live", [False, True])
def test_who_has_the_learning_rate_is_who_reduces_it(serve, join, live):
    server = serve(
        net(), optimizer=None if live else optim.SGD(lr=0.4, groups=[{"pattern": "*.bias", "lr": 0.2}])
    )
    worker = join(server, net(), local_batch_size=6)
    acts_on = server
    if live:
        worker.train(
            dataset=data(),
            optimizer=torch.optim.SGD(worker.model.parameters(), lr=0.4),
            loss_fn=nn.CrossEntropyLoss(),
        )
        acts_on = worker
    monitor = AsyncTrainingMonitor(
        None if live else worker.model, remediation_strategy="reduce_lr", acts_on=acts_on, warm_up=2
    )
    for step, loss in enumerate([1.0, 1.0, 1.0, 9.0]):
        monitor.observe(step, loss=loss)

    def rates():
        if not live:
            return [group["lr"] for group in server.status()["optimizer"]["spec"]["groups"]]
        before = nn.utils.parameters_to_vector(worker.model.parameters()).detach().clone()
        backward(worker.model)
        gradient = torch.cat([p.grad.flatten() for p in worker.model.parameters()])
        worker.step()
        moved = before - nn.utils.parameters_to_vector(worker.model.parameters()).detach()
        return [float(moved @ gradient / (gradient @ gradient))]

    whole = [0.4] if live else [0.2, 0.4]
    assert rates() == pytest.approx([rate / 2 for rate in whole], rel=1e-4)
    monitor.close()
    assert rates() == pytest.approx(whole, rel=1e-4)


def test_a_worker_that_has_no_optimizer_yet_is_asked_for_it_when_it_is_time_to(serve, join):
    server = serve(net())
    run = {"dataset": data(), "loss_fn": nn.CrossEntropyLoss()}
    for _ in range(2):  # the second one joins where another's runs on a worker already
        worker = join(server, net(), local_batch_size=6)
        assert worker.awaits_optimizer
        with AsyncTrainingMonitor(worker.model, remediation_strategy="reduce_lr", warm_up=10) as monitor:
            live = torch.optim.SGD(worker.model.parameters(), lr=0.4)
            worker.train(**run, optimizer=live)
            assert not worker.awaits_optimizer
            assert monitor.observe(99, loss=1e9)[0].result == "learning rates are multiplied by 0.5: 0.2 now"
            assert factor_of(live) == 0.5


def test_a_worker_whose_optimizer_runs_on_the_server_cannot_reduce_its_rate(serve, join):
    worker = join(serve(net(), optimizer=SGD), net())
    with pytest.raises(ConfigError, match="or the ParameterServer itself"):
        AsyncTrainingMonitor(worker.model, remediation_strategy="reduce_lr")


def test_a_server_without_checkpoints_cannot_go_back(serve):
    with pytest.raises(ConfigError, match="ParameterServer with checkpoint_dir="):
        AsyncTrainingMonitor(remediation_strategy="rollback", acts_on=serve(net()))


def test_a_rollback_goes_to_before_the_alert_and_then_further_back(serve, join, tmp_path):
    server = serve(net(), optimizer=SGD, checkpoint_dir=tmp_path, checkpoint_frequency=4)
    worker = join(server, net(), local_batch_size=6)

    def push_and_keep(version):
        backward(worker.model)
        while worker.step().version != version:
            backward(worker.model)
        wait_for(lambda: server.status()["checkpoints"]["version"] == version)

    monitor = AsyncTrainingMonitor(
        remediation_strategy=["alert", "rollback"], acts_on=server, warm_up=2, patience=1
    )
    push_and_keep(4)
    for step in range(4):
        monitor.observe(step, loss=1.0)
    monitor.observe(4, loss=9.0)  # what is kept from here on is of a run that has gone astray
    push_and_keep(8)
    assert monitor.observe(5, loss=9.0)[0].result == "went back to version 4"
    assert server.status()["term"] == 2
    assert monitor.observe(6, loss=9.0)[0].result == "went back to version 0"
    # None is older, and what was kept since is of what is to be gone back from.
    assert monitor.observe(7, loss=9.0)[0].result == "went back to version 0"


def test_a_rollback_is_never_forward(monkeypatch):
    kept, went = [130, 126, 97], []  # as they are listed, newest first

    class Server:
        keeps_checkpoints = True

        def status(self):
            return {"version": 128}

        def set_lr(self, lr, group=None):
            raise NotImplementedError

        def rollback(self, version=None):
            went.append(version)
            return version

    monkeypatch.setattr("offbeat.monitor.going_back._kept_by", lambda server: list(kept))
    server = Server()
    remedy = Rollback(lambda: [server])
    remedy.begin()
    remedy.take(None)
    remedy.take(None)
    remedy.take(None)
    assert went == [126, 97, 97]  # where none is older, once more to the same
    kept[:] = [140, 130, 126]
    with pytest.raises(ConfigError, match=r"as old as version 97, .*: kept are 126, 130, 140"):
        remedy.take(None)
    remedy.begin()  # of another alert, at which all that is kept is newer: the oldest is nearest to it
    kept[:] = [140, 130]
    remedy.take(None)
    assert went == [126, 97, 97, 130]
    remedy.begin()  # of another, after a return to 30: 40 was left behind, and is older by number alone
    kept[:] = [30, 40, 30, 20]
    remedy.take(None)
    assert went[-1] == 30


def test_a_run_whose_loss_is_infinite_goes_back_and_on_in_the_same_train(serve, join, tmp_path):
    server = serve(net(), optimizer=SGD, checkpoint_dir=tmp_path)
    worker = join(server, net(), local_batch_size=6)
    losses = []

    def loss_fn(outputs, targets):
        losses.append(nn.functional.cross_entropy(outputs, targets))
        return losses[-1] * (math.inf if len(losses) == 4 else 1.0)

    monitor = AsyncTrainingMonitor(worker.model, remediation_strategy="rollback", acts_on=server)
    history = worker.train(dataset=data(), loss_fn=loss_fn)
    assert (history.steps, history.receipts) == (9, {"applied": 9})
    assert monitor.report().alerts[0].result == "went back to version 0"
    assert server.status()["term"] == 2
    assert all(bool(value.isfinite().all()) for value in server.state_dict().values())


def test_what_is_not_finite_is_dropped_until_the_remedy_against_it_has_its_turn(serve, join, tmp_path):
    server = serve(net(), optimizer=SGD, checkpoint_dir=tmp_path)
    worker = join(server, net(), local_batch_size=6)
    losses = []

    def loss_fn(outputs, targets):
        losses.append(nn.functional.cross_entropy(outputs, targets))
        return losses[-1] * (math.inf if len(losses) in (4, 7) else 1.0)

    ladder = ["reduce_lr", "rollback"]
    monitor = AsyncTrainingMonitor(worker.model, remediation_strategy=ladder, acts_on=server)
    history = worker.train(dataset=data(), loss_fn=loss_fn)
    assert (history.steps, history.receipts) == (8, {"applied": 8})
    assert [(alert.action, alert.result) for alert in monitor.report().alerts] == [
        ("reduce_lr", "learning rates are multiplied by 0.5: 0.05 now; the step's gradient is dropped"),
        ("rollback", "went back to version 0"),
    ]
    assert monitor.report().num_dropped == 2
    assert all(bool(value.isfinite().all()) for value in server.state_dict().values())


def test_a_closed_worker_trains_its_model_no_more(serve):
    model = net()
    server = serve(model, optimizer=SGD)
    worker = offbeat.AsyncWorker(server.address, model)
    assert offbeat.trained_by.trainers_of(model) == [worker]
    worker.close()
    assert offbeat.trained_by.trainers_of(model) == []
