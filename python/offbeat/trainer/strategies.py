"""The ways to train: what each makes of a batch, and when it meets the others."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from offbeat import log, trained_by
from offbeat.averaging import AsyncModelAverager
from offbeat.averaging.methods import Method
from offbeat.averaging.settings import server_faults
from offbeat.averaging.turns import FLUSH_AGAIN
from offbeat.errors import ConnectionLostError, StateError
from offbeat.local.batches import MAKE_PAIRS, check_any, count, moved, split
from offbeat.local.log_lines import Skipped
from offbeat.local.loss import LossFunction, LossReduction, check_loss
from offbeat.local.parameters import each_once, fingerprint, other_values
from offbeat.receipt import Receipt
from offbeat.trainer.next import ENDINGS, check_next, meeting, next_of
from offbeat.trainer.numerics import Numerics
from offbeat.trainer.places import Places
from offbeat.trainer.settings import Sync

__all__ = ["Averaged", "Batch", "Local", "Made", "Strategy", "Tally", "Workshop"]

OWN_LOOPS = (
    "or train in a loop of your own, which takes any: with AsyncModelAverager.step(samples) or, at a "
    "parameter server, AsyncWorker.step(samples)"
)
"""What to do where a batch is no pair."""
TRAIN_AGAIN = (
    "the next round in which the server is there brings them to the others, as the end of a train() that is "
    "called again is one; or go on with this model"
)
"""What to do where the members' server is away: a trainer has no `flush`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is trained on at a time, on the device."""

    inputs: Any
    targets: Any
    samples: int

    @classmethod
    def of(cls, given: object, device: torch.device) -> "Batch":
        """Bring a pair to the device.

        Raises:
            ConfigError: If it is none, or its samples cannot be counted, or it has none.
        """
        inputs, targets = split(given, instead=f"{MAKE_PAIRS}, {OWN_LOOPS}")
        check_any(samples := count(inputs, targets))
        return cls(moved(inputs, device), moved(targets, device), samples)


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a batch.

    Attributes:
        outputs: The model's.
        loss: As the loss function gave it; detached.
        is_skipped: Nothing came of it: its scaled gradients were not finite, or a monitor dropped them. It
            counts in no mean.
        has_skipped_update: Of a strategy whose updates are of many batches: as this one was added, an update
            was skipped. None: each batch is by itself.
        lost: The others were, when this had been trained on: whoever goes on does so without them.
    """

    outputs: Any
    loss: torch.Tensor
    is_skipped: bool = False
    has_skipped_update: bool | None = None
    lost: ConnectionLostError | None = None

    @property
    def is_told_as_skipped(self) -> bool:
        """Whether callbacks hear of a skip, each of which is told once."""
        return self.is_skipped if self.has_skipped_update is None else self.has_skipped_update


@dataclass(slots=True)
class Tally:
    """What has been done over a trainer's life, by whichever strategy.

    Attributes:
        steps: Of the optimizer, on whichever side: updates, and pushes to one on a server.
        skipped: Batches of which nothing was made, and updates of many that a loss scale skipped; a step that
            was made without gradients, since a monitor dropped them, is among the steps as well.
        receipts: Of pushes; for whoever takes them.
    """

    steps: int = 0
    skipped: int = 0
    receipts: list[Receipt] = field(default_factory=list)

    def take_receipts(self) -> list[Receipt]:
        """Give them out, once."""
        taken, self.receipts = self.receipts, []
        return taken


@dataclass(slots=True)
class Workshop:
    """What every strategy works with.

    Attributes:
        model: Trained in place.
        device: Where it is.
        numerics: Of its steps.
        tally: Of what is done.
        reduction: Of the losses.
        places: Where members meet, as a user gives them.
        live: The optimizer here; None where there is none.
        given: The optimizer as the user gave it.
        loss_fn: From (outputs, targets) to a scalar.
    """

    model: nn.Module
    device: torch.device
    numerics: Numerics
    tally: Tally
    reduction: LossReduction
    places: Places
    live: torch.optim.Optimizer | None = None
    given: object = None
    loss_fn: LossFunction | None = None

    def compute(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        """Run a batch forwards and backwards; gives the outputs and the loss."""
        assert self.loss_fn is not None  # noqa: S101  `train` has one
        with self.numerics.passes(), self.numerics.forward():
            outputs = self.model(batch.inputs)
            loss = self.loss_fn(outputs, batch.targets)
        check_loss(loss, owner="AsyncTrainer")
        shown = loss.detach()
        trained_by.tell(self.model, loss=shown if self.reduction == "mean" else shown / batch.samples)
        with self.numerics.passes():
            self.numerics.backward(loss)
        return outputs, shown


class Strategy(ABC):
    """One way to train.

    Attributes:
        version_is: What `version` counts, as a log line says it; empty for nothing.
        skips: What is counted as skipped, likewise.
        meets_others: There is anybody to meet.
        stands_alone: Where the others are lost, the model here has all that was trained.
    """

    version_is = ""
    skips: Skipped = "batch"
    meets_others = True
    stands_alone = False

    def __init__(self, workshop: Workshop, sync: Sync) -> None:
        self.workshop = workshop
        self.sync = sync

    @property
    def version(self) -> int:
        """How often the model was brought together with the others'."""
        return 0

    @abstractmethod
    def batch(self, batch: Batch) -> Made:
        """Train on a batch, and meet the others if it is time to."""

    def begin(self) -> None:  # noqa: B027  most have nothing to do
        """Begin a `train`; the workshop has its optimizer and its loss."""

    def end_epoch(self) -> None:  # noqa: B027
        """Do what belongs at the end of a pass."""

    def note_measured(self, batches: int) -> None:  # noqa: B027
        """Tell whoever may wonder that this member gets on while it measures the model."""

    def settle(self, then: str) -> None:  # noqa: B027
        """End what is under way, or gathered: with the others, where members need one another for that.

        All have the same model then; at a parameter server they have as they are handed over (`Handover`).

        Args:
            then: What this member does next, in words; `next.ENDS`, if it ends.

        Raises:
            StateError: If members of a process group do not all do the same next.
        """

    def follow(self, sync: Sync) -> None:
        """Meet as often as this says from here on."""
        self.sync = sync

    def close(self, failure: BaseException | None = None) -> None:  # noqa: B027
        """Let go of everything, by a failure perhaps, and wait for nobody; what is to be kept is settled."""

    def abandon(self) -> None:  # noqa: B027
        """Forget what a batch that broke off has left."""

    # ------------------------------------------------------------------ state

    @property
    def has_joined_others(self) -> bool:
        """Whether the model is what others have made meanwhile, and not what a state has."""
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether a round is, which a state would end, or batches are gathered, which it would lack."""
        return False

    @property
    def is_about_to_settle(self) -> bool:
        """Whether it ends with the next batches, whatever others do."""
        return False

    @property
    def meets_at_server(self) -> bool:
        """Whether it ends together with others at a server."""
        return False

    @property
    def hosts_server(self) -> bool:
        """Whether that is this process's."""
        return False

    def bring(self) -> None:  # noqa: B027
        """Average what is left, before `settle` waits for the others' end."""

    def part(self) -> None:  # noqa: B027
        """Be ready to be saved, for the process is about to end, and the others may not come any more."""

    def state_dict(self) -> Any:  # noqa: ANN401  a nest
        """Give what it takes to go on, besides model and optimizer."""
        return None

    def state_of_now(self) -> Any:  # noqa: ANN401  a nest
        """Give it and wait for nobody, as if a round that is under way had not begun."""
        return self.state_dict()

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401, B027  as `state_dict` gave it
        """Go on from there, before the first batch."""


