"""An optimizer's saved state goes into one of its kind alone, and what it changes is told."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils._pytree import tree_flatten
from torch.utils.data import TensorDataset

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError
from offbeat.local.saved import of_groups

LOSS = nn.CrossEntropyLoss()
BATCHES = [(torch.full((4, 6), float(number)), torch.arange(4) % 5) for number in range(6)]
MADE = {
    "averager": functools.partial(offbeat.AsyncModelAverager, averaging_frequency=2, overlap=False),
    "accumulator": functools.partial(offbeat.AsyncGradientAccumulator, accumulation_steps=2),
    "trainer": functools.partial(offbeat.AsyncTrainer, strategy="average"),
    "local trainer": functools.partial(offbeat.AsyncTrainer, strategy="local"),
}
MOMENTUM, PLAIN = optim.SGD(lr=0.1, momentum=0.9), optim.SGD(lr=0.1)
YOUNGER = {
    "averager": {"classes", "settings", "dtypes"},
    "accumulator": {"classes", "settings", "dtypes", "steps", "model"},
    "trainer": {"classes", "settings", "dtypes"},
    "local trainer": {"classes", "settings", "dtypes"},
}
"""What states of before do not have."""


class Around(torch.optim.Optimizer):
    """One around another, whose state is laid out in its own way."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr=lr, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.param_groups = self.inner.param_groups


class SameAround(Around):
    """Another class of the same layout."""


class Lookahead(Around):
    """Has groups in its state, and no "state"."""

    def state_dict(self):
        inner = self.inner.state_dict()
        return {"fast": inner, "param_groups": inner["param_groups"]}

    def load_state_dict(self, state):
        super().load_state_dict({"inner": state["fast"]})


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


def plain_numbers(state):
    """Give a state in which all can be compared, without the times that go on by themselves."""
    leaves, shape = tree_flatten({name: part for name, part in state.items() if name != "seconds"})
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], str(shape)


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
    untouched = copy.deepcopy(plain_numbers(ours.state_dict()))
    made = "AdamW" if isinstance(other, functools.partial) else type(other).__name__
    told = rf"the optimizer is {made}, and the state's is {type(before).__name__}: give one of that class"
    with pytest.raises(ConfigError, match=told):
        ours.load_state_dict(state, optimizer=other)
    assert ours.optimizer is None
    assert plain_numbers(ours.state_dict()) == untouched
    assert all(torch.equal(value, values[name]) for name, value in ours.model.state_dict().items())
    ours.load_state_dict(state, optimizer=before)  # there is room for the right one still
    train(ours, before)


@pytest.mark.parametrize("kind", MADE)
def test_an_optimizer_of_other_groups_is_refused_likewise(kind):
    state, values = trained(kind, PLAIN)
    ours = begun(kind, values)
    with pytest.raises(ConfigError, match=r"the optimizer's groups have \[2, 2\] parameters, and "):
        ours.load_state_dict(state, optimizer=optim.SGD(lr=0.1, groups=[{"pattern": "0.*", "lr": 0.2}]))
    assert ours.optimizer is None


def test_of_a_group_that_was_added_in_mid_run_it_is_told_when_it_has_to_be_there():
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    live, grown = torch.optim.SGD([first], lr=0.1), torch.optim.SGD([first], lr=0.1)
    grown.add_param_group({"params": [second]})
    told = "the optimizer's groups have [1] parameters, and the checkpoint's [1, 1] (one that was added"
    (found,) = of_groups(live, grown.state_dict())
    assert found.startswith(told)
    assert of_groups(grown, live.state_dict())[0].endswith("have [1, 1] parameters, and the checkpoint's [1]")
    assert of_groups(grown, grown.state_dict()) == []


@pytest.mark.parametrize("kind", MADE)
def test_settings_that_are_given_otherwise_than_the_state_has_them_are_told(kind, caplog):
    state, values = trained(kind, MOMENTUM)
    ours = begun(kind, values)
    ours.load_state_dict(state, optimizer=optim.SGD(lr=0.5, momentum=0.8))
    assert (
        "the optimizer's lr is 0.5, and the state's run began with 0.1; "
        "the optimizer's momentum is 0.8, and the state's run began with 0.9: what the state has is taken"
        in caplog.text
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


def test_all_that_is_of_another_class_is_told_at_once():
    steps, cosine = functools.partial(StepLR, step_size=1), functools.partial(CosineAnnealingLR, T_max=10)
    state, values = trained("trainer", PLAIN, epochs=2, scheduler=steps)
    ours = begun("trainer", values)
    live = torch.optim.Adam(ours.model.parameters(), lr=0.1)
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(
        ConfigError, match=r"the optimizer is Adam, .* the scheduler is CosineAnnealingLR, and the state's is"
    ):
        ours.load_state_dict(state, optimizer=live, scheduler=cosine)
    assert live.state_dict() == before


def moved(live, life):
    """Move what a run moves by hand, or by a schedule that keeps no beginning."""
    for group in live.param_groups:
        group |= {"lr": 0.01 / life, "momentum": 0.5, "weight_decay": 0.1 * life}


@pytest.mark.parametrize("kind", MADE)
def test_what_a_run_has_moved_is_no_other_setting_in_any_later_life(kind, caplog):
    ours = MADE[kind](model())
    for life in (1, 2, 3):
        train(ours, MOMENTUM)
        moved(ours.optimizer, life)
        state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
        ours = begun(kind, values)
        ours.load_state_dict(state, optimizer=MOMENTUM)
        assert ours.optimizer.param_groups[0]["lr"] == 0.01 / life
        assert "the optimizer's" not in caplog.text
    begun(kind, values).load_state_dict(state, optimizer=optim.SGD(lr=0.01 / 3, momentum=0.5))
    assert "the optimizer's lr" not in caplog.text, "it is what the state has by now"
    begun(kind, values).load_state_dict(state, optimizer=optim.SGD(lr=0.5, momentum=0.9))
    assert "the optimizer's lr is 0.5, and the state's run began with 0.1: what" in caplog.text


def test_a_plateau_that_a_trainer_went_down_from_is_no_other_setting(caplog):
    keywords = {"epochs": 3, "scheduler_metric": "loss"}
    plateau = functools.partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=10.0)
    state, values = trained("trainer", PLAIN, scheduler=plateau, **keywords)
    ours = begun("trainer", values)
    ours.load_state_dict(state, optimizer=PLAIN, scheduler=plateau)
    assert ours.optimizer.param_groups[0]["lr"] < 0.1
    assert "the optimizer's" not in caplog.text


