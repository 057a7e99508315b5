"""A worker's step: count batches, push every so often, for whichever optimizer there is."""

import json
from collections.abc import Callable
from typing import cast

import torch

from offbeat import log, trained_by
from offbeat.errors import ConfigError, NonFiniteError
from offbeat.local.loss import LossReduction
from offbeat.optim import OptimizerSpec, as_spec
from offbeat.receipt import Receipt
from offbeat.samples import sample_count
from offbeat.worker import words
from offbeat.worker.contribution import Contribution, Kind
from offbeat.worker.facade import WorkerOptimizer
from offbeat.worker.fates import Watch
from offbeat.worker.gradients import Gradients
from offbeat.worker.link import UNSENT, Link
from offbeat.worker.live import LiveOptimizer

__all__ = ["Optimizer", "Steps"]

#: A spec, what becomes one (a class, a `functools.partial`), or a live optimizer.
Optimizer = OptimizerSpec | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


class Steps:
    """Gathers batches in a contribution and pushes it on every `update_frequency`-th.

    Attributes:
        batches: Batches gathered and not pushed.
        num_added: Batches gathered so far: those that were not left out.
        num_left_out: The others.
        num_pushed: Pushes made so far.
        is_quarantined: Whether all batches are left out.
        kept: Receipts that came in where nobody could be given them, oldest first.
    """

    def __init__(self, link: Link, *, update_frequency: int, reduction: LossReduction) -> None:
        self.batches = 0
        self.num_added = self.num_left_out = self.num_pushed = 0
        self.is_quarantined = False
        self.kept: list[Receipt] = []
        self._samples = 0
        self._link = link
        self._update_frequency = update_frequency
        self._reduction: LossReduction = reduction
        self._contribution_or_none: Contribution | None = None
        self._watch = Watch(link.session.worker_id)
        self._announced: object = None  # which optimizer the log was told of

    # ------------------------------------------------------------------ the optimizer

    def use(self, optimizer: Optimizer) -> None:
        """Take an optimizer: a live one under our own hands, any other to the server.

        Raises:
            ConfigError: If the run has another one, or this one does not fit the model.
        """
        if isinstance(optimizer, WorkerOptimizer):
            raise ConfigError(
                "this is the optimizer of another worker, or of one that was closed: give a spec "
                "(offbeat.optim.SGD(lr=0.1)), or a live optimizer of this worker's model"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            self._link.session.configure("gradient", json.dumps(as_spec(optimizer).spec()))
            if not isinstance(self._contribution_or_none, Gradients):
                self._begin(self._gradients())
        elif optimizer is not self.live:
            self.kept.extend(self.push_rest())
            live = LiveOptimizer(self._link.binding, optimizer)
            try:
                self._link.session.configure(live.kind, None)
                self._link.pull()
            except BaseException:
                live.close()
                raise
            self._begin(live)
        self._announce()

    def require_optimizer(self) -> None:
        """See that there is an optimizer, on either side.

        Raises:
            ConfigError: If there is none.
        """
        run = json.loads(self._link.session.configure(self.kind, None))
        if self.kind == "gradient" and run["optimizer"] is None:
            raise ConfigError(
                "there is no optimizer: give train(optimizer=offbeat.optim.SGD(lr=...)), or the server one"
            )
        self._announce()

    @property
    def live(self) -> torch.optim.Optimizer | None:
        """The optimizer that runs here, if one does."""
        contribution = self._contribution_or_none
        return contribution.optimizer if isinstance(contribution, LiveOptimizer) else None

    @property
    def awaits_optimizer(self) -> bool:
        """Whether nobody has said yet that it is to run on the server, and none runs here."""
        run = json.loads(self._link.session.run)
        return self.live is None and (run["optimizer"] is None or run["contribution"] == "delta")

    @property
    def kind(self) -> Kind:
        """What pushes carry."""
        return self._contribution.kind

    @property
    def words(self) -> str:
        """Which optimizer runs where."""
        if self.live is None:
            return words.of_run(self._link.session.run)
        return words.of_live(self.live, self._update_frequency)

    # ------------------------------------------------------------------ stepping

    def step(self, samples: int) -> list[Receipt]:
        """Take one batch; push if it is time to. Returns the receipts that came in.

        One that a watcher of the module does not admit is left out, and so are all in quarantine.
        """
        samples = sample_count(samples)
        contribution = self._contribution
        self._link.binding.refresh()
        self._mend()
        is_admitted = trained_by.admits(self._link.binding.module)
        if self.is_quarantined or not is_admitted:  # it is measured in either case
            self._leave_out()
            return []
        try:
            contribution.add(samples)
        except NonFiniteError:
            self._link.binding.put_back_corrupt()
            raise
        self.batches += 1
        self.num_added += 1
        self._samples += samples
        return self._push() if self.batches >= self._update_frequency else []

    def _leave_out(self) -> None:
        """Drop the batch whose gradients are on the module, and read the newest model where nothing waits."""
        self.num_left_out += 1
        binding = self._link.binding
        binding.clear_gradients()
        if self.batches:
            binding.put_back_corrupt()  # more would take from the batches before
        elif self._link.num_unsettled:
            binding.restore_buffers()
        else:
            self._link.pull()  # which brings the buffers, too

    def push_rest(self) -> list[Receipt]:
        """Push what is gathered, if anything is. Returns the receipts that came in."""
        if not self.batches:
            return []
        self._link.binding.refresh()
        return self._push()

    def settle(self) -> list[Receipt]:
        """Wait for what is in flight. Returns its receipts, after those of pushes that were broken off."""
        self._mend()
        broken_off, receipts = self._link.settle()
        for receipt in broken_off:
            self._watch.see(receipt)
        return [*broken_off, *map(self._settled, receipts)]

    def flush(self) -> None:
        """Push what is gathered, wait for everything in flight, and keep the receipts."""
        self.kept.extend(self.push_rest())
        self.kept.extend(self.settle())

    def take_kept(self) -> list[Receipt]:
        """Give out what is kept, once."""
        kept, self.kept = self.kept, []
        return kept

    def drop(self) -> None:
        """Forget what was not pushed. What is in flight is settled by the receipts that come."""
        self._contribution.drop(self._link.num_unsettled)
        self.batches = self._samples = 0

    def close(self) -> None:
        """Let go of what belongs to the user."""
        if self._contribution_or_none is not None:
            self._contribution_or_none.close()

    # ------------------------------------------------------------------ inside

    @property
    def _contribution(self) -> Contribution:
        """What pushes carry: where nothing was said, gradients for the server's optimizer."""
        if self._contribution_or_none is None:
            self._link.session.configure("gradient", None)
            self._begin(self._gradients())
            self._announce()
        return cast(Contribution, self._contribution_or_none)

    def _gradients(self) -> Gradients:
        return Gradients(self._link.binding, self._reduction, waits=self._update_frequency > 1)

    def _begin(self, contribution: Contribution) -> None:
        self.close()
        self._contribution_or_none = contribution

    def _announce(self) -> None:
        """Tell the log which optimizer runs where, once for each that begins."""
        which = self.words if self.live is None else self.live
        if which not in (self._announced, words.NONE_YET):
            self._announced = which
            log.info("worker %s: optimizer %s", self._link.session.worker_id, self.words)

    def _push(self) -> list[Receipt]:
        contribution = self._contribution
        values, samples = contribution.take(), self._samples
        self.batches = self._samples = 0
        try:
            receipt = self._link.push_pull(values, samples)
        except UNSENT:
            contribution.unsent()
            raise
        except BaseException:
            contribution.drop(self._link.num_unsettled)
            raise
        self.num_pushed += 1
        return [] if receipt is None else [self._settled(receipt)]

    def _mend(self) -> None:
        if self._link.mend() and self._contribution_or_none is not None:
            self._contribution_or_none.drop(self._link.num_unsettled)

    def _settled(self, receipt: Receipt) -> Receipt:
        self._contribution.settled(receipt)
        self._watch.see(receipt)
        name = "staleness" if receipt.applied else "staleness_of_rejected"
        trained_by.tell(self._link.binding.module, **{name: receipt.staleness})
        if self._announced is None:  # the server came by its optimizer after this worker's first step
            self._announce()
        return receipt
