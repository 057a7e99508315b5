"""The training loop: batches in, history out."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from offbeat import trained_by
from offbeat.errors import RejectedError
from offbeat.history import History, Record
from offbeat.local.batches import Epochs, Given, count, moved, split
from offbeat.local.loss import LossFunction, LossReduction, check_loss, wake
from offbeat.metrics import Meter
from offbeat.receipt import Receipt
from offbeat.tracking.fanout import Fanout
from offbeat.worker.fates import Fates, fate_of
from offbeat.worker.link import Link
from offbeat.worker.progress import Progress
from offbeat.worker.steps import Steps

__all__ = ["TrainPlan", "run", "stop_noted"]

#: In a row, before `train` gives up: what made so many wrong will not pass by itself.
MAX_REJECTIONS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """What one call of `train` is to do.

    Attributes:
        source: Where batches come from.
        epochs: How many passes.
        first_epoch: The number of the first, counted over the worker's life.
        max_steps: Steps after which to stop; None for no limit.
        loss_fn: From (outputs, targets) to a scalar.
        reduction: Whether that scalar is a mean or a sum over the batch.
        meters: What to measure.
        log_frequency: Steps between log lines.
        trackers: Who is handed the log lines' numbers.
        first_step: How many steps the worker had made before.
    """

    source: Epochs | Given
    epochs: int
    first_epoch: int
    max_steps: int | None
    loss_fn: LossFunction
    reduction: LossReduction
    meters: list[Meter]
    log_frequency: int
    trackers: Fanout
    first_step: int

    def num_batches(self, per_step: int) -> int | None:
        """Count the batches that there will be at most, if anyone knows."""
        limits = [] if self.max_steps is None else [self.max_steps * per_step]
        with suppress(TypeError):  # a loader over an iterable dataset
            limits.append(len(self.source) * self.epochs)
        return min(limits, default=None)


def run(
    plan: TrainPlan, *, link: Link, steps: Steps, device: torch.device, history: History, progress: Progress
) -> None:
    """Train by the plan and write down in `history` what happened; of an exception, `stop_noted` does.

    Receipts of earlier pushes that `steps` has kept are noted with the others. Afterwards nothing is in
    flight, and the module holds the newest model pulled.

    Raises:
        RejectedError: After 100 rejections in a row, with their reasons.
        ConfigError: If a batch or a loss is not what can be trained on.
    """
    loop = _Loop(plan, link=link, steps=steps, device=device, history=history, progress=progress)
    try:
        with progress:
            loop.run()
    finally:
        loop.note_time()
        link.binding.clear_gradients()  # of a batch that broke off between its backward and its step
        steps.drop()


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


class _Loop:
    """The state of one run of the loop."""

    def __init__(
        self,
        plan: TrainPlan,
        *,
        link: Link,
        steps: Steps,
        device: torch.device,
        history: History,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._link = link
        self._steps = steps
        self._device = device
        self._history = history
        self._progress = progress
        self._began = time.monotonic()
        self._logged_step = 0
        self._logged = (self._began, 0)
        self._rejected_in_a_row: Counter[str] = Counter()
        self._fates = Fates()  # since the last log line
        self._out_of_budget = False

    def run(self) -> None:
        wake(self._link.binding.module)
        self._link.binding.clear_gradients()
        self._note_kept()
        if not self._out_of_budget:
            self._train()
        settled = self._steps.settle()  # what is gathered and not pushed is for `drop`
        self._note_kept()
        self._note(settled)
        if self._out_of_budget:
            self._history.stopped = "budget"
        if self._history.steps > self._logged_step:
            self._log()

    def note_time(self) -> None:
        self._history.seconds = time.monotonic() - self._began

    def _train(self) -> None:
        plan, history = self._plan, self._history
        for number in range(plan.epochs):
            for batch in plan.source.epoch(plan.first_epoch + number):
                self._batch(batch)
                if self._out_of_budget:
                    return
                if plan.max_steps is not None and history.steps >= plan.max_steps:
                    self._count(self._steps.push_rest)
                    history.stopped = "max_steps"
                    return
            self._count(self._steps.push_rest)
            history.epochs += 1
            if self._out_of_budget:
                return
        history.stopped = "epochs"

    def _batch(self, batch: object) -> None:
        plan = self._plan
        inputs, targets = split(batch)
        samples = count(inputs, targets)
        inputs, targets = moved(inputs, self._device), moved(targets, self._device)
        outputs = self._link.binding.module(inputs)
        loss = plan.loss_fn(outputs, targets)
        check_loss(loss, owner="AsyncWorker")
        loss.backward()  # type: ignore[no-untyped-call]
        shown = loss.detach() if plan.reduction == "mean" else loss.detach() / samples
        for meter in plan.meters:
            meter.update(outputs, targets, shown, samples)
        trained_by.tell(self._link.binding.module, loss=shown)
        self._history.samples += samples
        self._count(lambda: self._steps.step(samples))
        self._progress.advance()

    def _count(self, act: Callable[[], list[Receipt]]) -> None:
        """Do what may push, and count a step if one was made: a push, or a step of a live optimizer."""
        history = self._history
        pushed, added = self._steps.num_pushed, self._steps.num_added
        receipts = act()
        is_live = self._steps.kind == "delta"
        history.steps += self._steps.num_added - added if is_live else self._steps.num_pushed - pushed
        self._note_kept()  # a metric may have called `evaluate`
        self._note(receipts)
        if history.steps >= self._logged_step + self._plan.log_frequency:
            self._log()

    def _note_kept(self) -> None:
        self._note(self._steps.take_kept())

    def _note(self, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            fate = fate_of(receipt)
            self._fates.add(receipt)
            self._history.receipts[fate] = self._history.receipts.get(fate, 0) + 1
            if receipt.reason == "budget":
                self._out_of_budget = True
            elif receipt.applied:
                self._rejected_in_a_row.clear()
            else:
                self._rejected_in_a_row[fate] += 1
            if self._rejected_in_a_row.total() >= MAX_REJECTIONS:
                raise RejectedError(_rejections(self._rejected_in_a_row, receipt.detail))

    def _log(self) -> None:
        history = self._history
        now = time.monotonic()
        metrics = {meter.name: meter.read() for meter in self._plan.meters}
        record = Record(
            step=history.steps,
            version=self._link.version,
            samples=history.samples,
            seconds=now - self._began,
            metrics=metrics,
            staleness=self._fates.mean_staleness,
        )
        history.records.append(record)
        since, samples = self._logged
        rate = (history.samples - samples) / max(now - since, 1e-9)
        self._logged = now, history.samples
        self._logged_step = history.steps
        measured = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        epoch = f"epoch {min(history.epochs + 1, self._plan.epochs)}/{self._plan.epochs}"
        fates = self._fates.read()
        speed = f"{rate:,.0f} samples/s" + (f", with those of rejected pushes; {fates}" if fates else "")
        text = f"{epoch}, step {record.step}, version {record.version}: {measured} ({speed})"
        self._progress.log(text, record, fates)
        self._plan.trackers.log(_tracked(record, rate), self._plan.first_step + record.step)
        self._link.session.set_progress(history.steps)


def _tracked(record: Record, samples_per_s: float) -> dict[str, float]:
    """Give a log line's numbers by the names under which trackers keep them."""
    ours: dict[str, float] = {
        "version": record.version,
        "samples": record.samples,
        "seconds": record.seconds,
        "samples_per_s": samples_per_s,
    }
    if record.staleness is not None:
        ours["staleness"] = record.staleness
    return record.metrics | {f"offbeat/{name}": value for name, value in ours.items()}


def _rejections(reasons: Counter[str], last: str) -> str:
    listed = ", ".join(f"{n}x {reason}" for reason, n in reasons.most_common())
    return (
        f"the server rejected {reasons.total()} pushes in a row: {listed}; of the last it said: {last}. The "
        f"worker is still joined, and worker.history has what went before"
    )