class Local(Strategy):
    """A plain loop, alone."""

    meets_others = False

    def batch(self, batch: Batch) -> Made:
        """Make a step of the optimizer."""
        workshop = self.workshop
        live, tally = workshop.live, workshop.tally
        assert live is not None  # noqa: S101  `begin` is after an optimizer was given
        live.zero_grad()
        outputs, loss = workshop.compute(batch)
        if not workshop.numerics.is_usable(live):
            tally.skipped += 1
            trained_by.skipped(workshop.model)
            return Made(outputs, loss, is_skipped=True)
        live.step()
        tally.steps += 1
        is_dropped = trained_by.has_dropped(workshop.model)
        tally.skipped += is_dropped
        return Made(outputs, loss, is_dropped)

    def state_dict(self) -> Any:  # noqa: ANN401  a nest
        """Tell which model it is that was trained."""
        return {"model": fingerprint(each_once(self.workshop.model))}

    def state_of_now(self) -> Any:  # noqa: ANN401  a nest
        """Tell nothing of it: who asks keeps the model itself."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401  as `state_dict` gave it
        """Warn if the model is another, which may be meant here, where nobody else has the same."""
        if state is None:
            return
        named, kept = each_once(self.workshop.model), state["model"]
        if len(named) != len(kept):
            other = f"it has {len(named)} parameters, and the state's had {len(kept)}"
        elif (name := other_values(named, kept)) is not None:
            other = f"parameter {name!r} has other values"
        else:
            return
        log.warn(
            f"the model is not the one of the state: {other}. Load the model's own state, as of when the "
            f"trainer's was taken, unless this is meant"
        )


class Averaged(Local):
    """Members that train apart, and average their models."""

    version_is = "round"
    meets_others = True
    stands_alone = True

    def __init__(self, workshop: Workshop, sync: Sync, method: Method) -> None:
        super().__init__(workshop, sync)
        meeting = workshop.places.meeting
        self.averager = AsyncModelAverager(
            workshop.model,
            averaging_frequency=sync.every,
            method=method,
            overlap=sync.overlap,
            communication_backend=workshop.places.backend,
            process_group=meeting.group,
            server_address=meeting.address,
            token=meeting.token,
            asynchronous=meeting.is_asynchronous,
            device=workshop.device,
        )
        if self.averager.is_alone and meeting.group is not False:
            with_tcp, at_a_server = (
                "with communication_backend='tcp' or ",
                "give server_address= of an offbeat server, ",
            )
            if server_faults(method):  # as of gossip, which meets at none
                with_tcp = at_a_server = ""
            log.announce(
                f"strategy {method!r} averages with nobody: this process trains alone. Start several, as "
                f"by offbeat launch --workers 4, each {with_tcp}after offbeat.init_distributed('gloo'), "
                f'{at_a_server}or take strategy="local"'
            )

    @property
    def version(self) -> int:
        """Rounds of averaging."""
        return self.averager.averaging_round

    def batch(self, batch: Batch) -> Made:
        """Make a step; average if it is time to. One that a loss scale skips is none for the averager either.

        One whose gradients a monitor dropped is: a member with many of these would keep the others waiting.
        """
        before = self.workshop.tally.steps
        made = super().batch(batch)
        if self.workshop.tally.steps > before:
            try:
                self.averager.step(batch.samples, optimizer=self.workshop.live)
            except ConnectionLostError as error:
                return replace(made, lost=error)
        return made

    def settle(self, then: str) -> None:
        """Average what is left; losing the members' server is told, and costs no model."""
        try:
            if then in ENDINGS:
                self.averager.flush()
            else:
                self.averager.flush_to_go_on()
            check_next(then, are_alike=self.averager.agree(then))
        except ConnectionLostError as error:
            if not self.averager.has_lost_server:
                raise
            what = str(error).replace(FLUSH_AGAIN, TRAIN_AGAIN)
            log.warn(f"what was trained last is not averaged: {what}")

    def close(self, failure: BaseException | None = None) -> None:
        """Give back the members' group; at a server, say by what this ends."""
        self.averager.end_by(failure)

    def note_measured(self, batches: int) -> None:
        """Tell the members' server."""
        self.averager.note_measured(batches)

    @property
    def has_joined_others(self) -> bool:
        """Whether the model is what others have made at a server."""
        return self.averager.has_joined_others

    def become(self, method: Method) -> bool:
        """Average by another method from here on, where members meet at a server: nobody leaves it for that.

        Who left, and came again by the new method, would meet there who still averages by the one before.
        Where others are not there to agree, or the server is lost, the averager asks again in each round.

        Returns:
            Whether it does; else this is to be closed, and another one made.
        """
        places, averager = self.workshop.places, self.averager
        if not places.are_served or places.is_asynchronous:
            return False
        then, num = next_of(method), averager.world_size
        self.settle(then)
        averager.method = method
        self.settle(then)
        if (num_left := averager.world_size) < num:
            log.warn(
                f"of {num} members {num - num_left} are not there any more, now that this one has waited to "
                f"change its strategy with them, and it {then} with those that are left: if they have ended, "
                f"set strategy in all of them, after the same batch of theirs"
            )
        return True

    @property
    def is_under_way(self) -> bool:
        """Whether a round is."""
        return self.averager.is_under_way

    @property
    def is_about_to_settle(self) -> bool:
        """Whether a round is under way of this member alone."""
        return self.averager.is_under_way and self.averager.is_alone

    @property
    def meets_at_server(self) -> bool:
        """Whether the averager does."""
        return self.averager.is_at_server

    @property
    def hosts_server(self) -> bool:
        """Whether the averager does."""
        return self.averager.hosts_server

    def bring(self) -> None:
        """Average it."""
        self.averager.bring()

    def state_dict(self) -> Any:  # noqa: ANN401  a nest
        """Give the averager's, but for how often members meet, which the trainer's own settings say."""
        return self.averager.state_dict() | {"optimizer": None, "timing": None}

    def state_of_now(self) -> Any:  # noqa: ANN401  a nest
        """Likewise."""
        return self.averager.state_of_now() | {"optimizer": None, "timing": None}

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401  as `state_dict` gave it
        """Go on from there, also with members that were saved in other rounds."""
        self.averager.load_state_dict(state, strict=False)

    def follow(self, sync: Sync) -> None:
        """Meet the others, so that all change before the same round, and agree there.

        Where their server is lost, the averager asks again in each round.

        Raises:
            StateError: If the others want something else.
        """
        super().follow(sync)
        averager, then = self.averager, meeting(sync)
        self.settle(then)
        averager.averaging_frequency, averager.overlap = sync.every, sync.overlap
        self.settle(then)
        has_other = (averager.averaging_frequency, averager.overlap) != (sync.every, sync.overlap)
        if has_other and not averager.has_lost_server:
            raise StateError(
                f"other members do not synchronize every {sync.every} batches from here on, as this "
                f"one does: "
                f"give all of them the same warm_up_epochs, warm_up_sync_frequency, "
                f"regular_sync_frequency and "
                f"overlap"
            )
        trained_by.was_set(self.workshop.model, averager, "averaging_frequency")
