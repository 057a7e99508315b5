"""What the demo found, as plain data: what the report prints, and what `--json` writes."""

from dataclasses import dataclass, field

__all__ = ["AsyncRun", "DemoResult", "Point", "Run", "TaskResult", "WorkerResult"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a loss curve.

    Attributes:
        seconds: Since the run began.
        samples: Trained on since then, all workers together.
        loss: Mean over the samples since the point before.
    """

    seconds: float
    samples: int
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One way of training one model.

    Attributes:
        accuracy: On the test part, 0..1.
        seconds: Wall time of the training alone.
        samples: Trained on.
        curve: Training loss over time.
    """

    accuracy: float
    seconds: float
    samples: int
    curve: list[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerResult:
    """One worker, as the server saw it.

    Attributes:
        id: Its name.
        slowed: How many times slower it was made; 1 for the others.
        samples: In the pushes that were applied.
        samples_per_s: Mean over the run.
        pushes: Sent.
        rejected: By reason. "budget" is what came when the run's samples were used up.
        mean_staleness: Of the pushes applied, in updates.
        max_staleness: The largest of them.
        staleness_histogram: Pushes by staleness, from 0; the last entry holds all above.
    """

    id: str
    slowed: float
    samples: int
    samples_per_s: float
    pushes: int
    rejected: dict[str, int]
    mean_staleness: float
    max_staleness: int
    staleness_histogram: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncRun(Run):
    """The run with a server and workers.

    Attributes:
        workers: One each.
        version: Of the model at the end: updates applied.
        optimizer: The server's, in words.
        staleness_policy: What late pushes were worth.
    """

    workers: list[WorkerResult]
    version: int
    optimizer: str
    staleness_policy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """One model, trained both ways.

    Attributes:
        name: Short name of the task.
        title: What the model is.
        lr: Learning rate at the begin.
        momentum: SGD's.
        batch_size: Samples per batch.
        single: The single process.
        asynchronous: The server and its workers.
    """

    name: str
    title: str
    lr: float
    momentum: float
    batch_size: int
    single: Run
    asynchronous: AsyncRun

    @property
    def points_below(self) -> float:
        """How many points of accuracy, in hundredths, the workers are below the single process."""
        return 100 * (self.single.accuracy - self.asynchronous.accuracy)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Everything.

    Attributes:
        data: Name of the data set.
        is_benchmark: Whether accuracies on it compare with published ones.
        seed: Of initial values and orders.
        quick: Whether the runs were cut short.
        seconds: Wall time of everything, start of the processes included.
        tasks: One per model.
        machine: Cores, and versions of what ran.
    """

    data: str
    is_benchmark: bool
    seed: int
    quick: bool
    seconds: float
    tasks: list[TaskResult]
    machine: dict[str, str] = field(default_factory=dict)
