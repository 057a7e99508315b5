"""The server's delayed Nesterov through real sockets, against its paper's algorithm and torch's optimizer."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError

SHAPES = {"weight": (7, 5), "bias": (7,), "large": (70_000,)}  # the last one in two fragments


class Paper:
    """Liu et al., 2024, algorithm 3, word for word, in double precision."""

    def __init__(self, theta, epsilon, beta, num, c):
        self.theta = theta.astype(np.float64)
        self.epsilon, self.beta, self.num, self.c = epsilon, beta, num, c
        self.m = np.zeros_like(self.theta)
        self.buffer = np.zeros_like(self.theta)
        self.t = 0

    def receive(self, g):
        self.buffer += g
        if (self.t + 1) % self.num == 0:
            self.m = self.beta * self.m + self.buffer / self.num
            momentum = (1 - self.c * self.num + self.c) * self.beta * self.m
            self.theta -= self.epsilon * (momentum + g / self.num)
            self.buffer = np.zeros_like(self.theta)
        else:
            self.theta -= self.epsilon * (self.c * self.beta * self.m + g / self.num)
        self.t += 1


def normal(random):
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("transaction", ["fragment", "model"])
@pytest.mark.parametrize("activation", [0.0, 0.2])
def test_interleaved_arrivals_are_the_papers(transaction, activation):
    random = np.random.default_rng(0)
    start = normal(random)
    spec = optim.DelayedNesterov(lr=0.7, momentum=0.9, delay=3, activation=activation)
    papers = {name: Paper(value, 0.7, 0.9, 3, activation) for name, value in start.items()}
    with ExitStack() as stack:
        server = stack.enter_context(offbeat.ParameterServer(start, optimizer=spec, transaction=transaction))
        members = [stack.enter_context(offbeat.Client(server.address)) for _ in range(4)]
        for member in members:
            member.pull()
        late = []
        for _ in range(40):
            member = members[random.integers(4)]
            way = {name: value for name, value in normal(random).items() if random.random() < 0.8}
            if way:
                late.append(member.push_pull(way).staleness)
                for name, value in way.items():
                    papers[name].receive(value)
        ours = members[0].pull()
    assert max(late) > 3, "the arrivals were not in turn"
    for name, paper in papers.items():
        assert np.abs(ours[name] - paper.theta).max() <= 1e-5 * np.abs(paper.theta).max(), name


def test_without_delay_it_is_torchs_nesterov_bit_for_bit():
    random = np.random.default_rng(1)
    start = normal(random)
    parameters = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in start.items()}
    theirs = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9, nesterov=True, foreach=False)
    with (
        offbeat.ParameterServer(start, optimizer=optim.DelayedNesterov(lr=0.7, momentum=0.9)) as server,
        offbeat.Client(server.address) as client,
    ):
        ours = client.pull()
        for _ in range(50):
            gradients = normal(random)
            client.push_pull(gradients, out=ours)
            for name, parameter in parameters.items():
                parameter.grad = torch.from_numpy(gradients[name])
            theirs.step()
    for name, parameter in parameters.items():
        assert np.array_equal(ours[name].view(np.uint32), parameter.detach().numpy().view(np.uint32)), name


def test_a_server_goes_on_between_two_steps_of_the_momentum(tmp_path):
    random = np.random.default_rng(2)
    start, ways = normal(random), [normal(random) for _ in range(8)]

    def arrive(ways, folder):
        spec = optim.DelayedNesterov(delay=3)
        with (
            offbeat.ParameterServer(start, optimizer=spec, checkpoint_dir=folder) as server,
            offbeat.Client(server.address) as client,
        ):
            client.pull()
            for way in ways:
                client.push(way)
            return client.pull()

    whole = arrive(ways, tmp_path / "whole")
    arrive(ways[:4], tmp_path / "parted")
    parted = arrive(ways[4:], tmp_path / "parted")
    assert all(np.array_equal(parted[name], whole[name]) for name in SHAPES)


def test_numbers_that_mean_nothing_are_refused():
    for keywords, told in [
        ({"delay": 0}, "delay is 0"),
        ({"delay": 2.5}, "delay is 2.5: it is a whole number"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"delay": 4, "activation": 0.3}, "activation is 0.3, and delay 4: it is at most 0.25"),
        ({"weight_decay": 0.1}, "weight_decay"),
    ]:
        with pytest.raises(ConfigError) as refused:
            optim.DelayedNesterov(**keywords)
        assert told in str(refused.value)
    with pytest.raises(ConfigError, match="runs on the server alone"):
        optim.DelayedNesterov(torch.nn.Linear(1, 1).parameters())
    ours = offbeat.AsyncModelAverager(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="runs on the server alone, and this one steps here"):
        ours.step(1, optimizer=optim.DelayedNesterov())
