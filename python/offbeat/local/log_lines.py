"""The log lines of a `train`: when one is due, and what is in it; and why training ended."""

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

from offbeat.history import History, Record, Validated
from offbeat.local.progress import Progress
from offbeat.metrics import Meter

__all__ = [
    "LogLines",
    "Skipped",
    "stop_noted",
    "tracked",
    "tracked_validation",
    "words_of",
    "words_of_skipped",
    "words_of_validation",
]

Skipped: TypeAlias = Literal["batch", "update"]
"""What a trainer counts as skipped."""


class LogLines:
    """Writes a record to the history on every so many steps, and tells whoever is to see it.

    Attributes:
        began_s: When it was made, by the monotonic clock.
    """

    def __init__(
        self,
        history: History,
        *,
        meters: Sequence[Meter],
        log_frequency: int,
        epochs: int,
        progress: Progress,
        track: Callable[[Mapping[str, float], int], None],
        first_step: int,
    ) -> None:
        """Begin at the start of a `train`.

        Args:
            history: Has the steps and samples, and gets the records.
            meters: What is measured; reading one begins it anew.
            log_frequency: Steps between two lines.
            epochs: That are to come.
            progress: Shows the lines.
            track: Is handed the numbers of a line, and the step where they belong.
            first_step: Steps made before this `train`.
        """
        self.began_s = time.monotonic()
        self._history = history
        self._meters = list(meters)
        self._log_frequency = log_frequency
        self._epochs = epochs
        self._progress = progress
        self._track = track
        self._first_step = first_step
        self._step = 0  # of the last line
        self._last = (self.began_s, 0)  # when it was written, and the samples until then
        self._skipped = 0  # batches, until then

    @property
    def is_due(self) -> bool:
        """Whether there were steps enough since the last line."""
        return self._history.steps >= self._step + self._log_frequency

    @property
    def is_one_missing(self) -> bool:
        """Whether there was any step since the last line."""
        return self._history.steps > self._step

    def write(
        self,
        *,
        version: int,
        where: str,
        staleness: float | None = None,
        fates: str = "",
        aside: str = "",
        skips: Skipped = "batch",
    ) -> Record:
        """Write one.

        Args:
            version: Of the model.
            where: What the line says after the step, such as "version 12".
            staleness: Mean, of the pushes since the last line.
            fates: What became of these, if any was rejected.
            aside: What the samples per second are to be read with.
            skips: What is counted as skipped.
        """
        history = self._history
        now = time.monotonic()
        empty = {meter.name for meter in self._meters if meter.is_empty}
        metrics = {meter.name: meter.read() for meter in self._meters}
        record = Record(
            step=history.steps,
            version=version,
            samples=history.samples,
            seconds=now - self.began_s,
            metrics=metrics,
            staleness=staleness,
        )
        history.records.append(record)
        since, samples = self._last
        rate = (history.samples - samples) / max(now - since, 1e-9)
        aside += words_of_skipped(history.skipped - self._skipped, skips)
        self._last, self._skipped = (now, history.samples), history.skipped
        self._step = history.steps
        measured = words_of(metrics, without=empty)
        epoch = f"epoch {min(history.epochs + 1, self._epochs)}/{self._epochs}"
        told = ", ".join(part for part in (epoch, f"step {record.step}", where) if part)
        self._progress.log(f"{told}: {measured} ({rate:,.0f} samples/s{aside})", record, fates)
        self._track(tracked(record, rate, without=empty), self._first_step + record.step)
        return record

    def validated(self, epoch: int, metrics: dict[str, float], took_s: float) -> None:
        """Write down what was measured after an epoch; the time that this took is of no log line's rate."""
        history = self._history
        history.validation.append(Validated(epoch, history.steps, metrics))
        when, samples = self._last
        self._last = when + took_s, samples
        measured = words_of_validation(metrics)
        where = f"epoch {min(history.epochs, self._epochs)}/{self._epochs}, step {history.steps}"
        self._progress.tell(f"{where}, {measured}", measured)
        self._track(tracked_validation(metrics), self._first_step + history.steps)

    def note_time(self) -> None:
        """Write down how long it took until now."""
        self._history.seconds = time.monotonic() - self.began_s


@contextmanager
def stop_noted(history: History) -> Iterator[None]:
    """Write down in `history` why training stopped, where that is an exception."""
    try:
        yield
    except KeyboardInterrupt:
        history.stopped = "interrupted"
        raise
    except BaseException:
        history.stopped = "failed"
        raise


def words_of(metrics: Mapping[str, float], *, without: Container[str]) -> str:
    """Word what a log line measured; of what no batch since the last one counts in there is no value."""
    told = [f"{name} {value:.4g}" for name, value in metrics.items() if name not in without]
    return ", ".join(told) if told or not metrics else "all batches since the last line were skipped"


def words_of_skipped(num: int, what: Skipped = "batch") -> str:
    """Say of how many batches since the line before nothing came, or how many updates were skipped."""
    several = "batches" if what == "batch" else "updates"
    return f"; {num} {what if num == 1 else several} skipped" if num else ""


def words_of_validation(metrics: Mapping[str, float]) -> str:
    """Word what was measured after an epoch."""
    return f"validation: {words_of(metrics, without=())}"


def tracked_validation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Give it by the names under which trackers keep it."""
    return {f"validation/{name}": value for name, value in metrics.items()}


def tracked(record: Record, samples_per_s: float, *, without: Container[str]) -> dict[str, float]:
    """Give a log line's numbers by the names under which trackers keep them, without those that have none."""
    ours: dict[str, float] = {
        "version": record.version,
        "samples": record.samples,
        "seconds": record.seconds,
        "samples_per_s": samples_per_s,
    }
    if record.staleness is not None:
        ours["staleness"] = record.staleness
    measured = {name: value for name, value in record.metrics.items() if name not in without}
    return measured | {f"offbeat/{name}": value for name, value in ours.items()}
