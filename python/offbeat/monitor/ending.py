"""How remedies are let go of soon, one each few steps, where what they were for is taken for usual."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["Ending"]

SOON = 5
"""Steps from one to the next: a rate that was cut ten times is whole after 50. A thousand times what it was,
at once, ends runs whose data has changed, as a beginning without a warm-up does."""


class Ending:
    """The rungs that were in effect when it began, of which the newest is let go of each few steps.

    Steps count whatever is in them: alerts that take nothing hold it up as little as a worker that is left
    out. A rung that is taken meanwhile is let go of in its own time, and those below it wait for that.
    """

    def __init__(self) -> None:
        self._num_left = 0
        self._num_ended = 0  # since it began, or was at work again
        self._steps: Counter[str | None] = Counter()  # of each worker, since then
        self._calm: Counter[str | None] = Counter()  # of each, in a row, without an alert of anyone's

    def begin(self, num_taken: int) -> None:
        """Let go soon of as many as are in effect."""
        self._num_left = num_taken
        self.wait()

    def wait(self) -> None:
        """Hear that a rung was taken: steps count anew once that is let go of."""
        self._num_ended = 0
        self._steps.clear()
        self._calm.clear()

    def is_at_work(self, num_taken: int) -> bool:
        """Tell whether the newest of as many as are in effect is one to let go of soon."""
        return 0 < num_taken <= self._num_left

    def num_without_alert(self, worker: str | None, *, had_alert: bool) -> int:
        """Count a worker's step while at work; give how many there were in a row by now without an alert."""
        if had_alert:
            self._calm.clear()
            return 0
        self._calm[worker] += 1
        return self._calm[worker]

    def is_due(self, worker: str | None) -> bool:
        """Count a step of a worker's while at work; tell whether the newest is let go of with it.

        Of several workers the one counts that has made most since the last. One that is new goes on from
        there, but for a step that the others have made: else those who come and go would get to none.
        """
        known = self._steps.get(worker, max(self._steps.values(), default=1) - 1)
        self._steps[worker] = max(known, SOON * self._num_ended - 1) + 1
        if self._steps[worker] < SOON * (self._num_ended + 1):
            return False
        self._num_ended += 1
        self._num_left -= 1
        return True

    def leave(self, place: int) -> None:
        """Hear that somebody else has ended a rung, by its place."""
        self._num_left -= place < self._num_left

    def state(self) -> dict[str, Any]:
        """Give all of it as plain data."""
        counters = {"steps": list(self._steps.items()), "calm": list(self._calm.items())}
        return {"num_left": self._num_left, "num_ended": self._num_ended, **counters}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; older states have nothing of it."""
        self._num_left, self._num_ended = int(state.get("num_left", 0)), int(state.get("num_ended", 0))
        self._steps, self._calm = (Counter(dict(state.get(name, ()))) for name in ("steps", "calm"))
