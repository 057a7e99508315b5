"""Which remedy is next, and when one is let go of: decided from how many steps had an alert, or none.

Pure values: `after_alert` and `after_quiet` give another state, and what to do.
"""

from dataclasses import dataclass, replace

__all__ = [
    "Growth",
    "Ladder",
    "Standing",
    "after_alert",
    "after_quiet",
    "as_anew",
    "has_gone_back",
    "has_more",
    "has_waited",
    "is_all_taken",
    "is_exhausted",
    "may_go_back",
    "noted",
    "until_again",
    "without_newest",
]

MOST_DOUBLINGS = 6
"""Of the quiet time: 64 times as long at most."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the patience with a rung grows that is taken again: twice as much each time.

    Attributes:
        after: How often it is taken with the same patience.
        most: How many times the patience at most; None: as many as it comes to.
        is_renewed: It is given anew, as much again, where values have fallen meanwhile.
    """

    after: int = 0
    most: int | None = None
    is_renewed: bool = False


@dataclass(frozen=True, slots=True)
class Ladder:
    """The remedies in their order.

    Attributes:
        num_rungs: How many.
        patience: Steps with an alert that a rung is given before the next one is taken.
        quiet_steps: Steps in the range after which the newest rung is let go of.
        repeats: How often the last rung may be taken; more than once where it does more each time.
        growth: How the patience with the last rung grows; None: it is the same each time.
        back: The place of the rung that goes back; None: there is none.
        most_back: How often that one may be taken, but for those below.
        mending: The places of those that change how training goes on. Where one comes behind going back, it
            is gone back once more with it: alerts that have come in spite of it are of what has gone astray.
    """

    num_rungs: int
    patience: int
    quiet_steps: int
    repeats: int = 1
    growth: Growth | None = None
    back: int | None = None
    most_back: int = 0
    mending: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Standing:
    """Where on the ladder a run is.

    Attributes:
        taken: The rungs in effect, by their place, in the order taken.
        strikes: Steps with an alert since the newest was taken.
        quiet: Steps in the range since the last alert, or since a rung was let go of.
        relapses: How often a rung was taken again after one was let go of. Each doubles the quiet time, so
            that what keeps coming back is let go of ever more seldom.
        has_let_go: Whether a rung was let go of since the last was taken.
        num_back: How often the rung that goes back was taken again with later ones in effect, since one was
            let go of last: for what is lost.
        num_again: How often it was with one that mends, for what is finite; nothing counts that.
    """

    taken: tuple[int, ...] = ()
    strikes: int = 0
    quiet: int = 0
    relapses: int = 0
    has_let_go: bool = False
    num_back: int = 0
    num_again: int = 0


def after_alert(
    standing: Standing,
    ladder: Ladder,
    *,
    is_elsewhere: bool = False,
    is_urgent: bool = False,
    is_lost: bool = False,
    is_in_vain: bool = False,
    is_astray: bool = False,
    is_falling: bool = False,
) -> tuple[Standing, int | None]:
    """Take a step with an alert into account.

    The first takes the first rung; when `patience` more have come in spite of it, the next one is taken. Of
    those that are later than going back none mends by itself what has gone astray: it is gone back once more
    with the next, and, of a model that is lost, without, where none is to be taken by then; `num_back` and
    `num_again` tell.

    Args:
        standing: Before it.
        ladder: The remedies.
        is_elsewhere: The newest rung does nothing for where this alert comes from, and would: it is taken
            again, there.
        is_urgent: Nothing that was taken can help against it: the next rung is taken at once.
        is_lost: Nothing passes any more, and to go back is what helps.
        is_in_vain: To take the last rung again would do nothing: it is only gone back.
        is_astray: It is training that has gone astray: all is finite, and this is no new matter.
        is_falling: What is out of range has come down since the newest rung was taken, or was given patience
            anew: it helps, or what it is for has passed. One that was taken often already is given it again.

    Returns:
        The new standing, and the rung to take now; None where there is none to take.
    """
    strikes = standing.strikes + 1
    goes_back = is_lost and strikes >= ladder.patience and may_go_back(standing, ladder)
    num_back = standing.num_back + goes_back
    # What was gone back to has the whole patience.
    waiting = replace(standing, strikes=0 if goes_back else strikes, quiet=0, num_back=num_back)
    if standing.taken and strikes < _patience(standing.taken, ladder) and not (is_elsewhere or is_urgent):
        return waiting, None
    rung = standing.taken[-1] if is_elsewhere else _next(standing.taken, ladder)
    is_patient = bool(standing.taken) and _num_patient(standing.taken, ladder) is not None
    is_renewed = is_falling and is_patient and ladder.growth is not None and ladder.growth.is_renewed
    if rung is not None and is_renewed and not (is_elsewhere or is_urgent or goes_back):
        return replace(waiting, strikes=0), None
    if rung is None or (is_in_vain and not has_more(standing.taken, ladder)):
        return waiting, None
    num_again = standing.num_again
    is_behind = ladder.back in standing.taken and rung in ladder.mending and rung != ladder.back
    if is_behind and is_astray and not is_elsewhere and not goes_back:
        num_again += 1
    relapses = min(standing.relapses + standing.has_let_go, MOST_DOUBLINGS)
    taken = (*standing.taken, rung)
    return Standing(taken=taken, relapses=relapses, num_back=num_back, num_again=num_again), rung


