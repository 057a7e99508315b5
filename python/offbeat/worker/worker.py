"""`AsyncWorker`: what users hold. Its parts do the work; this file says what they promise together."""

import json
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import nn
from torch.utils.data import Dataset

from offbeat import log, process, trained_by
from offbeat.checks import at_least_one, refuse
from offbeat.errors import ClosedError, ConfigError, ConnectError, ConnectionLostError, ForkedError
from offbeat.history import History
from offbeat.local.arguments import faults_of_train
from offbeat.local.batches import batches_of
from offbeat.local.evaluate import evaluate
from offbeat.local.log_lines import stop_noted
from offbeat.local.loss import LossFunction, LossReduction, other_reduction
from offbeat.local.progress import progress_for
from offbeat.metrics import Metric, meters
from offbeat.naming import known_attributes, known_keywords
from offbeat.receipt import Receipt
from offbeat.tracking import alerts
from offbeat.tracking.base import Tracker, trackers_of
from offbeat.tracking.fanout import Fanout
from offbeat.worker.facade import WorkerOptimizer
from offbeat.worker.join import Buffers, JoinConfig, join
from offbeat.worker.steps import Optimizer, Steps
from offbeat.worker.train import TrainPlan, run
from offbeat.worker.turn import one_thread, whole_turn

if TYPE_CHECKING:
    from offbeat.worker.link import Link

__all__ = ["AsyncWorker"]


