"""The demo: each model trained by a single process, then by a server and four unequal workers."""

import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

import offbeat
from offbeat import ParameterServer
from offbeat.demo import data, single
from offbeat.demo.models import TASKS, Task
from offbeat.demo.progress import Progress, Silent
from offbeat.demo.result import AsyncRun, DemoResult, Point, TaskResult, WorkerResult
from offbeat.demo.samples import Samples, accuracy
from offbeat.demo.workers import Crew, Finished, Job, crew
from offbeat.errors import StateError
from offbeat.schedule import Linear

__all__ = ["DemoConfig", "note", "run_demo"]

TICK_S = 0.25
"""How often the server is asked how far the run is."""

STAND_IN_SAMPLES = 76_800
"""What is trained on of the stand-in, which has a fortieth of the pictures."""

QUICK_SAMPLES = 51_200
"""Some seconds of training: with fewer, a stall of the machine may be all that a worker does."""

STALENESS_POLICY = "constant"
"""Without any damping: what is late is to be seen, and costs what it costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """How the demo runs; the defaults are the demo.

    Attributes:
        seed: Of initial values and of orders.
        data_dir: Where Fashion-MNIST is; None looks where it may be, and takes the stand-in if it is nowhere.
        quick: Cut the runs short: to see that it works, not how well.
        num_workers: How many worker processes.
        slowed: How many times slower the last of them is.
    """

    seed: int = 0
    data_dir: Path | None = None
    quick: bool = False
    num_workers: int = 4
    slowed: float = 5.0


def run_demo(config: DemoConfig, progress: Progress | None = None) -> DemoResult:
    """Run the demo.

    Args:
        config: How.
        progress: Where to show how far it is; None for nowhere.

    Raises:
        ConfigError: If there is no data to train on.
        StateError: If a worker fails.
    """
    progress = Silent() if progress is None else progress
    began = time.monotonic()
    images = data.load(config.data_dir)
    samples = Samples.of(images)
    with _one_thread(), crew(config.num_workers, samples) as workers, progress:
        single.warm_up()
        workers.ready()  # before anything is timed
        stage = _Stage(config, samples, workers, progress)
        tasks = [stage.run(_sized(task, config, is_benchmark=images.is_benchmark)) for task in TASKS]
    return DemoResult(
        data=images.name,
        is_benchmark=images.is_benchmark,
        seed=config.seed,
        quick=config.quick,
        seconds=time.monotonic() - began,
        tasks=tasks,
        machine=_machine(),
    )


def _sized(task: Task, config: DemoConfig, *, is_benchmark: bool) -> Task:
    if config.quick:
        return replace(task, num_samples=QUICK_SAMPLES)
    return task if is_benchmark else replace(task, num_samples=STAND_IN_SAMPLES)


class _Stage:
    """What all runs share: the samples, the workers, and who watches."""

    def __init__(self, config: DemoConfig, samples: Samples, workers: Crew, progress: Progress) -> None:
        self._config = config
        self._samples = samples
        self._workers = workers
        self._progress = progress

    def run(self, task: Task) -> TaskResult:
        """Train one model both ways, from the same initial values."""
        torch.manual_seed(self._config.seed)
        model = task.build()
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        self._progress.begin(f"{task.title}, single process", task.num_samples)
        alone = single.train(task, model, self._samples, seed=self._config.seed, report=self._progress.update)
        model.load_state_dict(initial)
        return TaskResult(
            name=task.name,
            title=task.title,
            lr=task.lr,
            momentum=task.momentum,
            batch_size=task.batch_size,
            single=alone,
            asynchronous=self._together(task, model),
        )

    def _together(self, task: Task, model: torch.nn.Module) -> AsyncRun:
        token = secrets.token_hex(16)
        server = ParameterServer(
            model,
            host="127.0.0.1",
            token=token,
            max_samples=task.num_samples,
            lr_schedule=Linear(total=task.num_samples, unit="samples"),
            staleness_policy=STALENESS_POLICY,
        )
        with server:
            jobs = self._jobs(task, server.address, token)
            self._workers.give(jobs)
            self._progress.begin(f"{task.title}, {len(jobs)} workers", task.num_samples)
            began = time.monotonic()
            finished = self._follow(server)
            status = server.status()
            model.load_state_dict(cast(dict[str, torch.Tensor], server.state_dict()), strict=True)
        _check(finished)
        seconds = max(each.began + each.history.seconds for each in finished) - began
        return AsyncRun(
            accuracy=accuracy(model, self._samples),
            seconds=seconds,
            samples=status["samples"],
            curve=_pooled(finished, began, task.log_frequency * task.batch_size),
            workers=[_worker(status, job, seconds) for job in jobs],
            version=status["version"],
            optimizer=status["optimizer"]["summary"],
            staleness_policy=STALENESS_POLICY,
        )

    def _jobs(self, task: Task, address: str, token: str) -> list[Job]:
        num_workers = self._config.num_workers
        return [
            Job(
                task=task,
                address=address,
                token=token,
                worker_id=f"worker-{rank}",
                seed=1 + rank + self._config.seed * num_workers,  # no two alike in neighbouring seeds
                slowed=self._config.slowed if rank == num_workers - 1 else 1.0,
                num_others=num_workers - 1,
            )
            for rank in range(num_workers)
        ]

    def _follow(self, server: ParameterServer) -> list[Finished]:
        """Show how far the run is until every worker has ended it."""
        finished = []
        for result in self._workers.go(tick_s=TICK_S):
            if result is not None:
                finished.append(result)
            status = server.status()
            self._progress.update(status["samples"], note(status))
        return finished


def note(status: Mapping[str, Any]) -> str:
    """Word how a run goes from its server's status: the version, and each worker's speed by name."""
    rates = [f"{worker['id']} {worker['samples_per_s']:,.0f}" for worker in status["workers"]]
    return f"version {status['version']:,}; samples/s: {', '.join(rates) or 'nobody has joined yet'}"


def _check(finished: Sequence[Finished]) -> None:
    """Make sure that the run ended as it should, by its samples."""
    for each in finished:
        if each.history.stopped != "budget":
            raise StateError(
                f"{each.worker_id} stopped by {each.history.stopped!r}, not by the run's samples"
            )


def _pooled(finished: Sequence[Finished], began: float, samples_per_point: int) -> list[Point]:
    """Make one curve of all workers' log lines, each point of about so many samples."""
    lines = []
    for each in finished:
        before = 0
        for record in each.history.records:
            lines.append(
                (each.began + record.seconds - began, record.samples - before, record.metrics["loss"])
            )
            before = record.samples
    total = sum(samples for _, samples, _ in lines)
    num_points = max(1, total // samples_per_point)
    curve: list[Point] = []
    seen = seen_before = 0
    loss = 0.0
    for seconds, samples, mean in sorted(lines):
        seen += samples
        loss += samples * mean
        if seen >= total * (len(curve) + 1) / num_points and seen > seen_before:
            curve.append(Point(seconds, seen, loss / (seen - seen_before)))
            seen_before, loss = seen, 0.0
    return curve


def _worker(status: Mapping[str, Any], job: Job, seconds: float) -> WorkerResult:
    seen = next(worker for worker in status["workers"] if worker["id"] == job.worker_id)
    return WorkerResult(
        id=job.worker_id,
        slowed=job.slowed,
        samples=seen["samples"],
        samples_per_s=seen["samples"] / seconds,
        pushes=seen["pushes"],
        rejected={reason: number for reason, number in seen["rejected"].items() if number},
        mean_staleness=seen["mean_staleness"],
        max_staleness=seen["max_staleness"],
        staleness_histogram=seen["staleness_histogram"],
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread, as each worker does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine() -> dict[str, str]:
    return {
        "cores": str(os.cpu_count()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "offbeat": offbeat.__version__,
    }
