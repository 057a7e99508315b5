"""`FaultTolerantTrainer`."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.utils.data import Dataset

from offbeat import log, process, trained_by
from offbeat.checkpoints import directory_of
from offbeat.checks import Faults, at_least_one, functions, is_count, of_seed, refuse
from offbeat.errors import ConfigError, StateError
from offbeat.frequency import Every, frequency
from offbeat.history import History
from offbeat.local.evaluate import Each, evaluate
from offbeat.local.loss import LossFunction, LossReduction, other_reduction
from offbeat.local.stopping import Stop
from offbeat.metrics import Meter, Metric, listed
from offbeat.naming import known_attributes, known_keywords
from offbeat.recovery import rng, settings
from offbeat.recovery.account import Account
from offbeat.recovery.choice import Mode, kept, planned
from offbeat.recovery.determinism import deterministic as same_bits
from offbeat.recovery.directory import Directory
from offbeat.recovery.goal import Goal
from offbeat.recovery.manifest import Manifest
from offbeat.recovery.modes import Modes, modes_of
from offbeat.recovery.place import Data, data_of, warn_of_workers
from offbeat.recovery.rollback import WayBack
from offbeat.recovery.run import Again, Plan, Run, check_state
from offbeat.recovery.saver import Delays, Saver
from offbeat.recovery.start import Found, Strategy, find, go_on
from offbeat.recovery.subjects import Asked, Subject, subject_of
from offbeat.recovery.trainee import GoesBack, Scheduler, Trainee
from offbeat.termination import noting_signals
from offbeat.trainer.alone import one_at_a_time
from offbeat.trainer.scheduling import Interval
from offbeat.trainer.validation import Validation

if TYPE_CHECKING:
    from offbeat.averaging import AsyncModelAverager
    from offbeat.trainer import AsyncTrainer
    from offbeat.worker import AsyncWorker

__all__ = ["FaultTolerantTrainer"]


@known_attributes
class FaultTolerantTrainer:
    """Trains a model so that the same command, after a crash, goes on where the last checkpoint was.

    A checkpoint holds the model, with the buffers that its `state_dict` leaves out, the optimizer, the
    learning rate scheduler, the GradScaler, the random states of Python, numpy, torch and the device, and of
    generators that are attributes of the dataset, the loader or its samplers, the place in the data, the
    history, and the state of monitors of the model and of callbacks that have `state_dict` and
    `load_state_dict`. It is a copy that is taken between two steps and written behind the next ones; a reader
    finds it whole, which digests prove, or not at all. Where the newest is damaged, the one before it is
    taken, with a warning. Parameters have to be of the checkpoint's names, shapes and dtypes; a buffer that
    training has made another one (it grew, began as None, or a forward has registered it) comes back as it
    was saved, and is named in the log.

    A module is trained here. Around an `AsyncTrainer` or an `AsyncModelAverager`, that trains, with all that
    it keeps; alone, it goes on bit for bit as well. A save waits for the end of a round that is under way.
    Others go on meanwhile, or were saved in another round: members of a process group, which are all started
    again, then go on from their own places, and what `method` has kept begins anew; one that comes back to
    members at a server takes over their mean, with its own optimizer, buffers that are not averaged, place
    and random states. Around an `AsyncWorker` (or with ``strategy="parameter_server"``) the model is the
    server's, which goes on: what is saved is the place in the data, the random states, the counts and a live
    optimizer. A worker that is started again joins, pulls and goes on from that place; what it had pushed
    since the save is pushed again, and the momentum that it kept for the server begins anew. All of these are
    closed by their owner.

    SIGTERM, on the main thread and where nobody else handles it, saves after the step under way and ends the
    process with exit code 143; Ctrl-C does so with `KeyboardInterrupt`. A validation breaks off after the
    batch under way, and is what the next life begins with; so does the wait at the end for others at a
    server, before which all is averaged and saved, unless the server is this process's. A second one, a
    moment later, ends it at once, unsaved. Under `offbeat launch`, which passes SIGTERM and Ctrl-C on as
    SIGINT, either is SIGTERM.

    Args:
        model: An `nn.Module`, brought to `device` and trained in place; or the `AsyncWorker`,
            `AsyncModelAverager` or `AsyncTrainer` that trains one.
        checkpoint_dir: Where checkpoints are kept, for this run alone; `~` is one's home.
        checkpoint_frequency: What is between two: steps, or a time such as "30s". The end is saved as well.
        recovery_strategy: "latest" goes on from the newest; "best" from that with the best mean of what
            `monitor` names; "last_good" from the newest with finite parameters and a loss within its band;
            "none" begins anew, and refuses a directory in which something is; a path, from that checkpoint.
            Where the directory has none, the run begins. "best" and a path go back once: where the newest
            checkpoint was made under the same of these, the run goes on from that, and one that is done
            trains nothing. "last_good" goes back at each start whose newest is not good; where the same
            command is done, only if that is not finite: a higher loss is an end as well. From such an end it
            goes back once, and again only if a newer good one has come of that; else it raises.
        device: Where to train a module; of others it is theirs.
        monitor: A metric, as in `train`, of which each checkpoint keeps the mean since the one before. One of
            fewer than half as many samples as was usual before it is not taken for the best.
        mode: Whether its best is the "min" or the "max". None: "max" of "accuracy", "min" of "loss" and of
            what is called as a loss is, such as mse_loss, cross_entropy or MSELoss. Of all else it is to be
            said.
        overwrite: Let "none" remove the checkpoints that are there.
        deterministic: Inside `train`, let torch compute the same bits each time, on as many threads: a run
            that was killed ends with the bits of one that was not. An operation that cannot is refused.
        loss_reduction: Whether `loss_fn` gives the "mean" over a batch or the "sum"; of others it is theirs.

    Attributes:
        model: The module.
        device: Where it is.
        history: Of all lives of the run; empty before `train`.
        resumed_from: The checkpoint that the last `train` went on from; None where it began.
        passed_over: Why each that would have come before it was not taken.

    Raises:
        ConfigError: Naming all settings that cannot be used.

    Example:
        >>> trainer = offbeat.FaultTolerantTrainer(nn.Linear(4, 2), "kept", checkpoint_frequency="30s")
        >>> trainer.train(
        ...     dataset=dataset,
        ...     epochs=10,
        ...     optimizer=offbeat.optim.Adam(lr=0.001),
        ...     loss_fn=nn.CrossEntropyLoss(),
        ... )
    """

    @known_keywords
    def __init__(
        self,
        model: "nn.Module | AsyncWorker | AsyncModelAverager | AsyncTrainer",
        checkpoint_dir: str | os.PathLike[str],
        checkpoint_frequency: int | str = 1000,
        recovery_strategy: str | os.PathLike[str] = "latest",
        device: str | torch.device = "cpu",
        *,
        monitor: Metric | None = None,
        mode: Mode | None = None,
        overwrite: bool = False,
        deterministic: bool = False,
        loss_reduction: LossReduction = "mean",
    ) -> None:
        faults = Faults()
        subject = faults.catch(lambda: subject_of(model, device=device, reduction=loss_reduction))
        place = faults.catch(lambda: directory_of(checkpoint_dir))
        every = faults.catch(
            lambda: frequency(checkpoint_frequency, name="checkpoint_frequency", counted="steps")
        )
        strategy = faults.catch(lambda: settings.strategy_of(recovery_strategy))
        monitored = faults.catch(lambda: settings.mean_of(monitor, name="monitor"))
        faults += settings.of_choices(mode, loss_reduction, overwrite=overwrite, deterministic=deterministic)
        if recovery_strategy == "best" and monitor is None:
            faults.append(
                "recovery_strategy is 'best', and there is no monitor: say by what, as monitor='loss'"
            )
        if mode == "max" and monitor is None:
            faults.append(
                "mode is 'max', and there is no monitor whose best it would tell: give one, as "
                "monitor='accuracy', or leave mode out"
            )
        name = None if monitored is None else monitored.name
        better = faults.catch(lambda: settings.mode_of(name)) if mode is None else mode
        if overwrite is True and recovery_strategy != "none":
            faults.append("overwrite is True, which is for recovery_strategy='none' alone: leave it out")
        if subject is not None and strategy is not None:
            faults += subject.faults_of(strategy=strategy[0])
        refuse(faults)
        assert subject is not None  # noqa: S101  else there is a fault
        assert place is not None  # noqa: S101
        assert every is not None  # noqa: S101
        assert strategy is not None  # noqa: S101
        assert better is not None  # noqa: S101
        if isinstance(model, nn.Module) or subject.why_it_stays is None:  # else who trains it has told so
            trained_by.register(subject.module, self)
        self.history = History()
        self.resumed_from: Path | None = None
        self.passed_over: tuple[str, ...] = ()
        self._subject: Subject = subject
        self._directory = Directory(Path(place))
        self._every: Every = every
        self._monitor = monitored
        self._strategy = Strategy(*strategy, name, better, overwrite)
        self._is_deterministic = deterministic
        self._request = self._strategy.request
        self._left: Modes | None = None  # of the model, as the last `train` has left it
        self._loss_fn: LossFunction | None = None
        self._delays = Delays()
        self._stop = Stop()
        self._way_back: WayBack | None = None  # inside `train`, where there is one
        self._run: Run | None = None  # inside `train`

    @known_keywords
    @one_at_a_time
    def train(
        self,
        *,
        dataset: Dataset[Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        epochs: int = 1,
        optimizer: object = None,
        loss_fn: LossFunction,
        scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None,
        scheduler_interval: Interval = "epoch",
        scheduler_metric: Metric | None = None,
        grad_scaler: "torch.amp.GradScaler | None" = None,
        batch_size: int | None = None,
        seed: int | None = None,
        metrics: Metric | Iterable[Metric] = ("loss",),
        log_frequency: int = 100,
        validation: Iterable[Any] | Dataset[Any] | None = None,
        max_steps: int | None = None,
    ) -> History:
        """Train, from where the directory's checkpoints say, until all is done.

        Args:
            dataset: Gives samples (inputs, targets). This or `dataloader`.
            dataloader: Gives batches (inputs, targets). One with `state_dict` and `load_state_dict` goes on
                in mid-epoch at once; of another, the epoch's batches that were done are read and dropped.
            epochs: Passes over the data in all, those before a crash among them: where they are done, nothing
                is trained.
            optimizer: A spec of `offbeat.optim`, which becomes torch's optimizer; a class; or a live one. Its
                settings come from the checkpoint where there is one, and others are warned of at each start:
                in a run that goes on they are changed by a hook of a live one (`register_step_pre_hook`).
                None: that of the `train` before.
            loss_fn: From (outputs, targets) to a scalar; of a module, buffers and parameters are saved, too.
            scheduler: A learning rate scheduler of torch's, or what makes one of the optimizer, such as
                ``functools.partial(StepLR, step_size=10)``.
            scheduler_interval: When it steps: after each "epoch", or each "step" that was not skipped.
            scheduler_metric: What ReduceLROnPlateau goes by, as `AsyncTrainer.train` has it: "loss",
                "accuracy" or a function. What was measured in the epoch under way goes on after a crash.
            grad_scaler: Scales the loss, and skips steps with infinite gradients (`history.skipped`).
            batch_size: Samples in a batch of `dataset`. None: `local_batch_size` of what has one, else 32. A
                `dataloader` makes its own.
            seed: Of the order of `dataset`. None: torch's own as the run began; an `AsyncWorker` and an
                `AsyncTrainer` have orders of their own.
            metrics: What the history tells: "loss", "accuracy", callables of (outputs, targets).
            log_frequency: Steps between log lines.
            validation: Data on which the model is measured after each whole epoch, by the loss and `metrics`,
                as `AsyncTrainer.train` does it: in ``history.validation``, and a log line. What was measured
                goes on after a crash.
            max_steps: Steps after which to stop, in all; None does not.

        Returns:
            The history of all lives of the run; also in `self.history`.

        Raises:
            ConfigError: Naming all that cannot be used, or is other data than the checkpoint's.
            ModelMismatchError: If model, optimizer, scheduler or GradScaler are others than the checkpoint's.
            UnsupportedTensorError: Naming state that no checkpoint can hold.
            CheckpointError: If the directory or its checkpoints cannot be used, or the last save fails, which
                is that of the end or after SIGTERM; one in mid-run is warned of, and tried again.
            StateError: With `deterministic`, naming an operation that has no such form; or where a `train` of
                this trainer is at work.
            SystemExit: With code 143, after SIGTERM; also where that came when all was done.
            KeyboardInterrupt: After Ctrl-C, likewise.
        """
        limits = {"batch_size": batch_size, "max_steps": max_steps}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        faults = Faults(at_least_one(epochs=epochs, log_frequency=log_frequency, **given) + of_seed(seed))
        if dataloader is not None:
            faults += settings.of_dataset_alone(seed=seed, batch_size=batch_size)
        faults += functions("a function of (outputs, targets)", loss_fn=loss_fn)
        faults += settings.of_scaler(grad_scaler) + settings.of_scheduler(
            scheduler, scheduler_interval, scheduler_metric, is_validated=validation is not None
        )
        metrics = listed(metrics)
        measured = faults.catch(lambda: settings.means_of(metrics, name="metrics"))
        passes = epochs if type(epochs) is int and epochs > 1 else 1
        faults.catch(lambda: self._data(dataset, dataloader, epochs=passes))
        validated = faults.catch(lambda: self._validation(validation, metrics if measured else (), passes))
        subject = self._subject
        asked = Asked(
            epochs=passes,
            optimizer=optimizer,
            loss_fn=loss_fn,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            scheduler_metric=scheduler_metric,
            is_validated=validation is not None,
            scaler=grad_scaler,
            stop=self._stop,
        )
        faults.catch(lambda: subject.check(asked))
        refuse(faults)
        assert measured is not None  # noqa: S101  else there is a fault
        if (warning := other_reduction(loss_fn, subject.reduction, owner=type(self).__name__)) is not None:
            log.warn(warning)
        trainee = subject.trainee(asked)
        self._loss_fn = loss_fn
        check_state(trainee)  # now, and not at the first save
        account = Account(measured, self._monitor, trainee.scheduler_meter if validation is None else None)
        account.history.optimizer = settings.words_of(trainee.optimizer_name)
        with ExitStack() as stack:
            stack.enter_context(self._directory.locked())
            terminated = stack.enter_context(noting_signals())
            process.note_exit(None)  # of a `train` before
            goal = Goal(epochs, max_steps)
            found = self._found(trainee, is_done=goal.is_done)
            rest = None if found is None else found.rest
            plan = Plan(
                goal=goal,
                log_frequency=log_frequency,
                validate=None
                if validated is None
                else partial(self._validate, validated, trainee.scheduler_meter),
                seed=rest["seed"] if rest else subject.seed if seed is None else int(seed),
                is_seed_given=rest.get("is_seed_given", True) if rest else seed is not None,
                member=rest["member"] if rest else subject.member if seed is None else "",
                num_threads=rest["num_threads"] if rest else torch.get_num_threads(),
                monitor=self._strategy.monitor,
                request=self._request,
                modes=rest["modes"]["began"] if rest and "modes" in rest else modes_of(self.model),
                device=self.device,
                may_go_back=not subject.faults_of(strategy="last_good"),
                gone_back_to=found.manifest.number if found is not None and found.is_behind else None,
            )
            data = self._data(
                dataset,
                dataloader,
                epochs=epochs,
                batch_size=subject.batch_size if batch_size is None else batch_size,
                seed=plan.seed,
                member=plan.member,
                is_deterministic=self._is_deterministic,
                is_ended=lambda: terminated.has_come,
            )
            if found is not None:
                go_on(
                    found,
                    self._directory,
                    trainee=trainee,
                    data=data,
                    account=account,
                    seed=seed,
                    member=subject.member,
                    left=self._left,
                    may_go_back=plan.may_go_back,
                )
            elif self.history.steps:
                log.warn(
                    f"no checkpoint has the {self.history.steps} steps that this trainer made before: the "
                    f"run begins anew, with the model and the optimizer as these have left them"
                )
            self._note(found, account, trainee)
            stack.callback(self._note_modes)
            if self._is_done_already(plan, trainee, account, found):
                return account.history
            if self._is_deterministic:
                stack.enter_context(same_bits(num_threads=plan.num_threads))
            saver = self._saver(account)
            stack.callback(saver.close)
            stack.enter_context(_end_noted(account.history))
            stack.enter_context(self._stop.training())
            stack.enter_context(self._going_back(trainee, saver))
            self._make(
                Run(
                    plan,
                    trainee=trainee,
                    data=data,
                    account=account,
                    saver=saver,
                    way_back=self._way_back,
                    terminated=terminated,
                    stop=self._stop,
                    resumed=rest,
                    again=Again.of(None if found is None else found.manifest),
                    is_validation_due=found is not None and found.manifest.is_validation_due,
                )
            )
        return self.history

    def stop(self, reason: str | None = None) -> None:
        """End `train` after the batch under way, well; to be called while it runs, as in another thread.

        In the callback of an `AsyncTrainer` that this trains its own `stop` does the same. What there is then
        is saved, and the same command trains no more: it tells that the run was stopped, and when. With more
        `epochs`, or a higher `max_steps`, it goes on from there. A process that is killed before that is
        saved goes on from the checkpoint before. A validation under way is made to its end.

        Args:
            reason: For people: in the log, and `history.stop_reason`.

        Raises:
            StateError: Outside of `train`.
            ConfigError: If the reason is no text.
        """
        self._stop.ask(reason)

    def rollback(self, step: int | None = None) -> int:
        """Go back to a checkpoint in the middle of `train`, as after a learning rate that was too high.

        To be called on the thread that trains: from a callback or a loss function, or by the remedy
        "rollback" of an `AsyncTrainingMonitor` of the model. The checkpoint is read at once, and in place
        when the step under way, of which nothing stays, has ended; of several calls in one step the last
        counts. By then it is saved once more, as the newest, so that a process that is killed goes on from
        there.

        What goes back: the model, parameters and buffers, what the optimizer remembers (as its moments), the
        GradScaler, a loss function's parameters and buffers, and by what the next checkpoints are judged.
        What goes on: the data, so that the batches that led there are not trained on again, as the authors of
        PaLM did (Chowdhery et al., 2022, section 5.1: back by some 100 steps, 200 to 500 batches skipped);
        steps, samples and log lines of the history; random states; monitors; and the scheduler, which counts
        the steps of the run, with the learning rate and all else that the optimizer's groups are set to.

        What was gone back from is looked at last by a later start, but for one by its path, and is the first
        to make room.

        Args:
            step: Whose values are wanted, as one of `checkpoint_steps()`; None: those of the newest
                checkpoint that is listed there. What a rollback has written counts as one of the step to
                which it went back.

        Returns:
            The step whose values are in place after the step under way.

        Raises:
            ConfigError: If `step` is none.
            CheckpointError: If there is no such checkpoint, or none yet; or if it is damaged, and is set
                aside.
            ModelMismatchError: If the model has become another since.
            StateError: Outside of `train`, on another thread, or where the model is not this trainer's alone.
        """
        if step is not None and not is_count(step):
            raise ConfigError(f"step is {step!r}: give a checkpoint's, a whole number, 0 or more, or None")
        return self._on_the_way_back().ask(step)

    def checkpoint_steps(self) -> list[int]:
        """List to which steps `rollback` may go back by itself, those that were written last first.

        These are checkpoints with finite parameters and a loss within its band that no rollback has gone back
        from; with `deterministic` and a `checkpoint_frequency` in steps only those at multiples of it, which
        there are in each run.

        Raises:
            CheckpointError: If one cannot be read.
            StateError: As `rollback`.
        """
        return self._on_the_way_back().steps()

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether `rollback` may go back to them in `train`: the model is this trainer's alone."""
        return self._subject.why_it_stays is None

    @property
    def is_training(self) -> bool:
        """Whether `train` is at work, and `rollback` can be called."""
        return self._way_back is not None and self._way_back.is_open

    @property
    def began_step(self) -> int:
        """Steps that there were as `train` began its newest batch: its loss is of the values of then."""
        return 0 if self._run is None else self._run.began_step

    @overload
    def evaluate(
        self, loader: Iterable[Any] | Dataset[Any], metrics: list[Any] | tuple[Any, ...] | nn.ModuleDict
    ) -> dict[str, float]: ...
    @overload
    def evaluate(self, loader: Iterable[Any] | Dataset[Any], metrics: Metric = "accuracy") -> float: ...
    def evaluate(
        self, loader: Iterable[Any] | Dataset[Any], metrics: Metric | list[Any] | tuple[Any, ...] = "accuracy"
    ) -> float | dict[str, float]:
        """Measure the model, in eval mode; no mode and no random state is other afterwards.

        Args:
            loader: Gives batches (inputs, targets). A dataset of samples, one for each index, is loaded in
                batches of 32.
            metrics: One metric, or a list of them: "accuracy" (0..1), "loss" (of the last `train`'s loss
                function), callables of (outputs, targets), torchmetrics objects and collections.

        Returns:
            The mean over all samples; for a list or a collection, a dict by name.

        Raises:
            ConfigError: If the loader or a metric cannot be used, or the loader gave no sample.
        """
        return evaluate(
            self.model,
            loader,
            metrics,
            batch_size=EVALUATED_TOGETHER,
            device=self.device,
            loss_fn=self._loss_fn,
            reduction=self._subject.reduction,
            keeps=[self],
        )

    @property
    def model(self) -> nn.Module:
        """The module."""
        return self._subject.module

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._subject.device

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The live optimizer; None before the first `train`, or where it runs on a server."""
        return self._subject.optimizer

    # ------------------------------------------------------------------ inside

    def _found(self, trainee: Trainee, *, is_done: Callable[[Manifest], bool]) -> Found | None:
        """Find what to go on from; nothing where one of those who train together has nothing."""
        found = find(self._directory, self._strategy, module=self.model, is_done=is_done)
        if trainee.agree(found is not None):
            return found
        if found is not None:
            log.warn(
                f"another member has no checkpoint yet, so all begin anew: {found.path} is not gone on from"
            )
        return None

    def _validation(
        self,
        data: Iterable[Any] | Dataset[Any] | None,
        metrics: Iterable[Metric],
        epochs: int,
    ) -> Validation | None:
        """Get ready to measure the model on other data, if there is some."""
        if data is None:
            return None
        if self._is_deterministic:
            warn_of_workers("validation", data)
        return Validation(data, metrics, batch_size=EVALUATED_TOGETHER, epochs=epochs, keeps=[self.model])

    def _validate(self, validation: Validation, beside: Meter | None, each: Each) -> dict[str, float]:
        assert self._loss_fn is not None  # noqa: S101  `train` was given one
        return validation.measure(
            self.model, self.device, self._loss_fn, self._subject.reduction, beside=beside, each=each
        )

    def _is_done_already(self, plan: Plan, trainee: Trainee, account: Account, found: Found | None) -> bool:
        """Tell whether nobody has anything to do, with the history of that in the account."""
        history = account.history
        if found is not None and plan.goal.was_stopped(found.manifest):
            history.stopped, history.stop_reason = "stop", found.manifest.stop_reason
        is_due = found is not None and found.manifest.is_validation_due
        is_done = (plan.is_done(account) and not is_due) or history.stopped == "stop"
        is_done = is_done and not (found is not None and found.manifest.is_end_due)
        # Others who are not done are to be met once more, at their end.
        if not (trainee.agree(is_done) and is_done):
            return False
        assert found is not None  # noqa: S101  a run that begins has something to do
        rng.restore(found.rest["rng"], self.device)  # for what comes after
        if history.stopped == "stop":
            log.announce(_stopped_before(history, found.path, Goal.of(found.manifest) or plan.goal))
        else:
            plan.end(account)
            log.announce(f"all is done already, in {found.path}: nothing is trained")
        return True

    def _data(
        self,
        dataset: Dataset[Any] | None,
        dataloader: Iterable[Any] | None,
        *,
        epochs: int,
        batch_size: int = 1,
        seed: int = 0,
        member: str = "",
        is_deterministic: bool = False,
        is_ended: Callable[[], bool] = lambda: False,
    ) -> Data:
        return data_of(
            dataset,
            dataloader,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            member=member,
            device=self.device,
            is_deterministic=is_deterministic,
            is_ended=is_ended,
        )

    @contextmanager
    def _going_back(self, trainee: Trainee, saver: Saver) -> Iterator[None]:
        """Let `rollback` be called in here, where it can be."""
        if self._subject.why_it_stays is None and isinstance(trainee, GoesBack):
            self._way_back = WayBack(
                self._directory,
                trainee=trainee,
                saver=saver,
                every=self._every,
                stay=self._stay,
                is_planned=self._is_planned,
            )
        try:
            yield
        finally:
            self._way_back = None

    def _on_the_way_back(self) -> WayBack:
        """Give it.

        Raises:
            StateError: If there is none.
        """
        if (why := self._subject.why_it_stays) is not None:
            raise StateError(f"this FaultTolerantTrainer goes back to no checkpoint in mid-run: {why}")
        if self._way_back is None or not self._way_back.is_open:
            raise StateError(
                "rollback() and checkpoint_steps() are for the middle of train(), which is not at work, or "
                "has saved its end: to begin with an older checkpoint, make a FaultTolerantTrainer with "
                "recovery_strategy='last_good', or with its path"
            )
        return self._way_back

    @property
    def _is_planned(self) -> Callable[[Manifest], bool]:
        return planned(self._every, is_deterministic=self._is_deterministic)

    def _stay(self, found: Sequence[Manifest]) -> set[int]:
        strategy = self._strategy
        return kept(found, monitor=strategy.monitor, mode=strategy.mode, is_planned=self._is_planned)

    def _saver(self, account: Account) -> Saver:
        can_go_back = self._subject.why_it_stays is None
        return Saver(
            self._directory,
            self._every,
            step=account.history.steps,
            newest=self.resumed_from,
            again=AGAIN_WITH_LATEST if self._request == "none" else "the same command",
            needs_good=self._request == "last_good",
            chosen=self._stay,
            delays=self._delays,
            # Which checkpoints there are is where a rollback may lead.
            waits=self._is_deterministic and self._every.count is not None and can_go_back,
        )

    def _make(self, run: Run) -> None:
        """Train to its end, and let go of it then, and so of a loader's workers."""
        self._run = run
        try:
            run.run()
        finally:
            self._run = None

    def _note(self, found: Found | None, account: Account, trainee: Trainee) -> None:
        """Tell what this life goes on from; the next in this process goes on from what it leaves."""
        self.history = account.history
        trainee.show(account.history)
        self.resumed_from = None if found is None else found.path
        self.passed_over = () if found is None else found.warnings
        self._strategy = replace(self._strategy, name="latest", path=None, overwrite=False)

    def _note_modes(self) -> None:
        self._left = modes_of(self.model)


def _stopped_before(history: History, where: Path, goal: Goal) -> str:
    """Say why nothing is trained, and by what it would go on."""
    why = "" if history.stop_reason is None else f" ({history.stop_reason})"
    more = "more epochs=" if goal.max_steps is None else "more epochs=, or a higher max_steps=,"
    return (
        f"stop() has ended this run after step {history.steps:,}{why}, and nothing is trained: {where} is "
        f"its end; {more} would go on from there"
    )


AGAIN_WITH_LATEST = "it again with recovery_strategy='latest'"
"""What to do where the same command would begin anew."""

EVALUATED_TOGETHER = 32
"""Samples."""


@contextmanager
def _end_noted(history: History) -> Iterator[None]:
    """Write down why training stopped, where that is an exception."""
    try:
        yield
    except BaseException as error:
        if history.stopped in {"running", "stop"}:
            history.stopped = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        raise
