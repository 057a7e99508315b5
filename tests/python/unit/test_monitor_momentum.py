"""What becomes of an optimizer's momentum as a rate that a remedy has cut becomes whole again."""

import copy

import pytest
import torch
from torch import nn

from offbeat import AsyncTrainingMonitor
from offbeat.local import lr_scale
from offbeat.local.lr_scale import factor_of

ONE = pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, foreach=True),
        lambda p: torch.optim.RMSprop(p, lr=1.0, momentum=0.9),
    ],
    ids=["sgd", "nesterov", "foreach", "rmsprop"],
)


def pulled(make):
    """Make an optimizer of a value whose gradient is 1; give it, and what makes a step and says how far."""
    value = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    live = make([value])

    def step():
        before = value.detach().clone()
        value.grad = torch.ones_like(value)
        live.step()
        return float((before - value.detach())[0])

    return live, step


def cut(live, **keywords):
    """Make a monitor whose remedy has cut the rate to a thousandth, by values out of their range."""
    given = {"patience": 1, "warm_up": 10, "quiet_steps": 1000, **keywords}
    monitor = AsyncTrainingMonitor(remediation_strategy="reduce_lr", acts_on=live, **given)
    for number in range(60):
        monitor.observe(number, loss=9.0 if number >= 10 else 1.0)
    return monitor


@ONE
@pytest.mark.parametrize("ends", ["reset", "close"])
def test_what_a_low_rate_has_gathered_moves_no_parameter_farther_as_the_rate_is_whole(make, ends):
    live, step = pulled(make)
    monitor = cut(live)
    assert monitor.in_effect == ("reduce_lr",) * 10
    moved = [step() for _ in range(500)][-1]
    assert 0.009 < moved < 0.011, "ten gradients of 1, at a thousandth of a rate of 1"
    getattr(monitor, ends)()
    assert step() < 2, "it was ten at once"
    assert [step() for _ in range(200)][-1] == pytest.approx(10, rel=0.01), "momentum gathers as before"


def test_each_remedy_that_is_let_go_of_leaves_the_parameters_the_pace_that_they_had():
    live, step = pulled(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9))
    monitor = cut(live, quiet_steps=100)
    paces = [step() for _ in range(300)]
    assert paces[-1] == pytest.approx(10 / 1024)
    (buffer,) = (state["momentum_buffer"] for state in live.state.values())
    for number in range(60, 60 + 3000):
        before = buffer.clone(), monitor.in_effect
        monitor.observe(number, loss=1.0)
        num_fewer = len(before[1]) - len(monitor.in_effect)
        assert torch.equal(buffer, before[0] * 0.5**num_fewer)
    assert monitor.in_effect == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=1.0),
        lambda p: torch.optim.SGD(p, lr=1.0),
        lambda p: torch.optim.Adagrad(p, lr=1.0),
        pytest.param(
            lambda p: torch.optim.Muon([nn.Parameter(torch.stack([*p]))], lr=1.0),
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and newer have it"),
        ),
    ],
    ids=["adam", "plain", "adagrad", "muon"],
)
def test_moments_whose_size_does_not_count_stay(make):
    live, _ = pulled(make)
    monitor = cut(live)
    for group in live.param_groups:
        for value in group["params"]:
            value.grad = torch.ones_like(value)
    live.step()
    before = copy.deepcopy(live.state_dict())
    monitor.reset()
    assert str(live.state_dict()) == str(before)


def test_momentum_that_cannot_be_scaled_costs_no_training_and_the_rate_is_whole(caplog):
    live, step = pulled(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9))
    monitor = cut(live)
    step()
    for state in live.state.values():
        with torch.inference_mode():
            state["momentum_buffer"] = torch.ones(2, dtype=torch.float64)
    monitor.reset()
    assert factor_of(live) == 1.0
    assert sum("what reduce_lr has led to meanwhile stays" in said for said in caplog.messages) == 10
    assert "could not be taken back" not in caplog.text


def test_a_rate_is_the_same_to_the_bit_whatever_came_and_went_before():
    """As in a run that was resumed, which knows nothing of that."""
    one, other = (pulled(lambda p: torch.optim.SGD(p, lr=1.0))[0] for _ in range(2))
    for _ in range(3):
        lr_scale.scale(one, 0.1)
    for _ in range(2):
        lr_scale.scale(one, 0.7)
        lr_scale.unscale(one, 0.1)
        lr_scale.scale(one, 0.1)
        lr_scale.unscale(one, 0.7)
    for _ in range(3):
        lr_scale.scale(other, 0.1)
    assert factor_of(one) == factor_of(other)


def test_momentum_of_a_state_that_is_loaded_stays_as_it_was_saved():
    live, step = pulled(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9))
    monitor = cut(live)
    step()
    saved = copy.deepcopy((live.state_dict(), monitor.state_dict()))
    for _ in range(5):
        step()
    live.load_state_dict(copy.deepcopy(saved[0]))
    monitor.load_state_dict(saved[1])
    assert str(live.state_dict()) == str(saved[0])
    assert monitor.in_effect == ("reduce_lr",) * 10
    monitor.reset()
    (buffer,) = (state["momentum_buffer"] for state in live.state.values())
    (of_saved,) = (state["momentum_buffer"] for state in saved[0]["state"].values())
    assert torch.allclose(buffer, of_saved / 1024)
