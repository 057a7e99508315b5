"""An accumulator that is taken up again goes on as if nothing had been, also in the middle of a window."""

import copy
import functools
import io
import re

import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.accumulator.state import KEYS
from offbeat.errors import ConfigError, StateError

LOSS = nn.CrossEntropyLoss()


def model(kind=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).to(kind)


def micro_batch(number):
    random = torch.Generator().manual_seed(number)
    size = 1 + number % 4
    return torch.randn(size, 6, generator=random), torch.randint(5, (size,), generator=random)


def train(ours, numbers, spec):
    for number in numbers:
        inputs, targets = micro_batch(number)
        ours.train_step(
            inputs=inputs.to(ours.model[0].weight.dtype), targets=targets, optimizer=spec, loss_fn=LOSS
        )


def same(one, other):
    return all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("taken_after", [0, 2, 4, 9])  # between windows, and in the middle of one
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [optim.SGD(lr=0.1, momentum=0.9), optim.AdamW(lr=0.01)], ids=repr)
def test_a_round_trip_goes_on_bit_for_bit(spec, kind, taken_after):
    whole = offbeat.AsyncGradientAccumulator(model(kind), 4)
    train(whole, range(18), spec)
    first = offbeat.AsyncGradientAccumulator(model(kind), 4)
    train(first, range(taken_after), spec)
    kept = through_a_file({"model": first.model.state_dict(), "accumulator": first.state_dict()})
    second = offbeat.AsyncGradientAccumulator(model(kind), 4)
    second.model.load_state_dict(kept["model"])
    second.load_state_dict(kept["accumulator"], optimizer=spec if taken_after else None)
    assert second.is_update_step() == first.is_update_step()
    assert second.effective_batch_size == first.effective_batch_size
    train(second, range(taken_after, 18), spec)
    second.flush()
    whole.flush()
    assert second.updates == whole.updates == 5
    assert same(second, whole)


def test_what_an_optimizer_keeps_in_float32_beside_a_bfloat16_model_comes_back_as_it_was():
    spec = functools.partial(torch.optim.NAdam, lr=0.01)
    first, second = (offbeat.AsyncGradientAccumulator(model(torch.bfloat16), 1) for _ in range(2))
    train(first, range(3), spec)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict(), optimizer=spec)
    kept = [[state["mu_product"] for state in one.optimizer.state.values()] for one in (first, second)]
    assert all(map(torch.equal, *kept))
    assert kept[1][0].dtype == torch.float32


def test_a_state_stays_as_it_was_taken_while_training_goes_on():
    ours = offbeat.AsyncGradientAccumulator(model(), 4)
    train(ours, range(2), optim.SGD(lr=0.1))
    state = ours.state_dict()
    before = copy.deepcopy(state["window"])
    train(ours, range(2, 3), optim.SGD(lr=0.1))
    assert state["window"]["batches"] == 2
    assert all(map(torch.equal, state["window"]["gradients"], before["gradients"]))
    other = offbeat.AsyncGradientAccumulator(model(), 4)
    other.load_state_dict(state, optimizer=optim.SGD(lr=0.1))
    train(other, range(2, 3), optim.SGD(lr=0.1))
    assert all(map(torch.equal, state["window"]["gradients"], before["gradients"]))
    for ended in (ours, other):
        ended.close()


def test_what_was_gathered_here_gives_way_to_the_state():
    ours = offbeat.AsyncGradientAccumulator(model(), 2)
    spec = optim.SGD(lr=0.1)
    train(ours, range(2), spec)
    kept = copy.deepcopy((ours.model.state_dict(), ours.state_dict()))
    train(ours, range(2, 3), spec)
    ours.model.load_state_dict(kept[0])
    ours.load_state_dict(kept[1])
    train(ours, range(2, 4), spec)
    whole = offbeat.AsyncGradientAccumulator(model(), 2)
    train(whole, range(4), spec)
    assert same(ours, whole)
    assert ours.updates == 2


