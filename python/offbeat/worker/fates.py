"""What became of a worker's pushes: for its log lines, and for a warning when most come to nothing."""

from collections import Counter, deque

from offbeat import log
from offbeat.receipt import Receipt

__all__ = ["Fates", "Watch", "fate_of"]

#: The receipts that the warning is about: the last so many.
WINDOW = 100

_REMEDIES = {
    "stale": "raise the server's max_staleness above the staleness of this worker's receipts, or let the "
    "others push less often, with a larger update_frequency",
    "norm": "raise the max_norm of the server's GradientFiltering, or clip the gradients",
    "nonfinite_result": "lower the learning rate",
    "non_finite": "look for what makes the gradients NaN or infinite",
}
_ELSEWHERE = "look at the receipts' detail, and at the server's log"


def fate_of(receipt: Receipt) -> str:
    """Name what became of a push: "applied", or why it was not."""
    return "applied" if receipt.applied else receipt.reason or receipt.verdict


class Fates:
    """Counts receipts, from one log line to the next."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._staleness = 0

    def add(self, receipt: Receipt) -> None:
        """Take one."""
        self._counts[fate_of(receipt)] += 1
        self._staleness += receipt.staleness if receipt.applied else 0

    @property
    def mean_staleness(self) -> float | None:
        """In updates, of the applied pushes since the last reading; None where none was applied."""
        applied = self._counts["applied"]
        return self._staleness / applied if applied else None

    def read(self) -> str:
        """Say what became of the pushes, if any was rejected, else nothing; and begin anew."""
        counts = self._counts
        applied = counts.pop("applied", 0)
        after_the_end = counts.pop("budget", 0)
        staleness = self._staleness
        self._counts, self._staleness = Counter(), 0
        told = []
        if counts:
            rejected = f"{counts.total()} rejected: {_listed(counts)}"
            lateness = f" (mean staleness {staleness / applied:.1f})" if applied else ""
            told.append(f"{applied} pushes applied{lateness}, {rejected}")
        if after_the_end:  # the end of every run with a budget, and no fault
            told.append(f"{after_the_end} came after the run's max_samples were used up")
        return "; ".join(told)


class Watch:
    """Warns, once, when of the last receipts more than half were rejected; of no optimizer at the first."""

    def __init__(self, name: str) -> None:
        """`name` is the worker's."""
        self._name = name
        self._last: deque[str] = deque(maxlen=WINDOW)
        self._is_told = False
        self._misses_optimizer = False

    def see(self, receipt: Receipt) -> None:
        """Take one; the end of the run is no fault."""
        if receipt.reason == "no_optimizer":  # which no push to come will bring
            self._tell_of_no_optimizer(receipt)
            return
        if self._is_told or receipt.reason == "budget":
            return
        self._last.append(fate_of(receipt))
        rejected = len(self._last) - self._last.count("applied")
        if rejected * 2 <= WINDOW:
            return
        self._is_told = True
        reasons = Counter(fate for fate in self._last if fate != "applied")
        remedies = dict.fromkeys(_REMEDIES.get(reason, _ELSEWHERE) for reason, _ in reasons.most_common())
        log.warn(
            f"worker {self._name}: of its last {len(self._last)} pushes the server rejected {rejected} "
            f"({_listed(reasons)}), so that their work is lost; {'; '.join(remedies)}"
        )

    def _tell_of_no_optimizer(self, receipt: Receipt) -> None:
        if self._misses_optimizer:
            return
        self._misses_optimizer = True
        log.warn(f"worker {self._name}: the server rejected a push, and does so with all: {receipt.detail}")


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{n}x {reason}" for reason, n in reasons.most_common())
