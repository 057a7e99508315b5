"""Whatever a user gives for an optimizer becomes the torch optimizer that it means, once."""

import functools

import pytest
import torch
from torch import nn

from offbeat import optim
from offbeat.errors import ConfigError
from offbeat.local import LocalOptimizer


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 3)
        self.outside = nn.Linear(3, 3)
        self.outside.weight = self.inside.weight


def held(live):
    return [[id(p) for p in group["params"]] for group in live.param_groups]


def settings(live):
    return [{name: v for name, v in group.items() if name != "params"} for group in live.param_groups]


@pytest.mark.parametrize(
    ("given", "theirs"),
    [
        (optim.SGD(lr=0.1, momentum=0.9), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})),
        (optim.Adam(lr=0.1, betas=(0.5, 0.9)), (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.9)})),
        (optim.AdamW, (torch.optim.AdamW, {})),
        (optim.RMSprop(lr=0.1, centered=True), (torch.optim.RMSprop, {"lr": 0.1, "centered": True})),
        (optim.Adagrad(lr_decay=0.1), (torch.optim.Adagrad, {"lr_decay": 0.1})),
        (torch.optim.NAdam, (torch.optim.NAdam, {})),
        (functools.partial(torch.optim.Adam, lr=0.3, eps=1e-4), (torch.optim.Adam, {"lr": 0.3, "eps": 1e-4})),
        (functools.partial(optim.SGD, lr=0.3), (torch.optim.SGD, {"lr": 0.3})),
    ],
)  # fmt: skip
def test_a_spec_or_a_class_becomes_the_torch_optimizer_of_its_name(given, theirs):
    module = small()
    kind, keywords = theirs
    live, expected = LocalOptimizer(module).use(given), kind(module.parameters(), **keywords)
    assert type(live) is kind
    assert held(live) == held(expected)
    assert settings(live) == settings(expected)


def test_groups_are_found_by_any_name_and_the_first_that_matches_counts():
    module = Tied()
    spec = optim.SGD(
        lr=1.0,
        groups=[{"pattern": "outside.w*", "lr": 2.0}, {"pattern": "*.bia?", "lr": 3.0}, {"pattern": "[a]"}],
    )
    live = LocalOptimizer(torch.compile(module)).use(spec)
    weight, biases = id(module.inside.weight), [id(module.inside.bias), id(module.outside.bias)]
    assert held(live) == [[weight], biases]
    assert [group["lr"] for group in live.param_groups] == [2.0, 3.0]


def test_an_equal_one_keeps_the_state_and_another_is_refused():
    module = small()
    local = LocalOptimizer(module)
    live = local.use(optim.SGD(lr=0.1, momentum=0.9))
    module(torch.ones(2, 3)).sum().backward()
    live.step()
    assert local.use(optim.SGD(lr=0.1, momentum=0.9)) is live
    assert local.use(None) is live
    assert local.use(live) is live
    assert live.state
    for other in (optim.SGD(lr=0.2, momentum=0.9), torch.optim.SGD(module.parameters(), lr=0.1), optim.SGD):
        with pytest.raises(
            ConfigError, match=r"is trained with SGD\(lr=0.1, momentum=0.9.* whose state would be"
        ):
            local.use(other)


def test_a_partial_is_equal_by_what_it_says():
    local = LocalOptimizer(small())
    live = local.use(functools.partial(torch.optim.NAdam, lr=0.1))
    assert local.use(functools.partial(torch.optim.NAdam, lr=0.1)) is live
    with pytest.raises(
        ConfigError, match=r"functools.partial\(NAdam, lr=0.2\), and this model is trained with"
    ):
        local.use(functools.partial(torch.optim.NAdam, lr=0.2))


def test_a_live_one_is_used_as_it_is_if_it_is_of_this_model():
    module = small()
    live = torch.optim.SGD(module.parameters(), lr=0.1)
    assert LocalOptimizer(module).use(live) is live
    with pytest.raises(
        ConfigError, match=r"does not hold the model's parameter '0.weight'.*SGD\(net.parameters"
    ):
        LocalOptimizer(small(), called="net").use(live)
    more = torch.optim.SGD([*module.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match="holds tensors that are not parameters of model"):
        LocalOptimizer(module).use(more)
    module.requires_grad_(requires_grad=False)
    head = torch.optim.SGD(module[2].requires_grad_().parameters(), lr=0.1)
    assert LocalOptimizer(module).use(head) is head, "what is frozen need not be in it"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (None, r"there is no optimizer: give optimizer=offbeat.optim.SGD\(lr=...\)"),
        ("sgd", "optimizer is 'sgd', a string.*did you mean offbeat.optim.SGD"),
        (3, "3 is no optimizer"),
        (torch.optim.LBFGS, r"LBFGS.step\(\) needs a closure"),
        (functools.partial(torch.optim.SGD, lr=-1.0), r"partial\(SGD, lr=-1.0\) cannot be made .* Invalid"),
        (functools.partial(torch.optim.SGD, [], lr=1.0), "holds parameters: leave them out"),
        (functools.partial(torch.optim.SGD, rate=1.0), r"cannot be made for this model: .*'rate'"),
    ],
)  # fmt: skip
def test_what_is_no_optimizer_is_refused_and_leaves_room_for_one(given, what):
    local = LocalOptimizer(small())
    with pytest.raises(ConfigError, match=what):
        local.use(given)
    assert isinstance(local.use(optim.SGD(lr=0.1)), torch.optim.SGD)
