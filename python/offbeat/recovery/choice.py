"""Which checkpoint a start goes on from, or a rollback goes back to, and which are kept: pure decisions."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Literal

from offbeat.errors import CheckpointError
from offbeat.frequency import Every
from offbeat.recovery.manifest import Manifest

__all__ = [
    "KEPT",
    "STRATEGIES",
    "Mode",
    "best",
    "ends_again",
    "is_short",
    "kept",
    "left_behind",
    "made_under",
    "planned",
    "preferred",
    "ranked",
    "to_go_back_to",
]

KEPT = 3
"""So many of the newest are kept, and what a strategy may want besides."""

SHORT = 2
"""A mean over fewer samples than a usual one's, divided by this, is left to chance too much to be best."""

STRATEGIES = ("latest", "best", "last_good", "none")

Mode = Literal["min", "max"]
"""Whether less or more is better."""


def left_behind(found: Sequence[Manifest]) -> set[int]:
    """Tell what rollbacks have gone back from: what was written since that to which they went.

    A rollback that was itself gone back from, or undone, says nothing any more.

    Args:
        found: Newest first.

    Returns:
        Their numbers.
    """
    behind: set[int] = set()
    for again in found:
        if again.again_number is not None and again.number not in behind:
            behind |= {m.number for m in found if again.again_number < m.number < again.number}
    return behind


def preferred(found: Sequence[Manifest]) -> list[Manifest]:
    """Put what was left behind after all else; else a damaged newest one would undo a rollback.

    Args:
        found: Newest first.
    """
    behind = left_behind(found)
    return sorted(found, key=lambda m: m.number in behind)


def planned(every: Every, *, is_deterministic: bool) -> Callable[[Manifest], bool]:
    """Give what tells which checkpoints a rollback may choose, and which count among those that are kept.

    Of a deterministic run these are the ones that a run has which nobody breaks off: what SIGTERM, or the end
    of a `train`, has saved between two of them would else change where it goes back to, and so its bits.
    """
    count = every.count
    if count is None or not is_deterministic:
        return lambda _: True
    return lambda m: m.again_step is not None or m.step % count == 0


def to_go_back_to(
    found: Sequence[Manifest], *, stay: set[int], is_planned: Callable[[Manifest], bool]
) -> list[Manifest]:
    """Choose what a rollback may go back to: what is good and was not left behind, newest first.

    Of several that have the values of one step it is the newest.

    Args:
        found: Newest first.
        stay: Numbers of those that are to be kept: after a crash another one may still be there.
        is_planned: Tells which may be chosen.
    """
    behind = left_behind(found)
    good = [m for m in found if m.is_good and m.number in stay and m.number not in behind and is_planned(m)]
    newest = {m.values_step: m for m in reversed(good)}
    return [m for m in good if newest[m.values_step] is m]


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
    found = preferred(found)
    behind = left_behind(found)
    match strategy:
        case "best":
            wanted = sorted(
                _comparable(found, monitor),
                key=lambda m: (
                    m.number in behind,
                    m.monitored if mode == "min" else -m.monitored,  # type: ignore[operator]
                    -m.number,
                ),
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

    It went back to the newest good checkpoint already, or to that which a rollback has written once more, and
    nothing that is good has come of that.

    Args:
        end: The newest checkpoint, with all that is asked for; not good.
        good: The newest that is good.
    """
    return end.gone_back_to is not None and end.gone_back_to in (good.number, good.again_number)


def kept(
    found: Sequence[Manifest],
    *,
    monitor: str | None,
    mode: Mode,
    is_planned: Callable[[Manifest], bool] = lambda _: True,
) -> set[int]:
    """Choose what is kept: the newest three, the newest good one, and the best where something is monitored.

    Likewise of those alone that are planned: what is saved besides takes no place of theirs.

    Of several of one step in a row the newest counts among the three: the save at the end, where one was due
    in mid-run, takes its place, and no older one's. What a rollback has written, which is once more what
    there is already, is none of the three, and stays as long as it is the newest, or what it left behind is
    there. That is the first to go.

    Args:
        found: Newest first.
        monitor: What "best" goes by; None without.
        mode: Likewise.
        is_planned: Tells which a rollback may choose by itself.

    Returns:
        Their numbers.
    """
    stay = list(found[:1])
    for some in (found, [m for m in found if is_planned(m)]):
        stay += _newest(some)
        stay += [m for m in preferred(some) if m.is_good][:1]
        if monitor is not None and (winner := best(some, monitor, mode)) is not None:
            stay.append(winner)
    numbers = {m.number for m in stay}
    return numbers | {
        m.number
        for m in found
        if m.again_number is not None and any(m.again_number < number < m.number for number in numbers)
    }


def _newest(found: Sequence[Manifest]) -> list[Manifest]:
    """Give the newest three of what was trained, each of another step than the one before it."""
    there = {m.number for m in found}
    own = [m for m in preferred(found) if m.again_step is None or m.again_number not in there]
    return [m for newer, m in zip((None, *own), own, strict=False) if not newer or newer.step != m.step][
        :KEPT
    ]


def _comparable(found: Sequence[Manifest], monitor: str | None) -> list[Manifest]:
    """Give those with a mean that was not short when it was written; where all were, these.

    That stays as it is, so that what was kept as the best is gone on from as that, also where means are over
    more samples by then, as with a higher `checkpoint_frequency`.
    """
    have = [m for m in found if _has_value(m, monitor)]
    return [m for m in have if not m.is_short] or have


def is_short(samples: int, before: Sequence[int], *, is_broken_off: bool) -> bool:
    """Tell whether a mean is over so few samples that it is left to chance too much to be best.

    As where one was saved a few batches after another, at SIGTERM or at the end. A single long one before it,
    as after a slow save, makes none short: what is usual is the median.

    Args:
        samples: Of it.
        before: Of those before it that were not broken off.
        is_broken_off: It was saved before it was time to, and not at the end: where there are none to tell
            what is usual, that is short.
    """
    return samples * SHORT < sorted(before)[len(before) // 2] if before else is_broken_off


def _has_value(manifest: Manifest, monitor: str | None) -> bool:
    value = manifest.monitored
    return value is not None and manifest.monitor == monitor and math.isfinite(value)
