"""Which checkpoint a start goes on from, and which are kept: pure decisions over manifests."""

import math
from collections.abc import Sequence
from typing import Literal

from offbeat.errors import CheckpointError
from offbeat.recovery.manifest import Manifest

__all__ = ["KEPT", "STRATEGIES", "Mode", "best", "kept", "ranked"]

KEPT = 3
"""So many of the newest are kept, and what a strategy may want besides."""

STRATEGIES = ("latest", "best", "last_good", "none")

Mode = Literal["min", "max"]
"""Whether less or more is better."""


def ranked(
    strategy: str, found: Sequence[Manifest], *, monitor: str | None = None, mode: Mode = "min"
) -> list[Manifest]:
    """Put checkpoints in the order in which a start tries them; those that it does not want are left out.

    Args:
        strategy: "latest", "best" or "last_good".
        found: Newest first.
        monitor: What "best" goes by.
        mode: Likewise.

    Raises:
        CheckpointError: If there are some, and none that the strategy wants.
    """
    match strategy:
        case "best":
            wanted = sorted(
                (m for m in found if _has_value(m, monitor)),
                key=lambda m: (m.monitored if mode == "min" else -m.monitored, -m.number),  # type: ignore[operator]
            )
            lacking = f"a finite {monitor!r}, which recovery_strategy 'best' goes by"
        case "last_good":
            wanted = [m for m in found if m.is_good]
            lacking = "finite parameters and a loss within its band, as 'last_good' asks for"
        case _:
            return list(found)
    if found and not wanted:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints has {lacking}: go on from the newest with 'latest', or "
            f"from one by its path"
        )
    return wanted


def best(found: Sequence[Manifest], monitor: str | None, mode: Mode) -> Manifest | None:
    """Give the best checkpoint, the newest of several; None if none has a value."""
    has_any = any(_has_value(m, monitor) for m in found)
    return ranked("best", found, monitor=monitor, mode=mode)[0] if has_any else None


def kept(found: Sequence[Manifest], *, monitor: str | None, mode: Mode) -> set[int]:
    """Choose what is kept: the newest three, the newest good one, and the best where something is monitored.

    Args:
        found: Newest first.
        monitor: What "best" goes by; None without.
        mode: Likewise.

    Returns:
        Their numbers.
    """
    stay = list(found[:KEPT])
    stay += [m for m in found if m.is_good][:1]
    if monitor is not None and (winner := best(found, monitor, mode)) is not None:
        stay.append(winner)
    return {m.number for m in stay}


def _has_value(manifest: Manifest, monitor: str | None) -> bool:
    value = manifest.monitored
    return value is not None and manifest.monitor == monitor and math.isfinite(value)
