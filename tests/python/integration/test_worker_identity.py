"""One worker computes what a plain torch loop computes, bit for bit; four that take turns are as one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import offbeat
from offbeat.staleness import AdaptiveLR, Hinge, Inverse, Polynomial

BATCHES = [16] * 12 + [5]  # the last one is ragged


class Net(nn.Module):
    """BatchNorm, Dropout, a tied and a frozen tensor, an integer buffer, one no forward pass touches."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.conv = nn.Conv1d(1, 2, 3)
        self.average = nn.BatchNorm1d(2, momentum=None)
        self.out = nn.Linear(8, 3)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x):
        x = self.drop(torch.tanh(self.norm(self.embed(x))))
        x = functional.relu(self.again(x) + self.frozen(x))
        x = functional.relu(self.average(self.conv(x[:, None, :])))
        return self.out(x.flatten(1))


def data(sizes=BATCHES):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def plain_loop(model, make, epochs=2):
    """What a user of torch would write."""
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    torch.manual_seed(7)
    for _ in range(epochs):
        for x, y in data():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def same_bits(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        # As integers: 0.0 and -0.0 are equal and not the same.
        both = [t.view(torch.int32) if t.dtype is torch.float32 else t for t in (found[name], tensor)]
        assert torch.equal(*both), f"{name}: {(both[0] != both[1]).sum()} of {tensor.numel()} differ"


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)


SPEC = offbeat.optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-2)

POLICIES = {
    "constant": {},
    "adaptive_lr": {"staleness_policy": "adaptive_lr", "max_staleness": 10},
    "inverse": {"staleness_policy": Inverse()},
    "polynomial": {"staleness_policy": Polynomial(a=0.7)},
    "hinge": {"staleness_policy": Hinge(a=2.0, b=0)},
    "gradient_filtering": {"staleness_policy": "gradient_filtering", "max_staleness": 3},
    "momentum_correction": {"staleness_policy": "momentum_correction"},
    "all": {"staleness_policy": [AdaptiveLR(0.5), Polynomial()], "max_staleness": 0},
    "model": {"transaction": "model"},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_one_worker_is_a_plain_loop_with_nesterov_bit_for_bit(serve, join, policy):
    wanted = plain_loop(net(), sgd)
    server = serve(net(), **POLICIES[policy])
    worker = join(server, net(seed=1), optimizer=SPEC)
    torch.manual_seed(7)
    history = worker.train(dataloader=data(), epochs=2, loss_fn=nn.CrossEntropyLoss(), progress=False)
    assert history.receipts == {"applied": 2 * len(BATCHES)}
    same_bits(worker.model.state_dict(), wanted)
    same_bits(server.state_dict(), wanted)


def test_one_worker_with_a_loop_of_its_own_is_a_plain_loop(serve, join):
    wanted = plain_loop(net(), sgd)
    worker = join(serve(net()), net(seed=1), optimizer=SPEC)
    torch.manual_seed(7)
    for _ in range(2):
        for x, y in data():
            functional.cross_entropy(worker.model(x), y).backward()
            receipt = worker.step(samples=len(x))
            assert (receipt.staleness, receipt.weight) == (0, 1.0)
    same_bits(worker.model.state_dict(), wanted)


SERVER_SIDE = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-2), {"lr": 0.05, "weight_decay": 1e-2}, {}),
    "heavy ball": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        {"lr": 0.05, "momentum": 0.9},
        {"momentum_correction": False},
    ),
}


@pytest.mark.parametrize("kind", SERVER_SIDE)
def test_one_worker_is_a_plain_loop_with_the_server_s_sgd(serve, join, kind):
    make, keywords, settings = SERVER_SIDE[kind]
    wanted = plain_loop(net(), make)
    worker = join(serve(net(), **settings), net(seed=1), optimizer=offbeat.optim.SGD(**keywords))
    torch.manual_seed(7)
    worker.train(dataloader=data(), epochs=2, loss_fn=nn.CrossEntropyLoss(), progress=False)
    same_bits(worker.model.state_dict(), wanted)


@pytest.mark.parametrize("kind", SERVER_SIDE)
def test_four_workers_that_take_strict_turns_are_as_one(serve, join, kind):
    make, keywords, settings = SERVER_SIDE[kind]
    wanted = plain_loop(net(), make)
    server = serve(net(), **settings)
    spec = offbeat.optim.SGD(**keywords)
    workers = [join(server, net(seed=i), optimizer=spec) for i in range(4)]
    torch.manual_seed(7)
    for number, (x, y) in enumerate(data() * 2):
        worker = workers[number % 4]
        worker.evaluate([(x, y)])  # pulls what the others made of the model
        functional.cross_entropy(worker.model(x), y).backward()
        assert worker.step(samples=len(x)).staleness == 0
    same_bits(server.state_dict(), wanted)


def test_a_live_optimizer_of_one_worker_is_a_plain_loop_wherever_the_difference_is_exact(serve, join):
    model = net(seed=1)
    worker = join(serve(net()), model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    twin = net()
    plain = torch.optim.Adam([p for p in twin.parameters() if p.requires_grad], lr=1e-3)
    for number, (x, y) in enumerate(data()):
        torch.manual_seed(number)
        functional.cross_entropy(twin(x), y).backward()
        before = {name: p.detach().clone() for name, p in twin.named_parameters()}
        plain.step()
        plain.zero_grad()
        torch.manual_seed(number)
        if number == 0:
            worker.train(
                dataloader=[(x, y)], optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), progress=False
            )
        else:
            functional.cross_entropy(worker.model(x), y).backward()
            worker.step(samples=len(x))
        for name, p in twin.named_parameters():
            # The server adds the difference: x + (p - x), which float32 rounds twice. It is p, to the bit,
            # where p is within a factor of two of x, and within half a unit of |x| + |p| elsewhere.
            difference = p.detach() - before[name]
            wanted = before[name] + difference
            assert torch.equal(worker.model.get_parameter(name).detach(), wanted), name
            exact = (p.detach() / before[name] >= 0.5) & (p.detach() / before[name] <= 2)
            assert torch.equal(wanted[exact], p.detach()[exact])
            with torch.no_grad():
                p.copy_(wanted)


def test_the_given_server_model_never_changes(serve, join):
    model = net()
    before = copy.deepcopy(model.state_dict())
    worker = join(serve(model), net(seed=1), optimizer=SPEC)
    worker.train(dataloader=data(), loss_fn=nn.CrossEntropyLoss(), progress=False)
    same_bits(model.state_dict(), before)
