"""The training loop of a `FaultTolerantTrainer`: batches in, checkpoints behind them."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn, Self

import torch

from offbeat import log, process, trained_by
from offbeat.errors import ConnectionLostError
from offbeat.history import History
from offbeat.local.batches import no_batch
from offbeat.local.evaluate import Each
from offbeat.local.finite import Finiteness
from offbeat.local.log_lines import (
    tracked,
    tracked_validation,
    words_of,
    words_of_skipped,
    words_of_validation,
)
from offbeat.local.loss import wake
from offbeat.local.stopping import Stop
from offbeat.recovery import files, rng
from offbeat.recovery.account import Account
from offbeat.recovery.files import Parts
from offbeat.recovery.goal import Goal
from offbeat.recovery.keepers import states_of
from offbeat.recovery.manifest import Manifest
from offbeat.recovery.modes import Modes, modes_of
from offbeat.recovery.nest import flatten
from offbeat.recovery.place import Data
from offbeat.recovery.rollback import WayBack
from offbeat.recovery.saver import Draft, Saver, parameters_of
from offbeat.recovery.trainee import GoesBack, Trainee
from offbeat.termination import BrokenOff, Terminated
from offbeat.worker.account import Account as Pushes

__all__ = ["Again", "Plan", "Run", "check_state"]

WHERE_NOT_FINITE = (
    "give a lower learning rate, clip gradients or, in half precision, scale the loss; or let "
    "AsyncTrainingMonitor(model, remediation_strategy='reject') drop such gradients"
)
"""What a user can do."""

TO_GO_BACK = ". recovery_strategy='last_good' goes on from the newest checkpoint that is finite"
"""Where it may be asked for."""

WORKER_HAS_GONE = "DataLoader worker (pid"
"""With which torch begins to tell that a process of a loader's has ended before its time."""


class _BrokenOffError(Exception):
    """The process is to end, and the model is being measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `train` was asked for.

    Attributes:
        goal: Where the run is to end.
        log_frequency: Steps between log lines.
        validate: Measures the model on other data, after each pass, and tells after each batch how many were
            measured; None: nothing is.
        seed: Of the order of a dataset.
        is_seed_given: Whether a user gave that as the run began.
        member: What else this order follows from, where several train together.
        num_threads: Of torch, where they are fixed.
        monitor: Name of what is monitored, if something is.
        request: As which `recovery_strategy` the run was asked for, in words.
        modes: Which parameters were trained, and which modules were in training mode, as the run began.
        device: Where is trained.
        may_go_back: Whether a start may choose an older checkpoint.
        gone_back_to: Number of the checkpoint that this life goes on from, where it went back past others.
    """

    goal: Goal
    log_frequency: int
    validate: Callable[[Each], dict[str, float]] | None
    seed: int
    is_seed_given: bool
    member: str
    num_threads: int
    monitor: str | None
    request: str
    modes: Modes
    device: torch.device
    may_go_back: bool
    gone_back_to: int | None

    @property
    def where_not_finite(self) -> str:
        """What a user can do where something is not finite."""
        return WHERE_NOT_FINITE + (TO_GO_BACK if self.may_go_back else "")

    def is_done(self, account: Account) -> bool:
        """Whether all of it was done."""
        return self.goal.is_reached(epochs=account.history.epochs, steps=account.history.steps)

    def end(self, account: Account) -> History:
        """Write down that all of it was done, and give the history."""
        history = account.history
        history.stopped = "epochs" if history.epochs >= self.goal.epochs else "max_steps"
        return history


@dataclass(frozen=True, slots=True)
class Again:
    """A checkpoint whose values there are once more, after a rollback.

    Attributes:
        number: Of that which was gone back to.
        step: That its values are of.
    """

    number: int
    step: int

    @classmethod
    def of(cls, manifest: Manifest | None) -> Self | None:
        """Tell what the values of a checkpoint are once more; None where they are its own."""
        if manifest is None or manifest.again_number is None or manifest.again_step is None:
            return None
        return cls(manifest.again_number, manifest.again_step)


