"""Training by updates of many batches, the members' own added up."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from offbeat import log
from offbeat.accumulator import AsyncGradientAccumulator
from offbeat.errors import NonFiniteError
from offbeat.local.group import group_of
from offbeat.trainer.next import check_next
from offbeat.trainer.numerics import LEAST_SCALE
from offbeat.trainer.settings import Sync
from offbeat.trainer.strategies import Batch, Made, Strategy, Workshop

__all__ = ["Accumulated", "least_scale"]


class Accumulated(Strategy):
    """An update is of as many batches of each member as `Sync.every` says."""

    version_is = "update"
    skips = "update"

    def __init__(self, workshop: Workshop, sync: Sync) -> None:
        super().__init__(workshop, sync)
        self._updates = 0  # of accumulators before this one
        self._in_epoch: int | None = 0  # batches; None where nobody knows
        self._has_warned = False
        self._accumulator = self._made()
        _forget_what_differs(workshop)  # not before: where a member is lost, this one goes on as it was

    @property
    def version(self) -> int:
        """Updates."""
        return self._updates + self._accumulator.updates

    def begin(self) -> None:
        """Begin with a pass, unless a state was of the middle of one."""
        self._in_epoch = None if self._in_epoch is None else 0

    def batch(self, batch: Batch) -> Made:
        """Add a batch; make an update if it is time to."""
        workshop, skipped = self.workshop, self.workshop.tally.skipped
        seen: list[tuple[Any, torch.Tensor]] = []

        def loss_fn(outputs: Any, targets: Any) -> torch.Tensor:  # noqa: ANN401  whatever the model gives
            assert workshop.loss_fn is not None  # noqa: S101  `train` has one
            loss = workshop.loss_fn(outputs, targets)
            seen.append((outputs, loss))
            return loss

        with self._counted(), workshop.numerics.passes():
            self._accumulator.train_step(
                inputs=batch.inputs,
                targets=batch.targets,
                optimizer=workshop.live,
                loss_fn=loss_fn,
                autocast=workshop.numerics.forward(),
            )
        self._in_epoch = None if self._in_epoch is None else self._in_epoch + 1
        outputs, loss = seen[-1]
        return Made(
            outputs,
            loss.detach(),
            is_skipped=self._accumulator.is_broken,
            has_skipped_update=workshop.tally.skipped > skipped,
        )

    def end_epoch(self) -> None:
        """Warn, once, if a pass is not even one window."""
        batches, self._in_epoch = self._in_epoch, 0
        if batches and batches < self.sync.every and not self._has_warned:
            self._has_warned = True
            log.warn(
                f'an epoch is of {batches} batches, and strategy "accumulate" makes an update of every '
                f"{self.sync.every} of a member's: fewer than one in an epoch. Give a smaller "
                f"regular_sync_frequency (warm_up_sync_frequency in the warm-up), which is batches per update"
            )

    def settle(self, then: str) -> None:
        """Make the updates that are due."""
        dropped: NonFiniteError | None = None
        try:
            with self._counted():
                self._accumulator.flush(optimizer=self.workshop.live)
        except NonFiniteError as error:  # of this member's window: all others have gone on behind it
            dropped = error
        check_next(then, are_alike=self._accumulator.agree(then))
        if dropped is not None:
            raise dropped

    def close(self, failure: BaseException | None = None) -> None:
        """Make no update of what is gathered, and give back the members' group."""
        del failure  # its group is told of none
        self._accumulator.close()

    def state_dict(self) -> Any:  # noqa: ANN401  a nest
        """Give the accumulator's, with what its window has gathered; the loss scale is in the trainer's."""
        own = self._accumulator.state_dict() | {"optimizer": None, "grad_scaler": None}
        return {"updates": self._updates, "accumulator": own}

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401  as `state_dict` gave it
        """Go on from there, also in the middle of a window."""
        scaler = self._scaler  # whose state the trainer brings back, whatever the strategy
        own = {"grad_scaler": None if scaler is None else scaler.state_dict()}
        self._accumulator.load_state_dict({**state["accumulator"], **own})
        self._updates = state["updates"]
        self._in_epoch = None

    def follow(self, sync: Sync) -> None:
        """Begin windows of another length, in all members after the same update."""
        super().follow(sync)
        self.settle("goes on with the next epoch")
        before, self._accumulator = self._accumulator, self._made()
        self._updates += before.updates
        before.close()

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        scaler = self.workshop.numerics.scaler
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _made(self) -> AsyncGradientAccumulator:
        workshop = self.workshop
        accumulator = AsyncGradientAccumulator(
            workshop.model,
            accumulation_steps=self.sync.every,
            overlap=self.sync.overlap is not False,
            device=workshop.device,
            loss_reduction=workshop.reduction,
            grad_scaler=self._scaler,
            process_group=workshop.places.group,
        )
        try:
            self._scale_alike(accumulator)
        except BaseException:
            accumulator.close()
            raise
        return accumulator

    def _scale_alike(self, accumulator: AsyncGradientAccumulator) -> None:
        """Let members that trained apart, each with a loss scale of its own, go on with the same."""
        if (scaler := self._scaler) is None:
            return
        own = scaler.state_dict()
        state = least_scale(accumulator.gathered(own))
        if state == own:
            return
        scaler.load_state_dict(state)
        if own["scale"] < LEAST_SCALE:
            log.warn(
                f"this member's loss scale had fallen to {own['scale']:g}, by which no gradient can be "
                f"divided: its batches were not finite for long. It goes on with {state['scale']:g}, the "
                f"least of the other members' scales"
            )
        else:
            log.info(
                "losses are scaled by %g, the least of the members' scales: this one's was %g",
                state["scale"], own["scale"],
            )  # fmt: skip

    @contextmanager
    def _counted(self) -> Iterator[None]:
        accumulator, tally = self._accumulator, self.workshop.tally
        made, skipped = accumulator.updates, accumulator.skipped_updates
        try:
            yield
        finally:
            tally.steps += accumulator.updates - made
            if skips := accumulator.skipped_updates - skipped:
                tally.skipped += skips
                self.workshop.numerics.tell_of_scale()


def least_scale(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Choose from members' states of a GradScaler: with the least scale no gradient of theirs overflows.

    One that is of no use any more is none, where others are.
    """
    usable = [state for state in states if state["scale"] >= LEAST_SCALE]
    return dict(min(usable or states, key=lambda state: (state["scale"], state["_growth_tracker"])))


def _forget_what_differs(workshop: Workshop) -> None:
    """Let an optimizer that has stepped apart from the others' begin anew: updates are to be the same."""
    group = group_of(workshop.places.group)
    live = workshop.live
    if live is None or group is None or distributed.get_world_size(group) == 1 or not workshop.tally.steps:
        return
    if live.state:
        live.state.clear()
        log.info(
            "the %s begins anew, for members' states differ and their updates may not", type(live).__name__
        )