@pytest.mark.parametrize("is_first", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", ["averager", "accumulator"])
def test_a_schedule_around_one_sets_no_other_setting_wherever_it_is_made(kind, is_first, caplog):
    def made(module):
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def cycle(live):
        return OneCycleLR(live, max_lr=1.0, total_steps=99)

    before, after = is_first  # the first life's, and the second's
    ours = MADE[kind](model())
    live = made(ours.model)
    scheduler = cycle(live) if before else None
    train(ours, live)
    scheduler = scheduler or cycle(live)
    train(ours, live)
    for _ in range(5):
        scheduler.step()
    state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    ours = begun(kind, values)
    live = made(ours.model)
    if after:
        cycle(live)
    ours.load_state_dict(state, optimizer=live)
    assert "the optimizer's" not in caplog.text


@pytest.mark.parametrize(
    "wrap", [lambda module: module, offbeat.AsyncTrainer, MADE["averager"], MADE["trainer"]]
)
def test_a_run_s_checkpoint_warns_of_nothing_that_the_run_has_moved(wrap, tmp_path, caplog):
    data = TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    for life in (1, 2, 3):
        trainer = offbeat.FaultTolerantTrainer(wrap(model()), tmp_path)

        def loss_fn(outputs, targets, trainer=trainer, life=life):
            moved(trainer.optimizer, life)
            return LOSS(outputs, targets)

        trainer.train(dataset=data, epochs=9, max_steps=life, optimizer=MOMENTUM, loss_fn=loss_fn)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.01 / life
    assert "the optimizer's" not in caplog.text


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("around", [Around, Lookahead])
def test_an_optimizer_whose_state_is_laid_out_otherwise_goes_on_and_is_of_its_class(kind, around):
    given = functools.partial(around, lr=0.1)
    ours = MADE[kind](model())
    train(ours, given)
    state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    again = begun(kind, values)
    with pytest.raises(
        ConfigError, match=f"the optimizer is SameAround, and the state's is {around.__name__}"
    ):
        again.load_state_dict(state, optimizer=functools.partial(SameAround, lr=0.1))
    again.load_state_dict(state, optimizer=given)
    for each in (ours, again):
        train(each, given)
    assert all(map(torch.equal, ours.model.parameters(), again.model.parameters()))


def test_a_run_of_such_an_optimizer_goes_on_from_its_checkpoint(tmp_path):
    data = TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    for steps in (1, 2):
        trainer = offbeat.FaultTolerantTrainer(model(), tmp_path)
        live = Around(trainer.model.parameters(), lr=0.1)
        history = trainer.train(dataset=data, epochs=9, max_steps=steps, optimizer=live, loss_fn=LOSS)
        assert history.steps == steps
    assert live.inner.state


@pytest.mark.parametrize("kind", MADE)
def test_a_state_of_before_is_taken_and_nothing_is_said_of_what_it_does_not_have(kind, caplog):
    ours = MADE[kind](model())
    train(ours, MOMENTUM)
    moved(ours.optimizer, 1)
    state, values = copy.deepcopy((ours.state_dict(), ours.model.state_dict()))
    older = {name: part for name, part in state.items() if name not in YOUNGER[kind]}
    assert len(older) == len(state) - len(YOUNGER[kind])
    again = begun(kind, values)
    again.load_state_dict(older, optimizer=MOMENTUM)
    for each in (ours, again):
        train(each, MOMENTUM)
    assert all(map(torch.equal, ours.model.parameters(), again.model.parameters()))
    assert "the optimizer's" not in caplog.text


@pytest.mark.parametrize("kind", MADE)
def test_an_optimizer_is_made_once_for_a_state(kind):
    made = []

    class Counted(torch.optim.SGD):
        def __init__(self, params, lr):
            made.append(lr)
            super().__init__(params, lr=lr)

    given = functools.partial(Counted, lr=0.1)
    state, values = trained(kind, given)
    made.clear()
    begun(kind, values).load_state_dict(state, optimizer=given)
    assert made == [0.1]
