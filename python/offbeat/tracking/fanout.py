"""Several trackers as one that never raises: a full disk or a lost network costs records, and no training."""

from collections.abc import Callable, Mapping, Sequence

from offbeat import log
from offbeat.process import cause_of
from offbeat.tracking.base import Tracker

__all__ = ["Fanout"]


class Fanout:
    """Hands numbers to every tracker.

    Args:
        trackers: Whom.
        source: Who logs, for the warning: "worker amy".
        also: Gives what goes with them each time.
    """

    def __init__(
        self, trackers: Sequence[Tracker], source: str, *, also: Callable[[], dict[str, float]] = dict
    ) -> None:
        self._trackers = list(trackers)
        self._source = source
        self._also = also
        self._have_failed: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there is anybody to hand numbers to."""
        return bool(self._trackers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand numbers on. A tracker that raises is warned of the first time, and asked again at the next."""
        told = self._also() | dict(values)
        for number, tracker in enumerate(self._trackers):
            try:
                tracker.log(dict(told), step)  # one that takes something out of it leaves it to the others
            except Exception as error:  # noqa: BLE001  whatever a tracker of the user's raises
                if number not in self._have_failed:
                    self._have_failed.add(number)
                    log.warn(
                        f"{self._source}: what was measured at step {step} did not get into "
                        f"{tracker!r:.200}: {cause_of(error)}; it is tried again with what follows, and not "
                        f"warned of again"
                    )
