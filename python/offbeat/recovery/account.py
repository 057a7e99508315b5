"""What a run has to tell, and what of it a checkpoint holds: history, meters, and the newest losses."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.history import History, Record, Validated
from offbeat.metrics import Mean
from offbeat.recovery.band import NUM_RECENT, Band, judged
from offbeat.recovery.choice import is_short
from offbeat.recovery.place import Place
from offbeat.recovery.trainee import Stepped

__all__ = ["Account", "Judgement"]

NUM_LENGTHS = 5
"""Means before one, by which it is short or not: where saves are more frequent from some start on, three of
them later these are the usual ones."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a run is doing at a save.

    Attributes:
        loss: Mean of the newest losses; NaN without.
        is_within: Whether they are finite, and that mean within the band.
        band: What it may be at most; None while nobody knows.
        monitored: Mean of what is monitored since the last save that broke nothing off; None without.
        monitored_samples: Of how many samples that is.
        is_short: Whether these are too few for it to be the best.
    """

    loss: float
    is_within: bool
    band: float | None
    monitored: float | None
    monitored_samples: int | None
    is_short: bool


class Account:
    """Counts and measures, across all lives of a run.

    Attributes:
        history: What `train` gives.
        place: In the data.
    """

    def __init__(
        self, meters: Sequence[Mean], monitor: Mean | None, for_scheduler: Mean | None = None
    ) -> None:
        """Measure by meters, one of which a scheduler may read."""
        self.history = History()
        self.place = Place()
        self._meters = meters
        self._monitor = monitor
        self._for_scheduler = for_scheduler
        if monitor is not None:
            monitor.read()  # of a `train` before, which broke off before it saved
        self.logged_skipped = 0  # batches, until the newest log line
        self._new_samples = 0
        self._monitored: float | None = None
        self._monitored_samples: int | None = None
        self._is_short = False
        self._lengths: deque[int] = deque(maxlen=NUM_LENGTHS)  # of the newest means, in samples
        self._recent: deque[torch.Tensor | float] = deque(maxlen=NUM_RECENT)
        self._band: Band | None = None

    @property
    def logged_step(self) -> int:
        """Of the newest log line."""
        return self.history.records[-1].step if self.history.records else 0

    def add(self, done: Stepped) -> None:
        """Take a step down. A batch of which nothing came tells nothing of the model, and is not measured."""
        if not done.is_skipped:
            others = [one for one in (self._monitor, self._for_scheduler) if one is not None]
            for meter in (*self._meters, *others):
                meter.update(done.outputs, done.targets, done.loss, done.samples)
            self._new_samples += done.samples
            self._recent.append(done.loss.reshape(()))
        self.history.steps += done.steps
        self.history.samples += done.samples
        self.place = Place(self.place.epoch, self.place.batch + 1)

    def end_epoch(self, steps: int) -> None:
        """Take the end of a pass down, and the steps that were made of what it left."""
        self.history.steps += steps
        self.history.epochs += 1
        self.place = Place(self.place.epoch + 1, 0)

    @property
    def unmeasured(self) -> set[str]:
        """The names of meters that no batch counts in since the last log line."""
        return {meter.name for meter in self._meters if meter.is_empty}

    def log(self, seconds: float, *, version: int, staleness: float | None) -> Record:
        """Make a log line."""
        metrics = {meter.name: meter.read() for meter in self._meters}
        record = Record(
            step=self.history.steps,
            version=version,
            samples=self.history.samples,
            seconds=seconds,
            metrics=metrics,
            staleness=staleness,
        )
        self.history.records.append(record)
        self.logged_skipped = self.history.skipped
        return record

    def validated(self, epoch: int, metrics: dict[str, float]) -> None:
        """Take down what was measured on other data after an epoch."""
        self.history.validation.append(Validated(epoch, self.history.steps, metrics))

    def judge(self, *, is_broken_off: bool) -> Judgement:
        """Look at how the run is doing. Waits for the device.

        Args:
            is_broken_off: It is saved before it was time to, and is to go on. Nothing of this judgement stays
                then: it is judged later as a run that nobody breaks off, and goes back to the same.
        """
        recent = self._read_recent()
        is_within, band = judged(recent, self._band)
        if not recent and self.history.skipped:
            is_within = False  # of all batches so far nothing came
        measured = self._monitored, self._monitored_samples, self._is_short
        if self._monitor is not None and self._new_samples:
            so_far = self._monitor.state_dict()
            is_short_now = is_short(self._new_samples, self._lengths, is_broken_off=is_broken_off)
            measured = self._monitor.read(), self._new_samples, is_short_now
            if is_broken_off:
                self._monitor.load_state_dict(so_far)
            else:
                self._lengths.append(self._new_samples)
                self._new_samples = 0
                self._monitored, self._monitored_samples, self._is_short = measured
        if not is_broken_off:
            self._band = band
        monitored, monitored_samples, is_too_short = measured
        return Judgement(
            loss=sum(recent) / len(recent) if recent else float("nan"),
            is_within=is_within,
            band=None if band is None else band.upper,
            monitored=monitored,
            monitored_samples=monitored_samples,
            is_short=is_too_short,
        )

    def state_dict(self) -> dict[str, Any]:
        """Give all of it."""
        history = self.history
        band, by = self._band, self._for_scheduler
        return {
            "steps": history.steps,
            "samples": history.samples,
            "epochs": history.epochs,
            "skipped": history.skipped,
            "logged_skipped": self.logged_skipped,
            "first_non_finite": history.first_non_finite,
            "receipts": dict(history.receipts),
            "seconds": history.seconds,
            "place": (self.place.epoch, self.place.batch),
            "records": _columns(history.records),
            "validation": [(one.epoch, one.step, dict(one.metrics)) for one in history.validation],
            "meters": {meter.name: meter.state_dict() for meter in self._meters},
            "monitor": None if self._monitor is None else (self._monitor.name, self._monitor.state_dict()),
            "for_scheduler": None if by is None else (by.name, by.state_dict()),
            "new_samples": self._new_samples,
            "monitored": self._monitored,
            "monitored_samples": self._monitored_samples,
            "is_short": self._is_short,
            "lengths": list(self._lengths),
            "recent": self._read_recent(),
            "band": None if band is None else (band.mean, band.deviation),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; a metric that was not measured then begins here."""
        history = self.history
        history.steps, history.samples, history.epochs = state["steps"], state["samples"], state["epochs"]
        history.seconds, history.skipped = state["seconds"], state["skipped"]
        history.first_non_finite = state.get("first_non_finite")  # which older checkpoints do not tell
        self.logged_skipped = state.get("logged_skipped", history.skipped)
        history.receipts = dict(state["receipts"])
        history.records = _records(state["records"])
        history.validation = [Validated(*one) for one in state.get("validation", ())]  # nor of this
        self.place = Place(*state["place"])
        for meter in self._meters:
            if (taken := state["meters"].get(meter.name)) is not None:
                meter.load_state_dict(taken)
        if self._monitor is not None and state["monitor"] is not None:
            name, taken = state["monitor"]
            if name == self._monitor.name:
                self._monitor.load_state_dict(taken)
                self._new_samples = state.get("new_samples", 0)  # older checkpoints: where nothing was new
                self._lengths.extend(state.get("lengths", ()))
                self._go_on_by(state)
        by = self._for_scheduler
        if by is not None and (kept := state.get("for_scheduler")) is not None and kept[0] == by.name:
            by.load_state_dict(kept[1])
        self._recent.extend(state["recent"])
        self._band = None if state["band"] is None else Band(*state["band"])

    def go_back(self, state: dict[str, Any]) -> None:
        """Judge the model by what it was judged by in a checkpoint that is gone back to; counts go on.

        Args:
            state: As `state_dict` gave it then.
        """
        self._recent = deque(state["recent"], maxlen=NUM_RECENT)
        self._band = None if state["band"] is None else Band(*state["band"])
        if self._for_scheduler is not None:
            self._for_scheduler.read()  # of what is gone back from
        if self._monitor is not None:
            self._monitor.read()  # likewise
            is_same = state["monitor"] is not None and state["monitor"][0] == self._monitor.name
            self._new_samples = 0
            self._go_on_by(state if is_same else {})

    def _go_on_by(self, state: dict[str, Any]) -> None:
        """Take the mean of a checkpoint for the newest; older ones do not tell all of it."""
        self._monitored, self._monitored_samples = state.get("monitored"), state.get("monitored_samples")
        self._is_short = state.get("is_short", False)

    def _read_recent(self) -> list[float]:
        """Give the newest losses as numbers, with one wait for all that are not."""
        waiting = [loss.float() for loss in self._recent if isinstance(loss, torch.Tensor)]
        read = iter(torch.stack(waiting).tolist() if waiting else ())
        numbers = [next(read) if isinstance(loss, torch.Tensor) else loss for loss in self._recent]
        self._recent = deque(numbers, maxlen=NUM_RECENT)
        return numbers


