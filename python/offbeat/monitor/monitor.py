"""`AsyncTrainingMonitor`: what users hold. Its parts decide and act; this file lets them meet."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from offbeat import log, process, termination, trained_by
from offbeat.checks import is_count, refuse, strings
from offbeat.errors import ClosedError, ConfigError
from offbeat.monitor.alert import Alert, is_finite
from offbeat.monitor.band import Band, is_usable
from offbeat.monitor.course import Course
from offbeat.monitor.ladder import Ladder
from offbeat.monitor.number import number
from offbeat.monitor.onset import Onset
from offbeat.monitor.remedies import until_when
from offbeat.monitor.report import MonitorReport
from offbeat.monitor.settings import LR_FACTOR, Callback, Given, resolve
from offbeat.monitor.skips import Skips
from offbeat.naming import known_attributes, known_keywords

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["AsyncTrainingMonitor"]

MEASURED = frozenset({"gradient_norm", "non_finite", "clip"})
"""Metrics and remedies that need to know the gradients' norm."""

DROPPING = frozenset({"clip", "reject", "quarantine", "rollback", "pause"})
"""Remedies that may drop gradients."""


SILENT_STEPS = 100
"""After as many of the model's a metric that has had no value is told of: most likely nobody measures it."""


LOOK_S = 0.2
"""How often a pause looks whether the process is to end."""


