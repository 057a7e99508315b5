"""Training against a parameter server."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch

from offbeat import trained_by
from offbeat.errors import (
    ClosedError,
    ConnectError,
    ConnectionLostError,
    ForkedError,
    ServerClosedError,
    StateError,
)
from offbeat.local.buffers import write
from offbeat.local.optimizer import are_equal
from offbeat.trainer.settings import Sync
from offbeat.trainer.strategies import Batch, Made, Strategy, Workshop
from offbeat.worker import AsyncWorker
from offbeat.worker.turn import AFTER_A_LOSS

__all__ = ["Left", "Served"]

CONNECT_S = 60.0
"""How long a server is tried to be reached where nothing says that it is to be there again."""

JOIN_AGAIN = (
    ". The model keeps the parameters last pulled: when a server is there again, call the trainer's close(), "
    "and then train(), which joins it; a server without a model begins with this one"
)
"""What to do where the server is lost: a trainer's user has no worker."""

PULL_AGAIN = (
    ". When the server is there again, with its checkpoints, call train() in all members: this one joins it "
    "anew, and takes what all have pushed, from which they go on; from another one, without a model, they go "
    "on with this member's"
)
"""What to do where it is lost as the first member takes what all have pushed."""

BRING_AGAIN = (
    ". The model is what all have made, as it was: when a server is there again, call train() in all "
    "members, which brings it there"
)
"""What to do where it is lost while the first member brings it what all have made."""


class Left(NamedTuple):
    """Where members were as they left a server.

    Attributes:
        run: The server's, by its id.
        term: The life of its values.
        version: Of its model, whose values they went on from.
        patience_s: How long it is waited for by who comes back, in seconds: as a lost one, or as any.
    """

    run: str
    term: int
    version: int
    patience_s: float = 0.0

    @classmethod
    def of(cls, state: Any) -> Self | None:  # noqa: ANN401  from a file
        """Take it from a list, as a state has it; None where they never were at one."""
        return None if state is None else cls(*state)


