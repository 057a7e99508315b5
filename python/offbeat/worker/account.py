"""What became of the pushes of one `train`: for its history and its log lines, and to end it in time."""

from collections import Counter

from offbeat.errors import RejectedError
from offbeat.history import History
from offbeat.receipt import Receipt
from offbeat.worker.fates import Fates, fate_of

__all__ = ["MAX_REJECTIONS", "Account"]

MAX_REJECTIONS = 100
"""In a row, before `train` gives up: what made so many wrong will not pass by itself."""


class Account:
    """Counts receipts into a history.

    Attributes:
        fates: What became of the pushes since the last log line.
        is_out_of_budget: The run's samples are used up.
    """

    def __init__(self, history: History, *, owner: str = "worker") -> None:
        """`owner`: how a user names what trains, for the error that ends it."""
        self.fates = Fates()
        self.is_out_of_budget = False
        self._history = history
        self._owner = owner
        self._rejected_in_a_row: Counter[str] = Counter()

    def note(self, receipts: list[Receipt]) -> None:
        """Take receipts down, oldest first.

        Raises:
            RejectedError: After 100 rejections in a row, with their reasons.
        """
        for receipt in receipts:
            fate = fate_of(receipt)
            self.fates.add(receipt)
            self._history.receipts[fate] = self._history.receipts.get(fate, 0) + 1
            if receipt.reason == "budget":
                self.is_out_of_budget = True
            elif receipt.applied:
                self._rejected_in_a_row.clear()
            else:
                self._rejected_in_a_row[fate] += 1
            if self._rejected_in_a_row.total() >= MAX_REJECTIONS:
                raise RejectedError(self._rejections(receipt.detail))

    def _rejections(self, last: str) -> str:
        reasons = self._rejected_in_a_row
        listed = ", ".join(f"{n}x {reason}" for reason, n in reasons.most_common())
        return (
            f"the server rejected {reasons.total()} pushes in a row: {listed}; of the last it said: {last}. "
            f"The worker is still joined, and {self._owner}.history has what went before"
        )
