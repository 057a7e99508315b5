"""A trainer's state: what is loaded whole, what is refused, and what a failure leaves as it was."""

import copy
import functools
import re
import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, SequentialLR

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError, StateError
from offbeat.trainer.scheduling import as_it_was_after_failure
from offbeat.trainer.stage import Stage
from offbeat.trainer.trainer import KEYS
from support.trainer_loop import layers, model, plain, same, train


def test_a_state_is_loaded_beside_buffers_that_are_expanded_or_of_inference_mode():
    def made():
        held = model()
        held.register_buffer("flat", torch.ones(1).expand(4), persistent=False)
        with torch.inference_mode():
            held.register_buffer("fixed", torch.ones(2), persistent=False)
        return offbeat.AsyncTrainer(held, strategy="local")

    ours, other = made(), made()
    train(ours, optim.Adam(lr=0.1))
    other.model.load_state_dict(ours.model.state_dict())
    other.load_state_dict(copy.deepcopy(ours.state_dict()), optimizer=optim.Adam(lr=0.1))
    for one in (ours, other):
        train(one, optim.Adam(lr=0.1), epochs=1)
    assert same(ours.model, other.model)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "a dict without epochs, .*"),
        ({"stage": None}, "a dict without epochs, .*"),
        (model().state_dict(), "an OrderedDict without epochs, .*"),
        (3, "an int without epochs, .*"),
        (None, "None"),
    ],
)
def test_what_is_no_state_at_all_is_refused(state, told):
    with pytest.raises(ConfigError, match=rf"the state is {told}: give what .*state_dict"):
        offbeat.AsyncTrainer(model(), strategy="local").load_state_dict(state)


OTHERS = {
    (6, 8, 5): "parameter '0.weight' has other values: load the model's own state before this one",
    (6, 9, 5): "parameter '0.weight' is of shape [9, 6], and the state's was of [8, 6]: build the model that",
    (6, 8, 8, 5): "the optimizer's groups have [6] parameters, and the state's [4]",
}


@pytest.mark.parametrize(
    ("strategy", "others"),
    [(one, other) for one in ("local", "average", "accumulate") for other in OTHERS][1:],
)
def test_a_state_of_another_model_is_refused_and_goes_into_that_one(strategy, others):
    often = {} if strategy == "local" else {"regular_sync_frequency": 3}
    made = functools.partial(offbeat.AsyncTrainer, strategy=strategy, **often)
    ours = made(layers(6, 8, 5))
    schedule = functools.partial(LinearLR, start_factor=0.1)
    train(ours, optim.SGD(lr=0.1, momentum=0.9), epochs=1, scheduler=schedule)
    state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    other = made(layers(*others))
    live = torch.optim.SGD(other.model.parameters(), lr=0.1, momentum=0.9)
    group = dict(live.param_groups[0])
    with pytest.raises((StateError, ConfigError), match=re.escape(OTHERS[others])):
        other.load_state_dict(state, optimizer=live, scheduler=schedule)
    assert live.param_groups == [group]
    assert (other.optimizer, other.history.steps, live.state) == (None, 0, {})
    assert other.state_dict()["stage"] is None
    with pytest.raises(ConfigError, match="there is no optimizer: give optimizer="):
        train(other, None)
    train(other, optim.Adam(lr=0.01), epochs=1)  # as if nothing had been
    assert type(other.optimizer) is torch.optim.Adam
    own = made(layers(6, 8, 5))
    own.model.load_state_dict(values)
    own.load_state_dict(state, optimizer=optim.SGD(lr=0.1, momentum=0.9), scheduler=schedule)
    for trainer in (ours, own):
        train(trainer, None, epochs=1)
    assert same(own.model, ours.model)


class Around(torch.optim.Optimizer):
    """One that remembers nothing itself."""

    state = property(lambda self: self.inner.state, lambda *_: None)

    def __init__(self, params):
        self.inner = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self.told = {"of": self, "optimizers": [self.inner]}
        self.told["told"] = self.told  # which goes round

    def step(self, closure=None):
        return self.inner.step(closure)

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        self.param_groups = self.inner.param_groups


