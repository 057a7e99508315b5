"""Which checkpoint a start goes on from, and which are kept: pure decisions over manifests."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

from offbeat.errors import CheckpointError
from offbeat.recovery.manifest import Manifest

__all__ = ["KEPT", "STRATEGIES", "Mode", "best", "ends_again", "kept", "made_under", "ranked"]

KEPT = 3
"""So many of the newest are kept, and what a strategy may want besides."""

SHORT = 2
"""A mean over fewer samples than a usual one's, divided by this, is left to chance too much to be best."""

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
                _comparable(found, monitor),
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
    has_any = bool(_comparable(found, monitor))
    return ranked("best", found, monitor=monitor, mode=mode)[0] if has_any else None


def made_under(request: str, found: Sequence[Manifest]) -> list[Manifest]:
    """Give the newest checkpoints that were all made under one request: what has come of it so far.

    Args:
        request: A `recovery_strategy`, in words.
        found: Newest first.
    """
    return list(takewhile(lambda m: m.request == request, found))


def ends_again(end: Manifest, good: Manifest) -> bool:
    """Tell whether a run that ended and is not good would be trained again to the same end.

    It went back to the newest good checkpoint already, and nothing that is good has come of that.

    Args:
        end: The newest checkpoint, with all that is asked for; not good.
        good: The newest that is good.
    """
    return end.gone_back_to == good.number


def kept(found: Sequence[Manifest], *, monitor: str | None, mode: Mode) -> set[int]:
    """Choose what is kept: the newest three, the newest good one, and the best where something is monitored.

    Of several of one step in a row the newest counts among the three: the save at the end, where one was due
    in mid-run, takes its place, and no older one's.

    Args:
        found: Newest first.
        monitor: What "best" goes by; None without.
        mode: Likewise.

    Returns:
        Their numbers.
    """
    stay = [m for newer, m in zip((None, *found), found, strict=False) if not newer or newer.step != m.step]
    del stay[KEPT:]
    stay += [m for m in found if m.is_good][:1]
    if monitor is not None and (winner := best(found, monitor, mode)) is not None:
        stay.append(winner)
    return {m.number for m in stay}


def _comparable(found: Sequence[Manifest], monitor: str | None) -> list[Manifest]:
    """Give those with a mean of about as many samples as is usual among them.

    The usual one is the median, so that a single long one, as after a slow save, shuts nobody out; what was
    saved a few batches after another, as at SIGTERM or at the end, is compared with nobody.
    """
    have = [m for m in found if _has_value(m, monitor)]
    lengths = sorted(m.monitored_samples for m in have if m.monitored_samples is not None)
    usual = lengths[len(lengths) // 2] if lengths else 0
    return [m for m in have if m.monitored_samples is None or m.monitored_samples * SHORT >= usual]


def _has_value(manifest: Manifest, monitor: str | None) -> bool:
    value = manifest.monitored
    return value is not None and manifest.monitor == monitor and math.isfinite(value)
