"""A fragment that is sent at one iteration and merged some later is one of Streaming DiLoCo (2501.18512)."""

import numpy as np
import pytest
import torch

import offbeat
from offbeat.averaging import DiLoCo
from support.averaging import LOSS, arrays, batch, close, model, step
from support.group import together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

EVERY, ITERATIONS = 12, 41
FRAGMENTS = {2: [[0, 1], [2, 3]], 3: [[0], [1, 2], [3]]}
"""Which parameters are each one's, in order, where there are so many."""
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def inner(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.5)


def member(rank, num, overlap, alpha):
    """Give the model after each iteration, and after `flush`."""
    trained = model(seed=rank)  # all start from the first one's
    method, live, course = DiLoCo(fragments=num, merge_alpha=alpha, **OUTER), inner(trained), []
    with offbeat.AsyncModelAverager(
        trained, averaging_frequency=EVERY, method=method, overlap=overlap
    ) as ours:
        for number in range(ITERATIONS):
            ours.step(step(trained, live, rank, number))
            course.append([value.copy() for value in arrays(trained)])
        ours.flush()
    return [*course, arrays(trained)]


class Alone:
    """One process that does what both members do, by the paper's form, in double precision."""

    def __init__(self, num, alpha):
        self.fragments, self.alpha = FRAGMENTS[num], alpha
        self.models = [model().double() for _ in range(2)]
        self.lives = [inner(trained) for trained in self.models]
        self.outer = [p.detach().clone().requires_grad_() for p in self.models[0].parameters()]
        self.optimizers = [torch.optim.SGD([self.outer[p] for p in f], **OUTER) for f in self.fragments]
        self.samples = [[0, 0] for _ in self.fragments]  # of each member, since a fragment was sent last
        self.num_sent = 0

    def train(self, number):
        for rank, (trained, live) in enumerate(zip(self.models, self.lives, strict=True)):
            inputs, targets = batch(rank, number)
            live.zero_grad()
            LOSS(trained(inputs.double()), targets).backward()
            live.step()
            for samples in self.samples:
                samples[rank] += len(inputs)

    def send(self):
        """Take the outer step from what members have now; give what each has sent, by parameter."""
        number = self.num_sent % len(self.fragments)
        weights, self.samples[number] = self.samples[number], [0, 0]
        self.num_sent += 1
        sent = {}
        for place in self.fragments[number]:
            sent[place] = [list(m.parameters())[place].detach().clone() for m in self.models]
            mean = sum(w * own for w, own in zip(weights, sent[place], strict=True)) / sum(weights)
            self.outer[place].grad = self.outer[place].detach() - mean
        self.optimizers[number].step()
        return sent

    def merge(self, sent, alpha):
        """Go on with a share of what each member has by now."""
        with torch.no_grad():
            for place, own in sent.items():
                for trained, before in zip(self.models, own, strict=True):
                    parameter = list(trained.parameters())[place]
                    if alpha is None:
                        parameter += self.outer[place] - before
                    else:
                        parameter.copy_(alpha * parameter + (1 - alpha) * self.outer[place])

    def course(self, overlap):
        """Give both models after each iteration, and after the end."""
        found, between, sent = [], EVERY // len(self.fragments), {}
        for number in range(ITERATIONS):
            self.train(number)
            if (number + 1) % between == overlap:
                self.merge(sent, self.alpha)
                sent = {}
            if (number + 1) % between == 0:
                sent = self.send()
            found.append([[value.copy() for value in arrays(trained)] for trained in self.models])
        assert not sent, "nothing is under way"
        for _ in self.fragments:
            self.merge(self.send(), 0.0)
        return [*found, [arrays(trained) for trained in self.models]]


@pytest.mark.parametrize("alpha", [None, 0.0, 0.25, 0.5])
@pytest.mark.parametrize(("num", "overlap"), [(2, 5), (3, 1)])
def test_a_fragment_is_merged_as_streaming_diloco_has_it(num, overlap, alpha):
    found = together(member, 2, num, overlap, alpha)
    expected = Alone(num, alpha).course(overlap)
    for rank, course in enumerate(found):
        for number, (ours, theirs) in enumerate(zip(course, expected, strict=True)):
            assert close(ours, theirs[rank]), f"member {rank} after iteration {number + 1}"
    (*_, first), (*_, second) = found
    assert all(map(np.array_equal, first, second)), "all end alike"
