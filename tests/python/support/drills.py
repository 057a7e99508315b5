"""Runs that something happens to: real training of a small network, with a fault from some step on."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import offbeat
from offbeat.demo.data import load

NUM_STEPS = 600
BATCH_SIZE = 64
LR = 0.05
POINT = 0.01


@dataclass(frozen=True)
class Data:
    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@functools.cache
def data():
    """Fashion-MNIST, or the digits where it is not there: as many as a small network needs."""
    found = load()
    return Data(
        torch.from_numpy(found.train_images[:12000]).flatten(1),
        torch.from_numpy(found.train_labels[:12000]),
        torch.from_numpy(found.test_images).flatten(1),
        torch.from_numpy(found.test_labels),
    )


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(seed, share=slice(None), num_steps=NUM_STEPS, batch_size=BATCH_SIZE):
    """Give the batches of a run, in an order that only the seed says."""
    images, labels = data().images[share], data().labels[share]
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(num_steps):
        if len(order) < batch_size:
            order = torch.randperm(len(images), generator=generator)
        taken, order = order[:batch_size], order[batch_size:]
        yield images[taken].clone(), labels[taken]


@torch.no_grad()
def accuracy(model, change=None):
    images, labels = data().test_images, data().test_labels
    if change is not None:
        images, labels = change(images, labels)
    return (model(images).argmax(1) == labels).float().mean().item()


def cosine(step, num_steps=NUM_STEPS):
    return 0.5 * (1 + math.cos(math.pi * step / num_steps))


def flipped(labels):
    return 9 - labels


class Run:
    """One run in a loop of torch's own: a schedule, a fault, and a guard that the fault knows nothing of."""

    def __init__(self, seed, num_steps=NUM_STEPS):
        self.seed, self.num_steps = seed, num_steps
        self.lr_fault = 1.0
        self.model = network(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: cosine(step, num_steps) * self.lr_fault
        )

    def train(self, fault=None, monitor=None):
        """Give the accuracy at the end; `fault` takes (run, step, images, labels) and gives a batch."""
        for step, batch in enumerate(batches(self.seed, num_steps=self.num_steps)):
            images, labels = batch if fault is None else fault(self, step, *batch)
            loss = functional.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            if monitor is not None and "loss" in monitor.report().series:
                monitor.observe(step, loss=loss.detach())
            self.optimizer.step()
            self.scheduler.step()
        return accuracy(self.model)


class Kept:
    """The same run by a `FaultTolerantTrainer`, which keeps a checkpoint every so many steps."""

    def __init__(
        self, seed, folder, *, checkpoint_frequency=40, wrap=lambda model: model, num_steps=NUM_STEPS
    ):
        self.seed, self.lr_fault, self.num_steps = seed, 1.0, num_steps
        self.model = network(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        self.trainer = offbeat.FaultTolerantTrainer(
            wrap(self.model), folder, checkpoint_frequency, deterministic=True
        )

    def train(self, fault=None, *, change=None, change_in=slice(250, None)):
        """Give the accuracy at the end.

        Args:
            fault: Takes (run, step) after each step of the optimizer.
            change: Takes images and labels, and gives what they are in some steps.
            change_in: These; of what comes after the last the accuracy is, too.
        """
        given = list(batches(self.seed, num_steps=self.num_steps))
        if change is not None:
            given[change_in] = [change(*batch) for batch in given[change_in]]

        def after(*_):
            fault(self, self.trainer.history.steps + 1)

        if fault is not None:
            self.optimizer.register_step_post_hook(after)
        self.trainer.train(
            dataloader=given,
            optimizer=self.optimizer,
            loss_fn=functional.cross_entropy,
            scheduler=torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda n: cosine(n, self.num_steps) * self.lr_fault
            ),
            scheduler_interval="step",
        )
        return accuracy(self.model, change if change_in.stop is None else None)


REPLICAS = 3
"""Members of a process group, each with an averager and a monitor of its own."""

REPLICA_STEPS = 760
"""In 38 rounds: the warm-up's 25 values, each known one round later, and some to judge and to act in."""


def replica(rank, seed, sorted_from=None, is_guarded=False):
    """Be one of them; from a step on the pictures of each one's shard are of a third of the classes.

    Returns:
        The accuracy at the end, the steps of alerts, how many values the monitor had, and the frequency that
        was in force after each step, and after the end.
    """
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    remedy = "increase_sync_frequency" if is_guarded else "alert"
    like = slice(rank, None, REPLICAS)
    by_class = data().labels.argsort().tensor_split(REPLICAS)[rank]
    shard, unlike = (batches(10 * seed + rank, share, REPLICA_STEPS) for share in (like, by_class))
    frequencies = []
    with offbeat.AsyncModelAverager(model, averaging_frequency=20, overlap=False) as averager:
        with offbeat.AsyncTrainingMonitor(
            model, ["parameter_variance"], remediation_strategy=remedy
        ) as monitor:
            for step in range(REPLICA_STEPS):
                images, labels = next(shard if sorted_from is None or step < sorted_from else unlike)
                optimizer.zero_grad()
                functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                averager.step(len(labels), optimizer=optimizer)
                frequencies.append(averager.averaging_frequency)
            report = monitor.report()
        averager.flush()
        frequencies.append(averager.averaging_frequency)
    num_seen = report.series["parameter_variance"].num_seen
    return accuracy(model), [alert.step for alert in report.alerts], num_seen, frequencies


