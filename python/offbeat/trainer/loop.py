"""The trainer's loop: batches in, history out."""

import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from offbeat import log
from offbeat.history import History
from offbeat.local.batches import Epochs, Given, no_batch
from offbeat.local.finite import Finiteness
from offbeat.local.log_lines import LogLines
from offbeat.local.loss import wake
from offbeat.local.progress import Progress
from offbeat.local.stopping import Stop
from offbeat.metrics import Meter
from offbeat.tracking.fanout import Fanout
from offbeat.trainer.callbacks import Callbacks, Step
from offbeat.trainer.next import ENDS
from offbeat.trainer.scheduling import Scheduling
from offbeat.trainer.stage import Stage
from offbeat.trainer.strategies import Batch, Made, Strategy, Workshop
from offbeat.trainer.validation import Validation
from offbeat.worker.account import Account

__all__ = ["Loop", "TrainPlan"]

WHERE_NOT_FINITE = (
    "give a lower learning rate, max_grad_norm= or, in half precision, a loss scale (amp='fp16' has one), "
    "let AsyncTrainingMonitor(model, remediation_strategy='reject') drop such gradients, or begin with "
    "FaultTolerantTrainer(recovery_strategy='last_good'), which goes back to where all was finite"
)
"""What a user can do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """What one call of `train` is to do.

    Attributes:
        source: Where batches come from.
        epochs: How many passes.
        first_epoch: The number of the first, counted over the trainer's life.
        max_steps: Steps after which to stop; None for no limit.
        meters: What to measure.
        log_frequency: Steps between log lines.
        trackers: Who is handed the log lines' numbers.
        validation: What to measure after each epoch; None for nothing.
        scheduling: Of the learning rate.
        callbacks: Who is told.
        stop: Whether it is to end before.
    """

    source: Epochs | Given
    epochs: int
    first_epoch: int
    max_steps: int | None
    meters: list[Meter]
    log_frequency: int
    trackers: Fanout
    validation: Validation | None
    scheduling: Scheduling
    callbacks: Callbacks
    stop: Stop

    def num_batches(self) -> int | None:
        """Count the batches that there will be at most, if anyone knows."""
        with suppress(TypeError):  # a loader over an iterable dataset
            return len(self.source) * self.epochs
        return None


class Loop:
    """One run of the loop.

    Attributes:
        is_within_a_pass: One has given a batch, and has not come to its end.
    """

    def __init__(
        self, plan: TrainPlan, *, workshop: Workshop, stage: Stage, history: History, progress: Progress
    ) -> None:
        self.is_within_a_pass = False
        self._plan = plan
        self._workshop = workshop
        self._stage = stage
        self._history = history
        self._progress = progress
        self._account = Account(history, owner="trainer")
        self._steps_before = workshop.tally.steps
        self._skipped_before = workshop.tally.skipped
        self._finiteness = Finiteness(workshop.model, history, remedy=WHERE_NOT_FINITE)
        self._lines = LogLines(
            history,
            meters=plan.meters,
            log_frequency=plan.log_frequency,
            epochs=plan.epochs,
            progress=progress,
            track=plan.trackers.log,
            first_step=self._steps_before,
        )

    def run(self) -> None:
        """Train by the plan and write down in the history what happened; of an exception, `stop_noted` does.

        Raises:
            RejectedError: After 100 rejections by a server in a row, with their reasons.
            ConfigError: If a batch or a loss is not what can be trained on.
        """
        try:
            with self._progress:
                self._run()
        except BaseException:
            if self._stage.strategy is not None:
                self._stage.strategy.abandon()
            raise
        finally:
            self._lines.note_time()

    def _run(self) -> None:
        wake(self._workshop.model)
        self._train()
        strategy = self._stage.strategy
        if strategy is not None:
            strategy.settle(ENDS)
            self._note()
            if self._lines.is_one_missing:
                self._log(strategy)
        self._finiteness.end()
        self._plan.stop.end()
        if self._history.stopped != "stop":  # the last log line may have been what somebody stopped at
            self._is_stopped()
        if self._account.is_out_of_budget:
            self._history.stopped = "budget"
        self._plan.callbacks.tell("on_train_end", self._history)

    def _train(self) -> None:
        plan, history = self._plan, self._history
        for epoch in range(plan.first_epoch, plan.first_epoch + plan.epochs):
            strategy = self._stage.at(epoch)
            for batch in plan.source.epoch(epoch):
                self.is_within_a_pass = True
                strategy = self._stage.at(epoch)  # a callback may have chosen another
                self._batch(strategy, batch, epoch)
                if self._account.is_out_of_budget or self._is_stopped():
                    return
                if plan.max_steps is not None and history.steps >= plan.max_steps:
                    history.stopped = "max_steps"
                    return
            if history.samples and not self.is_within_a_pass:  # one that never gave any is warned of
                raise no_batch(epoch)
            strategy.end_epoch()
            self._note()
            history.epochs += 1
            self.is_within_a_pass = False
            if not plan.scheduling.is_measured:
                plan.scheduling.end_epoch()  # first: measuring may fail, and training go on after that
            if plan.validation is not None:
                self._validate(plan.validation, epoch)
            if plan.scheduling.is_measured:
                plan.scheduling.end_epoch()
            plan.callbacks.tell("on_epoch_end", epoch)
            if self._account.is_out_of_budget or self._is_stopped():
                return
        history.stopped = "epochs"

    def _is_stopped(self) -> bool:
        """Whether somebody wants an end, which is written down."""
        stop, history = self._plan.stop, self._history
        if stop.is_wanted:
            history.stopped, history.stop_reason = "stop", stop.reason
            log.info("training ends at step %s: %s", history.steps, stop.reason or "stop() was called")
        return stop.is_wanted

    def _batch(self, strategy: Strategy, given: object, epoch: int) -> None:
        plan, workshop, history = self._plan, self._workshop, self._history
        batch = Batch.of(given, workshop.device)
        samples = batch.samples
        workshop.numerics.norm = None
        before = workshop.tally.steps  # with what the strategy before made as it gave way
        made = strategy.batch(batch)
        if made.lost is not None:
            raise made.lost
        loss = self._measure(batch, made)
        history.samples += samples
        self._progress.advance()
        self._note()
        if made.is_skipped:
            self._finiteness.skip(history.steps)
        else:
            self._finiteness.add(loss, history.steps)
        if plan.callbacks.has("on_step"):
            norm, is_update = workshop.numerics.norm, workshop.tally.steps > before
            is_skipped = made.is_told_as_skipped
            step = Step(history.steps, epoch, samples, made.loss, norm, is_skipped, is_update)
            plan.callbacks.tell("on_step", step)
        if self._lines.is_due:
            self._log(strategy)

    def _measure(self, batch: Batch, made: Made) -> torch.Tensor:
        """Update what is measured by a batch, unless nothing came of it; give its loss, the mean."""
        loss = made.loss if self._workshop.reduction == "mean" else made.loss / batch.samples
        if made.is_skipped:
            return loss
        meter = None if self._plan.validation is not None else self._plan.scheduling.meter
        for one in (*self._plan.meters, *(() if meter is None else (meter,))):
            one.update(made.outputs, batch.targets, loss, batch.samples)
        return loss

    def _validate(self, validation: Validation, epoch: int) -> None:
        """Measure the model; a scheduler that goes by a metric goes by this."""
        began_s, workshop = time.monotonic(), self._workshop
        assert workshop.loss_fn is not None  # noqa: S101  `train` was given one
        metrics = validation.measure(
            workshop.model,
            workshop.device,
            workshop.loss_fn,
            workshop.reduction,
            beside=self._plan.scheduling.meter,
            each=self._stage.note_measured,
        )
        self._lines.validated(epoch, metrics, time.monotonic() - began_s)

    def _note(self) -> None:
        tally = self._workshop.tally
        self._history.steps = tally.steps - self._steps_before
        self._history.skipped = tally.skipped - self._skipped_before
        self._account.note(tally.take_receipts())

    def _log(self, strategy: Strategy) -> None:
        fates = self._account.fates
        staleness, told = fates.mean_staleness, fates.read()
        record = self._lines.write(
            version=strategy.version,
            where=f"{strategy.version_is} {strategy.version}" if strategy.version_is else "",
            staleness=staleness,
            fates=told,
            aside=f", with those of rejected pushes; {told}" if told else "",
            skips=strategy.skips,
        )
        self._finiteness.look()
        self._plan.callbacks.tell("on_log", record)
