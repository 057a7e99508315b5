"""The training loop: batches in, history out."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from offbeat import trained_by
from offbeat.history import History
from offbeat.local.batches import MAKE_PAIRS, Epochs, Given, check_any, count, moved, no_batch, split
from offbeat.local.log_lines import LogLines
from offbeat.local.loss import LossFunction, LossReduction, check_loss, wake
from offbeat.local.progress import Progress
from offbeat.metrics import Meter
from offbeat.receipt import Receipt
from offbeat.tracking.fanout import Fanout
from offbeat.worker.account import Account
from offbeat.worker.link import Link
from offbeat.worker.steps import Steps

__all__ = ["TrainPlan", "run"]

OWN_LOOP = """a loop of your own takes any:
    for batch in loader:
        loss = ...                          # computed with worker.model
        loss.backward()
        worker.step(samples=len(batch))"""


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
        self._account = Account(history)
        self._lines = LogLines(
            history,
            meters=plan.meters,
            log_frequency=plan.log_frequency,
            epochs=plan.epochs,
            progress=progress,
            track=plan.trackers.log,
            first_step=plan.first_step,
        )

    def run(self) -> None:
        wake(self._link.binding.module)
        self._link.binding.clear_gradients()
        self._note_kept()
        if not self._account.is_out_of_budget:
            self._train()
        settled = self._steps.settle()  # what is gathered and not pushed is for `drop`
        self._note_kept()
        self._account.note(settled)
        if self._account.is_out_of_budget:
            self._history.stopped = "budget"
        if self._lines.is_one_missing:
            self._log()

    def note_time(self) -> None:
        self._lines.note_time()

    def _train(self) -> None:
        plan, history = self._plan, self._history
        for number in range(plan.epochs):
            epoch, before = plan.first_epoch + number, history.samples
            for batch in plan.source.epoch(epoch):
                self._batch(batch)
                if self._account.is_out_of_budget:
                    return
                if plan.max_steps is not None and history.steps >= plan.max_steps:
                    self._count(self._steps.push_rest)
                    history.stopped = "max_steps"
                    return
            if before and history.samples == before:  # one that never gave any is warned of
                raise no_batch(epoch)
            self._count(self._steps.push_rest)
            history.epochs += 1
            if self._account.is_out_of_budget:
                return
        history.stopped = "epochs"

    def _batch(self, batch: object) -> None:
        plan = self._plan
        inputs, targets = split(batch, instead=f"{MAKE_PAIRS}; {OWN_LOOP}")
        samples = count(inputs, targets, instead=OWN_LOOP)
        check_any(samples)
        inputs, targets = moved(inputs, self._device), moved(targets, self._device)
        outputs = self._link.binding.module(inputs)
        loss = plan.loss_fn(outputs, targets)
        check_loss(loss, owner="AsyncWorker")
        loss.backward()  # type: ignore[no-untyped-call]
        shown = loss.detach() if plan.reduction == "mean" else loss.detach() / samples
        trained_by.tell(self._link.binding.module, loss=shown)
        self._history.samples += samples
        before = self._steps.num_left_out

        def measure() -> None:
            if self._steps.num_left_out > before:
                self._history.skipped += 1
                return
            for meter in plan.meters:
                meter.update(outputs, targets, shown, samples)

        self._count(lambda: self._steps.step(samples), measure)
        self._progress.advance()

    def _count(self, act: Callable[[], list[Receipt]], measure: Callable[[], None] = lambda: None) -> None:
        """Do what may push, count a step if one was made, a push or one of a live optimizer, and measure.

        In this order: a metric that raises takes back nothing that the server has.
        """
        history = self._history
        pushed, added = self._steps.num_pushed, self._steps.num_added
        receipts = act()
        is_live = self._steps.kind == "delta"
        history.steps += self._steps.num_added - added if is_live else self._steps.num_pushed - pushed
        self._account.note(receipts)
        measure()
        self._note_kept()  # a metric may have called `evaluate`
        if self._lines.is_due:
            self._log()

    def _note_kept(self) -> None:
        self._account.note(self._steps.take_kept())

    def _log(self) -> None:
        fates = self._account.fates
        staleness, told = fates.mean_staleness, fates.read()
        version = self._link.version
        self._lines.write(
            version=version,
            where=f"version {version}",
            staleness=staleness,
            fates=told,
            aside=f", with those of rejected pushes; {told}" if told else "",
        )
        self._link.session.set_progress(self._history.steps)
