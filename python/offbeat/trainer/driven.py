"""A trainer whose loop is another's, who hands it batches and keeps the account."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from offbeat.history import History, Record
from offbeat.local.log_lines import Skipped
from offbeat.metrics import Meter
from offbeat.receipt import Receipt
from offbeat.tracking.fanout import Fanout
from offbeat.trained_by import Keeper
from offbeat.trainer.callbacks import Callbacks, Step
from offbeat.trainer.next import ENDS
from offbeat.trainer.scheduling import Scheduling
from offbeat.trainer.stage import Stage
from offbeat.trainer.strategies import Batch, Made, Workshop

__all__ = ["Driven"]


class Driven:
    """What an `AsyncTrainer` does with each batch, pass and end; callbacks and trackers hear of it."""

    def __init__(
        self,
        workshop: Workshop,
        stage: Stage,
        *,
        scheduling: Scheduling,
        callbacks: Callbacks,
        trackers: Fanout,
        follow: Callable[[int], None],
    ) -> None:
        """`follow` is told how many passes are finished."""
        self._workshop = workshop
        self._stage = stage
        self._scheduling = scheduling
        self._callbacks = callbacks
        self._trackers = trackers
        self._follow = follow
        self._step: Step | None = None  # of the newest batch, until callbacks have heard of it
        self._steps = self._skipped = 0  # of the tally, that were told

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hand over batches in here."""
        live, stage = self._workshop.live, self._stage
        self._steps, self._skipped = self._workshop.tally.steps, self._workshop.tally.skipped
        with ExitStack() as stack:
            stack.enter_context(self._scheduling.steps(live, self._workshop.model))
            if live is not None:
                stack.callback(live.register_step_pre_hook(self._workshop.numerics.clip_in_step).remove)
            stage.begin()
            stack.callback(stage.end)
            yield

    def begin_epoch(self, epoch: int) -> None:
        """End together with the others what is over, and begin what an epoch is trained with."""
        self._follow(epoch)
        self._stage.at(epoch)

    def batch(self, given: object, epoch: int) -> tuple[Batch, Made, int]:
        """Train on a batch of an epoch; gives it, what came of it, and how many steps since the last call."""
        workshop = self._workshop
        self._follow(epoch)
        strategy = self._stage.at(epoch)
        before = workshop.tally.steps
        batch = Batch.of(given, workshop.device)
        workshop.numerics.norm = None
        made = strategy.batch(batch)
        steps = workshop.tally.steps
        if self._callbacks.has("on_step"):
            norm, is_update = workshop.numerics.norm, steps > before
            is_skipped = made.is_told_as_skipped
            self._step = Step(steps, epoch, batch.samples, made.loss, norm, is_skipped, is_update)
        return batch, made, self._take_steps()

    def _take_steps(self) -> int:
        """Count those since this was last asked, also of a strategy that ended as another began."""
        before, self._steps = self._steps, self._workshop.tally.steps
        return self._steps - before

    def take_skipped(self) -> int:
        """Count what was skipped since this was last asked."""
        before, self._skipped = self._skipped, self._workshop.tally.skipped
        return self._skipped - before

    @property
    def skips(self) -> Skipped:
        """What is counted as skipped."""
        return "batch" if self._stage.strategy is None else self._stage.strategy.skips

    def after_step(self) -> None:
        """Let callbacks hear of a batch that was trained on, and is in the account."""
        step, self._step = self._step, None
        if step is not None:
            self._callbacks.tell("on_step", step)

    def end_epoch(self, epoch: int) -> int:
        """End a pass; gives how many steps that were."""
        self._stage.at(epoch).end_epoch()
        self._follow(epoch + 1)
        return self._take_steps()

    def after_epoch(self, epoch: int) -> None:
        """Let the scheduler and callbacks hear of a pass that has ended, and is in the account."""
        self._stage.epoch_at_work = epoch  # also where it was trained on in the life before
        self._scheduling.end_epoch()
        self._callbacks.tell("on_epoch_end", epoch)

    def note_measured(self, batches: int) -> None:
        """Tell whoever may wonder that this member gets on while its model is measured."""
        self._stage.note_measured(batches)

    def validated(self, numbers: dict[str, float], step: int) -> None:
        """Tell trackers what was measured after a pass."""
        self._trackers.log(numbers, step)

    def settle(self) -> int:
        """End together with the others; gives how many steps that were."""
        if self._stage.strategy is not None:
            self._stage.strategy.settle(ENDS)
        return self._take_steps()

    def part(self) -> int:
        """Be ready to be saved without the others; gives how many steps that were."""
        if self._stage.strategy is not None:
            self._stage.strategy.part()
        return self._take_steps()

    def abandon(self) -> None:
        """Forget what a batch that broke off has left."""
        if self._stage.strategy is not None:
            self._stage.strategy.abandon()

    @property
    def is_under_way(self) -> bool:
        """Whether a round is, or batches are gathered."""
        return self._stage.strategy is not None and self._stage.strategy.is_under_way

    @property
    def stands_alone(self) -> bool:
        """Whether the model here has all that was trained, should the others be lost, and may be saved."""
        return self._stage.stands_alone

    @property
    def is_about_to_settle(self) -> bool:
        """Whether what is under way ends with the next batches, whatever others do."""
        return self._stage.strategy is not None and self._stage.strategy.is_about_to_settle

    @property
    def meets_at_server(self) -> bool:
        """Whether it ends together with others at a server."""
        return self._stage.strategy is not None and self._stage.strategy.meets_at_server

    @property
    def hosts_server(self) -> bool:
        """Whether that is this process's: where it goes the others have none."""
        return self._stage.strategy is not None and self._stage.strategy.hosts_server

    def bring(self) -> None:
        """Average what is left, before `settle` waits for the others' end."""
        if self._stage.strategy is not None:
            self._stage.strategy.bring()

    @property
    def version(self) -> int:
        """How often the model was brought together with the others'."""
        return 0 if self._stage.strategy is None else self._stage.strategy.version

    def take_receipts(self) -> list[Receipt]:
        """Give out what a server has answered since the last call."""
        return self._workshop.tally.take_receipts()

    @property
    def scheduler_meter(self) -> Meter | None:
        """Measures what the scheduler goes by; to be told of what counts by whoever keeps the account."""
        return self._scheduling.meter

    @property
    def keepers(self) -> list[Keeper]:
        """The callbacks that have a state."""
        return self._callbacks.keepers

    def logged(self, record: Record, numbers: dict[str, float]) -> None:
        """Tell callbacks and trackers of a log line."""
        self._trackers.log(numbers, record.step)
        self._callbacks.tell("on_log", record)

    def finished(self, history: History) -> None:
        """Tell callbacks that all is done."""
        self._callbacks.tell("on_train_end", history)
