"""What a `FaultTolerantTrainer` may be given to train: a module, or one of the family that trains one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed, nn

from offbeat.averaging import AsyncModelAverager
from offbeat.checks import Faults, refuse
from offbeat.local import LocalOptimizer
from offbeat.local.device import usable_device
from offbeat.local.group import group_of
from offbeat.local.loss import LossFunction, LossReduction
from offbeat.local.optimizer import are_equal
from offbeat.local.stopping import Stop
from offbeat.metrics import Mean, Metric
from offbeat.recovery import settings
from offbeat.recovery.averaged import Averaged
from offbeat.recovery.buffers import Holder
from offbeat.recovery.driven import Trained
from offbeat.recovery.joined import Joined
from offbeat.recovery.local import Local
from offbeat.recovery.trainee import Scheduler, Trainee
from offbeat.trainer import AsyncTrainer
from offbeat.trainer.scheduling import Interval
from offbeat.worker import AsyncWorker

__all__ = ["Asked", "Subject", "subject_of"]

AT_THE_SERVER = "which goes on from where it is: call server.rollback() there"
TOGETHER = (
    "of whom none goes back alone: end all, move the checkpoints that are newer than the wanted one out of "
    "each one's checkpoint_dir, and start them again; one that is alone does so by a new start with "
    "recovery_strategy='last_good'"
)
"""What to do where no rollback in mid-run can be."""

BATCH_SIZE = 32
"""Samples, where nobody says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What `train` was asked for, of what is trained.

    Attributes:
        epochs: In all.
        optimizer: As given.
        loss_fn: From (outputs, targets) to a scalar.
        scheduler: As given.
        scheduler_interval: When it steps.
        scheduler_metric: What it goes by, as given.
        is_validated: Whether the model is measured on other data after each epoch.
        scaler: As given.
        stop: Whether somebody wants an end.
    """

    epochs: int
    optimizer: object
    loss_fn: LossFunction
    scheduler: object
    scheduler_interval: Interval
    scheduler_metric: Metric | None
    is_validated: bool
    scaler: "torch.amp.GradScaler | None"
    stop: Stop


class Subject(ABC):
    """What is trained, for all calls of `train`.

    Attributes:
        module: The model.
        device: Where it is.
        reduction: What losses are.
        batch_size: Of a dataset, where `train` is not told.
    """

    module: nn.Module
    device: torch.device
    reduction: LossReduction
    batch_size = BATCH_SIZE

    @abstractmethod
    def check(self, asked: Asked) -> None:
        """See that it can be trained as asked, before anything is changed.

        Raises:
            ConfigError: If it cannot.
        """

    @abstractmethod
    def trainee(self, asked: Asked) -> Trainee:
        """Begin.

        Raises:
            ConfigError: If it cannot be trained as asked.
        """

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The live optimizer, if there is one."""

    @property
    def member(self) -> str:
        """Name this one of several that train together, whose orders of a dataset are to differ."""
        return ""

    @property
    def seed(self) -> int:
        """Of the order of a dataset, where `train` is given none; 0 where `member` has it."""
        return torch.initial_seed()

    def faults_of(self, *, strategy: str) -> list[str]:
        """Word which settings do not go with it."""
        del strategy
        return []

    @property
    def why_it_stays(self) -> str | None:
        """Why it cannot go back to a checkpoint in mid-run, and what to do; None where it can."""
        return None


class _Module(Subject):
    def __init__(self, module: nn.Module, device: torch.device, reduction: LossReduction) -> None:
        self.module = module.to(device)
        self.device, self.reduction = device, reduction
        self._optimizer = LocalOptimizer(module)
        self._scheduler = _Scheduler()
        self._holder = Holder(self.module)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer.live

    def check(self, asked: Asked) -> None:
        self._optimizer.trial().use(asked.optimizer)

    def trainee(self, asked: Asked) -> Trainee:
        return Local(self.module, **self._of_loop(asked))

    def _of_loop(self, asked: Asked) -> dict[str, Any]:
        live = self._optimizer.use(asked.optimizer)
        scheduler = self._scheduler.of(asked.scheduler, live)
        return {
            "optimizer": live,
            "loss_fn": asked.loss_fn,
            "reduction": self.reduction,
            "device": self.device,
            "scheduler": scheduler,
            "scheduler_interval": asked.scheduler_interval,
            "scheduler_meter": _meter_for(scheduler, asked),
            "scaler": asked.scaler,
            "holder": self._holder,
        }