def _columns(records: Sequence[Record]) -> dict[str, Any]:
    """Put log lines into columns: there may be a million of them, and JSON is slow."""
    kinds = list({tuple(record.metrics): None for record in records})
    return {
        "step": torch.tensor([record.step for record in records], dtype=torch.int64),
        "version": torch.tensor([record.version for record in records], dtype=torch.int64),
        "staleness": torch.tensor([_or_nan(record.staleness) for record in records], dtype=torch.float64),
        "samples": torch.tensor([record.samples for record in records], dtype=torch.int64),
        "seconds": torch.tensor([record.seconds for record in records], dtype=torch.float64),
        "kinds": kinds,
        "kind": torch.tensor([kinds.index(tuple(r.metrics)) for r in records], dtype=torch.int64),
        "values": torch.tensor([v for r in records for v in r.metrics.values()], dtype=torch.float64),
    }


def _or_nan(number: float | None) -> float:
    return math.nan if number is None else number


def _records(columns: dict[str, Any]) -> list[Record]:
    values = iter(columns["values"].tolist())
    names = "step", "version", "samples", "seconds", "staleness", "kind"
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    return [
        Record(
            step=step,
            version=version,
            samples=samples,
            seconds=seconds,
            metrics={name: next(values) for name in columns["kinds"][kind]},
            staleness=None if math.isnan(staleness) else staleness,
        )
        for step, version, samples, seconds, staleness, kind in rows
    ]