class Served(Strategy):
    """A worker, which pushes every so many batches.

    How many is chosen when a worker is made. So where it changes the worker says goodbye and one of the same
    name takes its place, with the same model and the same live optimizer.

    Attributes:
        worker: None before `begin`, and where the server was lost or left.
        patience_s: How long the server is tried to be reached as it is joined next.
        may_lack: It has joined another server than it had pushed to, or an older checkpoint of it, and pushed
            nothing there.
    """

    version_is = "version"

    def __init__(self, workshop: Workshop, sync: Sync) -> None:
        super().__init__(workshop, sync)
        self._worker_id = workshop.places.worker_id
        self._gathered = 0
        self._given: object = None
        self._run: str | None = None  # which it has to be; None: any
        self._left: Left | None = None  # by the worker before
        self.worker: AsyncWorker | None = None  # from `begin` on
        self.may_lack = False
        self.patience_s = CONNECT_S

    @property
    def version(self) -> int:
        """The server's, as last heard."""
        return 0 if self.worker is None else self.worker.version

    @property
    def _is_live(self) -> bool:
        return isinstance(self._given, torch.optim.Optimizer)

    @property
    def is_to_join(self) -> bool:
        """Whether `begin` does: as there is no worker, or one with another optimizer."""
        given = self.workshop.given
        is_other = given is not None and given is not self._given and not are_equal(given, self._given)
        return self.worker is None or is_other

    def begin(self) -> None:
        """Join, with the optimizer there is; anew where that is another than before."""
        if self.is_to_join:
            if self.worker is not None:
                self._leave()
            self._join()

    def hand_over(self, left: Left | None, own: Sequence[torch.Tensor]) -> bool:
        """Join, and make the model here the server's, if nothing that others have trained is lost by that.

        Args:
            left: Where members were at a server before; None: they never were at one. In the place of a
                model in whose run they were not, it is put if nobody has trained that.
            own: Copies of that model's parameters and buffers.

        Returns:
            Whether it is; else it is the server's here.

        Raises:
            ConnectionLostError, OffbeatError: It has left the server then, and may come to this again.
        """
        model = self.workshop.model
        tensors = [*model.parameters(), *model.buffers()]

        def is_own() -> bool:
            return all(map(torch.equal, tensors, own))

        try:
            with _told_to_who_has_a_trainer(BRING_AGAIN):
                self.begin()  # with the server's model, or this one where there was none
                if is_own():
                    return True
                for tensor, value in zip(tensors, own, strict=True):
                    write(value, tensor)
                worker = self._joined
                is_new = left is None or left.run != worker.run_id
                is_taken = worker.replace(None if left is None or is_new else (left.term, left.version))
                return is_taken or is_own()  # where the answer was lost, and it was asked again
        except BaseException as error:
            self.close(error)
            raise

    def batch(self, batch: Batch) -> Made:
        """Hand a batch's gradients to the worker, which pushes if it is time to."""
        workshop, worker = self.workshop, self._joined
        self.may_lack = False
        optimizer = worker.optimizer
        optimizer.zero_grad()
        outputs, loss = workshop.compute(batch)
        if not workshop.numerics.is_usable(optimizer):
            optimizer.zero_grad()
            workshop.tally.skipped += 1
            trained_by.skipped(workshop.model)
            return Made(outputs, loss, is_skipped=True)
        if not self._is_live:  # whose own step clips
            workshop.numerics.clip([p for p in workshop.model.parameters() if p.grad is not None])
        before = worker.num_left_out
        with _told_to_who_has_a_trainer():
            receipt = worker.step(batch.samples)
        if receipt is not None:
            workshop.tally.receipts.append(receipt)
        if worker.num_left_out > before:
            workshop.tally.skipped += 1
            return Made(outputs, loss, is_skipped=True)
        self._gathered = 0 if receipt is not None else self._gathered + 1
        workshop.tally.steps += 1 if self._is_live else int(receipt is not None)
        return Made(outputs, loss)

    def end_epoch(self) -> None:
        """Push what is gathered."""
        if self.worker is None:  # who is told of a batch may have closed the trainer
            return
        if self._gathered and not self._is_live:
            self.workshop.tally.steps += 1
        self._gathered = 0
        with _told_to_who_has_a_trainer():
            self.workshop.tally.receipts += self._joined.flush()

    def settle(self, then: str) -> None:
        """Push what is gathered."""
        del then  # no worker needs others for that; those who go to a group together ask there
        self.end_epoch()

    def pull(self) -> bool:
        """Take the server's model as it is by now; what this member had is pushed.

        Returns:
            Whether it has joined one, to take it from.

        Raises:
            ConnectionLostError, OffbeatError: It has left the server then, and may come to this again.
        """
        if self.worker is None:
            return False
        try:
            with _told_to_who_has_a_trainer(PULL_AGAIN):
                self.workshop.tally.receipts += self.worker.prepare(None)
        except BaseException as error:
            self.close(error)
            raise
        return True

    @property
    def name(self) -> str | None:
        """What the server calls it, or called it; None where it has no name yet."""
        return self._worker_id if self.worker is None else self.worker.id

    @property
    def left(self) -> Left | None:
        """Where this member is, as it leaves, or was as it left; None where it never joined."""
        worker = self.worker
        try:
            if worker is None:
                return self._left
            patience_s = max(CONNECT_S, worker.reconnect_timeout_s)
            return Left(worker.run_id, worker.term, worker.version, patience_s)
        except (ClosedError, ForkedError):  # as at Python's end, when a worker has said goodbye by itself
            return self._left

    def follow(self, sync: Sync) -> None:
        """Leave for a worker that pushes as often as that, which takes this one's place in `begin`."""
        if sync.every == self.sync.every:
            super().follow(sync)
            return
        self._leave()
        super().follow(sync)

    def close(self, failure: BaseException | None = None) -> None:
        """Say goodbye, and by what."""
        self._left, worker = self.left, self.worker
        self.worker = None  # whatever breaks off its goodbye
        if worker is not None:
            self._worker_id = worker.id
            worker.end_by(failure)

    @property
    def is_under_way(self) -> bool:
        """Whether batches are gathered."""
        return self._gathered > 0

    def note_measured(self, batches: int) -> None:
        """Tell the server."""
        if self.worker is not None:
            self.worker.note_measured(batches)

    def part(self) -> None:
        """Push what is gathered."""
        self.end_epoch()

    def state_dict(self) -> Any:  # noqa: ANN401  a nest
        """Give which worker of which run this is; all else is the server's."""
        worker = self.worker
        return {
            "worker_id": self._worker_id if worker is None else worker.id,
            "run": self._run if worker is None else worker.run_id,
        }

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401  as `state_dict` gave it
        """Take the worker's old place, with the model that the server has by then."""
        self._worker_id, self._run = state["worker_id"], state["run"]

    def abandon(self) -> None:
        """Let go of a batch's gradients."""
        self.workshop.model.zero_grad()

    def _leave(self) -> None:
        self.settle("leaves")
        self.close()

    @property
    def _joined(self) -> AsyncWorker:
        assert self.worker is not None  # noqa: S101  `begin` has joined
        return self.worker

    def _join(self) -> None:
        workshop, places = self.workshop, self.workshop.places
        given: Any = workshop.given if workshop.given is not None else self._given
        self.worker = AsyncWorker(
            places.address,
            workshop.model,
            update_frequency=self.sync.every,
            device=workshop.device,
            optimizer=given,
            loss_reduction=workshop.reduction,
            token=places.token,
            worker_id=self._worker_id,
            connect_timeout_s=self.patience_s,
        )
        self.patience_s = CONNECT_S
        self._given = given
        if self._run not in (None, self.worker.run_id):
            found, left = self.worker.run_id, self._left
            self.close()
            self._left = left  # that server's model is nobody's here
            raise StateError(
                f"the server's run is {found!r}, and the state's was {self._run!r}, whose model this server "
                f"does not have: start it with the checkpoints of that run (checkpoint_dir=), or begin anew"
            )


@contextmanager
def _told_to_who_has_a_trainer(instead: str = JOIN_AGAIN) -> Iterator[None]:
    """Say what to do with a trainer, where a worker says what to do with it."""
    try:
        yield
    except ServerClosedError as error:  # which says why, and not what is to be done
        error.args = (f"{error}{instead}",)
        raise
    except ConnectionLostError as error:
        error.args = (str(error).replace(AFTER_A_LOSS, instead),)
        raise
    except ConnectError as error:
        if instead is BRING_AGAIN:
            error.args = (
                f"{error}{instead}. One that all had left ends after its linger, without --keep-running",
            )
        raise
