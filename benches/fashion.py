"""Fashion-MNIST in shards that are not alike, trained by a single process or by members that average.

A member goes through its own shard in an order of its own, and all members together have as many samples as
the single process, which has the whole. The rate of everyone's SGD falls in a straight line to 0 over the
samples it is to have.
"""

import functools
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import offbeat
from harness import BenchError
from offbeat.demo import data
from offbeat.demo.models import MLP
from offbeat.demo.samples import Samples, accuracy

NUM_CLASSES = 10
SHARES = (4, 3, 2, 1)
"""Sizes of the members' shards, in proportion."""
QUICK_SHARES = (2, 1)
"""To see that a bench runs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training.

    Attributes:
        seed: Of shards, model and orders.
        epochs: Of all together through all samples.
        skew: How unlike the shards' shares of each class are: the parameter of the gamma distribution by
            which they are drawn; less is more unlike.
        pass_s: Seconds that each member takes to go through its own shard, by sleeping, so that the data of
            all ends at the same time; 0: as fast as it can, and all have the same number of samples.
        lr_factor: Of the rate of the single process, for members.
        averager: Keywords of `AsyncModelAverager`.
        shares: Sizes of the members' shards, in proportion.
    """

    seed: int
    epochs: float
    skew: float = 1.0
    pass_s: float = 0.0
    lr_factor: float = 1.0
    averager: dict[str, Any] = field(default_factory=dict)
    shares: tuple[int, ...] = SHARES


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out.

    Attributes:
        accuracy: On the test part, 0..1.
        rounds: Of averaging.
        seconds: From the first batch to the last.
        samples: That it was trained on.
        spread_s: From the first member's last batch to the last one's; those that are left train alone then.
        frequencies: At each of the rounds, the frequency that followed from it.
    """

    accuracy: float
    rounds: int
    seconds: float
    samples: int
    spread_s: float = 0.0
    frequencies: list[float] = field(default_factory=list)


@functools.cache
def samples() -> Samples:
    """Load what is trained on, once in a process.

    Raises:
        BenchError: If it is not on this machine.
    """
    found = data.load()
    if not found.is_benchmark:
        raise BenchError("Fashion-MNIST is not here: install Debian's package dataset-fashion-mnist")
    return Samples.of(found)


def shards(labels: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
    """Deal out all samples to members: of unlike sizes, and of each class another share to each.

    Args:
        labels: int64, shape ``[N]``.
        plan: Has the seed of the draw, and says how unlike they are.

    Returns:
        By member the indices of its samples, int64.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    torch.manual_seed(plan.seed)  # a gamma distribution takes no generator
    drawn = torch.distributions.Gamma(plan.skew, 1.0).sample((NUM_CLASSES, len(plan.shares)))
    parts: list[list[torch.Tensor]] = [[] for _ in plan.shares]
    for number, weights in enumerate(drawn * torch.tensor(plan.shares)):
        own = (labels == number).nonzero().flatten()
        own = own[torch.randperm(len(own), generator=generator)]
        ends = (weights.cumsum(0) / weights.sum() * len(own)).round().long().tolist()
        for member, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            parts[member].append(own[start:end])
    return [torch.cat(part) for part in parts]


def single(rank: int, plans: list[Plan]) -> Result | None:
    """Train the plan of this rank alone, if there is one."""
    if rank >= len(plans):
        return None
    plan = plans[rank]
    torch.manual_seed(plan.seed)
    model = MLP.build()
    every = torch.arange(len(samples().train_labels))
    total = round(plan.epochs * len(every))
    loop = _Loop(model, every, (plan.seed, rank), total=total, pace_s=0.0, lr=MLP.lr)
    loss_fn = nn.CrossEntropyLoss()
    while (batch := loop.next_batch()) is not None:
        loop.optimizer.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        loop.optimizer.step()
    return Result(accuracy=accuracy(model, samples()), rounds=0, seconds=loop.seconds, samples=loop.done)


def member(rank: int, plan: Plan) -> Result:
    """Train a plan as one of the members."""
    torch.manual_seed(plan.seed)
    loss_fn = nn.CrossEntropyLoss()
    frequencies = []
    labels = samples().train_labels  # which takes seconds the first time: before others wait for this member
    place = {"rank": rank, "world_size": len(plan.shares)}
    with offbeat.AsyncModelAverager(MLP.build(), **place, **plan.averager) as averager:
        own = shards(labels, plan)[rank]
        total = plan.epochs * (len(own) if plan.pass_s else len(labels) / len(plan.shares))
        pace_s = plan.pass_s * MLP.batch_size / len(own)
        lr = MLP.lr * plan.lr_factor
        loop = _Loop(averager.model, own, (plan.seed, rank), total=round(total), pace_s=pace_s, lr=lr)
        before = 0
        while (batch := loop.next_batch()) is not None:
            averager.train_step(inputs=batch[0], targets=batch[1], optimizer=loop.optimizer, loss_fn=loss_fn)
            if averager.averaging_round > before:
                before = averager.averaging_round
                frequencies.append(averager.averaging_frequency)
        seconds = loop.seconds
        averager.flush()
        return Result(
            accuracy=accuracy(averager.model, samples()) if rank == 0 else 0.0,
            rounds=averager.averaging_round,
            seconds=seconds,
            samples=loop.done,
            frequencies=frequencies,
        )


def median(results: list[Result]) -> float:
    """Give the median accuracy, in percent."""
    return 100 * statistics.median(result.accuracy for result in results)


class _Loop:
    """Batches in a random order, at a pace, and the optimizer whose rate falls with them."""

    def __init__(
        self,
        model: nn.Module,
        indices: torch.Tensor,
        seeds: tuple[int, int],
        *,
        total: int,
        pace_s: float,
        lr: float,
    ) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MLP.momentum)
        self._lr = lr
        self.done = 0
        self._indices = indices
        self._total = total
        self._pace_s = pace_s
        self._generator = torch.Generator().manual_seed(1000 * seeds[0] + seeds[1])
        self._order = torch.empty(0, dtype=torch.int64)
        self._never = threading.Event()
        self._began_s = self._due_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began_s

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Give the next batch when it is due, and set its rate; None at the end."""
        if self.done >= self._total:
            return None
        if self._pace_s:
            now_s = time.monotonic()
            self._never.wait(max(0.0, self._due_s - now_s))
            self._due_s = max(now_s, self._due_s) + self._pace_s
        while len(self._order) < MLP.batch_size:
            shuffled = self._indices[torch.randperm(len(self._indices), generator=self._generator)]
            self._order = torch.cat([self._order, shuffled])
        size = min(MLP.batch_size, self._total - self.done)
        chosen, self._order = self._order[:size], self._order[size:]
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * (1.0 - self.done / self._total)
        self.done += size
        return samples().train_images[chosen], samples().train_labels[chosen]
