"""`worker.optimizer`: what schedulers, GradScaler and a loop of one's own find there."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import offbeat
from offbeat.errors import ClosedError, ConfigError
from support.small_net import backward, net, same, values

SPEC = offbeat.optim.SGD(lr=0.1)


def test_the_optimizer_s_step_is_the_worker_s(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    assert isinstance(worker.optimizer, torch.optim.Optimizer)
    backward(worker.model)
    worker.optimizer.step()
    assert server.status()["version"] == 1
    loss = worker.optimizer.step(lambda: backward(worker.model) or 0.5)
    assert loss == 0.5
    assert server.status()["version"] == 2


@pytest.mark.parametrize("live", [False, True])
def test_grad_scaler_steps_and_skips_infinite_steps(serve, join, live):
    server = serve(net())
    model = net()
    worker = join(server, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1) if live else SPEC)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    versions = []
    for spoil in (False, True, False):
        worker.optimizer.zero_grad()
        x = torch.randn(6, 4)
        scaler.scale(functional.cross_entropy(worker.model(x), torch.zeros(6, dtype=torch.long))).backward()
        if spoil:
            worker.model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(worker.optimizer)
        scaler.step(worker.optimizer)
        scaler.update()
        versions.append(server.status()["version"])
    assert versions == [1, 1, 2]
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
    ],
    ids=["StepLR", "LambdaLR", "OneCycleLR", "ReduceLROnPlateau"],
)
def test_a_torch_lr_scheduler_on_the_server_s_optimizer_raises_and_names_lr_schedule(serve, join, schedule):
    worker = join(serve(net()), net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match="lr_schedule="):
        schedule(worker.optimizer).step(1.0)


def test_a_torch_lr_scheduler_works_with_a_live_optimizer(serve, join):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker = join(serve(net()), model, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    backward(worker.model)
    worker.step()
    schedule.step()
    before = values(worker.model)
    backward(worker.model)
    gradient = worker.model[0].weight.grad.clone()
    worker.step()
    torch.testing.assert_close(worker.model[0].weight.detach(), before[0] - 0.1 * gradient)


def test_the_optimizer_s_state_is_that_of_a_live_one(serve, join):
    def made():
        model = net()
        return join(serve(net()), model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))

    one, other = made(), made()
    optimizer = one.optimizer
    backward(one.model)
    one.step()
    assert len(optimizer.state) == 4
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["step"] == 1
    assert saved["param_groups"][0]["lr"] == 0.01
    fresh = other.optimizer
    fresh.load_state_dict(saved)
    assert fresh.state_dict()["state"].keys() == saved["state"].keys()
    for number, worker in enumerate((one, other)):
        worker.model.load_state_dict(net().state_dict())
        backward(worker.model)
        worker.step()
        assert worker.optimizer.state_dict()["state"][0]["step"] == 2, number
    moments = [[s["exp_avg"] for s in o.state.values()] for o in (optimizer, fresh)]
    assert same(*moments)


def test_a_group_added_to_the_optimizer_is_a_live_one_s(serve, join):
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[2].requires_grad_(False)
    worker = join(serve(net()), model, optimizer=optimizer)
    held = worker.optimizer
    held.add_param_group({"params": model[2].parameters(), "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    model[2].requires_grad_(True)
    backward(model)
    wanted = model[2].weight - 0.2 * model[2].weight.grad
    held.step()
    torch.testing.assert_close(model[2].weight, wanted)


def test_state_and_groups_of_the_server_s_optimizer_are_not_to_be_set_here(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match=r"load_state_dict\(\) of worker\.optimizer .* on the server"):
        worker.optimizer.load_state_dict(worker.optimizer.state_dict())
    with pytest.raises(ConfigError, match=r"add_param_group\(\) of worker\.optimizer .* on the server"):
        worker.optimizer.add_param_group({"params": [torch.zeros(2)]})
    assert len(worker.optimizer.param_groups) == 1


def test_the_facade_follows_replaced_parameters(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)
    optimizer = worker.optimizer
    worker.model.load_state_dict(net(3).state_dict(), assign=True)
    worker.model.requires_grad_(True)
    backward(worker.model)
    worker.step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in worker.model.parameters()]


def test_the_facade_has_a_replaced_submodule_before_the_step_that_pushes_its_gradient(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)
    assert worker.optimizer
    worker.model[2] = nn.Linear(8, 2)
    held = worker.optimizer.param_groups[0]["params"]
    assert [id(p) for p in held] == [id(p) for p in worker.model.parameters()]


def test_the_facade_does_not_keep_the_worker(serve):
    server = serve(net())
    worker = offbeat.AsyncWorker(server.address, net(), optimizer=SPEC)
    optimizer, gone = worker.optimizer, weakref.ref(worker)
    del worker
    assert gone() is None, gc.get_referrers(gone())
    with pytest.raises(ClosedError, match="worker is gone"):
        optimizer.step()


def test_a_train_without_an_optimizer_leaves_the_choice_to_a_live_one(serve, join):
    model = net()
    worker = join(serve(net()), model)
    with pytest.raises(ConfigError, match="there is no optimizer"):
        worker.train(dataloader=[], loss_fn=nn.CrossEntropyLoss())
    adam = torch.optim.Adam(model.parameters())
    worker.train(dataloader=[], optimizer=adam, loss_fn=nn.CrossEntropyLoss())
    backward(worker.model)
    assert worker.step().applied
