"""A model to average, and one process that does what all members do."""

import logging
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

import offbeat
from offbeat import optim

LOSS = nn.CrossEntropyLoss()
SPEC = optim.SGD(lr=0.1, momentum=0.9)
METHODS = ["average", "easgd", "diloco", "slowmo", "bmuf"]


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def batch(rank, number):
    """Of one member, as large as nobody else's."""
    random = torch.Generator().manual_seed(1000 * rank + number)
    size = 1 + (3 * rank + number) % 5
    return torch.randn(size, 6, generator=random), torch.randint(5, (size,), generator=random)


def step(trained, live, rank, number):
    inputs, targets = batch(rank, number)
    live.zero_grad()
    LOSS(trained(inputs), targets).backward()
    live.step()
    return len(inputs)


def sick_beside_one_that_has_ended(member, ill_at, **settings):
    """Be the one of two that has ended, or the other, which is not finite for once.

    Returns:
        How often that was told, what the model has in the end, and for each time that members went back
        whether all that a finite one has, and all that the method keeps, stayed as it was.
    """
    torch.manual_seed(member)
    trained = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    stayed = []
    with warned() as told, offbeat.AsyncModelAverager(trained, averaging_frequency=4, **settings) as ours:
        go_back = ours._turns.rounds._go_back

        def watched(*arguments):
            def held():
                tensors = list(trained.state_dict().values())
                for memory in ours._turns.rounds._memories:
                    tensors += [part for kept in ours.method.keeps for part in memory.parts(kept)]
                return [tensor.clone() for tensor in tensors]

            before = held()
            found = go_back(*arguments)
            stayed.append(all(map(torch.equal, before, held())))
            return found

        ours._turns.rounds._go_back = watched
        for number in range((4, 26)[member]):
            random = torch.Generator().manual_seed(100 * member + number)
            inputs, targets = torch.randn(8, 6, generator=random), torch.randint(5, (8,), generator=random)
            if (member, number) == (1, ill_at):
                inputs[0, 0] = float("nan")
            live.zero_grad()
            LOSS(trained(inputs), targets).backward()
            live.step()
            ours.step(len(inputs), optimizer=live)
        ours.flush()
    values = [value.numpy() for name, value in trained.state_dict().items() if "num_" not in name]
    return len([text for text in told if "were not finite" in text]), values, stayed


def arrays(trained):
    return [p.detach().cpu().numpy() for p in trained.parameters()]


class Counter:
    """A model of one number, which begins with 0 and to which each iteration adds as much."""

    def __init__(self, by=1.0, samples=1):
        self.by, self.samples = by, samples
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)

    def train(self, averager, iterations=1):
        for _ in range(iterations):
            with torch.no_grad():
                self.model.weight += self.by
            averager.step(self.samples)

    @property
    def value(self):
        return self.model.weight.item()


def held_number(server):
    """Give what a server holds of a `Counter`."""
    return np.asarray(server.state_dict()["weight"]).item()


class Alone:
    """One process that does what all members do, by the papers' forms, in double precision."""

    def __init__(self, num, method):
        self.num = num
        self.method = method
        self.models = [model() for _ in range(num)]
        self.lives = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]
        self.reference = [p.detach().double().clone() for p in self.models[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.reference]
        self.samples = [0] * num

    def take(self):
        """Give each member's parameters, and what they weigh."""
        own = [[p.detach().double().clone() for p in m.parameters()] for m in self.models]
        weights, self.samples = self.samples, [0] * self.num
        return own, weights

    def lead(self, own, weights, moved):
        """Bring the members from where they were to where the method leads, or as far from where they are."""
        if sum(weights) == 0:
            return
        for place in range(len(self.reference)):
            mean = sum(w * o[place] for w, o in zip(weights, own, strict=True)) / sum(weights)
            targets = self.targets(place, [o[place] for o in own], mean)
            for trained, o, target in zip(self.models, own, targets, strict=True):
                parameter = list(trained.parameters())[place]
                with torch.no_grad():
                    parameter.add_((target - o[place]).float()) if moved else parameter.copy_(target)

    def targets(self, place, own, mean):
        if self.method == "average":
            return [mean] * self.num
        if self.method == "easgd":
            alpha = 0.9 / self.num
            centre = self.reference[place]
            self.reference[place] = centre + alpha * self.num * (mean - centre)
            return [o - alpha * (o - centre) for o in own]
        lr, momentum, looks_ahead = {"diloco": (0.7, 0.9, True), "slowmo": (1.0, 0.5, False)}.get(
            self.method, (1.0, 1 - 1 / self.num, True)
        )
        way = mean - self.reference[place]
        velocity = self.velocity[place] = momentum * self.velocity[place] + way
        self.reference[place] = self.reference[place] + lr * (
            way + momentum * velocity if looks_ahead else velocity
        )
        return [self.reference[place]] * self.num

    def train(self, iterations, frequency, overlap):
        """Train up to the end; give the round that is still to be ended."""
        taken = None
        for number in range(iterations):
            for rank in range(self.num):
                self.samples[rank] += step(self.models[rank], self.lives[rank], rank, number)
            if taken and (number + 1) % frequency == overlap:
                self.lead(*taken, moved=True)
                taken = None
            if (number + 1) % frequency == 0:
                taken = self.take()
                if not overlap:
                    self.lead(*taken, moved=False)
                    taken = None
        return taken


def close(ours, theirs, within=2e-6):
    return all(
        np.abs(a - b).max() <= within * max(np.abs(b).max(), 1e-3) for a, b in zip(ours, theirs, strict=True)
    )


@contextmanager
def warned():
    """Give the texts of what is warned of meanwhile."""
    handler = logging.Handler(logging.WARNING)
    texts = []
    handler.emit = lambda record: texts.append(record.getMessage())
    log = logging.getLogger("offbeat")
    log.addHandler(handler)
    yield texts
    log.removeHandler(handler)
