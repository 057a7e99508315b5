"""The demo's workers: processes that wait for jobs, and train each as one worker of a server."""

import contextlib
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offbeat import AsyncWorker
from offbeat.demo.models import Task
from offbeat.demo.samples import Samples, Shuffled, Slowed
from offbeat.errors import StateError
from offbeat.history import History
from offbeat.optim import SGD

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

__all__ = ["Crew", "Finished", "Job", "crew"]

END_S = 10.0
"""Time for a worker process to end by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One worker's part in one run.

    Attributes:
        task: What is trained.
        address: The server's.
        token: The server's.
        worker_id: The worker's name.
        seed: Of this worker's order of the samples.
        slowed: How many times slower than the others; 1 for as fast as it can.
        num_others: How many other workers the run has.
    """

    task: Task
    address: str
    token: str
    worker_id: str
    seed: int
    slowed: float
    num_others: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """What a worker has to tell at the end of its job.

    Attributes:
        worker_id: Its name.
        began: When it began to train, on the monotonic clock, which processes of one machine share.
        history: What `train` did.
    """

    worker_id: str
    began: float
    history: History


@dataclass(frozen=True, slots=True)
class _Failed:
    worker_id: str
    summary: str
    trace: str


def work(pipe: Connection, samples: Samples) -> None:
    """Be a worker process: ready, job, ready, go, result; until there is no more job."""
    torch.set_num_threads(1)  # cores are what the workers share
    with contextlib.suppress(EOFError, ConnectionError):  # the demo has ended, in whatever way
        pipe.send(None)
        while True:
            pipe.send(_attempt(pipe.recv(), pipe, samples))


def _attempt(job: Job, pipe: Connection, samples: Samples) -> Finished | _Failed:
    try:
        return _do(job, pipe, samples)
    except Exception as error:  # noqa: BLE001  told to the other side, whatever it is
        return _Failed(job.worker_id, f"{type(error).__name__}: {error}", traceback.format_exc())


def _do(job: Job, pipe: Connection, samples: Samples) -> Finished:
    task = job.task
    worker = AsyncWorker(job.address, task.build(), task.batch_size, token=job.token, worker_id=job.worker_id)
    with worker:
        batches = Shuffled(samples, task.batch_size, job.seed)
        pipe.send(None)
        pipe.recv()  # all are ready: go
        slowed = Slowed(batches, job.slowed, version=lambda: worker.version, num_others=job.num_others)
        began = time.monotonic()
        history = worker.train(
            dataloader=batches if job.slowed == 1 else slowed,
            optimizer=SGD(lr=task.lr, momentum=task.momentum),
            loss_fn=nn.CrossEntropyLoss(),
            log_frequency=max(1, round(task.log_frequency / job.slowed)),
            progress=False,
        )
    return Finished(worker_id=job.worker_id, began=began, history=history)


class Crew:
    """The worker processes, seen from the demo."""

    def __init__(self, processes: "Sequence[SpawnProcess]", pipes: Sequence[Connection]) -> None:
        self._processes = processes
        self._pipes = pipes

    def ready(self) -> None:
        """Wait until each process says that it is ready for what comes next.

        Raises:
            StateError: If one fails, or is gone.
        """
        for _ in self._answers(None):
            pass

    def give(self, jobs: Sequence[Job]) -> None:
        """Give each its job, and wait until all have joined their server."""
        for index, job in enumerate(jobs):
            self._send(index, job)
        self.ready()

    def go(self, *, tick_s: float) -> Iterator[Finished | None]:
        """Let all train; gives each result as it comes, and None whenever `tick_s` went by without one."""
        for index in range(len(self._pipes)):
            self._send(index, None)
        for answer in self._answers(tick_s):
            if answer is not None and not isinstance(answer, Finished):
                raise StateError(f"a worker answered {answer!r} where its result was due")
            yield answer

    def _answers(self, tick_s: float | None) -> Iterator[Any]:
        """Give one answer from each, in the order in which they come, and None at each tick."""
        waited_for = dict(enumerate(self._pipes))
        while waited_for:
            answered = wait(list(waited_for.values()), timeout=tick_s)
            if not answered:
                yield None
            for index, pipe in list(waited_for.items()):
                if pipe in answered:
                    del waited_for[index]
                    yield self._receive(index, pipe)

    def _send(self, index: int, what: Job | None) -> None:
        try:
            self._pipes[index].send(what)
        except ConnectionError as error:
            raise self._gone(index) from error

    def _gone(self, index: int) -> StateError:
        self._processes[index].join(END_S)
        return StateError(f"worker process {index} is gone, with exit code {self._processes[index].exitcode}")

    def _receive(self, index: int, pipe: Connection) -> Any:  # noqa: ANN401  whatever was sent
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._gone(index) from error
        if isinstance(answer, _Failed):
            failure = StateError(f"{answer.worker_id} failed: {answer.summary}")
            failure.add_note(answer.trace)
            raise failure
        return answer


@contextmanager
def crew(num_workers: int, samples: Samples) -> Iterator[Crew]:
    """Start worker processes, by "spawn", and end them afterwards.

    Args:
        num_workers: How many.
        samples: What they train on; handed over in shared memory.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        for number in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(theirs, samples), name=f"worker-{number}", daemon=True
            )
            with _deaf_to_ctrl_c():
                process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield Crew(processes, pipes)
    finally:
        for pipe in pipes:
            pipe.close()  # which ends a worker that waits
        for process in processes:
            process.join(END_S)
            if process.is_alive():
                process.terminate()
                process.join(END_S)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Start processes that do not hear the Ctrl-C that a terminal sends to all: the demo ends them itself."""
    if threading.current_thread() is not threading.main_thread():  # only that one can say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