@known_attributes
class AsyncWorker(process.Live):
    """Trains a module against a parameter server, at its own pace.

    Connects, pulls, and has `worker.model` when the constructor returns. The module is never re-pointed: a
    push reads the gradients where autograd left them, a pull writes into the parameters' own memory, and both
    happen only inside `step()` and the methods that call it, on the calling thread; one thread at a time.

    Args:
        server_address: "HOST:PORT"; OFFBEAT_SERVER if not given.
        model: A module like the server's, moved to `device` and filled in place. None: built from the
            server's description, where the server's model is one of `torch.nn` layers in `nn.Sequential`.
            Where the server has no model yet, this one is brought to it. Its gradients are dropped.
        local_batch_size: Batch size of `train(dataset=...)`, and what `step()` counts if not told otherwise.
        update_frequency: Batches per push, whose gradients are averaged by samples, or added up where the
            losses are sums; with a live optimizer, local steps per push.
        device: Where the model computes.
        optimizer: See `train`; for a loop of one's own.
        loss_reduction: Whether losses are means over their batch, or sums. Gradients of sums are added up
            and never divided, so that a push grows with its samples; the losses shown are per sample.
        in_flight: 1: each step waits for its answer. 2: a step pushes and takes the answer to the one before,
            so that the network is busy in both directions; every push is then one update late at least.
        buffers: "sync": changes of buffers (BatchNorm and others) are added up on the server; floats are
            taken for averages and go no further than the value that a worker brings, counts belong in
            integers. "local": this worker keeps its own, and the server's stay as they began.
        token: The server's; OFFBEAT_TOKEN if not given.
        worker_id: A name of one's own, under which a restarted process takes its old place. None: the server
            gives one.
        connect_timeout_s: How long to go on trying to reach the server, in seconds.
        reconnect_timeout_s: How long to wait for a server that is lost, in seconds; 0: not at all. None: 300
            for one that keeps checkpoints, and may be started again; else 30.
        seed: Of the order in which `train(dataset=...)` goes through the data. None: each worker has an order
            of its own, that follows from the run's and the worker's id.

    Raises:
        ConfigError: If a setting cannot be used, or if there is no model and the server's cannot be
            described.
        ConnectError: If the server cannot be reached.
        AuthenticationError: If the token is not the server's.
        ModelMismatchError: If the model is not the server's; names the first tensor that differs.
        UnsupportedTensorError: If the model has tensors that the server cannot hold; names them.

    Example:
        >>> worker = offbeat.AsyncWorker("10.0.0.1:5000", local_batch_size=64)
        >>> worker.train(dataset=data, loss_fn=nn.CrossEntropyLoss(), optimizer=offbeat.optim.SGD(lr=0.1))
    """

    _closed = True  # until there is something to close
    _is_broken_off = False  # the last `train` raised: what was to be done is not
    _instead = "make one in each process, after it was started; worker.model and worker.history can be both"

    @known_keywords
    def __init__(
        self,
        server_address: str | None = None,
        model: nn.Module | None = None,
        local_batch_size: int = 32,
        update_frequency: int = 1,
        device: str | torch.device = "cpu",
        *,
        optimizer: Optimizer | None = None,
        loss_reduction: LossReduction = "mean",
        in_flight: int = 1,
        buffers: Buffers = "sync",
        token: str | None = None,
        worker_id: str | None = None,
        connect_timeout_s: float = 60.0,
        reconnect_timeout_s: float | None = None,
        seed: int | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._config = config = JoinConfig(
            server_address=server_address,
            token=token,
            worker_id=worker_id,
            local_batch_size=local_batch_size,
            update_frequency=update_frequency,
            device=device,
            loss_reduction=loss_reduction,
            in_flight=in_flight,
            buffers=buffers,
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            seed=seed,
        )
        self._local_batch_size = local_batch_size
        self._epochs_begun = 0
        self._steps_made = 0  # by calls of `train`
        self._history = History()
        self._loss_fn: LossFunction | None = None
        self._facade: WorkerOptimizer | None = None
        process.register(self)  # now already: connecting may have to tell the log what it waits for
        try:
            self._link: Link = join(config, model)
        except BaseException:
            process.release(self)
            raise
        self._steps = Steps(self._link, update_frequency=update_frequency, reduction=loss_reduction)
        session = self._link.session
        self._id, self._run_id = session.worker_id, session.run_id
        self._words = f"{self._id} at {session.address}"
        self._has_warned_of_reduction = False
        self._closed = False
        trained_by.register(self.model, self, is_puller=True)
        try:
            if optimizer is not None:
                self._steps.use(optimizer)
        except BaseException as error:
            self._end("withdrawn", process.cause_of(error))
            raise

    # ------------------------------------------------------------------ what it is

    @property
    def model(self) -> nn.Module:
        """The module it trains: the one given, or the one built."""
        return self._link.binding.module

    @property
    def device(self) -> torch.device:
        """Where the model computes; chosen when the worker is made."""
        return self._config.torch_device

    @property
    def local_batch_size(self) -> int:
        """What `step()` counts if not told otherwise, and the next `train` loads at a time; may be set."""
        return self._local_batch_size

    @local_batch_size.setter
    def local_batch_size(self, given: int) -> None:
        refuse(at_least_one(local_batch_size=given))
        self._local_batch_size = given

    @property
    def update_frequency(self) -> int:
        """Batches per push, or local steps per push; chosen when the worker is made."""
        return self._config.update_frequency

    @property
    def in_flight(self) -> int:
        """How many pushes may wait for their answer; chosen when the worker is made."""
        return self._config.in_flight

    @property
    def id(self) -> str:
        """Its name on the server."""
        return self._id

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self._run_id

    @property
    def version(self) -> int:
        """The model's version, as last heard; any thread may ask."""
        self._usable()
        return self._link.version

    @property
    def max_samples(self) -> int | None:
        """The server's, after which it takes nothing from anybody; as last heard."""
        self._usable()
        found: int | None = json.loads(self._link.session.run)["max_samples"]
        return found

    @property
    def term(self) -> int:
        """The life of the server's values, as last heard: versions are of one."""
        self._usable()
        return self._link.session.term

    @property
    def reconnect_timeout_s(self) -> float:
        """How long a call waits for the server where that is lost, in seconds: as given, or by the server."""
        self._usable()
        return self._link.session.patience_s

    @property
    def history(self) -> History:
        """What the last `train` did, also if it was interrupted or failed.

        It is `train`'s alone: with a loop of one's own it stays empty, and says "running".
        """
        return self._history

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """A `torch.optim.Optimizer` whose `step()` is `worker.step()`, for GradScaler and its like."""
        self._usable()
        self._link.binding.refresh()  # a GradScaler unscales the gradients of what it finds here
        return self._followed_facade()

    # ------------------------------------------------------------------ a loop of one's own

    @one_thread
    def step(self, samples: int | None = None) -> Receipt | None:
        """Take the batch whose gradients are on the model; call it after `backward()` and clipping.

        What it takes is a batch. `history.steps` counts what batches make: pushes, or the steps of a live
        optimizer.

        On every `update_frequency`-th call it pushes, and the model then holds the server's newest
        parameters. The gradients are None afterwards.

        Args:
            samples: How many samples the batch had; `local_batch_size` if not given.

        Returns:
            The receipt of the push; None while batches are gathered. With two pushes in flight it is the
            receipt of the push before, also where `evaluate` has waited for that in between.

        Raises:
            StateError: If no parameter has a gradient.
            NonFiniteError: If a gradient is NaN or infinite; nothing was sent.
        """
        steps = self._usable()
        receipts = steps.step(self.local_batch_size if samples is None else samples)
        if self._facade is not None:
            self._followed_facade()
        if not receipts and not steps.batches and steps.kept:  # this push has no answer yet
            return steps.kept.pop(0)
        return receipts[-1] if receipts else None

    @one_thread
    def flush(self) -> list[Receipt]:
        """Push what is gathered, and wait for everything in flight.

        Returns:
            The receipts that came in since they were last given out, oldest first.
        """
        steps = self._usable()
        steps.flush()
        return steps.take_kept()

    # ------------------------------------------------------------------ for whoever has the loop

    @one_thread
    def prepare(self, optimizer: object) -> list[Receipt]:
        """Get ready for a loop of another's: with an optimizer, nothing gathered, and the newest model.

        Args:
            optimizer: As in `train`.

        Returns:
            Receipts that nobody was given yet.

        Raises:
            ConfigError: If there is no optimizer, or the run has another.
        """
        steps = self._usable()
        self._link.binding.rescan()  # a live optimizer is measured by the module as it is now
        if optimizer is not None and optimizer is not self._facade:  # which stands for the one there is
            steps.use(optimizer)  # type: ignore[arg-type]  # which looks at it
        steps.require_optimizer()
        steps.flush()
        self._link.pull()
        self._link.binding.clear_gradients()
        return steps.take_kept()

    @one_thread
    def replace(self, since: tuple[int, int] | None) -> bool:
        """Make the model here the server's, if nothing that was trained is lost by that; take what is there.

        Before the first batch. The server's optimizer begins anew then.

        Args:
            since: The term and version of the server's model that this one goes on from: it is to be that
                still, or, of a server that was started again, what an earlier one of that term was. None:
                nobody is to have trained what the server's owner gave it.

        Returns:
            Whether it is.

        Raises:
            NonFiniteError: If a parameter is NaN or infinite.
        """
        self._usable()
        return self._link.replace(since)

    @one_thread
    def drop(self) -> None:
        """Forget the batches that were gathered and not pushed, and the gradients of one that broke off."""
        self._link.binding.clear_gradients()
        self._usable().drop()

    @property
    def order(self) -> str:
        """What its order of a dataset follows from, besides the epoch."""
        seed = self._config.seed
        return f"run {self.run_id} worker {self.id}" if seed is None else f"seed {seed}"

    @property
    def num_gathered(self) -> int:
        """Batches gathered and not pushed."""
        return self._steps.batches

    @property
    def steps_made(self) -> int:
        """Pushes, or with a live optimizer its steps, since this worker was made."""
        return self._steps.num_added if self._steps.live is not None else self._steps.num_pushed

    @property
    def num_left_out(self) -> int:
        """Batches of which nothing came since this worker was made: quarantined, or dropped by a monitor."""
        return self._steps.num_left_out

    @property
    def live_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that runs here; None where it runs on the server."""
        return self._steps.live

    @property
    def awaits_optimizer(self) -> bool:
        """Whether its optimizer may still come to be one that runs here: none does, nor on the server."""
        return self._steps.awaits_optimizer

    @property
    def optimizer_words(self) -> str:
        """Which optimizer runs where, in words."""
        return self._steps.words

    @property
    def loss_reduction(self) -> LossReduction:
        """Whether losses are means over their batch, or sums; chosen when the worker is made."""
        return self._config.loss_reduction

    @property
    def keeps_buffers(self) -> bool:
        """Whether its buffers are its own (``buffers="local"``)."""
        return self._config.buffers == "local"

    # ------------------------------------------------------------------ left out

    def quarantine(self, worker_id: str | None = None) -> None:
        """Push nothing from now on, until `release()`; any thread may call it.

        `step` and `train` go on: each batch is computed on the newest model, and left out.

        Args:
            worker_id: This worker's own name, for who has several; None is this one.

        Raises:
            ConfigError: If it is another's name.
        """
        self._check_own(worker_id)
        self._steps.is_quarantined = True
        log.info("worker %s is in quarantine: it pushes nothing", self._words)

    def release(self, worker_id: str | None = None) -> None:
        """Push again, after `quarantine()`; any thread may call it."""
        self._check_own(worker_id)
        self._steps.is_quarantined = False
        log.info("worker %s pushes again", self._words)

    @property
    def is_quarantined(self) -> bool:
        """Whether it pushes nothing."""
        return self._steps.is_quarantined

    # ------------------------------------------------------------------ a loop of ours

    @known_keywords
    @one_thread
    def train(
        self,
        *,
        dataset: Dataset[Any] | None = None,
        dataloader: Iterable[Any] | None = None,
        epochs: int = 1,
        optimizer: Optimizer | None = None,
        loss_fn: LossFunction,
        metrics: Metric | Iterable[Metric] = ("loss",),
        log_frequency: int = 100,
        max_steps: int | None = None,
        progress: bool | None = None,
        trackers: Tracker | Iterable[Tracker] = (),
    ) -> History:
        """Train, and leave the model with the newest parameters pulled.

        Args:
            dataset: Gives samples (inputs, targets); loaded in batches of `local_batch_size`, in an order
                that is this worker's own and the same in every run of the same name.
            dataloader: Gives batches (inputs, targets) and is used as it is, once per epoch; it, its
                sampler and its dataset are told which, where they have a `set_epoch`. One of the two.
            epochs: Passes over this worker's data.
            optimizer: A spec (`offbeat.optim.SGD(lr=0.1)`, or `functools.partial(torch.optim.SGD, lr=0.1)`)
                runs on the server; a live `torch.optim.Optimizer` over `worker.model.parameters()` runs here.
                None, or `worker.optimizer`: what the constructor was given, or what the server has.
            loss_fn: From (outputs, targets) to a scalar.
            metrics: "loss", "accuracy", callables of (outputs, targets), torchmetrics objects or
                collections.
            log_frequency: Steps between two log lines. A step is a push, or a step of a live optimizer.
            max_steps: Stop after that many steps.
            progress: True for a bar, False for nothing; None: one bar per terminal, and without a terminal
                one line per `log_frequency` to stderr where logging is not configured.
            trackers: One of `offbeat.tracking`, or several, which keep each log line: the metrics, and
                `offbeat/version`, `/samples`, `/seconds`, `/samples_per_s` and `/staleness`, at this
                worker's step, counted over all its calls of `train`. One that fails is warned of once and
                stops nothing. They are yours to finish.

        Returns:
            What happened. `history.stopped` is "epochs", "max_steps", or "budget" where the run's
            `max_samples` were used up.

        Raises:
            ConfigError: If the arguments, a batch or a loss are not what can be trained on.
            RejectedError: If the server rejected 100 pushes in a row; with the reasons.
            KeyboardInterrupt: At Ctrl-C. What is not pushed is dropped, the worker stays joined, `history` is
                kept, and `train` may be called again.
        """
        steps = self._usable()
        self._is_broken_off = True  # until it returns
        faults = faults_of_train(
            epochs=epochs,
            log_frequency=log_frequency,
            max_steps=max_steps,
            loss_fn=loss_fn,
            progress=progress,
        )
        tracking = faults.catch(lambda: trackers_of(trackers)) or []
        refuse(faults)
        source = batches_of(
            dataset,
            dataloader,
            epochs=epochs,
            batch_size=self.local_batch_size,
            order=self.order,
            pin_memory=self.device.type == "cuda",
        )
        measured = meters(metrics)
        self._warn_of_reduction(loss_fn)
        self._link.binding.rescan()  # a live optimizer is measured by the module as it is now
        if optimizer is not None and optimizer is not self._facade:  # which stands for the one there is
            steps.use(optimizer)
        steps.require_optimizer()
        plan = TrainPlan(
            source=source,
            epochs=epochs,
            first_epoch=self._epochs_begun,
            max_steps=max_steps,
            loss_fn=loss_fn,
            reduction=self._config.loss_reduction,
            meters=measured,
            log_frequency=log_frequency,
            trackers=Fanout(tracking, f"worker {self.id}", also=alerts.scalars),
            first_step=self._steps_made,
        )
        self._loss_fn = loss_fn
        self._history = history = History(optimizer=steps.words)
        with stop_noted(history):
            steps.flush()
            self._link.pull()
            try:
                total = plan.num_batches(1 if steps.live else self.update_frequency)
                shown = progress_for(asked=progress, total=total, name=self.id)
                run(plan, link=self._link, steps=steps, device=self.device, history=history, progress=shown)
            finally:
                self._epochs_begun += history.epochs + (history.stopped != "epochs")
                self._steps_made += history.steps
        self._is_broken_off = False
        if not history.samples and history.stopped == "epochs":
            what = "dataset" if dataloader is None else "dataloader"
            log.warn(f"worker {self.id} trained on nothing: the {what} gave no batch")
        return history

    @overload
    def evaluate(
        self, loader: Iterable[Any] | Dataset[Any], metrics: list[Any] | tuple[Any, ...] | nn.ModuleDict
    ) -> dict[str, float]: ...
    @overload
    def evaluate(self, loader: Iterable[Any] | Dataset[Any], metrics: Metric = "accuracy") -> float: ...
    @one_thread
    def evaluate(
        self, loader: Iterable[Any] | Dataset[Any], metrics: Metric | list[Any] | tuple[Any, ...] = "accuracy"
    ) -> float | dict[str, float]:
        """Measure the newest model, in eval mode; no mode and no random state is other afterwards.

        If the server is gone, the parameters last pulled are measured, with a warning. While batches wait to
        be pushed, or one was begun (a gradient is on the model, or zeros and statistics of its buffers), the
        model is measured as it is: a pull would make what was computed before it count as fresh.

        Args:
            loader: Gives batches (inputs, targets). A dataset of samples, one for each index, is loaded in
                batches of `local_batch_size`.
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
            loss_fn=self._loss_fn,
            reduction=self._config.loss_reduction,
            first=self._pull_newest,
            each=self.note_measured,
            keeps=[self],
        )

    def note_measured(self, batches: int) -> None:
        """Tell the server that this worker gets on while it measures the model, which may take long."""
        with suppress(ClosedError):  # or lost: the model is measured all the same
            self._link.session.set_progress(self._steps_made + batches)

    # ------------------------------------------------------------------ an end

    def close(self) -> None:
        """Say goodbye to the server. May be called twice; the model stays usable.

        The work counts as finished unless the last `train` raised.

        Batches that are gathered and not pushed are dropped, with a warning: `flush()` pushes them.

        Raises:
            StateError: If another thread is in a call of this worker, which then stays as it is.
        """
        self._end("left" if self._is_broken_off else "finished")

    def end_by(self, failure: BaseException | None) -> None:
        """Close, where an exception is on its way perhaps: the server then tells by what this one left.

        Args:
            failure: None, and a `SystemExit` of code 0, are as `close`.

        Raises:
            StateError: As `close`.
        """
        if (failure := process.failure_in(failure)) is None:
            self.close()
        else:
            self._end("left", process.cause_of(failure))

    def __enter__(self) -> Self:
        """Use the worker in a `with` block, at whose end it is closed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_by(error)

    def __repr__(self) -> str:
        if self._closed:
            return "<offbeat.AsyncWorker, closed>"
        return f"<offbeat.AsyncWorker {self._words}>"  # a session answers neither in a child nor two threads

    def __del__(self) -> None:
        """Leave when nobody holds the worker any more, as a function that made it returns."""
        self.close()

    # ------------------------------------------------------------------ inside

    def _usable(self) -> Steps:
        """The step counter, if this worker may be used here and now."""
        if os.getpid() != self._pid:
            raise ForkedError(
                "this AsyncWorker was made before a fork and is used in the child: make it after the fork, "
                'or start processes with the "spawn" method'
            )
        if self._closed:
            raise ClosedError("this AsyncWorker is closed: make a new one")
        return self._steps

    def _warn_of_reduction(self, loss_fn: LossFunction) -> None:
        """Warn, once, where a loss function says that it reduces otherwise than the worker was told."""
        warning = other_reduction(loss_fn, self._config.loss_reduction, owner="worker")
        if warning is not None and not self._has_warned_of_reduction:
            self._has_warned_of_reduction = True
            log.warn(warning)

    def _followed_facade(self) -> WorkerOptimizer:
        parameters = [slot.tensor for slot in self._link.binding.parameters]
        if self._facade is None:
            self._facade = WorkerOptimizer(self.step, self._give_up, parameters)
        self._facade.follow(parameters, self._steps.live)
        return self._facade

    def _give_up(self) -> None:
        """Undo what a batch that is not stepped broke in the buffers, while the worker lives."""
        if not self._closed and os.getpid() == self._pid:
            with whole_turn(self._turn, "zero_grad()"):
                self._link.binding.put_back_corrupt()

    def _pull_newest(self) -> None:
        binding = self._link.binding
        binding.refresh()
        gradients = [g for g in binding.gradients() if g is not None]
        is_begun = any(g.is_sparse or bool(g.any()) for g in gradients)
        # Zeros are what zero_grad(set_to_none=False) leaves; those of a batch may come with its statistics.
        is_begun |= bool(gradients) and binding.has_changed_buffers()
        if is_begun or self._usable().batches:
            what = "a batch was begun on it" if is_begun else "batches wait to be pushed"
            log.info("worker %s measures its model as it is: %s", self.id, what)
            return
        try:
            self._steps.flush()
            self._link.pull()
        except (ConnectError, ConnectionLostError) as error:
            log.warn(f"the parameters last pulled are measured, for the server cannot be asked: {error}")

    def _check_own(self, worker_id: str | None) -> None:
        if worker_id not in (None, self._id):
            raise ConfigError(f"worker_id is {worker_id!r}, and this is worker {self._id!r}")

    def _end(self, parting: Literal["finished", "left", "withdrawn"], cause: str | None = None) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        with whole_turn(self._turn, "close()"):
            self._link.session.close(parting, cause)
            self._closed = True
            trained_by.unregister(self.model, self)
            if parting == "finished" and (batches := self._steps.batches):
                log.warn(
                    f"worker {self._words} is closed with {batches} batch(es) gathered and not pushed, which "
                    f"are lost: call worker.flush() before, which pushes them"
                )
            self._steps.close()
        process.release(self)

    def _at_exit(self, failure: BaseException | None) -> None:
        self.end_by(failure)