@known_attributes
class AsyncTrainingMonitor:
    """Watches a run, tells when it leaves the range that its own past lets expect, and acts on it.

    Each metric has a range: the mean of what was, and 2.5 standard deviations to both sides, of which the
    newest values count most (ZClip); its upper edge is never below a quarter of the mean of the warm-up. The
    limit is above that edge by `alert_threshold` times the edge's size; of "staleness" by that share of 8 at
    least. A value raises an alert if it and the mean of the last five, with it, both exceed the limit; or it
    alone, where it is also 16 standard deviations above the mean. Of "staleness" it raises one only where
    three of the worker's last five exceed the limit, where it is told whose they are (`model`, or
    ``worker=``). What is below the range raises none. What is NaN or infinite raises one at once. As long
    as there is no range, so does what is beyond all that the first values let expect: three in a row of
    more than a thousand times their median, or one of a million times the largest.

    Readings come from `observe`, in a loop of one's own; and, with `model`, from hooks: the norm of the
    gradient as backward left it (whether it is clipped then or not), its elements that are not finite, and
    how far the parameters move, before each step of any torch optimizer that has them; from whatever of ours
    trains the model (worker, accumulator, averager, trainers) its losses, the staleness of a worker's pushes
    that were applied, and how far members that are averaged have been from their mean. Call `observe` before
    the optimizer's step, so that the step's gradient can be dropped for what was observed.

    A monitor acts as long as it is kept; `close()`, or the end of a `with` block, lets go of its remedies.

    Args:
        model: Whose training it is. None: only what is observed counts.
        divergence_metrics: What is judged: "loss", "loss_variance" (of five losses one after the other, and
            judged by its root, as "parameter_variance" is), "gradient_norm", "update_ratio" (how far a step
            moves the parameters, by their norm), "staleness", "parameter_variance" (the square distance of a
            member's parameters from the members' mean, as a round of averaging begins; the mean over those
            members of a process group whose monitors judge it, which all of them hear in the next round, and
            by gossip, where it is estimated from pairs, some rounds later; at a server each hears its own),
            "non_finite" (elements of the gradient).
        alert_threshold: The share of the upper edge's size by which the limit is above it: 0.5 is half as
            much again.
        remediation_strategy: A remedy, or a list of them in order: the first alert takes the first one, and
            when `patience` steps with an alert have come in spite of it, the next one is taken; of what is
            NaN or infinite at its next occurrence, where nothing taken keeps that out, and where one on the
            list does, its gradient is dropped from the first on. What does more each time it is taken is
            taken again, where it is the last. "alert" tells. "clip" scales gradients down that are above
            their range, as ZClip does, and drops those that are not finite. "reject" drops the gradients of a
            step with an alert: that step changes neither parameters nor buffers (see below). Where no step
            has passed for 100 it is warned of, and after 200 the range is learnt anew.
            "increase_sync_frequency" halves an `averaging_frequency` or `sync_frequency`, "tighten_staleness"
            a `max_staleness`, as a `ParameterServer` has: from then on pushes that are later are rejected.
            "reduce_lr" multiplies learning rates by `lr_factor`: a live optimizer's while it steps, beside
            any scheduler; a server's for all workers; not once more where parameters are not finite already.
            After 100 steps with an alert that is finite since it was taken as often as it may be (or eight
            times `patience`, if that is more and it was not gone back), in which the metric has not fallen by
            a tenth (or no loss was in its range since it was gone back), its level is taken for usual.
            "quarantine" leaves out the worker whose metric it was, which goes on being measured; of several
            that are observed by their names, fewer than half. "rollback" goes back to the newest checkpoint
            before the alert, a server's or that of the `FaultTolerantTrainer` that trains the model, and when
            taken again to the one before, never forward; at once, as a new matter, where parameters are lost
            again after values in the range; with each remedy behind it that changes how training goes on, for
            what is finite, until all was taken and no loss was in the range in spite of it, which then is
            taken for usual; three times in all, with one or without, where nothing is finite any more; the
            step's gradient, which is of what was gone back from, is dropped. "pause" lets the thread that
            trains wait for `resume()`, and drops what it had computed.
        acts_on: What the remedies act on: one object or a list. None: what has said that it trains `model`.
        callbacks: Functions of an `Alert`, called on the thread that trains; one or a list. Of alerts of one
            metric in a row they hear the first, the second, the fourth, the eighth and so on, as the log
            does, and those at which a remedy is taken; the log and the report say when it is over. An
            `Exception` of
            theirs is warned of and costs no training: who wants the run's end raises SystemExit or
            KeyboardInterrupt.
        warm_up: Values of a metric before it has a range. With a scheduler that lets the rate rise at first,
            for "gradient_norm", "update_ratio" and "clip" give as many as the steps in which it does, and 25
            more.
        patience: Steps with an alert that a remedy is given before the next one is taken. What does more each
            time, as "reduce_lr", has twice as many each time from the fourth on, eight times as many at most,
            and as many again while the metric falls, but behind a "rollback" that went back; "pause" has
            twice as many each time.
        quiet_steps: Steps within all ranges (of several workers, of the one that has made most) after which
            the newest remedy is let go of, and after as many more the one before. Twice as many each time
            that a remedy had to be taken again; where a level is taken for usual, one each five steps. From
            an alert of the loss on its limit goes no higher, until all are let go of and so many losses were
            no higher than the range had been, or ten times as many in the range; or it alone has made three
            times `patience` alerts, or as many times as there are remedies.
        lr_factor: Of "reduce_lr".
        grad_scaler: The `torch.amp.GradScaler` that multiplies the loss, so that norms are without it; and in
            a loop of your own an alert on a batch whose step it skips costs no later one, and what such a
            batch has broken of buffers goes back: at the next call of `observe` or `close`, or the next step.
            Beside a remedy that may drop gradients its scale is read in each of these, which waits for the
            device. Without it, the first step that is made after an alert is taken for that batch's.
        pause_timeout_s: How long a pause lasts without `resume()`; None: for ever.

    Raises:
        ConfigError: Naming all settings that cannot be used; also a remedy that has nothing to act on.

    Note:
        What a dropped batch has done to buffers is undone, but for this. Where it breaks what you have
        assigned to a buffer since the last step that was used, that is again what it was then, and of that
        size. Before any such step a part of the model in which it made NaN or infinities is as it was when
        the monitor was made: load a model before that. A part or a buffer that is new since keeps what the
        batch has made of it; so do a buffer of more numbers than are trained and than four million, and one
        of a sparse or quantized layout.

        Of a batch whose step a GradScaler skips, buffers keep nothing that is NaN or infinite, and else what
        torch leaves in them. A loop of your own is best served by `observe` in each step: where a forward
        reads what is broken, all batches after it would be skipped. Of several optimizers under one
        GradScaler all have to skip: what one that steps finds there is kept.

    Example:
        >>> monitor = offbeat.AsyncTrainingMonitor(divergence_metrics=["loss"])
        >>> for step in range(30):
        ...     alerts = monitor.observe(step, loss=1.0)
        >>> alerts, len(monitor.observe(30, loss=2.0))
        ((), 1)
    """

    @known_keywords
    def __init__(
        self,
        model: "nn.Module | None" = None,
        divergence_metrics: Sequence[str] = ("loss",),
        alert_threshold: float = 0.5,
        remediation_strategy: str | Sequence[str] = "alert",
        *,
        acts_on: object = None,
        callbacks: Callback | Sequence[Callback] = (),
        warm_up: int = 25,
        patience: int = 5,
        quiet_steps: int = 100,
        lr_factor: float = LR_FACTOR,
        grad_scaler: "torch.amp.GradScaler | None" = None,
        pause_timeout_s: float | None = None,
    ) -> None:
        settings = resolve(
            Given(
                model=model,
                divergence_metrics=divergence_metrics,
                alert_threshold=alert_threshold,
                remediation_strategy=remediation_strategy,
                acts_on=acts_on,
                callbacks=callbacks,
                warm_up=warm_up,
                patience=patience,
                quiet_steps=quiet_steps,
                lr_factor=lr_factor,
                grad_scaler=grad_scaler,
                pause_timeout_s=pause_timeout_s,
            )
        )
        last = settings.remedies[-1]
        back = settings.names.index("rollback") if "rollback" in settings.names else None
        ladder = Ladder(
            len(settings.names),
            patience,
            quiet_steps,
            last.repeats,
            last.growth,
            back=back,
            most_back=0 if back is None else settings.remedies[back].repeats,
            mending=frozenset(n for n, remedy in enumerate(settings.remedies) if remedy.is_mending),
        )
        self._course = Course(
            settings,
            ladder,
            threshold=float(alert_threshold),
            warm_up=warm_up,
            is_of_one=model is not None,
        )
        self._metrics, self._names = settings.metrics, settings.names
        self._callbacks = settings.callbacks
        self._have_failed: list[Callback] = []
        self._norms = Band(warm_up)  # of "clip", whether the norm is judged or not
        self._first_norms = Onset()  # likewise
        self._warm_up = warm_up
        self._lock = threading.RLock()
        self._num_steps = 0
        self._num_steps_told = 0  # of these, by the end of the batch that `on_step` heard of last
        self._ahead = 1  # by what the number of the step under way is more; or as the caller counts
        self._is_outdated = False  # the gradient on the model: it is of before a pause, or a rollback
        self._is_suspect = False  # the gradient of this step, for what was observed before it
        self._is_broken = False  # likewise, by something that is not finite
        self._skips = Skips(grad_scaler)  # since one of these came about
        self._resumed = threading.Event()
        self._resumed.set()
        self._pause_timeout_s = pause_timeout_s
        self._is_closed = False
        self._attachment = None
        if model is not None:
            from offbeat.monitor.attachment import Attachment
            from offbeat.monitor.rising_rate import RisingRate

            named = (*settings.metrics, *settings.names)

            self._attachment = Attachment(
                model,
                self._hear,
                self._judge_step,
                forget=self._forget,
                was_set=self._was_set,
                is_lost=self._is_lost,
                keep=self.state_dict,
                bring=self.load_state_dict,
                scaler=grad_scaler,
                rising_rate=RisingRate(named, warm_up),
                is_measured=not MEASURED.isdisjoint(named),
                may_drop=not DROPPING.isdisjoint(settings.names),
            )
            self._attachment.parts_members = settings.parts_members
            self._attachment.wants = frozenset(settings.metrics)
            if settings.act_on_updates:  # as all of these say
                numbers = [float(alert_threshold), warm_up, patience, quiet_steps, float(lr_factor)]
                self._attachment.acts_on_updates = [*settings.names, *settings.metrics, *numbers]

    # ------------------------------------------------------------------ what users call

    @known_keywords
    def observe(
        self,
        step: int,
        *,
        worker: str | None = None,
        loss: float | None = None,
        loss_variance: float | None = None,
        gradient_norm: float | None = None,
        update_ratio: float | None = None,
        staleness: float | None = None,
        parameter_variance: float | None = None,
        non_finite: float | None = None,
    ) -> tuple[Alert, ...]:
        """Judge what was measured in a step.

        Args:
            step: Which; its other readings, if there are, may come in other calls.
            worker: Whose, where several are watched: the range is that of all; "quarantine" needs to know,
                and "staleness", of which without a name each late push by itself may raise an alert.
            loss: A float, or a tensor of one element, as all that follow.
            loss_variance: In place of that of the losses observed.
            gradient_norm: As `clip_grad_norm_` returns it.
            update_ratio: ‖change of the parameters‖ / ‖parameters‖.
            staleness: In updates.
            parameter_variance: Of the members' parameters around their mean: of the squares of their
                distances from it, the mean.
            non_finite: Elements that are NaN or infinite.

        Returns:
            The alerts that this raised.

        Raises:
            ConfigError: If a value is no number, or below 0 where only the loss may be, or is of a metric
                that is not judged; or `worker` is no name.
            ClosedError: After `close()`.
        """
        given = {
            "loss": loss,
            "loss_variance": loss_variance,
            "gradient_norm": gradient_norm,
            "update_ratio": update_ratio,
            "staleness": staleness,
            "parameter_variance": parameter_variance,
            "non_finite": non_finite,
        }
        readings = {name: _observed(value) for name, value in given.items() if value is not None}
        faults = [] if is_count(step) else [f"step is {step!r}: give a whole number, 0 or more"]
        faults += strings(worker=worker)
        faults += [f"{name} is {given[name]!r}: give a number" for name, v in readings.items() if v is None]
        faults += [
            f"{name} is {given[name]!r}, and never below 0: give what it is, or 0 where that is below it by "
            f"rounding"
            for name, v in readings.items()
            if name != "loss" and v is not None and v < 0
        ]
        faults += [
            f"{name} is observed and is not among divergence_metrics: name it there"
            for name in readings
            if not self._wants(name)
        ]
        refuse(faults)
        self._check_open()
        if self._attachment is not None:
            self._attachment.look_for_skipped()
        with self._lock:
            self._ahead = step - self._num_steps
            alerts = self._take({name: v for name, v in readings.items() if v is not None}, worker)
        self._is_outdated |= self._tell(alerts)
        return alerts

    def on_step(self, trainer: Any, step: Any) -> None:  # noqa: ANN401  of a package that this is not above
        """Hear of a batch, where it is one of an `AsyncTrainer`'s `callbacks`.

        What watches the trainer's model has heard of it already, by hooks, and what is closed hears no more.
        """
        hears_all = self._attachment in trained_by.keepers_of(trainer.model)
        if self._is_closed or hears_all:
            return
        mean = step.loss if trainer.loss_reduction == "mean" else step.loss / step.samples
        is_made = self._num_steps > self._num_steps_told  # of this batch: a hook has judged it, and counted
        self._hear({"loss": mean, "gradient_norm": step.gradient_norm}, is_made=is_made)
        if self._attachment is None:  # else the steps of what it watches count
            self._num_steps += 1
            if self._num_steps == SILENT_STEPS:
                self._warn_of_silence()
        self._num_steps_told = self._num_steps

    def resume(self) -> None:
        """Let training go on after a "pause"; any thread may call it."""
        self._resumed.set()

    @property
    def is_paused(self) -> bool:
        """Whether training waits for `resume()`."""
        return not self._resumed.is_set()

    @property
    def in_effect(self) -> tuple[str, ...]:
        """The remedies in effect, in the order in which they were taken."""
        return self._course.in_effect

    def report(self) -> MonitorReport:
        """Tell what was seen and done so far."""
        with self._lock:
            return self._course.report()

    def reset(self) -> None:
        """Let go of all remedies and begin with new ranges, as after a change of what is trained."""
        with self._lock:
            self._course.begin_anew()
            self._norms, self._first_norms = Band(self._warm_up), Onset()
            self._is_suspect = self._is_broken = False
            if self._attachment is not None:
                self._attachment.rising_rate.begin()
            self._resumed.set()

    def state_dict(self) -> dict[str, Any]:
        """Give what it takes to go on after a restart: ranges, and which remedies are in effect since when.

        Returns:
            Plain data, for `torch.save` or JSON. Of what `report` tells it has how many alerts there were,
            and not the alerts and values themselves.
        """
        with self._lock:
            return {
                "divergence_metrics": list(self._metrics),
                "remediation_strategy": list(self._names),
                "num_steps": self._num_steps,
                "ahead": self._ahead,
                "norms": asdict(self._norms),
                "first_norms": asdict(self._first_norms),
                "course": self._course.state(),
                "ratio_since": None if self._attachment is None else self._attachment.gradients.ratio_since(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what is in effect is let go of first.

        Remedies that were in effect are so again as soon as there is what they act on, and are let go of in
        their time: a frequency, a bound or a server's rate that came back with a checkpoint as they had set
        it is not changed once more, and one that is as before is set; where it is neither, somebody has set
        it since, and it stays.

        Args:
            state: As `state_dict` gave it.

        Raises:
            ConfigError: If it is none, or of a monitor of other metrics or remedies.
            ClosedError: After `close()`.
        """
        self._check_open()
        try:
            given = {name: list(state[name]) for name in ("divergence_metrics", "remediation_strategy")}
            norms, first = Band(**state["norms"]), state["first_norms"]
            first_norms = Onset(**{**first, "sizes": tuple(first["sizes"])})
            num_steps, ahead, course = int(state["num_steps"]), int(state["ahead"]), state["course"]
        except (KeyError, TypeError, ValueError) as error:
            raise _no_state(error) from error
        ours = {"divergence_metrics": list(self._metrics), "remediation_strategy": list(self._names)}
        refuse(
            f"{name} is {ours[name]!r}, and the state is of a monitor's with {given[name]!r}: give the same"
            for name in given
            if given[name] != ours[name]
        )
        with self._lock:
            try:
                self._course.load(course)
            except (KeyError, TypeError, ValueError) as error:
                raise _no_state(error) from error
            self._norms, self._first_norms = norms, first_norms
            self._num_steps = self._num_steps_told = num_steps
            self._ahead = ahead
            if self._attachment is not None:
                self._attachment.gradients.resume(state.get("ratio_since"))  # which older ones do not have
                rising_rate = self._attachment.rising_rate
                if num_steps >= self._warm_up:
                    rising_rate.end()
                else:
                    rising_rate.begin(num_steps)
            self._is_suspect = self._is_outdated = self._is_broken = False
            self._resumed.set()

    def close(self) -> None:
        """Let go of all remedies, and watch no more. May be called twice."""
        self._end()

    def __enter__(self) -> Self:
        """Use it in a `with` block, at whose end it is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(has_failed=error is not None)

    # ------------------------------------------------------------------ what hooks call

    def _hear(self, readings: Mapping[str, Any], *, is_made: bool = False) -> None:
        """Take what a trainer tells of the step under way, or of the one that was made last."""
        wanted = {name: value for name, value in readings.items() if self._wants(name)}
        numbers = {name: read for name, v in wanted.items() if (read := number(v)) is not None}
        if numbers:
            with self._lock:
                alerts = self._take(numbers, None, is_made=is_made)
            self._is_outdated |= self._tell(alerts)
        if self._wants("staleness") and (late := number(readings.get("staleness_of_rejected"))) is not None:
            with self._lock:
                if not self._is_closed:
                    self._course.take_unused(self._num_steps + self._ahead, "staleness", late)

    def _judge_step(self, optimizer: "torch.optim.Optimizer | None") -> bool:
        """Judge the gradients on the model; tell whether they are to be used."""
        assert self._attachment is not None  # noqa: S101  which calls this
        gradients = self._attachment.gradients
        reading = gradients.read(optimizer)
        if reading is None:  # of nothing, or of what the optimizer will not use
            self._is_suspect = self._is_broken = False
            return True
        measured = {"gradient_norm": reading.norm, "non_finite": float(reading.num_non_finite)}
        readings = {name: value for name, value in measured.items() if self._wants(name)}
        if self._wants("update_ratio") and (ratio := gradients.update_ratio()) is not None:
            readings["update_ratio"] = ratio
        with self._lock:
            alerts = self._take(readings, None)
            is_out = self._is_suspect
            most = self._clipped(reading.norm)
            in_effect = self._course.in_effect
            is_clipping = "clip" in in_effect
            is_used = not (is_out and "reject" in in_effect)
            # Of what is measured of an update, all members of a group hear the same.
            is_unusable = self._course.keeps_out_non_finite and reading.num_non_finite > 0
            is_used &= not (self._is_broken or is_unusable)
            if is_used and is_clipping and most < reading.norm:
                self._course.num_clipped += gradients.clip(most, optimizer)
            is_used &= not (self.is_paused or self._is_outdated)
            self._course.count(is_used=is_used, is_finite=not is_unusable)
            self._num_steps += 1
            self._is_suspect = self._is_outdated = self._is_broken = False
        self._tell(alerts)
        if self._num_steps == SILENT_STEPS:
            self._warn_of_silence()
        return is_used

    def _forget(self) -> None:
        """Hear that the gradients of what was seen so far are gone: the next ones are others."""
        with self._lock:
            self._is_suspect = self._is_outdated = self._is_broken = False

    def _was_set(self, thing: object, name: str) -> None:
        """Hear that a trainer has set an attribute of a thing's anew: a remedy that had set it has ended."""
        with self._lock:
            self._course.was_set(thing, name)

    def _is_lost(self) -> bool:
        """Tell whether parameters are not finite, as far as was seen."""
        return self._course.is_lost

    # ------------------------------------------------------------------ inside

    def _end(self, *, has_failed: bool = False) -> None:
        """Close; where a block has failed, nothing is to hide why."""
        with self._lock:
            self._is_closed = True
            self._course.let_go()
            self._resumed.set()
        if self._attachment is None:
            return
        try:
            self._attachment.look_for_skipped()
        except Exception as error:
            if not has_failed:
                raise
            log.warn(
                f"the monitor could not look for what a skipped step has broken in buffers, which may hold "
                f"NaN or infinity: {process.cause_of(error)}"
            )
        finally:
            with self._lock:
                self._attachment.close()

    def _take(
        self, readings: Mapping[str, float], worker: str | None, *, is_made: bool = False
    ) -> tuple[Alert, ...]:
        """Judge readings of the step under way, or of the one before, and act on what is out of range."""
        if self._is_closed:  # by another monitor's callback or thread, since somebody began to tell this one
            return ()
        if self._was_skipped():
            self._forget()
        step = self._num_steps + self._ahead - is_made
        num_pauses, num_went_back = self._course.num_taken["pause"], self._course.num_went_back
        is_alone = self._attachment is not None and not self._attachment.are_shared()
        alerts = self._course.take(step, readings, worker, may_drop=is_alone, is_lost=self._is_lost_now)
        if self._course.num_taken["pause"] > num_pauses:
            self._resumed.clear()
        self._is_outdated |= is_alone and self._course.num_went_back > num_went_back
        self._is_suspect |= bool(alerts)
        if alerts:
            self._skips.begin()
        self._is_broken |= is_alone and self._course.keeps_out_non_finite and not all(map(is_finite, alerts))
        return alerts

    def _is_lost_now(self) -> bool:
        """Tell whether parameters of the model are not finite; waits for the device."""
        return self._attachment is not None and self._attachment.is_lost_now()

    def _was_skipped(self) -> bool:
        """Tell whether the GradScaler has skipped the step of which there was an alert.

        Gradients that are gathered over several losses are still to come to theirs.
        """
        is_any = self._is_suspect or self._is_outdated or self._is_broken
        return is_any and self._skips.are_any()

    def _clipped(self, norm: float) -> float:
        """Give what "clip" leaves of a norm, and take the norm up."""
        first = self._first_norms
        if not self._norms.is_ready and is_usable(norm):
            self._first_norms = first.after(norm)
            if first.is_beyond(norm):  # the range to come knows nothing of it
                return first.most
        most = self._norms.clipped(norm)
        self._norms = self._norms.after(norm)
        return most

    def _tell(self, alerts: Sequence[Alert]) -> bool:
        """Call the callbacks, then wait if training is to pause; not under the lock, which others want.

        Returns:
            Whether it was paused, and what was computed before is not to be used: not what all members of a
            group use.
        """
        for alert in (alert for alert in alerts if alert.is_news):
            for callback in self._callbacks:
                self._call(callback, alert)
        is_to_wait = not self._resumed.is_set()
        if is_to_wait:
            log.warn(f"training is paused, and {until_when(self._pause_timeout_s)}")
            self._wait()
            self._resumed.set()
        is_alone = self._attachment is None or not self._attachment.are_shared()
        return is_to_wait and is_alone

    def _wait(self) -> None:
        """Wait for `resume`, for as long as a pause may last, or until the run is to end and be saved."""
        timeout_s = math.inf if self._pause_timeout_s is None else self._pause_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._resumed.wait(min(max(deadline - time.monotonic(), 0.0), LOOK_S)):
            if termination.is_noted() or time.monotonic() >= deadline:
                return

    def _call(self, callback: Callback, alert: Alert) -> None:
        """Call a callback; one that fails, as where a chat cannot be reached, is warned of the first time."""
        try:
            callback(alert)
        except Exception as error:  # noqa: BLE001  whatever a callback of the user's raises
            has_failed = any(known is callback for known in self._have_failed)
            if not has_failed:
                self._have_failed.append(callback)
            say = log.debug if has_failed else log.warn
            say(
                "the callback %.100r failed at an alert, and training goes on; later failures of its are "
                "logged as debug: %s",
                callback,
                process.cause_of(error),
                exc_info=True,
            )

    def _warn_of_silence(self) -> None:
        """Say which metrics nobody has measured so far: their alerts would be waited for in vain."""
        silent = [metric for metric in self._metrics if not self._course.has_seen(metric)]
        if self._attachment is not None and self._attachment.are_averaged():  # once there are two rounds
            silent = [metric for metric in silent if metric != "parameter_variance"]
        if silent:
            names = dict.fromkeys("loss" if metric == "loss_variance" else metric for metric in silent)
            observed = ", ".join(f"{name}=…" for name in names)
            log.warn(
                f"the model has made {SILENT_STEPS} steps, and nobody has measured {', '.join(silent)}: in a "
                f"loop of your own call monitor.observe(step, {observed}) between backward() and the "
                f"optimizer's step(), or leave it out of divergence_metrics"
            )

    def _wants(self, metric: str) -> bool:
        return metric in self._metrics or (metric == "loss" and "loss_variance" in self._metrics)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this AsyncTrainingMonitor is closed: make a new one")


def _no_state(error: Exception) -> ConfigError:
    return ConfigError(f"state is no state_dict() of an AsyncTrainingMonitor's: {process.cause_of(error)}")


def _observed(value: Any) -> float | None:  # noqa: ANN401  a tensor, perhaps
    """Give what a user gave as a float; None if it is no number, as what is true or false is none."""
    is_boolean = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    return None if is_boolean else number(value)
