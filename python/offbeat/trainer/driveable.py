"""What of a trainer is asked for by whoever has the loop: itself, or a `FaultTolerantTrainer`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from offbeat import trained_by
from offbeat.averaging.methods import Method
from offbeat.checks import Faults, refuse
from offbeat.history import History
from offbeat.local import LocalOptimizer
from offbeat.local.loss import LossFunction, LossReduction
from offbeat.local.stopping import Stop
from offbeat.metrics import Metric
from offbeat.tracking.base import Tracker
from offbeat.tracking.fanout import Fanout
from offbeat.trainer import settings
from offbeat.trainer.alone import see_alone
from offbeat.trainer.callbacks import Callbacks
from offbeat.trainer.driven import Driven
from offbeat.trainer.places import Places, ProcessGroup
from offbeat.trainer.scheduling import Given as GivenScheduler
from offbeat.trainer.scheduling import (
    Interval,
    Scheduling,
    as_it_was_after_failure,
    faults_of_scheduler,
    measured_apart_faults,
    scheduling_of,
)
from offbeat.trainer.settings import Kind
from offbeat.trainer.stage import Stage
from offbeat.trainer.strategies import Averaged, Workshop

__all__ = ["Driveable"]


class Driveable:
    """A trainer without a loop: its optimizer, its scheduler, its strategies, and how to hand it batches."""

    _workshop: Workshop
    _stage: Stage
    _places: Places
    _callbacks: Callbacks
    _trackers: list[Tracker]
    _optimizer: LocalOptimizer
    _scheduled: tuple[object, LRScheduler] | None
    _epochs_begun: int
    _stop: Stop
    _shown: History | None  # of another's loop, where the last one was

    def driven(
        self,
        *,
        epochs: int,
        optimizer: object,
        loss_fn: LossFunction,
        scheduler: GivenScheduler = None,
        scheduler_interval: Interval = "epoch",
        scheduler_metric: Metric | None = None,
        is_validated: bool = False,
        stop: Stop,
    ) -> Driven:
        """Get ready for `FaultTolerantTrainer`'s loop, which hands over batches and keeps the account.

        That loop is the one that ends where an end is wanted: `stop` is its wish, and `self.stop` makes it.

        Raises:
            ConfigError: If these cannot be used, as in `train`.
            StateError: If a `train` of this is at work.
        """
        see_alone(self)
        _, scheduling = self._chosen(
            Faults(),
            optimizer,
            epochs,
            (scheduler, scheduler_interval, scheduler_metric),
            is_validated=is_validated,
        )
        self._stop = stop
        self._scheduled = None if scheduling.scheduler is None else (scheduler, scheduling.scheduler)
        self._workshop.loss_fn = loss_fn
        return Driven(
            self._workshop,
            self._stage,
            scheduling=scheduling,
            callbacks=self._callbacks,
            trackers=Fanout(self._trackers, "the trainer"),
            follow=self._follow,
        )

    def show(self, history: History) -> None:
        """Give that as `history`: of a `FaultTolerantTrainer`'s run, in which callbacks look for it."""
        self._shown = history

    def _follow(self, epochs: int) -> None:
        self._epochs_begun = epochs

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The live optimizer; None before the first `train`, or where it runs on a server."""
        return self._optimizer.live

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scale, with ``amp="fp16"``; torch's own, whose `state_dict` may be kept."""
        return self._workshop.numerics.scaler

    @property
    def averages_models(self) -> bool:
        """Whether a strategy of its averages models: its averager is made when its turn comes."""
        return any(isinstance(kind, Method) for kind in self._stage.schedule.values())

    @property
    def tells_variance(self) -> bool:
        """Whether its averagers tell how far members were from their mean; for `AsyncTrainingMonitor`."""
        strategy = self._stage.strategy
        if isinstance(strategy, Averaged):
            return strategy.averager.tells_variance
        return self.averages_models and self._places.average_with_others()

    @property
    def loss_reduction(self) -> LossReduction:
        """Whether losses are means over their batch, or sums."""
        return self._workshop.reduction

    @property
    def process_group(self) -> ProcessGroup:
        """The members, as given."""
        return self._places.group

    @property
    def needs_group(self) -> bool:
        """Whether a strategy's members are a process group of torch's. For `FaultTolerantTrainer`."""
        return self._places.need_group(self._stage.schedule.values())

    def meetings(self, state: Mapping[str, Any]) -> tuple[int, bool]:
        """Tell where a state is among those of its members. For `FaultTolerantTrainer`.

        Returns:
            How many strategies had begun by which members meet in a process group, and whether such a one was
            at work.
        """
        if (stage := state["stage"]) is None:
            return 0, False
        begun = 0
        before: Kind | None = None
        for epoch, kind in sorted(self._stage.schedule.items()):
            if epoch <= stage["epoch"]:
                begun += kind != before and self._places.need_group([kind])
                before = kind
        return begun, before is not None and self._places.need_group([before])

    @property
    def averages_at_a_server(self) -> bool:
        """Whether those that average meet at a server."""
        return self.averages_models and self._places.are_served

    @property
    def strategies(self) -> dict[int, Kind]:
        """Strategies by the epochs that they begin with."""
        return dict(self._stage.schedule)

    @property
    def classes(self) -> dict[str, str | None]:
        """The classes of what goes with the model, by name. For `FaultTolerantTrainer`'s checkpoints."""
        made = None if self._scheduled is None else self._scheduled[1]
        parts = {"optimizer": self.optimizer, "scheduler": made, "grad_scaler": self.scaler}
        return {name: None if part is None else type(part).__name__ for name, part in parts.items()}

    def _chosen(
        self,
        faults: Faults,
        optimizer: object,
        epochs: int,
        asked: tuple[GivenScheduler, Interval, Metric | None],
        *,
        is_validated: bool,
    ) -> tuple[torch.optim.Optimizer | None, Scheduling]:
        """Give the optimizer that is here, if one is needed, and the scheduler; keep both if all is right.

        Raises:
            ConfigError: Naming all that is wrong with them beside the other faults; nothing is changed then.
        """
        workshop, kept, num_others = self._workshop, self._optimizer, len(faults)
        span = epochs if type(epochs) is int else 1
        kinds = settings.kinds_in(self._stage.schedule, self._epochs_begun, span)
        given = workshop.given if optimizer is None else optimizer
        is_here = "parameter_server" not in kinds or isinstance(given, torch.optim.Optimizer)
        is_needed = is_here or any(kind != "parameter_server" for kind in kinds)
        chosen = kept.trial()
        live = faults.catch(lambda: chosen.use(optimizer)) if is_needed else None
        faults += faults_of_scheduler(*asked)
        faults += trained_by.part_members(workshop.model) if self._places.share_updates(kinds) else []
        scheduling = None
        with as_it_was_after_failure(live):
            if len(faults) == num_others:
                own = live if is_here else None
                scheduling = faults.catch(
                    lambda: scheduling_of(
                        *asked,
                        own,
                        self._scheduled,
                        is_validated=is_validated,
                    )
                )
                if scheduling is not None and scheduling.is_measured and self._places.share_updates(kinds):
                    faults += measured_apart_faults(asked[2])
            refuse(faults)
        assert scheduling is not None  # noqa: S101  else there is a fault
        self._optimizer, workshop.live, workshop.given = chosen, live, given
        return live, scheduling