def test_a_state_that_does_not_fit_is_refused_with_all_that_is_wrong_and_changes_nothing():
    theirs = offbeat.AsyncGradientAccumulator(nn.Linear(6, 5), 4)
    inputs, targets = micro_batch(1)
    theirs.train_step(inputs=inputs, targets=targets, optimizer=optim.SGD(lr=0.1), loss_fn=LOSS)
    state = theirs.state_dict() | {"size": 3}
    ours = offbeat.AsyncGradientAccumulator(model(), 4, loss_reduction="sum")
    with pytest.raises(ConfigError) as caught:
        ours.load_state_dict(state)
    for what in (
        "there is no optimizer",
        "the state is of one of 3 members, and here are 1",
        "the state's losses are ['mean', False]",
        "it is of another",
    ):
        assert what in str(caught.value)
    assert ours.updates == 0
    assert ours.state_dict()["window"]["batches"] == 0


def test_a_refused_state_leaves_no_optimizer_behind_and_a_wrong_one_is_told_with_the_rest():
    theirs = offbeat.AsyncGradientAccumulator(model(), 4)
    train(theirs, range(5), optim.SGD(lr=0.1))
    state = theirs.state_dict()
    ours = offbeat.AsyncGradientAccumulator(model(), 4)
    with pytest.raises(ConfigError, match="the state is of one of 3 members"):
        ours.load_state_dict(state | {"size": 3}, optimizer=optim.Adam(lr=0.01))
    assert ours.optimizer is None
    with pytest.raises(ConfigError, match=r"3 members.*does not hold the model's parameter '0.weight'"):
        ours.load_state_dict(
            state | {"size": 3}, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        )
    ours.model.load_state_dict(theirs.model.state_dict())
    ours.load_state_dict(state, optimizer=optim.SGD(lr=0.1))
    assert type(ours.optimizer) is torch.optim.SGD


def test_a_model_that_has_not_its_values_back_is_refused_and_nothing_changes():
    theirs, spec = offbeat.AsyncGradientAccumulator(model(), 4), optim.SGD(lr=0.1)
    train(theirs, range(5), spec)
    ours = offbeat.AsyncGradientAccumulator(model(), 4)
    with pytest.raises(
        StateError, match=r"parameter '0\.weight' has other values: load the model's own state"
    ):
        ours.load_state_dict(theirs.state_dict(), optimizer=spec)
    assert (ours.updates, ours.optimizer) == (0, None)
    assert ours.state_dict()["window"]["batches"] == 0
    ours.model.load_state_dict(theirs.model.state_dict())
    ours.load_state_dict(theirs.state_dict(), optimizer=spec)
    for ended in (theirs, ours):
        ended.flush()
    assert same(theirs, ours)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"accumulation_steps": 2}, None),
        ({"base_batch_size": 4, "target_batch_size": 8}, None),
        (
            {"accumulation_steps": 3},
            "updates are of 3 micro-batches of a member, .* and of 2 where the state",
        ),
        ({"base_batch_size": 4, "target_batch_size": 16}, "updates are of 4 micro-batches"),
    ],
)
def test_windows_of_another_length_than_the_states_are_told_of(sizes, told, caplog):
    state = offbeat.AsyncGradientAccumulator(model(), 2).state_dict()
    ours = offbeat.AsyncGradientAccumulator(model(), **sizes)
    ours.load_state_dict(state)
    assert ours.accumulation_steps == sizes.get("accumulation_steps", sizes.get("target_batch_size", 0) // 4)
    assert len(caplog.messages) == (told is not None)
    if told is not None:
        assert re.match(told, caplog.messages[0])


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "a dict without updates, .*"),
        ({"size": 1, "losses": ["mean", False]}, "a dict without updates, .*"),
        (model().state_dict(), "an OrderedDict without updates, .*"),
        (3, "an int without updates, .*"),
        (None, "None"),
    ],
)
def test_what_is_no_state_at_all_is_refused(state, told):
    ours = offbeat.AsyncGradientAccumulator(model(), 4)
    with pytest.raises(ConfigError, match=rf"the state is {told}: give what .*state_dict"):
        ours.load_state_dict(state)


def test_every_state_has_what_is_looked_for():
    ours = offbeat.AsyncGradientAccumulator(model(), 4)
    assert set(ours.state_dict()) == {
        *KEYS,
        "steps",
        "model",
        "classes",
        "settings",
        "dtypes",
        "window_scale",
    }  # older ones lack these