@pytest.mark.parametrize("given", [optim.SGD(lr=0.1, momentum=0.9), Around])
@pytest.mark.parametrize("error", [StateError, RuntimeError, KeyboardInterrupt])
def test_what_breaks_off_while_a_state_is_taken_up_leaves_the_optimizer_as_it_was(error, given, monkeypatch):
    def broken(stage, state, account):
        del state, account
        stage._workshop.live.state.clear()  # as where members of a group accumulate
        raise error

    ours = offbeat.AsyncTrainer(plain())
    train(ours, given, epochs=1)
    state, momenta = copy.deepcopy(ours.state_dict()), copy.deepcopy([*ours.optimizer.state.values()])
    with monkeypatch.context() as patched:
        patched.setattr(Stage, "load_state_dict", broken)
        with pytest.raises(error):
            ours.load_state_dict(state)
    assert len(momenta) == 4
    for entry, before in zip(ours.optimizer.state.values(), momenta, strict=True):
        assert torch.equal(entry["momentum_buffer"], before["momentum_buffer"])
    ours.load_state_dict(state)
    train(ours, None, epochs=1)


def several(num):
    """Give what makes a scheduler of as many others."""

    def made(live):
        parts = [ConstantLR(live, 1 / (number + 2), total_iters=100) for number in range(num)]
        return SequentialLR(live, parts, milestones=list(range(2, num + 1)))

    return made


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("given", [optim.SGD(lr=0.1, momentum=0.9), Around])
def test_a_scheduler_that_does_not_take_its_state_is_refused_and_the_optimizer_is_as_it_was(given, is_there):
    ours, other = (offbeat.AsyncTrainer(plain()) for _ in range(2))
    train(ours, given, epochs=1, scheduler=several(3))
    state = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    if is_there:
        train(other, given, epochs=1, scheduler=several(2))
        live, others = other.optimizer, {}
    else:
        kind = Around if given is Around else functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        live = kind(other.model.parameters())
        others = {"optimizer": live, "scheduler": several(2)}
    other.model.load_state_dict(state[1])
    before, scheduled = copy.deepcopy((live.state_dict(), other.state_dict()["scheduler"]))
    told = (
        r"the SequentialLR does not take the state's \(IndexError: .*\): make it as it was made where the st"
    )
    with pytest.raises(ConfigError, match=told):
        other.load_state_dict(state[0], **others)
    now = live.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert now["state"].keys() == before["state"].keys()
    for number, entry in now["state"].items():
        assert torch.equal(entry["momentum_buffer"], before["state"][number]["momentum_buffer"])
    assert getattr(live, "inner", live).param_groups is live.param_groups
    assert other.optimizer is (live if is_there else None)
    assert other.state_dict()["scheduler"] == scheduled
    train(other, None if is_there else live, epochs=1)


class Factor:
    def __init__(self, by):
        self.by = by

    def __call__(self, epoch):
        return self.by**epoch


def test_a_failure_undoes_what_was_loaded_into_the_function_of_a_scheduler_too():
    def made(by):
        live = torch.optim.SGD(plain().parameters(), lr=0.1)
        return LambdaLR(live, [Factor(by)])

    scheduler, other = made(0.5), made(0.9)
    (function,) = scheduler.lr_lambdas

    def fail():
        with as_it_was_after_failure(scheduler):
            scheduler.load_state_dict(other.state_dict())
            assert function.by == 0.9
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert function.by == 0.5


@pytest.mark.parametrize("lambdas", [None, Factor(0.5)])
def test_a_scheduler_whose_lambdas_are_no_list_is_undone_too(lambdas):
    class Own(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer):
            self.lr_lambdas = lambdas
            super().__init__(optimizer)

        def get_lr(self):
            return [group["lr"] for group in self.optimizer.param_groups]

    scheduler = Own(torch.optim.SGD(plain().parameters(), lr=0.1))

    def fail():
        with as_it_was_after_failure(scheduler):
            scheduler.last_epoch = 7
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert scheduler.last_epoch == 0


