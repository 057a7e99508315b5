"""DiLoCo with one slow worker of four: how soon it gets there when nobody waits, and when all wait for all.

    PYTHONPATH=python python benches/async_diloco.py [--seeds 3] [--lrs 0.25 0.5 1.0] [--quick]

Four worker processes train a small MLP on Fashion-MNIST, in shards of 40, 30, 20 and 10 % of its pictures,
and meet at an Offbeat server every 20 iterations. Each is held to a number of milliseconds per iteration,
by sleep, as if it had a machine of its own; the one with the largest shard to five times as many. What is
compared is the time from the first iteration to the first outer parameters that reach 86 % on the test
pictures: synchronous DiLoCo against the same call with `asynchronous=True`, each at the best of the same
outer learning rates. Runs take turns. A fast worker sends the outer parameters whenever it has some, and
this process, which also has the server, judges them.
"""

import argparse
import contextlib
import multiprocessing
import queue
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import torch
from torch import nn

import machine
import offbeat
from offbeat.averaging import DiLoCo
from offbeat.demo import data

SHARES = (0.4, 0.3, 0.2, 0.1)
"""Of the pictures, by worker."""
SLOW = 0
"""The worker that is slowed down: the one with the most pictures."""
REPORTER = 1
"""The worker whose outer parameters are judged."""
SLOWER = 5
"""So many times."""
BATCH = 32
INNER_LR = 3e-3
"""AdamW's, which is DiLoCo's inner optimizer."""
LONGEST_START_S = 120
NAMES = {False: "synchronous", True: "asynchronous"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, as a worker is told of it."""

    address: str
    asynchronous: bool
    lr: float
    seed: int
    every: int
    iteration_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one training has come to; rates are iterations per second of work, by worker."""

    reached_s: float | None
    best: float
    rates: list[float]
    outer_steps: list[int]


def pictures(*, made_up: bool) -> data.ImageData:
    """Load Fashion-MNIST; or make pictures up that take no time, ten patterns with noise."""
    if not made_up:
        return data.load()
    random = np.random.default_rng(0)
    labels = random.integers(10, size=1200)
    images = random.random((10, 1, 28, 28), np.float32)[labels]
    images += random.standard_normal(images.shape, np.float32) / 2
    return data.ImageData(
        train_images=images[:1000],
        train_labels=labels[:1000],
        test_images=images[1000:],
        test_labels=labels[1000:],
        name="made up",
        is_benchmark=False,
    )


def mlp() -> nn.Module:
    """Make a perceptron 784-64-10, so small that four processes do not fight for two cores."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


# ------------------------------------------------------------------------------------------------ workers


def work(
    rank: int,
    jobs: Connection,
    sent: Any,  # noqa: ANN401  a queue of the context's
    stop: Event,
    made_up: bool,  # noqa: FBT001  a process takes no keywords here
) -> None:
    """Train as often as one is told to."""
    torch.set_num_threads(1)
    loaded = pictures(made_up=made_up)
    jobs.send("ready")  # so that they begin together
    with contextlib.suppress(EOFError):  # nobody has a job any more
        while True:
            jobs.send(train(rank, jobs.recv(), loaded, sent, stop))


def train(
    rank: int,
    job: Job,
    loaded: data.ImageData,
    sent: Any,  # noqa: ANN401
    stop: Event,
) -> tuple[float, int]:
    """Train until one is told to stop; give iterations per second of work, and outer steps."""
    order = np.random.default_rng(job.seed).permutation(len(loaded.train_labels))
    bounds = np.cumsum([0, *SHARES]) * len(order)
    shard = order[int(bounds[rank]) : int(bounds[rank + 1])]
    images = torch.from_numpy(loaded.train_images[shard])
    labels = torch.from_numpy(loaded.train_labels[shard])
    torch.manual_seed(job.seed)
    model = mlp()
    live = torch.optim.AdamW(model.parameters(), lr=INNER_LR, fused=True)
    drawn = torch.Generator().manual_seed(1000 * job.seed + rank)
    times_slower = SLOWER if rank == SLOW else 1
    worked_s = 0.0
    with offbeat.AsyncModelAverager(
        model,
        len(SHARES),
        rank,
        averaging_frequency=job.every,
        method=DiLoCo(lr=job.lr),
        overlap=False,
        server_address=job.address,
        asynchronous=job.asynchronous,
    ) as averager:
        began_s = time.monotonic()
        if rank == REPORTER:
            sent.put((began_s, flat(model)))
        while not stop.is_set():
            since_s, before = time.monotonic(), averager.averaging_round
            batch = torch.randint(len(labels), (BATCH,), generator=drawn)
            live.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            live.step()
            # Before the averager's turn: what it waits for others is not this worker's speed.
            full_s = times_slower * max(time.monotonic() - since_s, job.iteration_s)
            time.sleep(max(0.0, since_s + full_s - time.monotonic()))  # noqa: TID251  this is what slows down
            worked_s += time.monotonic() - since_s
            averager.step(BATCH)
            if rank == REPORTER and averager.averaging_round > before:
                sent.put((time.monotonic(), flat(model)))
        return averager.iterations / worked_s, averager.averaging_round


def flat(model: nn.Module) -> np.ndarray[Any, Any]:
    """Copy all parameters."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


# ------------------------------------------------------------------------------------------------ judging


class Judge:
    """Measures outer parameters on the test pictures."""

    def __init__(self, loaded: data.ImageData) -> None:
        self._model = mlp()
        self._images = torch.from_numpy(loaded.test_images)
        self._labels = torch.from_numpy(loaded.test_labels)

    def accuracy(self, values: np.ndarray[Any, Any]) -> float:
        """Measure one vector of parameters."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.from_numpy(values), self._model.parameters())
            return float((self._model(self._images).argmax(1) == self._labels).double().mean())


class Workers:
    """Four processes that train what they are told to."""

    def __init__(self, *, made_up: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._sent = context.Queue()
        self._stop = context.Event()
        self._pipes: list[Connection] = []
        for rank in range(len(SHARES)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(rank, theirs, self._sent, self._stop, made_up), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, job: Job, judge: Judge, *, target: float, longest_s: float) -> Result:
        """Have a job done until its parameters reach the target, or the time is up."""
        self._stop.clear()
        for pipe in self._pipes:
            pipe.send(job)
        began_s, _ = self._sent.get(timeout=LONGEST_START_S)
        reached_s, best = None, 0.0
        while reached_s is None:
            try:
                at_s, values = self._sent.get(timeout=max(0.1, began_s + longest_s - time.monotonic()))
            except queue.Empty:
                break
            accuracy = judge.accuracy(values)
            best = max(best, accuracy)
            if accuracy >= target:
                reached_s = at_s - began_s
            elif at_s - began_s > longest_s:
                break
        self._stop.set()
        answers = [pipe.recv() for pipe in self._pipes]
        while not self._sent.empty():
            self._sent.get()
        rates, outer_steps = zip(*answers, strict=True)
        return Result(reached_s=reached_s, best=best, rates=list(rates), outer_steps=list(outer_steps))

    def close(self) -> None:
        """Let them go."""
        for pipe in self._pipes:
            pipe.close()


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Start a server of one's own for a run."""
    with offbeat.ParameterServer(transaction="model", linger_s=0.1) as server:
        yield server.address


def told(times: list[float | None]) -> str:
    """Write times, where one that is None was not reached."""
    return ", ".join("not reached" if s is None else f"{s:.1f} s" for s in times)


def median(times: list[float | None]) -> float:
    """Give the median, where one that was not reached is later than all."""
    return statistics.median(float("inf") if s is None else s for s in times)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind at each rate")
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="outer learning rates")
    parser.add_argument("--every", type=int, default=20, help="iterations from outer step to outer step")
    parser.add_argument("--iteration-ms", type=float, default=8.0, help="of a worker that is not slow")
    parser.add_argument("--target", type=float, default=0.86, help="test accuracy")
    parser.add_argument("--longest", type=float, default=180.0, help="seconds after which a run is given up")
    parser.add_argument("--quick", action="store_true", help="a look whether all works, without pictures")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.lrs, arguments.target = 1, arguments.lrs[:1], 0.5
        arguments.every, arguments.iteration_ms, arguments.longest = 10, 2.0, 20.0
    torch.set_num_threads(1)
    print(machine.describe())
    judge = Judge(pictures(made_up=arguments.quick))
    workers = Workers(made_up=arguments.quick)
    found: dict[bool, dict[float, list[float | None]]] = {False: {}, True: {}}
    try:
        for seed in range(arguments.seeds):
            for lr in arguments.lrs:
                for asynchronous in (False, True) if seed % 2 == 0 else (True, False):
                    with serving() as address:
                        job = Job(
                            address=address,
                            asynchronous=asynchronous,
                            lr=lr,
                            seed=seed,
                            every=arguments.every,
                            iteration_s=arguments.iteration_ms / 1e3,
                        )
                        result = workers.run(job, judge, target=arguments.target, longest_s=arguments.longest)
                    found[asynchronous].setdefault(lr, []).append(result.reached_s)
                    rates = ", ".join(f"{rate:.1f}" for rate in result.rates)
                    print(
                        f"{NAMES[asynchronous]}, outer lr {lr:g}, seed {seed}: {told([result.reached_s])} "
                        f"(best {result.best:.4f}); iterations/s by worker {rates}; "
                        f"outer steps {result.outer_steps}",
                        flush=True,
                    )
    finally:
        workers.close()
    medians = {
        asynchronous: {lr: median(times) for lr, times in by_lr.items()}
        for asynchronous, by_lr in found.items()
    }
    for asynchronous, by_lr in found.items():
        name = "asynchronous" if asynchronous else "synchronous"
        for lr, times in by_lr.items():
            print(f"{name}, outer lr {lr:g}: median {medians[asynchronous][lr]:.1f} s of {told(times)}")
    best = {asynchronous: min(by_lr.values()) for asynchronous, by_lr in medians.items()}
    print(
        f"to {arguments.target:.0%} at the best of these rates: synchronous {best[False]:.1f} s, "
        f"asynchronous {best[True]:.1f} s, {best[False] / best[True]:.2f} times sooner"
    )


if __name__ == "__main__":
    main()
