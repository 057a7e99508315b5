"""`AsyncTrainer`."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import nn
from torch.utils.data import Dataset

from offbeat import log, trained_by
from offbeat.averaging.methods import Method
from offbeat.averaging.settings import Backend
from offbeat.checks import Faults, at_least_one, check_keys, of_seed, of_worker_id, refuse, strings
from offbeat.errors import ConfigError
from offbeat.history import History
from offbeat.launchers import find
from offbeat.local import LocalOptimizer
from offbeat.local.arguments import faults_of_train
from offbeat.local.batches import batches_of, loaded
from offbeat.local.device import usable_device
from offbeat.local.evaluate import evaluate
from offbeat.local.log_lines import stop_noted
from offbeat.local.loss import LossFunction, LossReduction, other_reduction
from offbeat.local.parameters import of_model
from offbeat.local.progress import progress_for
from offbeat.local.saved import bring_back_told, faults_of_kind, faults_of_state, state_told
from offbeat.local.stopping import Stop
from offbeat.metrics import Metric, listed, meters
from offbeat.naming import known_attributes, known_keywords
from offbeat.tracking import alerts
from offbeat.tracking.base import Tracker, trackers_of
from offbeat.tracking.fanout import Fanout
from offbeat.trainer import settings
from offbeat.trainer.alone import one_at_a_time
from offbeat.trainer.callbacks import Callbacks, callbacks_of
from offbeat.trainer.driveable import Driveable
from offbeat.trainer.loop import Loop, TrainPlan
from offbeat.trainer.numerics import Numerics
from offbeat.trainer.places import Places, ProcessGroup
from offbeat.trainer.predict import predict
from offbeat.trainer.recompute import parts_of
from offbeat.trainer.scheduling import Given as GivenScheduler
from offbeat.trainer.scheduling import (
    Interval,
    as_it_was_after_failure,
    bring_back_scheduler,
    idle_faults,
    scheduler_for,
    shared_faults,
)
from offbeat.trainer.settings import Amp, Sync, Syncs
from offbeat.trainer.stage import Stage
from offbeat.trainer.strategies import Tally, Workshop
from offbeat.trainer.validation import Validation

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

__all__ = ["AsyncTrainer"]


KEYS = ("epochs", "steps", "skipped", "stage", "optimizer", "scheduler", "scaler", "history")
"""What every state has."""


@known_attributes
class AsyncTrainer(Driveable):
    """Trains a model with one call, alone or with others, in whichever way `strategy` says.

    With ``"local"`` it is a plain torch loop, bit for bit. With a method of averaging it is that loop, and an
    `AsyncModelAverager` that is told of each step; with ``"accumulate"`` an `AsyncGradientAccumulator`, whose
    updates are of as many batches as the frequency says; with ``"parameter_server"`` an `AsyncWorker`, which
    pushes every so many batches.

    Where a strategy ends, it ends together with the others: they average what is left, or make the updates
    that are due, or push what is gathered. The next one goes on from there. What stays is the model, the live
    optimizer with its state, the scheduler, the loss scale and the count of steps; what a method keeps from
    round to round (a reference, a velocity) begins anew. So does an optimizer on a server, which is not the
    one here, and where members change to ``"accumulate"``, whose updates are the same in all of them, the
    state of the one here. All members have to change after the same batch of theirs. After
    ``"parameter_server"`` members of a process group go on from the server's model, once all have pushed what
    they had. On the way back the first one brings what they have made together, for all, unless the server's
    model has had pushes or other values since they left it, or before they came: these would be lost. Then
    all go on from the server's model, and a warning says so. After ``"local"``, or a `close` in between,
    they do so as well, where the server has a model.
    So do methods of averaging and ``"accumulate"``: members begin with the model of the first, or of the
    server, as models that were trained apart for long have no good mean.

    Args:
        model: An `nn.Module`, complete: its parameters are to stay the same objects. It is brought to
            `device` and trained in place.
        warm_up_epochs: Epochs, counted over the trainer's life, in which members meet every
            `warm_up_sync_frequency` batches and wait for one another. At their end they meet once more. This
            and the two frequencies do nothing with ``"local"``, and a warning says so.
        warm_up_sync_frequency: Batches from meeting to meeting in these epochs.
        regular_sync_frequency: In all others. With ``"accumulate"`` a meeting is an update; with
            ``"parameter_server"`` a push.
        strategy: ``"local"``, ``"average"``, ``"easgd"``, ``"diloco"``, ``"slowmo"``, ``"bmuf"``,
            ``"gossip"``, an object of `offbeat.averaging`, ``"accumulate"`` or ``"parameter_server"``; or a
            dict of these by the epoch that each begins with, counted from 0 over the trainer's life. May be
            set later.
        local_batch_size: Batch size of `train(dataset=...)`.
        device: Where to train.
        callbacks: Objects with any of ``on_step(trainer, step)``, ``on_log(trainer, record)``,
            ``on_epoch_end(trainer, epoch)`` and ``on_train_end(trainer, history)``. Their errors are raised.
            A method with nearly such a name, as ``on_epochs_end``, is refused. An `AsyncTrainingMonitor` is
            one, too: it hears the losses, and clipped gradients' norms, where hooks do not tell it already.
        max_grad_norm: Gradients are clipped to this total norm before each step of the optimizer; with one on
            a server, before each batch's are gathered. None: not at all.
        amp: ``"none"``; ``"bf16"``: autocast; ``"fp16"``: autocast, and a `torch.amp.GradScaler`: a batch
            whose scaled gradients are not finite makes no step, is told to nobody, and is counted in
            `skipped_steps`; with ``"accumulate"`` so is an update, which all members skip. One scaler goes
            through all strategies, and members that have one each change to ``"accumulate"`` with the least
            of their scales. Evaluation is in full precision.
        compile: Let `torch.compile` have the model, in place; or with the backend of that name.
        gradient_checkpointing: Names of the model's parts whose results are computed again for the backward
            pass, to save memory; True: all parts with parameters of each `nn.Sequential` that the model is,
            or has right below it. Their forward runs twice in a batch: torch's layers that would be another
            the second time (running statistics, spectral norms) are refused. Name no part of your own that
            writes something there (a moving average, a counter, a codebook, observers of quantization): it
            may be written twice, and where outputs depend on it, gradients are not those of the loss.
        loss_reduction: Whether losses are means over their batch, or sums.
        overlap: As `AsyncModelAverager`'s and `AsyncGradientAccumulator`'s, after the warm-up; a number is
            for methods of averaging alone.
        communication_backend: Where members meet that average, as `AsyncModelAverager`'s: ``"tcp"``: at an
            Offbeat server, where they come, go and die without stopping the others; ``"gloo"`` or
            ``"nccl"``: in torch's process group. None: ``"tcp"`` with `server_address`, unless
            `process_group` is given, or the server is that of a strategy ``"parameter_server"``; else the
            group that there is.
        process_group: The members, as theirs.
        server_address: "HOST:PORT" of the parameter server, or of the server at which models are averaged;
            OFFBEAT_SERVER if not given.
        token: Its token; OFFBEAT_TOKEN if not given.
        worker_id: This worker's name there, with ``"parameter_server"``; None: the server gives one.
        asynchronous: With ``"diloco"`` at a server: nobody waits for anybody, as `AsyncModelAverager`'s.
        trackers: Get the log lines of every `train`.
        seed: Of the order in which `train(dataset=...)` goes through the data. None: each member has an order
            of its own, the same in every run.

    Raises:
        ConfigError: Naming all settings that cannot be used, or that no strategy has a use for.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> trainer = offbeat.AsyncTrainer(model)
        >>> data = [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))] * 10
        >>> history = trainer.train(
        ...     dataloader=data,
        ...     epochs=2,
        ...     optimizer=offbeat.optim.SGD(lr=0.1),
        ...     loss_fn=nn.CrossEntropyLoss(),
        ... )
        >>> history.steps, history.stopped
        (20, 'epochs')
    """

    @known_keywords
    def __init__(
        self,
        model: nn.Module,
        warm_up_epochs: int = 0,
        warm_up_sync_frequency: int = settings.WARM_UP_EVERY,
        regular_sync_frequency: int = settings.REGULAR_EVERY,
        *,
        strategy: str | Method | Mapping[int, str | Method] = "local",
        local_batch_size: int = 32,
        device: str | torch.device = "cpu",
        callbacks: object = (),
        max_grad_norm: float | None = None,
        amp: Amp = "none",
        compile: bool | str = False,  # noqa: A002  the name that users know it by
        gradient_checkpointing: bool | Iterable[str] = False,
        loss_reduction: LossReduction = "mean",
        overlap: bool | int = True,
        communication_backend: Backend | None = None,
        process_group: ProcessGroup = None,
        server_address: str | None = None,
        token: str | None = None,
        worker_id: str | None = None,
        asynchronous: bool = False,
        trackers: Tracker | Iterable[Tracker] = (),
        seed: int | None = None,
    ) -> None:
        faults = Faults(of_model(model))
        sound = None if faults else model
        schedule = faults.catch(lambda: settings.schedule_of(strategy))
        counts = {
            "warm_up_sync_frequency": warm_up_sync_frequency,
            "regular_sync_frequency": regular_sync_frequency,
            "local_batch_size": local_batch_size,
        }
        wrong = settings.faults_of(
            warm_up_epochs=warm_up_epochs,
            counts=counts,
            max_grad_norm=max_grad_norm,
            amp=amp,
            compiles=compile,
            overlap=overlap,
            loss_reduction=loss_reduction,
        )
        faults += wrong
        faults += [*of_seed(seed), *strings(server_address=server_address, token=token)]
        faults += of_worker_id(worker_id)
        syncs = Syncs(
            warm_up_epochs, Sync(warm_up_sync_frequency, overlap=False), Sync(regular_sync_frequency, overlap)
        )
        kinds = [*(schedule or {}).values()]
        places = Places(
            backend=communication_backend,
            group=process_group,
            address=server_address,
            token=token,
            worker_id=worker_id,
            is_asynchronous=asynchronous,
        ).of(kinds)
        if schedule is not None:
            fitting = None if wrong else syncs
            faults += places.faults(schedule, amp=amp, syncs=fitting, model=sound)
            faults += places.idle_faults(kinds, overlap)
        where = faults.catch(lambda: usable_device(device))
        told = faults.catch(lambda: callbacks_of(callbacks)) or []
        tracking = faults.catch(lambda: trackers_of(trackers)) or []
        twice: list[nn.Module] = []
        if isinstance(model, nn.Module):
            twice = faults.catch(lambda: parts_of(model, gradient_checkpointing)) or []
        if compile is not False and gradient_checkpointing is not False:
            faults.append("compile and gradient_checkpointing do not go together here: take one of the two")
        refuse(dict.fromkeys(faults))
        assert where is not None  # noqa: S101  else there is a fault
        assert schedule is not None  # noqa: S101
        if compile is not False:
            _compile(model, compile)
        self.model = model.to(where)
        trained_by.register(model, self)
        self.device = where
        self._local_batch_size = local_batch_size
        self._amp = amp
        self._places = places
        self._seed = seed
        self._callbacks = Callbacks(self, told)
        self._trackers = tracking
        self._optimizer = LocalOptimizer(model)
        numerics = Numerics(amp, where, max_grad_norm, twice)
        self._workshop = Workshop(model, where, numerics, Tally(), loss_reduction, places)
        self._stage = Stage(self._workshop, schedule, syncs)
        self._epochs_begun = 0
        self._history = History()
        self._scheduled: tuple[object, LRScheduler] | None = None
        self._has_warned = self._is_training = False
        self._stop = Stop()
        self._shown: History | None = None

    # ------------------------------------------------------------------ training

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
        metrics: Metric | Iterable[Metric] = ("loss",),
        log_frequency: int = 100,
        validation: Iterable[Any] | Dataset[Any] | None = None,
        scheduler: GivenScheduler = None,
        scheduler_interval: Interval = "epoch",
        scheduler_metric: Metric | None = None,
        max_steps: int | None = None,
        progress: bool | None = None,
        trackers: Tracker | Iterable[Tracker] = (),
    ) -> History:
        """Train; members end together, with the same model. Also called `fit`.

        Args:
            dataset: Gives samples (inputs, targets); loaded in batches of `local_batch_size`, in an order
                that is this member's own.
            dataloader: Gives batches (inputs, targets) and is used as it is, once per epoch. One of the two.
            epochs: Passes over this member's data.
            optimizer: A spec of `offbeat.optim`, which becomes torch's optimizer, or with
                ``"parameter_server"`` runs on the server; a class; or a live one of the model's parameters.
                The same at each call, or its equal; may be left out after the first.
            loss_fn: From (outputs, targets) to a scalar.
            metrics: "loss", "accuracy", callables of (outputs, targets), torchmetrics objects or collections.
            log_frequency: Steps between two log lines. A step is one of a live optimizer, or a push.
            validation: Data on which the model is measured after each whole epoch, in eval mode, by the loss
                and `metrics`; as `evaluate` takes it, and without a trace, so that training has the same bits
                with and without it. In `history.validation`, a log line, and for trackers as
                "validation/loss". Each member measures its own model, after the last epoch, too, which is
                before all end together: what `train` leaves is measured by `evaluate`. With
                ``"parameter_server"`` it is the one last pulled.
            scheduler: One of torch.optim.lr_scheduler, or a function, not a class, that makes one of the
                optimizer: ``functools.partial(StepLR, step_size=10)``. It is kept where the next call gives
                the same, or its equal.
            scheduler_interval: When it steps: after each ``"epoch"``, or each ``"step"`` of the optimizer,
                but for those that are skipped.
            scheduler_metric: What ReduceLROnPlateau goes by: its mean over `validation`; without, over the
                epoch's batches, in training. None: the loss, with `validation`.
            max_steps: Stop after that many steps.
            progress: True for a bar, False for nothing; None: one bar per terminal, and without a terminal
                one line per `log_frequency` to stderr where logging is not configured.
            trackers: As the constructor's, for this call.

        Returns:
            What happened. A record's `version` counts rounds of averaging or updates, or is the server's;
            `skipped` the batches, or updates, of which nothing was made. `history.stopped` is "epochs",
            "max_steps", "budget" where the run's `max_samples` were used up, or "stop", with
            `history.stop_reason`.

        Raises:
            ConfigError: Naming all arguments that cannot be used; or for a batch or a loss.
            StateError: If the model has other parameters than at first, or members are set differently; or if
                a `train` of this trainer is at work.
            NonFiniteError: If a gradient is NaN or infinite with ``"accumulate"`` or ``"parameter_server"``,
                without a loss scale.
            ConnectionLostError: If a member or the server is lost.
            RejectedError: If the server rejected 100 pushes in a row; with the reasons.
            KeyboardInterrupt: At Ctrl-C; `history` is kept, and `train` may be called again.
        """
        faults = faults_of_train(
            epochs=epochs,
            log_frequency=log_frequency,
            max_steps=max_steps,
            loss_fn=loss_fn,
            progress=progress,
        )
        tracking = faults.catch(lambda: trackers_of(trackers)) or []
        metrics = listed(metrics)
        measured = faults.catch(lambda: meters(metrics))
        faults += idle_faults(scheduler, scheduler_interval, scheduler_metric)
        faults += shared_faults(scheduler_metric, metrics)
        passes = epochs if type(epochs) is int else 1
        source = faults.catch(
            lambda: batches_of(
                dataset,
                dataloader,
                epochs=passes,
                batch_size=self.local_batch_size,
                order=self.order,
                pin_memory=self.device.type == "cuda",
            )
        )
        validated = None
        if validation is not None and measured is not None:
            validated = faults.catch(
                lambda: Validation(
                    validation,
                    metrics,
                    batch_size=self.local_batch_size,
                    epochs=passes,
                    keeps=[self, self.model],
                )
            )
        live, scheduling = self._chosen(
            faults,
            optimizer,
            epochs,
            (scheduler, scheduler_interval, scheduler_metric),
            is_validated=validation is not None,
        )
        assert source is not None  # noqa: S101  else there is a fault
        if scheduling.scheduler is not None:
            self._scheduled = scheduler, scheduling.scheduler
        self._warn_of_reduction(loss_fn)
        plan = TrainPlan(
            source=source,
            epochs=epochs,
            first_epoch=self._epochs_begun,
            max_steps=max_steps,
            meters=measured or [],
            log_frequency=log_frequency,
            trackers=Fanout([*self._trackers, *tracking], "the trainer", also=alerts.scalars),
            validation=validated,
            scheduling=scheduling,
            callbacks=self._callbacks,
            stop=self._stop,
        )
        self._workshop.loss_fn = loss_fn
        self._history = history = History(optimizer=self._words())
        self._shown = None
        shown = progress_for(asked=progress, total=plan.num_batches(), name="train", source="trainer")
        with stop_noted(history), ExitStack() as stack:
            stack.enter_context(self._in_train())
            stack.enter_context(self._stop.training())
            stack.enter_context(scheduling.steps(live, self.model))
            if live is not None:
                stack.callback(live.register_step_pre_hook(self._workshop.numerics.clip_in_step).remove)
            self._stage.begin()
            stack.callback(self._stage.end)
            loop = Loop(plan, workshop=self._workshop, stage=self._stage, history=history, progress=shown)
            try:
                loop.run()
            finally:
                self._epochs_begun += history.epochs + loop.is_within_a_pass
                if self._stage.used:
                    history.optimizer = self._words()
        if not history.samples and history.stopped == "epochs":
            what = "dataset" if dataloader is None else "dataloader"
            log.warn(f"the trainer trained on nothing: the {what} gave no batch")
        return history

    fit = train

    def stop(self, reason: str | None = None) -> None:
        """End `train` after the batch under way, well: what is called from a callback, or another thread.

        It ends as after `max_steps`: of members that train together each may stop by itself, and is to the
        others as one whose data has ended; but where a change of strategy, or the end of the warm-up, is
        still to come for them, all have to stop after the same batch. `on_train_end` is called, and the
        history says ``"stop"``. In a `FaultTolerantTrainer` see its `stop`.

        Args:
            reason: For people: in the log, and `history.stop_reason`.

        Raises:
            StateError: Outside of `train`, or in `on_train_end`.
            ConfigError: If the reason is no text.
        """
        self._stop.ask(reason)

    # ------------------------------------------------------------------ what is known

    @property
    def history(self) -> History:
        """What the last `train` did, also if it was interrupted or failed; ``history.plot()`` draws it.

        In and after that of a `FaultTolerantTrainer` around this it is the one of that run, of all its lives.
        """
        return self._history if self._shown is None else self._shown

    @property
    def local_batch_size(self) -> int:
        """Batch size of `train(dataset=...)`, from the next one on; may be set."""
        return self._local_batch_size

    @local_batch_size.setter
    def local_batch_size(self, given: int) -> None:
        refuse(at_least_one(local_batch_size=given))
        self._local_batch_size = given

    @property
    def strategy(self) -> str | Method:
        """How the next batch is trained on; in ``on_epoch_end`` still how the epoch was that has just ended.

        May be set, also in mid-run, as by a callback: to what the constructor takes, by all members after the
        same batch of theirs. What is under way is ended before the next batch, or the next `train`.
        """
        epoch = self._stage.epoch_at_work
        return settings.kind_at(self._stage.schedule, self._num_finished if epoch is None else epoch)

    @strategy.setter
    def strategy(self, given: str | Method | Mapping[int, str | Method]) -> None:
        schedule = settings.schedule_of(given)
        stage, share = self._stage, self._places.share_updates([*schedule.values()])
        faults = self._places.faults(
            schedule,
            amp=self._amp,
            syncs=stage.syncs,
            model=self.model,
            first=self._num_finished,
        )
        refuse(faults + (trained_by.part_members(self.model) if share else []))
        stage.follow(schedule)

    @property
    def skipped_steps(self) -> int:
        """Batches, or updates, of which nothing was made, in all calls of `train`; see `History.skipped`."""
        return self._workshop.tally.skipped

    @overload
    def evaluate(
        self, loader: Iterable[Any] | Dataset[Any], metrics: list[Any] | tuple[Any, ...] | nn.ModuleDict
    ) -> dict[str, float]: ...
    @overload
    def evaluate(self, loader: Iterable[Any] | Dataset[Any], metrics: Metric = "accuracy") -> float: ...
    def evaluate(
        self,
        loader: Iterable[Any] | Dataset[Any],
        metrics: Metric | list[Any] | tuple[Any, ...] = "accuracy",
    ) -> float | dict[str, float]:
        """Measure the model as it is, in eval mode; modes and random states stay as they are.

        Nobody else is asked: with ``"parameter_server"`` it is the model last pulled.

        Args:
            loader: Gives batches (inputs, targets); or a dataset.
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
            batch_size=self.local_batch_size,
            device=self.device,
            loss_fn=self._workshop.loss_fn,
            reduction=self._workshop.reduction,
            each=self._stage.note_measured,
            keeps=[self],
        )

    def predict(self, loader: Iterable[Any] | Dataset[Any]) -> Any:  # noqa: ANN401  what the model gives
        """Give what the model makes of all inputs, in eval mode; modes and random states stay as they are.

        Args:
            loader: Gives batches of inputs, or pairs (inputs, targets); or a dataset, taken in its order.

        Returns:
            A tensor on the CPU of all outputs one behind the other; a nest of such where the model gives a
            nest.

        Raises:
            ConfigError: If there are no batches, or what the model gives cannot be put together.
        """
        return predict(self.model, loaded(loader, self.local_batch_size), device=self.device)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Give what it takes to go on, besides the model: a nest of plain values and tensors.

        It refers to live tensors, as torch's own states and the model's do: save it, or take `copy.deepcopy`
        of it, at once.

        Of a round that is under way members ask one another as in `AsyncModelAverager.state_dict`: all call
        this in the same place, and take the model's own state after it. Of ``"parameter_server"`` there is
        the worker's name and the run's: the model, and an optimizer there, are the server's to keep.

        Raises:
            StateError: If members are set differently.
            NonFiniteError: If no member's parameters are finite.
            ConnectionLostError: If a member is lost.
        """
        return self._state(self._stage.state_dict(), self.history)

    def state_of_now(self) -> dict[str, Any]:
        """Give it as if a round that is under way had not begun. For `FaultTolerantTrainer`.

        Its history is of what this trained by itself before: that of the run is the other's to keep.
        """
        return self._state(self._stage.state_dict(is_of_now=True), self._history)

    def _state(self, stage: dict[str, Any] | None, history: History) -> dict[str, Any]:
        scheduled, scaler = self._scheduled, self._workshop.numerics.scaler
        return {
            "epochs": self._num_finished,
            "steps": self._workshop.tally.steps,
            "skipped": self._workshop.tally.skipped,
            "stage": stage,
            "handover": self._stage.account(),
            **state_told(self._optimizer),
            "scheduler": None if scheduled is None else scheduled[1].state_dict(),
            "classes": self.classes,
            "scaler": None if scaler is None else scaler.state_dict(),
            "history": asdict(history),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, optimizer: object = None, scheduler: GivenScheduler = None
    ) -> None:
        """Go on from a state, in a model that has its values back already. To be called by all members.

        The next `train` begins with the first epoch that was not finished, with the strategy that was at
        work, where it was.

        Args:
            state: As `state_dict` gave it, of a trainer that was made in the same way.
            optimizer: As in `train`; needed where the state has an optimizer's, and there is none here. Its
                settings are the state's then; a warning tells those that were given otherwise.
            scheduler: As in `train`, likewise.

        Raises:
            ConfigError: If the state does not fit, or there is no optimizer or scheduler of its class for it.
            StateError: If members average or accumulate, and the model of one is not that of its state. Where
                the strategy is "local", other values are warned of, as they may be meant. What is refused, or
                fails, leaves the optimizer as it was; what was at work before may have ended.
        """
        faults = Faults(self.differences(state))
        workshop, history = self._workshop, History.of(state["history"])
        chosen = self._optimizer.trial()
        live, scheduled, is_new = chosen.live, self._scheduled, chosen.live is None
        if state["optimizer"] is not None:
            faults += faults_of_state(state, chosen, optimizer)
            live = chosen.live
        with as_it_was_after_failure(live):
            if state["scheduler"] is not None and live is not None:
                if scheduler is None and scheduled is None:
                    faults.append("the state has a scheduler's, and there is none here: give scheduler=")
                elif scheduler is not None:
                    made = faults.catch(lambda: scheduler_for(scheduler, live, scheduled))
                    scheduled = scheduled if made is None else (scheduler, made)
                if scheduled is not None:
                    faults += faults_of_kind("scheduler", scheduled[1], state)
            refuse(faults)
            goes_by = None if scheduled is None else scheduled[1]
            with self._at_work(live), as_it_was_after_failure(goes_by):
                self._stage.load_state_dict(state["stage"], state.get("handover"))
                if live is not None and state["optimizer"] is not None:
                    bring_back_told(chosen, state, is_new=is_new)
                if scheduled is not None and state["scheduler"] is not None:
                    bring_back_scheduler(scheduled[1], state["scheduler"])
                if workshop.numerics.scaler is not None:
                    workshop.numerics.scaler.load_state_dict(state["scaler"])
        self._optimizer, self._scheduled = chosen, scheduled
        workshop.tally.steps, workshop.tally.skipped = state["steps"], state["skipped"]
        self._epochs_begun = state["epochs"]
        self._history, self._shown = history, None

    @contextmanager
    def _at_work(self, live: torch.optim.Optimizer | None) -> Iterator[None]:
        """Have an optimizer there for what is to be at work; where that fails in here, neither is."""
        workshop = self._workshop
        before = workshop.live, workshop.given
        if live is not None:
            workshop.live = live
            workshop.given = live if workshop.given is None else workshop.given
        try:
            yield
        except BaseException as failure:
            self._stage.close(failure)
            workshop.live, workshop.given = before
            raise

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """Word why a state does not fit this trainer; nothing if it does. For `FaultTolerantTrainer`.

        Raises:
            ConfigError: If it is no trainer's at all.
        """
        check_keys(state, KEYS, owner="a trainer")
        found = self._stage.differences(state["stage"])
        if (state["scaler"] is None) != (self.scaler is None):
            found.append(
                f"amp is {self._amp!r}, and the state is of one "
                f"{'with' if self.scaler is None else 'without'} a loss scale: make the trainer with the same"
            )
        return found

    # ------------------------------------------------------------------ an end

    def close(self) -> None:
        """Let go of members and servers; a worker says goodbye. Model and `train` stay usable.

        The model of ``"parameter_server"`` is as it was pulled last. Where members of a process group are to
        go on from what all have pushed, change `strategy` first, and train on without this in between.
        """
        self._stage.close()

    def __enter__(self) -> Self:
        """Use the trainer in a `with` block, at whose end it is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stage.close(error)

    def __repr__(self) -> str:
        """Say what it does."""
        return (
            f"<offbeat.AsyncTrainer of a {type(self.model).__name__}, strategy {self.strategy!r}, "
            f"{self._num_finished} epochs, {self._workshop.tally.steps} steps>"
        )

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _in_train(self) -> Iterator[None]:
        """Know that the newest history is of passes that `_epochs_begun` does not have yet."""
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    @property
    def _num_finished(self) -> int:
        return self._epochs_begun + (self._history.epochs if self._is_training else 0)

    @property
    def order(self) -> str:
        """What this member's order of a dataset follows from, besides the epoch."""
        if self._seed is not None:
            return f"seed {self._seed}"
        place = find(os.environ)
        return f"member {place.rank} of {place.world_size}"

    def _words(self) -> str:
        live = self._workshop.live
        planned = settings.shown_kind(settings.kind_at(self._stage.schedule, self._epochs_begun))
        shown = ", then ".join(self._stage.used or [planned])
        if live is None:
            return f"the server's; strategy {shown}"
        return f"{type(live).__name__}(lr={live.param_groups[0].get('lr')}); strategy {shown}"

    def _warn_of_reduction(self, loss_fn: LossFunction) -> None:
        warning = other_reduction(loss_fn, self._workshop.reduction, owner="AsyncTrainer")
        if warning is not None and not self._has_warned:
            self._has_warned = True
            log.warn(warning)


def _compile(model: nn.Module, given: bool | str) -> None:  # noqa: FBT001  as users give it
    from torch._dynamo.exc import InvalidBackend

    try:
        model.compile(**({} if given is True else {"backend": given}))
    except InvalidBackend as error:
        raise ConfigError(f"compile is {given!r}, and torch.compile has no such backend: {error}") from error