class Two(torch.optim.Optimizer):
    """Several as one, whose groups are a tuple, around what cannot be copied and what cannot be read."""

    param_groups = property(lambda self: tuple(group for one in self.both for group in one.param_groups))
    state = property(lambda self: {name: value for one in self.both for name, value in one.state.items()})

    class Unready(torch.optim.Optimizer):
        def __init__(self):  # as one that is set up by what it steps first
            pass

        @property
        def param_groups(self):
            raise RuntimeError("not ready yet")

    def __init__(self, params):
        first, *others = params
        groups = [{"params": [first], "lock": threading.Lock()}], others
        self.both = [torch.optim.SGD(group, lr=0.1) for group in groups]
        self.later = self.Unready()

    def step(self, closure=None):
        for one in self.both:
            one.step(closure)

    def zero_grad(self, set_to_none=True):
        for one in self.both:
            one.zero_grad(set_to_none)


def test_an_optimizer_that_cannot_be_copied_or_read_whole_trains_and_is_as_it_was_after_a_failure():
    def failing(live):
        for one in live.both:
            one.param_groups[0]["lr"] = 9.0
        raise ValueError("the cause")

    ours = offbeat.AsyncTrainer(plain())
    live = Two(ours.model.parameters())
    with pytest.raises(ConfigError, match="ValueError: the cause"):
        train(ours, live, epochs=1, scheduler=failing)
    assert [group["lr"] for group in live.param_groups] == [0.1, 0.1]
    beside = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    beside.other = Two(nn.Linear(2, 2).parameters())
    train(ours, beside, epochs=1)
    assert ours.optimizer is beside


def test_what_is_frozen_may_have_another_shape_where_one_trains_alone(caplog):
    def with_frozen(size):
        head = layers(6, 5)
        return nn.Sequential(head, nn.Linear(5, size).requires_grad_(False)), head

    built, head = with_frozen(5)
    ours = offbeat.AsyncTrainer(built)
    train(ours, torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9), epochs=1)
    state = copy.deepcopy(ours.state_dict())
    built, head = with_frozen(7)
    live = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    offbeat.AsyncTrainer(built).load_state_dict(state, optimizer=live)
    assert len(live.state) == 2
    assert "the model is not the one of the state: parameter" in caplog.text


@pytest.mark.parametrize("num", [1, 3])
def test_more_or_fewer_parameters_beside_what_is_trained_are_warned_of(num, caplog):
    def with_frozen(num):
        head = layers(6, 5)
        return nn.Sequential(head, *(nn.Linear(5, 5).requires_grad_(False) for _ in range(num))), head

    state = None
    for many in (2, num):
        built, head = with_frozen(many)
        trainer, live = offbeat.AsyncTrainer(built), torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
        if state is not None:
            trainer.load_state_dict(state, optimizer=live)
        train(trainer, live, epochs=1)
        state = copy.deepcopy(trainer.state_dict())
    assert (
        f"the model is not the one of the state: it has {2 + 2 * num} parameters, and the state's had 6"
        in (caplog.text)
    )
    assert "other values" not in caplog.text


@pytest.mark.parametrize("seed", [0, 1])
def test_one_that_trains_alone_is_warned_of_other_values_which_may_be_meant(seed, caplog):
    ours = offbeat.AsyncTrainer(plain())
    train(ours, optim.SGD(lr=0.1, momentum=0.9), epochs=1)
    state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    other = offbeat.AsyncTrainer(plain())
    if seed == 0:
        other.model.load_state_dict(values)
    other.load_state_dict(state, optimizer=optim.SGD(lr=0.1, momentum=0.9))
    told = "the model is not the one of the state: parameter '0.weight' has other values. Load the "
    assert (told in caplog.text) == (seed == 1)
    assert other.state_of_now()["stage"]["work"] is None  # who asks for this has the model itself
    other.model.load_state_dict(values)  # later on will do as well
    for trainer in (ours, other):
        train(trainer, None, epochs=1)
    assert same(other.model, ours.model)


def test_a_state_of_before_tells_of_no_model_and_is_taken():
    ours, other = (offbeat.AsyncTrainer(plain()) for _ in range(2))
    train(ours, optim.SGD(lr=0.1), epochs=1)
    state = ours.state_dict()
    assert state["stage"]["work"]["model"]
    other.load_state_dict(state | {"stage": state["stage"] | {"work": None}}, optimizer=optim.SGD(lr=0.1))
    assert other.history.steps == ours.history.steps


def test_every_state_has_what_is_looked_for():
    state = offbeat.AsyncTrainer(model(), strategy="local").state_dict()
    assert set(state) == {*KEYS, "classes", "settings", "dtypes", "handover"}  # older ones lack these
