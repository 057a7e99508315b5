"""What is loaded into members of a server that has gone on is not taken for learnt."""

import copy

import pytest
import torch
from torch import nn

import offbeat
from support.averaging import METHODS, held_number, warned

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("members_in_one_process")]

EVERY = 3
SAVED, HELD = 5.0, 8.0
"""What members have saved, and what the server has come to by then."""


class Member:
    """One of one number, to which each step of an optimizer of torch's adds 1, or nothing."""

    def __init__(self, server, *, lr=1.0, **settings):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, SAVED)
        self.live = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.averager = offbeat.AsyncModelAverager(
            self.model,
            averaging_frequency=EVERY,
            overlap=False,
            server_address=server.address,
            **({"method": "average"} | settings),
        )

    def train(self, *, in_a_loop, iterations=EVERY):
        for _ in range(iterations):
            if in_a_loop:
                self.live.zero_grad()
                self.model(-torch.ones(1, 1)).sum().backward()
                self.live.step()
                self.averager.step(1, optimizer=self.live)
            else:
                self.averager.train_step(
                    inputs=-torch.ones(1, 1),
                    targets=torch.zeros(1),
                    optimizer=self.live,
                    loss_fn=lambda outputs, _: outputs.sum(),
                )

    @property
    def value(self):
        return self.model.weight.item()

    def state(self):
        return copy.deepcopy({"averager": self.averager.state_dict(), "model": self.model.state_dict()})

    def load(self, state, *, with_averager):
        self.model.load_state_dict(state["model"])
        if with_averager:
            self.averager.load_state_dict(state["averager"], optimizer=self.live)


def of_a_life_before(server, **settings):
    """Let a member save its state, train on, end and leave."""
    member = Member(server, **settings)
    state = member.state()
    with torch.no_grad():
        member.model.weight.fill_(HELD)
    member.averager.step(1)
    member.averager.flush()
    member.averager.close()
    return state


def told_of(texts):
    return [text for text in texts if "what was loaded into this model after it had joined, or" in text]


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("with_averager", [False, True])
@pytest.mark.parametrize("settings", [*METHODS, "asynchronous"])
def test_loading_at_a_server_that_has_gone_on_moves_nobodys_model(serve, settings, with_averager, in_a_loop):
    """Members come one after the other, so that what each brings is added to what the others have brought."""
    how = {"method": settings}
    if settings == "asynchronous":  # whose momentum is the server's, and would go on
        how = {"method": offbeat.averaging.DiLoCo(momentum=0.0), "asynchronous": True}
    server = serve(transaction="model")
    state = of_a_life_before(server, **how)
    held = held_number(server)
    assert held != SAVED
    members = [Member(server, lr=0.0, **how) for _ in range(2)]  # nothing is learnt
    with warned() as texts:
        for member in members:
            member.load(state, with_averager=with_averager)
        for member in members:
            member.train(in_a_loop=in_a_loop)
            member.averager.close()
            assert member.value == held_number(server)
    assert held_number(server) == held
    assert len(told_of(texts)) == len(members)  # each once


@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("with_averager", [False, True])
def test_what_is_learnt_after_loading_there_counts(serve, with_averager, in_a_loop):
    server = serve(transaction="model")
    state = of_a_life_before(server)
    members = [Member(server) for _ in range(2)]
    for member in members:
        member.load(state, with_averager=with_averager)
    for number, member in enumerate(members):
        member.train(in_a_loop=in_a_loop)
        member.averager.close()
        assert member.value == held_number(server) == HELD + (number + 1) * EVERY


def test_what_is_learnt_before_the_first_step_is_told_of_counts(serve):
    server = serve(transaction="model")
    of_a_life_before(server)
    member = Member(server)
    with warned() as texts:
        for _ in range(2):
            member.model.weight.grad = -torch.ones(1, 1)
            member.live.step()
        member.train(in_a_loop=True)
    member.averager.close()
    assert held_number(server) == HELD + EVERY + 2
    assert not texts


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("method", ["slowmo", "easgd"])
def test_where_the_server_has_what_is_loaded_rounds_go_on_with_what_they_have_kept(serve, method, is_older):
    server = serve(transaction="model")
    member = Member(server, method=method)
    member.train(in_a_loop=True, iterations=2 * EVERY)
    member.averager.flush()
    state = member.state()
    member.averager.close()
    if is_older:  # it tells of no shapes
        state["averager"]["model"] = [entry[:2] for entry in state["averager"]["model"]]
    again = Member(server, method=method)
    with warned() as texts:
        again.load(state, with_averager=True)
    assert not texts
    assert again.value == held_number(server)
    kept = again.averager.state_dict()["rounds"]
    assert kept["number"] == state["averager"]["rounds"]["number"]
    for name in again.averager.method.keeps:
        ours, theirs = kept["memories"][0][name], state["averager"]["rounds"]["memories"][0][name]
        assert all(map(torch.equal, ours, theirs))
    again.averager.close()


def test_a_state_that_is_loaded_without_its_model_brings_nothing_of_before(serve):
    server = serve(transaction="model")
    state = of_a_life_before(server, method="slowmo")
    held = held_number(server)
    member = Member(server, lr=0.0, method="slowmo")
    member.averager.load_state_dict(state["averager"], optimizer=member.live)
    member.train(in_a_loop=True)
    member.averager.close()
    assert member.value == held_number(server) == held


def test_a_member_that_has_trained_there_keeps_what_it_has_trained(serve):
    server = serve(transaction="model")
    of_a_life_before(server)
    member = Member(server)
    member.train(in_a_loop=True, iterations=EVERY - 1)
    trained = member.value
    with warned() as texts:
        member.averager.load_state_dict(member.averager.state_dict(), optimizer=member.live)
    assert member.value == trained != HELD
    assert not texts
    member.averager.close()
