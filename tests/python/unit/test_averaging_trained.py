"""Which parameters an averager's rounds have, as they are frozen and unfrozen in mid-run."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.averaging.trained import Trained

NUM = 4


def parameters(are_trained=(True,) * NUM):
    return [nn.Parameter(torch.zeros(2), requires_grad=is_one) for is_one in are_trained]


class ByData(torch.optim.Optimizer):
    """One that writes past torch's count, as many that were written by hand do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


FUSED = functools.partial(torch.optim.SGD, lr=1.0, fused=True)


def trained_on(parameter):
    """A step of an optimizer: a gradient, and a write."""
    parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        parameter.add_(1.0)


def places(trained):
    return trained.places(trained.of(range(len(trained.parameters))))


def test_it_begins_with_what_is_trained():
    trained = Trained(parameters([True, False, True, False]))
    assert places(trained) == [0, 2]
    assert trained.wanted() == [True, False, True, False]


def test_one_that_is_frozen_is_wanted_while_it_has_a_gradient():
    every = parameters()
    trained = Trained(every)
    for parameter in every:
        trained_on(parameter)
    every[1].requires_grad_(False)
    assert trained.wanted() == [True] * NUM  # the other one of two networks may be in turn
    every[1].grad = None
    assert trained.wanted() == [True, False, True, True]


def test_one_that_is_in_no_round_is_wanted_once_it_was_trained_since_the_newest():
    every = parameters([True, False, True, True])
    trained = Trained(every)
    every[1].requires_grad_(True)
    trained_on(every[1])
    every[1].requires_grad_(False)
    assert trained.wanted()[1]
    trained.note_written()
    assert not trained.wanted()[1]


@pytest.mark.parametrize("made", [FUSED, ByData], ids=["fused", "by .data"])
def test_one_that_an_optimizer_stepped_is_wanted_also_where_torch_counts_no_write(made):
    every = parameters()
    trained = Trained(every)
    for parameter in every:
        parameter.grad = torch.ones_like(parameter)
    for parameter in every[:2]:
        parameter.requires_grad_(False)
    trained.note_written()
    before = trained.writes().versions
    optimizers = [made(every[:1]), made(every[1:])]  # of which the second has made no step
    optimizers[0].step()
    assert trained.writes().versions == before
    assert every[0][0] != 0
    assert trained.wanted() == [True, False, True, True]
    trained.note_written()
    assert trained.wanted() == [False, False, True, True]


def test_a_step_while_a_round_is_under_way_is_training():
    every = parameters()
    trained = Trained(every)
    every[0].grad = torch.ones_like(every[0])
    every[0].requires_grad_(False)
    live = FUSED(every[:1])
    begun = trained.writes()
    live.step()
    trained.note_written(since=begun, until=trained.writes())
    assert trained.wanted()[0]


def test_what_is_counted_again_has_no_samples_of_before():
    every = parameters([True, True, False, False])
    trained = Trained(every)
    every[2].requires_grad_(True)
    trained.wish(8)
    trained.follow([True, True, True, False], differ=(), samples=8)
    every[3].requires_grad_(True)
    trained.wish(16)
    trained.count_from(4)  # as of a state of before
    assert trained.apart(40) == {2: 36, 3: 36}
    trained.note_alike(40)
    assert trained.apart(44) == {3: 4}
    assert trained.new_among(trained.of(range(NUM)), 44) == {}


def test_what_a_round_itself_writes_is_no_training_and_what_is_trained_meanwhile_is():
    every = parameters([False] * NUM)
    trained = Trained(every)
    begun = trained.writes()
    trained_on(every[0])  # while the round is under way
    every[1].grad = torch.ones(2)
    until = trained.writes()
    with torch.no_grad():
        every[1].copy_(torch.ones(2))  # the round's own
    trained.note_written(since=begun, until=until)
    assert trained.wanted() == [True, False, False, False]


def test_what_is_frozen_where_members_differ_is_averaged_until_all_have_met_with_it():
    trained = Trained(parameters())
    trained.follow([True, False, False, True], differ={2, 3}, samples=8)
    assert places(trained) == [0, 2, 3]
    trained.note_met([trained.parameters[2]], are_alike=False)  # a pair
    assert places(trained) == [0, 2, 3]
    trained.note_met([trained.parameters[2]], are_alike=True)
    assert places(trained) == [0, 3]


def test_what_is_unfrozen_is_apart_with_its_samples_until_a_round_has_it():
    every = parameters([True, True, False, False])
    trained = Trained(every)
    assert trained.apart(40) == {2: 0, 3: 0}
    every[2].requires_grad_(True)
    trained.wish(8)
    every[3].requires_grad_(True)
    trained.wish(16)
    assert trained.apart(40) == {2: 32, 3: 24}  # others may never wish for it
    assert trained.follow([True] * NUM, differ=(), samples=24)
    assert trained.apart(40) == {2: 32, 3: 24}
    assert trained.new_among(trained.of([1, 2, 3]), 48) == {1: 40, 2: 32}
    trained.note_met([every[2]], are_alike=True)
    assert trained.apart(40) == {3: 24}
    assert trained.new_among(trained.of([1, 2, 3]), 48) == {2: 32}


def test_what_was_wished_for_and_is_no_more_begins_anew():
    every = parameters([True, True, True, False])
    trained = Trained(every)
    for samples, is_trained in ((8, True), (16, False), (24, True)):
        every[3].requires_grad_(is_trained)
        trained.wish(samples)
    assert trained.apart(40) == {3: 16}


WISHES = st.lists(st.booleans(), min_size=NUM, max_size=NUM)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("follow"), WISHES, st.sets(st.integers(0, NUM - 1)), st.integers(0, 9)),
        st.tuples(st.just("meet"), WISHES, st.booleans()),
        st.tuples(st.just("end")),
    ),
    max_size=12,
)


@given(WISHES, STEPS)
def test_nothing_that_differs_is_ever_left_out_also_through_a_state(begun, steps):
    """Beside a list of what differs, kept the long way round."""
    trained = Trained(parameters(begun))
    wants, differ = list(begun), set()
    for kind, *what in steps:
        if kind == "follow":
            wanted, held_apart, samples = what
            trained.follow(wanted, differ=held_apart, samples=samples)
            for place, is_one in enumerate(wanted):
                if wants[place] and not is_one and place in held_apart:
                    differ.add(place)
            wants = wanted
        elif kind == "meet":
            are_in, are_alike = what
            met = [place for place in places(trained) if are_in[place]]
            trained.note_met([trained.parameters[place] for place in met], are_alike=are_alike)
            differ -= set(met) if are_alike else set()
            assert not set(met) & set(trained.gained)
        else:
            trained.note_alike(samples=9)
            differ.clear()
        assert set(places(trained)) == {place for place, is_one in enumerate(wants) if is_one} | differ
        again = Trained(parameters())
        again.load_state_dict(trained.state_dict())
        assert places(again) == places(trained)
        assert (again.apart(9), again.gained) == (trained.apart(9), trained.gained)