class Run:
    """One life of a run.

    Args:
        plan: What to do.
        trainee: What to train; where a checkpoint was, already as it was there.
        data: To train on.
        account: Where the run is.
        saver: Makes checkpoints.
        way_back: Has what somebody has asked to go back to; None where nobody can.
        terminated: Whether to end at the next step.
        stop: Whether somebody wants an end.
        resumed: The rest of the checkpoint's state; None for a run that begins.
        again: Whose values that checkpoint has once more; None where they are its own.
        is_validation_due: Whether a signal had broken off what belongs after the pass before it.

    Attributes:
        began_step: Steps that there were as the newest batch was begun: its loss is of the values of then.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        trainee: Trainee,
        data: Data,
        account: Account,
        saver: Saver,
        way_back: WayBack | None,
        terminated: Terminated,
        stop: Stop,
        resumed: dict[str, Any] | None,
        again: Again | None,
        is_validation_due: bool,
    ) -> None:
        self._plan = plan
        self._trainee = trainee
        self._data = data
        self._account = account
        self._saver = saver
        self._way_back = way_back
        self._terminated = terminated
        self._stop = stop
        self._was_stopped = account.history.stopped == "stop"  # in a life before
        self._resumed = resumed
        self._again = again  # until there are values of another step
        self._is_validation_due = is_validation_due
        self._has_ended = self._has_caught_up = False
        self._untold: int | None = None  # number of what was gone back to, until a checkpoint says so
        self._pushes = Pushes(account.history, owner="trainer")
        self._finiteness = Finiteness(trainee.module, account.history, remedy=plan.where_not_finite)
        self._is_checked = False
        self._first_step = self.began_step = account.history.steps
        self._seconds_before = account.history.seconds
        self._began = time.monotonic()
        self._logged = self._began, account.history.samples

    def run(self) -> None:
        """Train to the end, and save that.

        Raises:
            CheckpointError: If the last save fails.
            SystemExit: With code 143 after SIGTERM, when that is saved.
            KeyboardInterrupt: After Ctrl-C, likewise.
        """
        if self._resumed is None:  # else it is in the modes that it was saved in
            wake(self._trainee.module)
        try:
            with self._trainee.training():
                self._train()
        except BaseException:
            self._trainee.abandon()
            raise
        finally:
            self._note_time()

    def _train(self) -> None:
        trainee, account, history = self._trainee, self._account, self._account.history
        self._hear()
        if self._is_validation_due:
            self._catch_up()
        while not (self._is_stopped() or self._plan.is_done(account) or self._pushes.is_out_of_budget):
            self._check_terminated()
            if self._pass():
                epoch = account.place.epoch
                account.end_epoch(trainee.end_epoch(epoch))
                self._hear()
                self._after_epoch(epoch)
        if self._resumed is not None:  # nothing was left to train on; for what comes after
            rng.restore(self._resumed["rng"], self._plan.device)
        with self._saving_if_lost():
            history.steps += self._end()
        self._hear()
        if history.steps > account.logged_step:
            self._log()
        self._go_back_if_asked()
        self._finiteness.end()
        self._stop.end()
        if not self._is_stopped():  # the last log line may have been what somebody stopped at
            self._plan.end(account)
        if self._pushes.is_out_of_budget:
            history.stopped = "budget"
        self._save()
        self._saver.wait()
        if self._way_back is not None:
            self._way_back.close()
        trainee.finished(history)

    def _end(self) -> int:
        """End together with the others, if there are any; tell how many steps that were.

        At a server that takes as long as they train. So this one's share is brought first, and all is saved;
        then a signal ends the wait, which the next life takes up again. It does not where the server is this
        process's, without which the others could average no more: there the next life has it once more, for
        those whom the signal has ended, too.
        """
        trainee = self._trainee
        if not trainee.meets_at_server:
            return trainee.end()
        trainee.bring()  # where it cannot be, `end` says so, or brings it once the server is back
        if not self._has_nothing_new or self._has_caught_up or self._was_stopped:
            self._save(is_broken_off=True)
            self._saver.settle()  # what fails is told now, and not when the others have ended
            if self._saver.has_failed:
                log.warn(
                    f"the members that train on are waited for, and what this one has done up to step "
                    f"{self._account.history.steps:,} is saved when they have ended, or at a signal "
                    f"(SIGTERM, Ctrl-C)"
                )
        num_steps = self._end_together()
        if num_steps is None:
            self._leave(is_saved=not self._saver.has_failed)
        if trainee.hosts_server and self._terminated.has_come:
            self._leave()
        self._has_ended = True
        return num_steps

    def _end_together(self) -> int | None:
        """Do so; None where a signal has ended the wait."""
        if self._trainee.hosts_server:
            return self._trainee.end()
        try:
            with self._terminated.breaking_off():
                return self._trainee.end()
        except BrokenOff:
            return None

    def _after_epoch(self, epoch: int) -> None:
        """Do what belongs after a pass that is in the account; a checkpoint of before says that it is due."""
        self._is_validation_due = True
        self._validate(epoch)
        self._trainee.after_epoch(epoch)
        self._is_validation_due = False
        self._go_back_if_asked()

    def _catch_up(self) -> None:
        """Do so after the pass with which the life before has ended, with all random states as they were."""
        resumed, self._resumed = self._resumed, None
        assert resumed is not None  # noqa: S101  a run that begins has made no pass
        self._data.bring_back(resumed["data"], lambda: rng.restore(resumed["rng"], self._plan.device))
        with warnings.catch_warnings():
            # Of torch, to who steps the scheduler first: the optimizer's steps were made in another life.
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)`")
            self._after_epoch(self._account.place.epoch - 1)
        self._has_caught_up = True

    def _validate(self, epoch: int) -> None:
        """Measure the model on other data; what that takes is of no log line's rate."""
        if self._plan.validate is None:
            return
        history, began_s = self._account.history, time.monotonic()
        metrics = self._measured(self._plan.validate)
        if metrics is None:
            self._leave()
        self._account.validated(epoch, metrics)
        since, samples = self._logged
        self._logged = since + time.monotonic() - began_s, samples
        where = f"epoch {history.epochs}/{self._plan.goal.epochs}, step {history.steps}"
        log.announce(f"{where}, {words_of_validation(metrics)}")
        self._trainee.validated(tracked_validation(metrics), history.steps)

    def _measured(self, validate: Callable[[Each], dict[str, float]]) -> dict[str, float] | None:
        """Measure the model; None where the process is to end meanwhile: to measure may take long."""
        try:
            return validate(self._note_measured)
        except _BrokenOffError:
            return None
        except RuntimeError as error:
            if self._has_cut_off(error):
                return None
            raise

    def _note_measured(self, batches: int) -> None:
        self._trainee.note_measured(batches)
        if self._is_to_leave:
            raise _BrokenOffError

    def _is_stopped(self) -> bool:
        """Whether somebody wants an end, which is written down. No checkpoint of before says so."""
        history = self._account.history
        if self._stop.is_wanted and not self._was_stopped:
            self._was_stopped = True
            history.stopped, history.stop_reason = "stop", self._stop.reason
            log.info("training ends at step %s: %s", history.steps, self._stop.reason or "stop() was called")
        return self._was_stopped

    def _hear(self) -> None:
        """Take down what was skipped, and what a server has answered."""
        self._account.history.skipped += self._trainee.take_skipped()
        self._pushes.note(self._trainee.take_receipts())

    def _pass(self) -> bool:
        """Train on one pass, or on the rest of one; tell whether it came to its end."""
        with self._saving_if_lost():
            self._trainee.begin_epoch(self._account.place.epoch)
        for batch in self._until_cut_off():
            if self._has_nothing_new:
                self._check_terminated()
            self.began_step = self._account.history.steps
            # A batch that was taken is trained on, whatever came meanwhile: no state is of before that.
            done = self._trainee.step(batch, self._account.place.epoch)
            self._account.add(done)
            self._again = None
            self._hear()
            history = self._account.history
            if done.is_skipped:
                self._finiteness.skip(history.steps)
            else:
                self._finiteness.add(done.loss, history.steps)
            self._trainee.after_step()
            if done.lost is not None:
                with self._saving_if_lost():
                    raise done.lost
            if history.steps - self._account.logged_step >= self._plan.log_frequency:
                self._log()
            self._go_back_if_asked()
            self._save_if_wanted(has_stepped=done.steps > 0 and not done.is_skipped)
            self._check_terminated()
            if self._pushes.is_out_of_budget or self._is_stopped():
                return False
            if self._plan.goal.max_steps is not None and history.steps >= self._plan.goal.max_steps:
                return False
        if not self._account.place.batch:
            raise no_batch(self._account.place.epoch)
        return True

    def _save_if_wanted(self, *, has_stepped: bool) -> None:
        """Save, when it is time to; after the first step see that one can: most state is new."""
        if self._saver.is_wanted(self._account.history.steps):
            if self._trainee.is_settled:
                self._save()
        elif has_stepped and not self._is_checked and self._trainee.is_settled:
            self._is_checked = True
            check_state(self._trainee)

    def _go_back_if_asked(self) -> None:
        """Put the values of a checkpoint in place, where somebody has asked for that, and save them at once.

        The data, all counts, the random states and what watches the run go on from here. Until the new
        checkpoint is on the disk the next step waits: a process that is killed after that goes on from it.
        Where it cannot be written, the next one that can says from where it was gone back.
        """
        back = None if self._way_back is None else self._way_back.take()
        if back is None:
            return
        trainee, step = self._trainee, self._account.history.steps
        assert isinstance(trainee, GoesBack)  # noqa: S101  else there is no way back
        trainee.abandon()
        trainee.go_back(back.state)
        self._account.go_back(back.account)
        self._finiteness.begin_anew()
        trained_by.went_back(trainee.module)
        log.announce(
            f"after step {step:,} the model goes back to what it was at step "
            f"{back.manifest.values_step:,}, as {back.path} has it; the data goes on"
        )
        self._again = Again(back.manifest.number, back.manifest.values_step)
        self._untold = self._again.number
        self._save()
        self._saver.settle()

    def _batches(self) -> Iterator[Any]:
        place, resumed = self._account.place, self._resumed
        self._resumed = None
        if resumed is None:
            return self._data.begin(place.epoch)
        return self._data.resume(
            place, resumed["data"], lambda: rng.restore(resumed["rng"], self._plan.device)
        )

    def _until_cut_off(self) -> Iterator[Any]:
        """Give batches, and end the run where a signal has ended the workers that load them, too."""
        try:
            yield from self._batches()
        except RuntimeError as error:
            if self._has_cut_off(error):
                self._leave()
            raise

    def _has_cut_off(self, error: RuntimeError) -> bool:
        """Whether this tells that the signal has ended a loader's worker, too."""
        return self._terminated.has_come and str(error).startswith(WORKER_HAS_GONE)

    @property
    def _has_nothing_new(self) -> bool:
        """Whether no step was made in this life: the checkpoint that it went on from says all."""
        return self._account.history.steps == self._first_step

    @property
    def _is_to_leave(self) -> bool:
        return self._terminated.has_come and not self._trainee.is_about_to_settle

    def _check_terminated(self) -> None:
        if self._is_to_leave:
            self._leave()

    @contextmanager
    def _saving_if_lost(self) -> Iterator[None]:
        """Save the model as it is where those who average with it are lost: told to end, too, as a rule."""
        try:
            yield
        except ConnectionLostError as error:
            if not self._trainee.stands_alone:
                raise
            log.warn(
                f"the round under way is given up, and this member's model is saved as it is after step "
                f"{self._account.history.steps:,}, with what it has trained since the round before: {error}"
            )
            if self._terminated.has_come:
                self._leave()
            if not self._has_nothing_new:
                self._save(is_broken_off=True)
                self._saver.wait()
            raise

    def _leave(self, *, is_saved: bool = False) -> NoReturn:
        """Save what is new, say from where it goes on, and end."""
        self._is_stopped()  # else the same command would train on
        self._account.history.stopped = "interrupted"
        if not (is_saved or self._has_nothing_new):
            self._account.history.steps += self._trainee.settle()
            self._hear()
            self._save(is_broken_off=True)
        self._saver.wait()
        log.announce(f"ended after step {self._account.history.steps:,}; to go on, {self._saver.to_go_on}")
        leaving = self._terminated.end()
        if isinstance(leaving, SystemExit):
            process.note_exit(leaving)
        raise leaving

    def _save(self, *, is_broken_off: bool = False) -> None:
        """Save, when it is time to or all is done; or because the run is broken off."""
        self._note_time()
        self._saver.settle()
        if not self._saver.has_failed and self._again is None:
            self._untold = None  # the checkpoint before has said it
        self._saver.save(self._draft(is_broken_off=is_broken_off))

    def _draft(self, *, is_broken_off: bool) -> Draft:
        plan, account, again = self._plan, self._account, self._again
        judgement = account.judge(is_broken_off=is_broken_off)
        is_done = plan.is_done(account) and not self._is_validation_due
        is_end_due = (is_done or self._was_stopped) and self._trainee.meets_at_server and not self._has_ended
        parts = taken_apart(self._trainee, self._rest(account))
        self._is_checked = True
        history, place = account.history, account.place
        manifest = Manifest(
            number=0,
            step=history.steps,
            epoch=place.epoch,
            batch=place.batch,
            samples=history.samples,
            seconds=history.seconds,
            written_unix_s=0.0,
            is_finished=not is_end_due and (is_done or self._pushes.is_out_of_budget or self._was_stopped),
            is_good=judgement.is_within,
            loss=judgement.loss,
            band=judgement.band,
            monitored=judgement.monitored,
            monitor=plan.monitor,
            monitored_samples=judgement.monitored_samples,
            is_short=judgement.is_short,
            request=plan.request,
            gone_back_to=plan.gone_back_to,
            epochs=plan.goal.epochs,
            max_steps=plan.goal.max_steps,
            is_stopped=self._was_stopped,
            stop_reason=history.stop_reason,
            is_validation_due=self._is_validation_due,
            is_end_due=is_end_due,
            again_number=self._untold if again is None else again.number,
            again_step=None if again is None else again.step,
            num_parameters=sum(p.numel() for p in self._trainee.module.parameters()),
            optimizer=self._trainee.optimizer_name,
            offbeat=_version(),
            torch=torch.__version__,
            files=(),
        )
        return Draft(parts, manifest, parameters_of(self._trainee.module, parts.model.tensors))

    def _rest(self, account: Account) -> Callable[[], dict[str, Any]]:
        return lambda: {
            "account": account.state_dict(),
            # Of a life that takes no batch nothing was begun, and the place is where the life before was.
            "data": self._data.state() if self._resumed is None else self._resumed["data"],
            "described": self._data.described.to_plain(),
            "rng": rng.capture(self._plan.device),
            "seed": self._plan.seed,
            "is_seed_given": self._plan.is_seed_given,
            "member": self._plan.member,
            "num_threads": self._plan.num_threads,
            "keepers": states_of(self._trainee.keepers),
            "modes": {"began": self._plan.modes, "now": modes_of(self._trainee.module)},
        }

    def _note_time(self) -> None:
        self._account.history.seconds = self._seconds_before + time.monotonic() - self._began

    def _log(self) -> None:
        self._note_time()
        num_skipped = self._account.history.skipped - self._account.logged_skipped
        fates = self._pushes.fates
        staleness, told = fates.mean_staleness, fates.read()
        version, empty = self._trainee.version(self._account.history.steps), self._account.unmeasured
        record = self._account.log(self._account.history.seconds, version=version, staleness=staleness)
        now = time.monotonic()
        since, samples = self._logged
        rate = (record.samples - samples) / max(now - since, 1e-9)
        self._logged = now, record.samples
        measured = words_of(record.metrics, without=empty)
        epoch = min(self._account.history.epochs + 1, self._plan.goal.epochs)
        aside = f"; {told}" if told else ""
        aside += words_of_skipped(num_skipped, self._trainee.skips)
        where = f"epoch {epoch}/{self._plan.goal.epochs}, step {record.step}"
        log.announce(f"{where}: {measured} ({rate:,.0f} samples/s{aside})")
        self._finiteness.look()
        self._trainee.logged(record, tracked(record, rate, without=empty))


def check_state(trainee: Trainee) -> None:
    """Check that a checkpoint can hold the state that there is.

    Raises:
        UnsupportedTensorError: Naming what it cannot.
    """
    files.check(taken_apart(trainee, lambda: {"keepers": states_of(trainee.keepers)}))


def taken_apart(trainee: Trainee, rest: Callable[[], dict[str, Any]]) -> Parts:
    """Take a run's whole state apart.

    Raises:
        UnsupportedTensorError: Naming what no checkpoint can hold.
    """
    state = trainee.state_dict()
    model = flatten(state.pop("model"), what="model")
    return Parts(model, flatten({"trained": state} | rest(), what="state"))


def _version() -> str:
    try:
        return version("offbeat")
    except PackageNotFoundError:  # run from a source tree
        return "of a source tree"
