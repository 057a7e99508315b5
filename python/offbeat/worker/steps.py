"""A worker's step: count batches, and push every so often."""

from offbeat.errors import ConfigError
from offbeat.receipt import Receipt
from offbeat.worker.contribution import Contribution
from offbeat.worker.link import Link

__all__ = ["Steps"]


class Steps:
    """Gathers batches in a contribution and pushes it on every `update_frequency`-th.

    Attributes:
        contribution: What pushes carry.
        batches: Batches gathered and not pushed.
    """

    def __init__(self, link: Link, contribution: Contribution, update_frequency: int) -> None:
        self.contribution = contribution
        self.batches = 0
        self._samples = 0
        self._link = link
        self._update_frequency = update_frequency

    def step(self, samples: int) -> list[Receipt]:
        """Take one batch; push if it is time to. Returns the receipts that came in."""
        if samples < 1:
            raise ConfigError(f"samples is {samples}: a batch has at least one")
        self._link.binding.refresh()
        self.contribution.add(samples)
        self.batches += 1
        self._samples += samples
        return self._push() if self.batches >= self._update_frequency else []

    def push_rest(self) -> list[Receipt]:
        """Push what is gathered, if anything is. Returns the receipts that came in."""
        if not self.batches:
            return []
        self._link.binding.refresh()
        return self._push()

    def settle(self) -> list[Receipt]:
        """Wait for what is in flight. Returns its receipts."""
        return [self._settled(receipt) for receipt in self._link.settle()]

    def drop(self) -> None:
        """Forget what was not pushed, and what was pushed and not answered."""
        self.contribution.drop()
        self.batches = self._samples = 0

    def _push(self) -> list[Receipt]:
        values, samples = self.contribution.take(), self._samples
        self.batches = self._samples = 0
        try:
            receipt = self._link.push_pull(values, samples)
        except BaseException:
            self.contribution.drop()
            raise
        return [] if receipt is None else [self._settled(receipt)]

    def _settled(self, receipt: Receipt) -> Receipt:
        self.contribution.settled(receipt)
        return receipt