class _Averager(_Module):
    def __init__(self, averager: AsyncModelAverager) -> None:
        self.module, self.device, self.reduction = averager.model, averager.device, "mean"
        self._averager = averager
        self._optimizer = averager._turns.optimizer  # noqa: SLF001  whose state is the averager's, too
        self._scheduler = _Scheduler()
        self._holder = Holder(self.module, is_fixed=averager.is_at_server)

    def trainee(self, asked: Asked) -> Trainee:
        return Averaged(self._averager, **self._of_loop(asked))

    @property
    def member(self) -> str:
        return f"/member {self._averager.rank}"

    def faults_of(self, *, strategy: str) -> list[str]:
        return [] if self._averager.is_alone else _of_several(strategy)

    @property
    def why_it_stays(self) -> str | None:
        return f"an AsyncModelAverager's model is its members', {TOGETHER}"


class _Ordered(Subject):
    """One of the family with an order of a dataset, and a way to scale losses, of its own."""

    on_scaler: str
    """What is said to who gives a GradScaler."""

    def __init__(self, trains: AsyncWorker | AsyncTrainer) -> None:
        self.module, self.device, self.batch_size = trains.model, trains.device, trains.local_batch_size
        self.reduction = trains.loss_reduction
        self._ordered = trains

    @property
    def member(self) -> str:
        return f"/{self._ordered.order}"

    @property
    def seed(self) -> int:
        return 0

    def check(self, asked: Asked) -> None:
        faults = Faults()
        if asked.scaler is not None:
            faults.append(f"grad_scaler is given, and {self.on_scaler}")
        refuse(faults + self.faults_asked(asked))

    def faults_asked(self, asked: Asked) -> list[str]:
        """Word what else cannot be done as asked."""
        del asked
        return []


class _Worker(_Ordered):
    on_scaler = "an AsyncWorker trains here without one: leave it out"

    def __init__(self, worker: AsyncWorker) -> None:
        super().__init__(worker)
        self._worker = worker
        self._scheduler = _Scheduler()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._worker.live_optimizer

    def faults_asked(self, asked: Asked) -> list[str]:
        live = asked.optimizer if asked.optimizer is not None else self.optimizer
        if asked.scheduler is None or isinstance(live, torch.optim.Optimizer):
            return []
        return [
            (
                "scheduler is given, and the optimizer runs on the server, as its learning rate does: give "
                "ParameterServer lr_schedule=, or a live optimizer here"
            )
        ]

    def trainee(self, asked: Asked) -> Trainee:
        made = Joined(
            self._worker, optimizer=asked.optimizer, loss_fn=asked.loss_fn, reduction=self.reduction
        )
        if self.optimizer is not None:
            scheduler = self._scheduler.of(asked.scheduler, self.optimizer)
            made.follow(scheduler, asked.scheduler_interval, _meter_for(scheduler, asked))
        return made

    def faults_of(self, *, strategy: str) -> list[str]:
        return _of_the_server(strategy)

    @property
    def why_it_stays(self) -> str | None:
        return f"an AsyncWorker's model is the server's, {AT_THE_SERVER}"


