"""What one call of `train` did, as plain data."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from offbeat import plain_json

__all__ = ["History", "Record", "Stopped"]

#: Why training ended. "epochs" and "max_steps": all that was asked for is done. "budget": the run's
#: `max_samples` are used up. "interrupted": Ctrl-C. "failed": an exception. "running": it has not ended, or
#: not begun.
Stopped = Literal["running", "epochs", "max_steps", "budget", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Record:
    """One log line.

    Attributes:
        step: Steps of this worker since `train` began: pushes, or steps of a live optimizer.
        version: Version of the model that the worker had read last.
        samples: Samples this worker has trained on since `train` began.
        seconds: Wall time since `train` began.
        metrics: Mean of each metric over the samples since the log line before.
        staleness: Mean staleness, in updates, of the applied pushes that were answered since the log line
            before; None where there was none.
    """

    step: int
    version: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    staleness: float | None = None


@dataclass(slots=True)
class History:
    """What one call of `train` did.

    A worker's is empty, and `stopped` is "running", until its first `train` ends: a loop of one's own around
    `worker.step()` writes nothing here. What became of its pushes is in the receipts that `step()` gives.

    Attributes:
        records: The log lines, one per `log_frequency` steps and one for the rest.
        epochs: Passes over this worker's data that were finished.
        steps: Steps of this worker: pushes, or steps of a live optimizer. Not calls of `worker.step()`, each
            of which takes a batch.
        samples: Samples trained on.
        seconds: Wall time.
        receipts: How many pushes met which fate: "applied", or the reason of a rejection. Pushes from before
            `train` whose receipts nobody had seen are among them.
        stopped: Why it ended.
        optimizer: Which optimizer ran, and on which side.
    """

    records: list[Record] = field(default_factory=list)
    epochs: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    receipts: dict[str, int] = field(default_factory=dict)
    stopped: Stopped = "running"
    optimizer: str = ""

    def to_json(self, *, indent: int | None = None) -> str:
        """Give the whole history as JSON text, an object with this class's attributes.

        JSON knows finite numbers only: a metric that is NaN or infinite is null.
        """
        return plain_json.dumps(asdict(self), indent=indent)
