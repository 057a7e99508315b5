"""How many alerts the monitors of this process have raised, by metric and by what was done about them.

They are counted for the process, as all that Prometheus reads of one is, and not for a monitor: a count does
not fall when a monitor is let go of.
"""

import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["NAME", "count", "counted", "scalars"]

NAME = "monitor_alerts_total"

_lock = threading.Lock()
_counts: Counter[tuple[str, str]] = Counter()


def count(metric: str, action: str) -> None:
    """Take down an alert: which metric was out of its range, and which remedy was taken or is in effect."""
    with _lock:
        _counts[metric, action] += 1


def counted() -> Mapping[tuple[str, str], int]:
    """Tell how many there were, by metric and action; of what there was none it says nothing."""
    with _lock:
        return dict(_counts)


def scalars() -> dict[str, float]:
    """Give them as a tracker has them."""
    return {f"offbeat/{NAME}/{metric}/{action}": float(n) for (metric, action), n in counted().items()}