class _Trainer(_Ordered):
    on_scaler = 'an AsyncTrainer has its own: make it with amp="fp16" instead'

    def __init__(self, trainer: AsyncTrainer) -> None:
        super().__init__(trainer)
        self._trainer = trainer
        is_served = trainer.averages_at_a_server or "parameter_server" in trainer.strategies.values()
        self._holder = Holder(self.module, is_fixed=is_served)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._trainer.optimizer

    def trainee(self, asked: Asked) -> Trainee:
        driven = self._trainer.driven(
            epochs=asked.epochs,
            optimizer=asked.optimizer,
            loss_fn=asked.loss_fn,
            scheduler=cast(Any, asked.scheduler),
            scheduler_interval=asked.scheduler_interval,
            scheduler_metric=asked.scheduler_metric,
            is_validated=asked.is_validated,
            stop=asked.stop,
        )
        return Trained(self._trainer, driven, asked.loss_fn, self._holder)

    def faults_of(self, *, strategy: str) -> list[str]:
        kinds = self._trainer.strategies.values()
        faults = _of_the_server(strategy) if "parameter_server" in kinds else []
        group = group_of(self._trainer.process_group) if self._trainer.needs_group else None
        if group is None or distributed.get_world_size(group) == 1:
            return faults or (_of_several(strategy) if self._trainer.averages_at_a_server else [])
        if "accumulate" in kinds:
            faults.append(
                'the AsyncTrainer\'s strategy is "accumulate", whose updates are the same in all members, '
                "which are saved at different ones: give strategy='average', or process_group=False"
            )
        return faults or _of_several(strategy)

    @property
    def why_it_stays(self) -> str | None:
        kinds = list(self._trainer.strategies.values())
        if "parameter_server" in kinds:
            return f"the AsyncTrainer's model is a server's, {AT_THE_SERVER}"
        if others := [kind for kind in kinds if kind != "local"]:
            return (
                f"the AsyncTrainer has strategy {others[0]!r}, and what it makes is its members', {TOGETHER}"
            )
        return None


class _Scheduler:
    """A learning rate scheduler, made once of what is given: a second one would begin anew."""

    def __init__(self) -> None:
        self._given: object = None
        self._made: Scheduler | None = None

    def of(self, given: object, live: torch.optim.Optimizer) -> Scheduler | None:
        if not are_equal(given, self._given):
            self._made = settings.scheduler_of(given, live) if given is not None else None
            self._given = given
        return self._made


def _meter_for(scheduler: Scheduler | None, asked: Asked) -> Mean | None:
    """Make what a scheduler goes by.

    Raises:
        ConfigError: If it goes by a metric and there is none, or the reverse.
    """
    return settings.scheduler_meter_of(
        scheduler, asked.scheduler_interval, asked.scheduler_metric, is_validated=asked.is_validated
    )


def subject_of(given: object, *, device: object, reduction: object) -> Subject:
    """Take what is to be trained.

    Args:
        given: A module, or one of the family.
        device: As given; of a module alone.
        reduction: Likewise.

    Raises:
        ConfigError: If it cannot be trained here, or has another device or reduction.
    """
    subject: Subject | None = None
    match given:
        case AsyncModelAverager():
            subject = _Averager(given)
        case AsyncWorker():
            subject = _Worker(given)
        case AsyncTrainer():
            subject = _Trainer(given)
        case _:
            pass
    if subject is not None:
        faults = Faults()
        where = faults.catch(lambda: usable_device(cast(Any, device)))
        name = type(given).__name__
        if where is not None and where != subject.device and where.type != "cpu":
            faults.append(f"device is {where}, and the {name}'s is {subject.device}: leave it out")
        if reduction not in ("mean", subject.reduction):
            faults.append(
                f"loss_reduction is {reduction!r}, and the {name}'s is {subject.reduction!r}: leave it out"
            )
        refuse(faults)
        return subject
    faults = Faults(settings.of_model(given))
    where = faults.catch(lambda: usable_device(cast(Any, device)))
    refuse(faults)
    assert where is not None  # noqa: S101  else there is a fault
    return _Module(cast(nn.Module, given), where, cast(LossReduction, reduction))


def _of_several(strategy: str) -> list[str]:
    if strategy in ("latest", "none"):
        return []
    text = "and members go on together, from their newest: take 'latest'"
    return [f"recovery_strategy is {strategy!r}, {text}"]


def _of_the_server(strategy: str) -> list[str]:
    if strategy in ("latest", "none"):
        return []
    text = "and the model is the server's, which goes on from where it is"
    remedy = "take 'latest' here, and server.rollback() for an older model"
    return [f"recovery_strategy is {strategy!r}, {text}: {remedy}"]