class Crowd:
    """A server with one velocity, and two workers in one thread; in the second's place later a crowd.

    Each of these has its turn so rarely that its gradients are as many updates late as there were in between.
    """

    def __init__(self, stack, seed, *, num_late=30, num_steps=NUM_STEPS):
        self.seed, self.num_steps, self._stack = seed, num_steps, stack
        self.server = stack.enter_context(
            offbeat.ParameterServer(
                network(seed),
                optimizer=offbeat.optim.SGD(lr=0.02, momentum=0.9),
                momentum_correction=False,
                lr_schedule=offbeat.schedule.Cosine(total=2 * num_steps, end_factor=0.5),
            )
        )
        self._fast, self._second = self._join("fast"), [self._join("second")]
        self._num_late = num_late

    def _join(self, name):
        return self._stack.enter_context(
            offbeat.AsyncWorker(self.server.address, network(self.seed), worker_id=name)
        )

    def train(self, *, late_from=None, monitor=None):
        """Give the accuracy at the end; the monitor is told of the staleness of what was applied."""
        given = batches(self.seed, num_steps=2 * self.num_steps)
        for step in range(self.num_steps):
            if step == late_from:
                self._second = [self._join(f"late{i}") for i in range(self._num_late)]
            for worker in (self._fast, self._second[step % len(self._second)]):
                images, labels = next(given)
                functional.cross_entropy(worker.model(images), labels).backward()
                receipt = worker.step(samples=len(labels))
                if monitor is not None and receipt.applied:
                    monitor.observe(step, staleness=receipt.staleness)
        plain = network(self.seed)
        plain.load_state_dict(self.server.state_dict())
        return accuracy(plain)


class Fleet:
    """A parameter server and its workers in one thread, each stepping in its turn: the same in every run."""

    def __init__(self, stack, seed, *, num_workers=4, num_steps=NUM_STEPS, **keywords):
        self.seed, self.num_steps = seed, num_steps
        self.server = stack.enter_context(
            offbeat.ParameterServer(
                network(seed),
                optimizer=offbeat.optim.SGD(lr=LR),
                lr_schedule=offbeat.schedule.Cosine(total=num_workers * num_steps, end_factor=0.3),
                **keywords,
            )
        )
        self.workers = [
            stack.enter_context(offbeat.AsyncWorker(self.server.address, network(seed), worker_id=f"w{i}"))
            for i in range(num_workers)
        ]

    def train(self, fault=None, monitors=None):
        """Give the accuracy at the end; `fault` takes (fleet, step, worker's number, images, labels)."""
        n = len(self.workers)
        shards = [batches(10 * self.seed + i, slice(i, None, n), self.num_steps, 32) for i in range(n)]
        for step in range(self.num_steps):
            for i, worker in enumerate(self.workers):
                images, labels = next(shards[i])
                if fault is not None:
                    images, labels = fault(self, step, i, images, labels)
                loss = functional.cross_entropy(worker.model(images), labels)
                loss.backward()
                if monitors is not None and "loss" in monitors[i].report().series:
                    monitors[i].observe(step, loss=loss.detach())
                worker.step(samples=len(labels))
        plain = network(self.seed)
        plain.load_state_dict(self.server.state_dict())
        return accuracy(plain)


class Uneven(Fleet):
    """Workers whose turns come in an order that only the seed says; the last has half as many as another."""

    def train(self):
        """Give the accuracy at the end."""
        n, num_turns = len(self.workers), len(self.workers) * self.num_steps
        shards = [batches(10 * self.seed + i, slice(i, None, n), num_turns, 32) for i in range(n)]
        speeds = torch.tensor([2.0] * (n - 1) + [1.0])
        order = torch.Generator().manual_seed(self.seed)
        for i in torch.multinomial(speeds, num_turns, replacement=True, generator=order).tolist():
            images, labels = next(shards[i])
            functional.cross_entropy(self.workers[i].model(images), labels).backward()
            self.workers[i].step(samples=len(labels))
        plain = network(self.seed)
        plain.load_state_dict(self.server.state_dict())
        return accuracy(plain)
