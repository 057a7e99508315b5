"""What one call of `train` did, as plain data."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from offbeat import plain_json
from offbeat.errors import StateError
from offbeat.plots import draw_metrics, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["History", "Record", "Stopped", "Validated"]

#: Why training ended. "epochs" and "max_steps": all that was asked for is done. "budget": the run's
#: `max_samples` are used up. "stop": `stop()` was called. "interrupted": Ctrl-C. "failed": an exception.
#: "running": it has not ended, or not begun.
Stopped = Literal["running", "epochs", "max_steps", "budget", "stop", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Record:
    """One log line.

    Attributes:
        step: Steps of this worker since `train` began: pushes, or steps of a live optimizer.
        version: Version of the model that the worker had read last.
        samples: Samples this worker has trained on since `train` began.
        seconds: Wall time since `train` began.
        metrics: Mean of each metric over the samples since the log line before, without those of batches that
            were skipped; NaN where all were.
        staleness: Mean staleness, in updates, of the applied pushes that were answered since the log line
            before; None where there was none.
    """

    step: int
    version: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    staleness: float | None = None


@dataclass(frozen=True, slots=True)
class Validated:
    """What an `AsyncTrainer` measured after an epoch, on the data that was given for that.

    Attributes:
        epoch: Counted over the trainer's life, from 0.
        step: As a record's.
        metrics: Means over all samples, by name; "loss" is always among them.
    """

    epoch: int
    step: int
    metrics: dict[str, float]


@dataclass(slots=True)
class History:
    """What one call of `train` did.

    A worker's is empty, and `stopped` is "running", until its first `train` ends: a loop of one's own around
    `worker.step()` writes nothing here. What became of its pushes is in the receipts that `step()` gives.

    Attributes:
        records: The log lines, one per `log_frequency` steps and one for the rest.
        validation: What was measured after each epoch, of a trainer that was given `validation=`.
        epochs: Passes over this worker's data that were finished.
        steps: Steps of this worker: pushes, or steps of a live optimizer. Not calls of `worker.step()`, each
            of which takes a batch.
        samples: Samples trained on.
        seconds: Wall time.
        receipts: How many pushes met which fate: "applied", or the reason of a rejection. Pushes from before
            `train` whose receipts nobody had seen are among them.
        stopped: Why it ended.
        stop_reason: What was given to `stop()`, where that has ended it; None without.
        optimizer: Which optimizer ran, and on which side.
        skipped: Batches of which nothing was made, and which count in no mean: their scaled gradients were
            not finite (`AsyncTrainer(amp="fp16")`, and a `FaultTolerantTrainer`'s `grad_scaler`), a monitor's
            remedy dropped them, or their worker was in quarantine. A step of a live optimizer that a monitor
            left without gradients is among `steps` as well. Of "accumulate", whose updates are of many
            batches, those updates are counted that a loss scale skipped, and none that a monitor dropped;
            their batches were measured before, but for losses that are not finite.
        first_non_finite: The step with the first loss, of batches that were not skipped, that was NaN or
            infinite, or after which a parameter was; where a monitor dropped all since, the first that met
            such parameters. None: all were finite. Of `AsyncTrainer` and `FaultTolerantTrainer`, whose log
            lines look; others raise.
    """

    records: list[Record] = field(default_factory=list)
    epochs: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    receipts: dict[str, int] = field(default_factory=dict)
    stopped: Stopped = "running"
    optimizer: str = ""
    skipped: int = 0
    first_non_finite: int | None = None
    stop_reason: str | None = None
    validation: list[Validated] = field(default_factory=list)

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Self:
        """Make it of what `dataclasses.asdict` made of one; older ones have fewer entries."""
        given = dict(kept)
        given["records"] = [Record(**record) for record in kept["records"]]
        given["validation"] = [Validated(**one) for one in kept.get("validation", ())]
        return cls(**given)

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draw each metric over this worker's steps, also in validation, and the staleness of its pushes.

        Args:
            path: Where to write the picture, in the format that its name says, in a folder that is made where
                it is not there; None: nowhere.

        Returns:
            The picture, a `matplotlib.figure.Figure`.

        Raises:
            StateError: If there is no log line to draw.
            ConfigError: If matplotlib is not installed, or has no such format.
            OSError: If the picture cannot be written.
        """
        told = [record.metrics for record in self.records] + [one.metrics for one in self.validation]
        names = [*dict.fromkeys(name for metrics in told for name in metrics)]
        is_late_told = any(record.staleness is not None for record in self.records)
        if not names and not is_late_told:
            raise StateError("this history has nothing to draw: train() fills it, with a record per log line")
        title = self.optimizer or "training"
        with picture(
            [1.0] * (len(names) + is_late_told), title=title, path=path, what="History.plot"
        ) as drawn:
            draw_metrics(drawn.panels, self, names)
        return drawn.figure

    def to_json(self, *, indent: int | None = None) -> str:
        """Give the whole history as JSON text, an object with this class's attributes.

        JSON knows finite numbers only: a metric that is NaN or infinite is null.
        """
        return plain_json.dumps(asdict(self), indent=indent)