def may_go_back(standing: Standing, ladder: Ladder) -> bool:
    """Tell whether the rung that goes back, taken already, may be taken again beside later ones.

    Where it is the last one that is taken again as any other.
    """
    is_last = ladder.back == ladder.num_rungs - 1
    return ladder.back in standing.taken and not is_last and not has_gone_back(standing, ladder)


def has_gone_back(standing: Standing, ladder: Ladder) -> bool:
    """Tell whether it was taken as often as it may be."""
    num = sum(rung == ladder.back for rung in standing.taken) + standing.num_back
    return ladder.back in standing.taken and num >= ladder.most_back


def is_exhausted(standing: Standing, ladder: Ladder) -> bool:
    """Tell whether alerts persist although all was taken as often as it may be, and more than once."""
    does_more = has_gone_back(standing, ladder) or ladder.repeats > 1
    return does_more and has_waited(standing, ladder)


def is_all_taken(standing: Standing, ladder: Ladder) -> bool:
    """Tell whether each rung was taken as often as it may be."""
    return bool(standing.taken) and _next(standing.taken, ladder) is None


def has_waited(standing: Standing, ladder: Ladder) -> bool:
    """Tell whether all was taken, and the newest has had its patience.

    Where patience has no end, the last has as much as any other rung: nothing is to come after it.
    """
    has_end = ladder.growth is not None and ladder.growth.most is not None
    patience = _patience(standing.taken, ladder) if standing.taken and has_end else ladder.patience
    return is_all_taken(standing, ladder) and standing.strikes >= patience


def noted(standing: Standing) -> Standing:
    """Take an alert into account that counts for no climbing: it is quiet no more."""
    return replace(standing, quiet=0)


def as_anew(standing: Standing) -> Standing:
    """Give what was taken the time that it had when the newest was: what has come since was for nothing."""
    return Standing(taken=standing.taken, relapses=standing.relapses, has_let_go=True)


def without_newest(standing: Standing) -> Standing:
    """Take the newest rung out, be the step in the range or not; strikes count on."""
    *rest, _ = standing.taken
    quiet = standing.quiet if rest else 0
    return replace(standing, taken=tuple(rest), quiet=quiet, has_let_go=True, num_back=0, num_again=0)


def after_quiet(standing: Standing, ladder: Ladder) -> tuple[Standing, int | None]:
    """Take a step in the range into account.

    Returns:
        The new standing, and the rung to let go of now: the newest; None where there is none.
    """
    quiet = standing.quiet + 1
    if quiet < ladder.quiet_steps * 2**standing.relapses:
        return replace(standing, quiet=quiet), None
    if standing.taken:
        *rest, newest = standing.taken
        return Standing(taken=tuple(rest), relapses=standing.relapses, has_let_go=True), newest
    return Standing(), None  # quiet for so long without any: the next alert is a new matter


def until_again(standing: Standing, ladder: Ladder) -> tuple[int, int | None]:
    """Tell what has to come before the newest rung, which is in effect, may be taken again.

    Returns:
        Steps in the range, after which it is let go of; or as many more with an alert, None where those take
        another rung or none.
    """
    quiet = ladder.quiet_steps * 2**standing.relapses - standing.quiet
    if has_more(standing.taken, ladder) or _next(standing.taken, ladder) is None:
        return quiet, None
    return quiet, max(_patience(standing.taken, ladder) - standing.strikes, 1)


def _next(taken: tuple[int, ...], ladder: Ladder) -> int | None:
    if not taken:
        return 0
    if has_more(taken, ladder):
        return taken[-1] + 1
    return taken[-1] if taken.count(taken[-1]) < ladder.repeats else None


def _patience(taken: tuple[int, ...], ladder: Ladder) -> int:
    """Tell how many steps with an alert the newest rung is given."""
    num = _num_patient(taken, ladder)
    if ladder.growth is None or num is None:
        return ladder.patience
    times = 1 << num
    return ladder.patience * (times if ladder.growth.most is None else min(times, ladder.growth.most))


def _num_patient(taken: tuple[int, ...], ladder: Ladder) -> int | None:
    """Tell how often the newest rung was taken since its patience grows by that; None: it does not."""
    if ladder.growth is None or has_more(taken, ladder):
        return None
    num = taken.count(taken[-1]) - ladder.growth.after
    return num if num >= 0 else None


def has_more(taken: tuple[int, ...], ladder: Ladder) -> bool:
    """Tell whether there is a rung that was not taken yet."""
    return not taken or taken[-1] + 1 < ladder.num_rungs
