"""An optimizer's saved state goes into one of its kind alone, and what it changes is told."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError

LOSS = nn.CrossEntropyLoss()
BATCHES = [(torch.full((4, 6), float(number)), torch.arange(4) % 5) for number in range(6)]
MADE = {
    "averager": functools.partial(offbeat.AsyncModelAverager, averaging_frequency=2, overlap=False),
    "accumulator": functools.partial(offbeat.AsyncGradientAccumulator, accumulation_steps=2),
    "trainer": functools.partial(offbeat.AsyncTrainer, strategy="average"),
    "local trainer": functools.partial(offbeat.AsyncTrainer, strategy="local"),
}
MOMENTUM, PLAIN = optim.SGD(lr=0.1, momentum=0.9), optim.SGD(lr=0.1)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def train(ours, spec, **keywords):
    if isinstance(ours, offbeat.AsyncTrainer):
        ours.train(dataloader=BATCHES, optimizer=spec, loss_fn=LOSS, progress=False, **keywords)
        return
    for inputs, targets in BATCHES:
        ours.train_step(inputs=inputs, targets=targets, optimizer=spec, loss_fn=LOSS)


def trained(kind, spec, **keywords):
    """Give what a life has left: its state and its model's."""
    ours = MADE[kind](model())
    train(ours, spec, **keywords)
    return copy.deepcopy((ours.state_dict(), ours.model.state_dict()))


def begun(kind, values):
    ours = MADE[kind](model())
    ours.model.load_state_dict(values)
    return ours


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize(
    ("before", "other"),
    [
        (MOMENTUM, optim.Adam(lr=0.01)),
        (PLAIN, optim.AdamW(lr=0.01)),
        (optim.Adam(lr=0.01), functools.partial(torch.optim.AdamW, lr=0.01)),
    ],
)
def test_the_state_of_an_optimizer_of_another_kind_is_refused_and_changes_nothing(kind, before, other):
    state, values = trained(kind, before)
    ours = begun(kind, values)
    untouched = ours.state_dict()
    made = "AdamW" if isinstance(other, functools.partial) else type(other).__name__
    told = rf"the optimizer is {made}, and the state's is {type(before).__name__}: give one of that class"
    with pytest.raises(ConfigError, match=told):
        ours.load_state_dict(state, optimizer=other)
    assert ours.optimizer is None
    assert ours.state_dict().keys() == untouched.keys()
    ours.load_state_dict(state, optimizer=before)  # there is room for the right one still
    train(ours, before)


@pytest.mark.parametrize("kind", MADE)
def test_an_optimizer_of_other_groups_is_refused_likewise(kind):
    state, values = trained(kind, PLAIN)
    ours = begun(kind, values)
    with pytest.raises(ConfigError, match=r"the optimizer's groups have \[2, 2\] parameters, and "):
        ours.load_state_dict(state, optimizer=optim.SGD(lr=0.1, groups=[{"pattern": "0.*", "lr": 0.2}]))
    assert ours.optimizer is None


@pytest.mark.parametrize("kind", MADE)
def test_settings_that_are_given_otherwise_than_the_state_has_them_are_told(kind, caplog):
    state, values = trained(kind, MOMENTUM)
    ours = begun(kind, values)
    ours.load_state_dict(state, optimizer=optim.SGD(lr=0.5, momentum=0.8))
    assert (
        "the optimizer's lr is 0.5, and the state's is 0.1; "
        "the optimizer's momentum is 0.8, and the state's is 0.9: what the state has is taken" in caplog.text
    )
    assert ours.optimizer.param_groups[0]["lr"] == 0.1
    caplog.clear()
    ours.optimizer.param_groups[0]["lr"] = 0.3
    ours.model.load_state_dict(values)
    ours.load_state_dict(state)  # nobody has given one: what is gone back from is no wish
    begun(kind, values).load_state_dict(state, optimizer=MOMENTUM)
    assert "the optimizer's" not in caplog.text


@pytest.mark.parametrize(
    "scheduler",
    [
        functools.partial(StepLR, step_size=1, gamma=0.5),
        functools.partial(OneCycleLR, max_lr=1.0, total_steps=9),
    ],
)
def test_what_a_scheduler_has_moved_is_no_other_setting(scheduler, caplog):
    state, values = trained("trainer", MOMENTUM, epochs=2, scheduler=scheduler)
    now = state["optimizer"]["param_groups"][0]["lr"]
    ours = begun("trainer", values)
    ours.load_state_dict(state, optimizer=MOMENTUM, scheduler=scheduler)
    assert ours.optimizer.param_groups[0]["lr"] == now != 0.1
    begun("trainer", values).load_state_dict(
        state, optimizer=optim.SGD(lr=now, momentum=0.9), scheduler=scheduler
    )
    assert "the optimizer's" not in caplog.text


def test_the_state_of_a_scheduler_of_another_class_is_refused_and_changes_nothing(caplog):
    caplog.set_level(logging.WARNING)
    steps, cosine = functools.partial(StepLR, step_size=1), functools.partial(CosineAnnealingLR, T_max=10)
    state, values = trained("trainer", PLAIN, epochs=2, scheduler=steps)
    ours = begun("trainer", values)
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    before = copy.deepcopy(live.state_dict())
    told = "the scheduler is CosineAnnealingLR, and the state's is StepLR: give one of that class"
    with pytest.raises(ConfigError, match=told):
        ours.load_state_dict(state, optimizer=live, scheduler=cosine)
    assert ours.optimizer is None
    assert live.state_dict() == before
    ours.load_state_dict(state, optimizer=live, scheduler=steps)
    with pytest.raises(ConfigError, match=told):  # beside the one that there is by now, too
        ours.load_state_dict(state, scheduler=cosine)
