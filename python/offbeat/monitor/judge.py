"""The course of a run, decided: readings in, alerts and steps on the ladder out.

Holds what the pure parts (`Detector`, `Ladder`) have come to, and nothing else: no clock, no hooks, no log.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from offbeat.monitor.attempts import Attempts
from offbeat.monitor.band import Band, is_usable
from offbeat.monitor.detector import RECENT, Detector, Metric, Verdict
from offbeat.monitor.ending import Ending
from offbeat.monitor.hold import Hold
from offbeat.monitor.ladder import (
    Ladder,
    Standing,
    after_alert,
    after_quiet,
    as_anew,
    has_gone_back,
    has_more,
    has_waited,
    is_all_taken,
    is_exhausted,
    may_go_back,
    noted,
    until_again,
    without_newest,
)
from offbeat.monitor.onset import Onset
from offbeat.monitor.spell import QUIET_VALUES, Spell
from offbeat.monitor.trial import Trial

__all__ = ["Excess", "Judge"]

LOSSES_PER_VARIANCE = 5
"""Of as many losses one after the other a variance is taken; windows that overlap would be so alike that a
band could not tell how far variances stray."""

LEAST_FALL = 0.01
"""Share by which the last values are lower than those when patience began, so that a metric falls."""

FALL_OF_LONG = 0.1
"""Likewise, in the hundred steps or so after all was taken: less may be noise."""

LASTING = frozenset({"staleness"})
"""Of which one value is no alert, however far out it is. A thread that stands still for a moment, on a busy
machine, makes one push late by 55 updates where others are by 3: of six runs without a fault, each of four
workers at speeds of their own, one gave an alert for that. What is wrong with a worker lasts."""

LEAST_LASTING = 3
"""Values above the limit, of a worker's last few. One who stands still once with two pushes in flight has two
that are late; one who is late in every second push has three."""

STUCK_STEPS = 3
"""In a row, each with something that is not finite: one or two may be batches, or be of a worker that has the
model of before still when its server has gone back."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A value that is out of its range.

    Attributes:
        metric: Whose.
        value: It.
        expected: The range.
        limit: What a value has to exceed.
        is_first: Whether this step had none before, so that it is to climb the ladder.
        spell: The metric's alerts that are one matter, with this one.
        is_new: Whether nothing else was out of its range, or had been of late: a new matter.
    """

    metric: Metric
    value: float
    expected: tuple[float, float]
    limit: float
    is_first: bool
    spell: Spell
    is_new: bool

    @property
    def is_finite(self) -> bool:
        """Whether it, or what it counts, is."""
        return self.metric != "non_finite" and is_usable(self.value)


@dataclass(slots=True)
class _Step:
    """What was seen of a worker's step so far."""

    number: object = None
    had_alert: bool = False
    had_excess: bool = False  # an alert, or a value above the range that gave none
    had_value_in_range: bool = False
    had_value: bool = False
    had_unusable: bool = False  # something that is not finite
    had_loss_in_range: bool = False
    loss_age: int = 0  # steps since the loss was measured
    is_loss_out: bool = False  # whether that was an alert and finite, or, after such, above the range still
    was_low: bool = False  # the loss was no higher than the ceiling, where there is one


class Judge:
    """Judges one reading after the other.

    A step is quiet where no reading of it is above its range, and counts for letting go; one that had an
    alert climbs the ladder once, whatever else was out of range in it. Where several workers are observed,
    each has steps of its own, and those count of the worker that has made most: else ten workers would
    make a step ten times, and be let go of, or climb, in a tenth of the time.

    From an alert of the loss on its limit is held for a while (`hold.py`). Other metrics rise in sound runs,
    too, and are followed.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        ladder: Ladder,
        *,
        threshold: float,
        warm_up: int,
        is_of_one: bool = True,
    ) -> None:
        """Begin.

        Args:
            metrics: What is judged.
            ladder: How remedies follow one another.
            threshold: The share by which a value may exceed the upper edge.
            warm_up: Values before there is a range.
            is_of_one: What comes without a worker's name is all of the same.
        """
        self._is_of_one = is_of_one
        self.detectors = {metric: Detector(metric, threshold, Band(warm_up)) for metric in metrics}
        self.standing = Standing()
        self._given = ladder
        self._has_way_back = True  # as far as is known
        self._ladder = _beside_going_back(ladder)
        self._steps: dict[str | None, _Step] = {}
        self._quiet: Counter[str | None] = Counter()  # since the last alert, or a rung was let go of
        self._strikes: Counter[str | None] = Counter()  # since the newest rung was taken
        self._spells: dict[tuple[Metric, str | None], Spell] = {}
        self._are_above: dict[
            tuple[Metric, str | None], tuple[bool, ...]
        ] = {}  # the last few, above the limit
        self._over: Spell | None = None
        self._num_unusable = 0  # steps in a row, whose ever, with something that is not finite
        self._unusable: set[Metric] = set()  # of which metrics that was
        self._is_to_go_back = False
        self._hold = Hold(ladder)
        self._attempts = Attempts()
        self._levels: dict[Metric, float] = {}  # what the last values were when patience began
        self._num_in_vain = 0  # alerts, as `num_in_vain` has them
        self._trial: Trial | None = None  # of a remedy that was taken with going back
        self._ending = Ending()
        self._is_of_data = False
        self._step = 0
        self._worker: str | None = None
        self._losses: list[float] = []

    def begin(self, step: int, worker: str | None = None) -> int | None:
        """Note to whose step the next readings belong; give the rung to let go of, if it is time."""
        self._step, self._worker = step, worker
        last = self._steps.setdefault(worker, _Step(step))
        if step == last.number:
            return None
        self._steps[worker] = _Step(step, loss_age=last.loss_age + 1, is_loss_out=last.is_loss_out)
        if last.had_value and not last.had_unusable:
            self._num_unusable = 0
            self._unusable.clear()
        self._hold.see_step(worker, was_low=last.was_low)
        if self._hold.is_over(worker) and not self.standing.taken:
            self._let_go_of_limit()
        is_quiet = not last.had_excess and last.had_value_in_range
        if is_quiet:
            self._see_quiet_step(worker, last)
        if self._ending.is_at_work(len(self.standing.taken)):
            released = self._end_newest(worker, is_quiet=is_quiet, had_alert=last.had_alert)
        else:
            released = self._let_go_of_newest(worker) if is_quiet else None
        if released is not None:
            self._trial = None
            self._hold.await_return()
            self._attempts = self._attempts if self.standing.taken else Attempts()
        return released

    def _see_quiet_step(self, worker: str | None, step: _Step) -> None:
        if "loss" not in self.detectors:
            self._attempts = self._attempts.after_range()
        if step.had_loss_in_range and not self.standing.taken:
            self._hold.see_calm_step(worker)
        self._quiet[worker] += 1

    def _let_go_of_newest(self, worker: str | None) -> int | None:
        """Give the rung for which a worker's steps in the range are enough by now, if they are."""
        if self._quiet[worker] <= self.standing.quiet:  # another has made more
            return None
        self.standing, released = after_quiet(self.standing, self._ladder)
        if self.standing.quiet == 0:
            self._quiet.clear()
        return released

    def _end_newest(self, worker: str | None, *, is_quiet: bool, had_alert: bool) -> int | None:
        """Give the rung that is let go of soon, if it is with this step; what is in the range counts on."""
        if is_quiet and self._quiet[worker] > self.standing.quiet:
            self.standing = replace(self.standing, quiet=self.standing.quiet + 1)
        # What comes after a while without is another matter, also before there is a range again.
        if self._ending.num_without_alert(worker, had_alert=had_alert) == QUIET_VALUES:
            self._forget_strikes()
        if not self._ending.is_due(worker):
            return None
        newest = self.standing.taken[-1]
        self.standing = without_newest(self.standing)
        if not self.standing.taken:
            self._quiet.clear()
        return newest

    def _forget_strikes(self) -> None:
        self.standing = replace(self.standing, strikes=0)
        self._strikes.clear()

    def see(self, metric: Metric, value: float) -> Excess | None:
        """Judge a reading of this step; give it if it is out of range. `over` says what has ended by it."""
        detector = self.detectors[metric]
        self.detectors[metric], verdict = detector.see(value)
        edge = self._edge_of_trial(value) if metric == "loss" else math.inf
        is_by_trial = verdict in ("quiet", "raised") and min(value, self.detectors[metric].level) > edge
        verdict = "alert" if is_by_trial else verdict
        verdict = self._where_it_lasts(metric, value, verdict, bound=detector.bound)
        step = self._steps.setdefault(self._worker, _Step())
        step.had_excess |= verdict in ("alert", "raised")
        step.had_value_in_range |= verdict == "quiet"
        step.had_value = True
        if not is_usable(value) or (metric == "non_finite" and value > 0):
            self._unusable.add(metric)
            self.see_unusable()
        elif metric in self._unusable:  # at once: a step's first alert is what climbs
            self._unusable.discard(metric)
            self._num_unusable = int(step.had_unusable)
        key = metric, self._worker
        known = self._spells.get(key)
        self._over = None
        if known is not None and verdict in ("quiet", "warm_up"):
            self._spells[key] = known = known.after_quiet()
            if known.is_over:
                self._over = self._spells.pop(key)
        if metric == "loss":
            self._see_loss(step, value, verdict, ceiling=detector.ceiling)
        if verdict != "alert":
            return None
        if metric == "loss" and is_usable(value):
            is_by_ceiling = is_by_trial or detector.is_by_ceiling(value)
            if self._hold.lasts_after_alert(self._worker, is_by_ceiling=is_by_ceiling):
                self.detectors["loss"] = self.detectors["loss"].held()
            else:
                self._let_go_of_limit()
        expected, limit = detector.allowed, detector.bound
        if is_by_trial:
            expected, limit = (min(expected[0], edge), edge), edge
        # A worker that has left in the middle of its alerts ends none of them.
        is_new = not self._spells or self.standing.quiet >= QUIET_VALUES
        begun = Spell(self._step, expected if is_by_trial else detector.expected)
        self._spells[key] = spell = begun if known is None else known.after_alert()
        is_first, step.had_alert = not step.had_alert, True
        return Excess(metric, value, expected, limit, is_first, spell, is_new)

    def _where_it_lasts(self, metric: Metric, value: float, verdict: Verdict, *, bound: float) -> Verdict:
        """Give a verdict that is no alert where no other of the worker's last few values was above the limit.

        By worker: of many that are observed together, one that is always late makes few of the last values.
        Of several without a name nobody knows whose the last few were.
        """
        is_of_many = self._worker is None and not self._is_of_one
        if metric not in LASTING or is_of_many or not is_usable(value):
            return verdict
        key = metric, self._worker
        self._are_above[key] = last = (*self._are_above.get(key, ()), value > bound)[-RECENT:]
        return "raised" if verdict == "alert" and sum(last) < LEAST_LASTING else verdict

    def see_unused(self, metric: Metric, value: float) -> None:
        """Hear how what is kept out would be judged: no alert, since nothing comes of it.

        Where it is in the range again, there is nothing more to keep out.
        """
        _, verdict = self.detectors[metric].see(value)
        step = self._steps.setdefault(self._worker, _Step())
        step.had_excess |= verdict in ("alert", "raised")
        step.had_value_in_range |= verdict == "quiet"

    def _see_loss(self, step: _Step, value: float, verdict: Verdict, *, ceiling: float | None) -> None:
        """Note what a loss tells of its step, and of what it was gone back to."""
        step.was_low = ceiling is not None and value <= ceiling
        step.had_loss_in_range |= verdict == "quiet"
        if verdict in ("quiet", "warm_up"):
            self._attempts = self._attempts.after_range()
        is_as_before = verdict == "raised" and step.is_loss_out
        step.is_loss_out = is_as_before or (verdict == "alert" and is_usable(value))
        step.loss_age = 0

    def _edge_of_trial(self, loss: float) -> float:
        """Take a loss into account, where a remedy is on trial; give what it is to be no higher than.

        Not of several workers, some of which have the model of before for a step or two. What is above the
        limit is judged by that, and may be of that model as well, where it is told late.
        """
        if self._trial is None or self.num_workers > 1:
            return math.inf
        if loss <= self.detectors["loss"].limit:
            self._trial = self._trial.after(loss)
        return self._trial.edge(self._ladder.quiet_steps)

    def see_unusable(self) -> None:
        """Note that something of this step is not finite, be it judged or not."""
        step = self._steps.setdefault(self._worker, _Step())
        self._num_unusable += not step.had_unusable
        step.had_value = step.had_unusable = True
        self._attempts = self._attempts.after_unusable()

    def went_back(self, place: int | None = None, *, is_mended: bool = False) -> None:
        """Note that the model is another, of which nothing is known yet.

        Args:
            place: The step or version that it is of, where that is known.
            is_mended: A remedy was taken with it, which is on trial now.
        """
        self._num_unusable = 0
        self._unusable.clear()
        self._trial = Trial.of(self.detectors["loss"]) if is_mended and "loss" in self.detectors else None
        self._attempts = self._attempts.after(place)
        self._levels.clear()  # which are not of this one: that it begins lower helps nothing
        for step in self._steps.values():
            step.is_loss_out = False

    def see_way_back(self, *, is_there: bool) -> None:
        """Hear whether there is something to go back to.

        What was gone back to is anew, and patience with what is beside it the same each time. Where no
        checkpoint was kept yet, it is as if it were alone.
        """
        self._has_way_back = is_there
        self._ladder = _beside_going_back(self._given) if is_there else self._given

    @property
    def is_to_stay(self) -> bool:
        """Whether the remedy that goes back, taken once more with another, need go no further than it did."""
        return self._attempts.is_to_stay(self._ladder.most_back)

    @property
    def has_led_back(self) -> bool:
        """Whether a loss was in its range since it was gone back, for what is in effect."""
        return self._attempts.num > 0 and self._attempts.is_well

    @property
    def is_of_data(self) -> bool:
        """Whether the alert that was climbed for last is of what is measured, and not of the model.

        No loss was in the range on all that was gone back to, as many checkpoints as are tried, each older
        than the one before, or two if none older is kept; and all was taken that there is: a burst of broken
        batches has ended by then. Of another metric the range may be of a model that had collapsed, of which
        a sound one is out.
        """
        return self._is_of_data

    @property
    def is_stuck(self) -> bool:
        """Whether nothing has been finite for some steps: where such is kept out, no gradient passes."""
        return self._num_unusable >= STUCK_STEPS

    @property
    def may_go_back(self) -> bool:
        """Whether the remedy that goes back may be taken again beside later ones."""
        return may_go_back(self.standing, self._ladder)

    @property
    def has_gone_back(self) -> bool:
        """Whether it was taken as often as it may be."""
        return has_gone_back(self.standing, self._ladder)

    @property
    def is_exhausted(self) -> bool:
        """Whether alerts persist although all was taken as often as it may be, and more than once."""
        return is_exhausted(self.standing, self._ladder)

    @property
    def has_waited(self) -> bool:
        """Whether all was taken as often as it may be, and the newest has had its patience."""
        return has_waited(self.standing, self._ladder)

    @property
    def num_in_vain(self) -> int:
        """How many steps had an alert that is finite since all was taken as often as it may be.

        A level that is learnt, or that has come down, begins anew.
        """
        return self._num_in_vain

    @property
    def is_to_go_back(self) -> bool:
        """Whether the alert for which the ladder was climbed last is one to go back for once more."""
        return self._is_to_go_back

    @property
    def over(self) -> Spell | None:
        """The alerts that have ended by the value that was seen last, one of several in the range."""
        return self._over

    @property
    def is_at_end(self) -> bool:
        """Whether each rung was taken, and the last is all that can be taken again."""
        return not has_more(self.standing.taken, self._ladder)

    @property
    def until_again(self) -> tuple[int, int | None]:
        """How many steps in the range, or more with an alert, come before what is newest is taken again."""
        return until_again(self.standing, self._ladder)

    @property
    def num_workers(self) -> int:
        """How many workers were observed by their names."""
        return len(self._steps) - (None in self._steps)

    def climb(
        self,
        *,
        is_elsewhere: bool = False,
        is_urgent: bool = False,
        is_lost: bool = False,
        is_in_vain: bool = False,
        is_astray: bool = False,
        metric: Metric | None = None,
    ) -> int | None:
        """Take the step's alert into account; give the rung to take, if it is time.

        All as `after_alert` has them; what is taken again has its patience. `metric` is that of the alert, if
        it is finite. `is_to_go_back` and `is_of_data` tell the rest.
        """
        self._is_to_go_back = self._is_of_data = False
        is_urgent = is_urgent and has_more(self.standing.taken, self._ladder)
        self._strikes[self._worker] += 1
        is_counted = self._strikes[self._worker] <= self.standing.strikes  # by another worker's
        if self.standing.taken and is_counted and not (is_elsewhere or is_urgent):
            self.wait()
            return None
        self._quiet.clear()
        before = self.standing
        self.standing, rung = after_alert(
            self.standing,
            self._ladder,
            is_elsewhere=is_elsewhere,
            is_urgent=is_urgent,
            is_lost=is_lost,
            is_in_vain=is_in_vain,
            is_astray=is_astray,
            is_falling=metric is not None and self._has_fallen(metric, LEAST_FALL),
        )
        now = self.standing
        is_known_again = not self._levels and now.strikes >= RECENT  # of what was gone back to
        if now.strikes == 0 or is_known_again:  # patience begins anew
            self._note_levels()
        self._num_in_vain += metric is not None
        if now.strikes == 0 or not is_all_taken(now, self._ladder):
            self._num_in_vain = 0
        self._is_to_go_back = (now.num_back, now.num_again) != (before.num_back, before.num_again)
        if rung is not None or self._is_to_go_back:
            self._strikes.clear()
            self._ending.wait()
            self._trial = None
        is_behind = self._ladder.back != self._ladder.num_rungs - 1  # else nothing in effect does harm
        is_over = is_behind and self._attempts.were_in_vain(self._ladder.most_back) and self.is_exhausted
        self._is_of_data = self.is_loss_out() and is_astray and is_over
        return rung

    def _note_levels(self) -> None:
        self._levels = {metric: detector.level for metric, detector in self.detectors.items()}

    def _has_fallen(self, metric: Metric, share: float) -> bool:
        """Tell whether a metric has since patience began, or the loss in its place.

        That is where it is out of its range as well, as was measured in this step or the one before.
        """
        told: Metric = "loss" if self.is_loss_out(within=1) else metric
        before = self._levels.get(told, math.nan)
        return self.detectors[told].level < before - share * abs(before)

    def wait(self) -> None:
        """Take an alert into account for which there is nothing more to do: nothing is let go of."""
        self._quiet.clear()
        self._is_of_data = False
        self.standing = noted(self.standing)

    def await_fall(self, metric: Metric) -> bool:
        """Begin anew to count alerts in vain where what is out of range has come down since; tell whether.

        Not where no loss was in its range on what was gone back to. That was kept while all was well, so that
        it is most likely the data: and of that any rate learns, the lower the longer.
        """
        is_of_data = self._attempts.num > 0 and not self._attempts.is_well
        if is_of_data or not self._has_fallen(metric, FALL_OF_LONG):
            return False
        self._note_levels()
        self._num_in_vain = 0
        return True

    @property
    def in_alert(self) -> set[Metric]:
        """Those metrics of this step's worker whose alerts are not over, and that may have another range."""
        return {metric for metric, worker in self._spells if worker == self._worker} - {"non_finite"}

    def is_loss_out(self, *, within: float = math.inf) -> bool:
        """Tell whether the worker's loss is out of its range and finite, as it was measured last.

        Then it decides whether it is the data, whatever else is out of its range and is judged first. One
        of before it was gone back is of another model, and says nothing.

        Args:
            within: The steps, before this one, in which it was measured.
        """
        step = self._steps.get(self._worker, _Step())
        return step.is_loss_out and step.loss_age <= within

    def take_level(self, also: Collection[Metric] = ()) -> list[Metric]:
        """Learn the range anew of each metric whose last values are above it, and of some; give which.

        Patience begins anew. Alerts are over once some values are in the new range.
        """
        above = [name for name, detector in self.detectors.items() if detector.is_above or name in also]
        self.detectors.update({metric: self.detectors[metric].anew() for metric in above})
        if "loss" in above:
            self._trial = None
            self._hold.forget_alerts()
        self._levels.clear()
        self._num_in_vain = 0
        self._forget_strikes()
        return above

    def end_all_soon(self) -> None:
        """Let go soon of all that is in effect, the newest first."""
        self._strikes.clear()
        self._quiet.clear()
        self._levels.clear()
        self._num_in_vain = 0
        self._attempts = Attempts()
        self._trial = None
        self.standing = as_anew(self.standing)
        self._ending.begin(len(self.standing.taken))

    def end(self, place: int) -> None:
        """Take a rung out of those in effect, by its place: somebody else has ended it."""
        taken = self.standing.taken
        self.standing = replace(self.standing, taken=(*taken[:place], *taken[place + 1 :]))
        self._trial = None
        self._ending.leave(place)

    def _let_go_of_limit(self) -> None:
        self._trial = None
        self._hold.end()
        if "loss" in self.detectors:
            self.detectors["loss"] = self.detectors["loss"].let_go()

    def state(self) -> dict[str, Any]:
        """Give all of it as plain data."""
        return {
            "detectors": {metric: asdict(detector) for metric, detector in self.detectors.items()},
            "standing": asdict(self.standing),
            "steps": [(worker, asdict(step)) for worker, step in self._steps.items()],
            "quiet": list(self._quiet.items()),
            "hold": self._hold.state(),
            "attempts": asdict(self._attempts),
            "levels": dict(self._levels),
            "num_in_vain": self._num_in_vain,
            "trial": self._trial and asdict(self._trial),
            "ending": self._ending.state(),
            "has_way_back": self._has_way_back,
            "strikes": list(self._strikes.items()),
            "spells": [(*key, asdict(spell)) for key, spell in self._spells.items()],
            "losses": list(self._losses),
            "are_above": [(*key, list(last)) for key, last in self._are_above.items()],
            "num_unusable": self._num_unusable,
            "unusable": sorted(self._unusable),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        detectors = {
            metric: _detector(state["detectors"][metric], threshold=detector.threshold)
            for metric, detector in self.detectors.items()
        }
        standing = Standing(**{**state["standing"], "taken": tuple(state["standing"]["taken"])})
        steps = {worker: _Step(**step) for worker, step in state["steps"]}
        quiet, strikes = Counter(dict(state["quiet"])), Counter(dict(state["strikes"]))
        spells = {(metric, worker): Spell.of(spell) for metric, worker, spell in state["spells"]}
        losses = [float(loss) for loss in state["losses"]]
        self.detectors, self.standing, self._steps, self._quiet = detectors, standing, steps, quiet
        self._strikes, self._spells, self._losses = strikes, spells, losses
        self._num_unusable = int(state.get("num_unusable", 0))  # which states had not, once
        self._unusable = set(state.get("unusable", ()))  # likewise
        above = state.get("are_above", ())  # likewise
        self._are_above = {(metric, worker): tuple(last) for metric, worker, last in above}
        self._hold.load(state.get("hold", {}))  # likewise
        self._levels = dict(state.get("levels", {}))  # likewise
        self._num_in_vain = int(state.get("num_in_vain", 0))  # likewise
        self._trial = Trial(**trial) if (trial := state.get("trial")) else None  # likewise
        self._ending.load(state.get("ending", {}))  # likewise
        self.see_way_back(is_there=bool(state.get("has_way_back", True)))  # likewise
        attempts = state.get("attempts", {})  # likewise
        self._attempts = Attempts(**{**attempts, "places": tuple(attempts.get("places", ()))})

    def variance_with(self, readings: Mapping[str, float]) -> float | None:
        """Gather losses; give the variance of the last few when there are enough.

        Of a loss that is NaN or infinite it is NaN, and at once, where the loss itself is not judged: it
        would pass unseen.
        """
        if "loss" not in readings:
            return None
        if not is_usable(readings["loss"]):
            return None if "loss" in self.detectors else math.nan
        self._losses.append(readings["loss"])
        if len(self._losses) < LOSSES_PER_VARIANCE:
            return None
        losses, self._losses = self._losses, []
        mean = sum(losses) / len(losses)
        return sum((loss - mean) ** 2 for loss in losses) / len(losses)


def _beside_going_back(ladder: Ladder) -> Ladder:
    """Give it with the same patience each time where the last rung mends what was gone back to."""
    is_beside = ladder.back is not None and ladder.num_rungs - 1 in ladder.mending
    return replace(ladder, growth=None) if is_beside else ladder


def _detector(state: Mapping[str, Any], *, threshold: float) -> Detector:
    onset = state["onset"] and Onset(**{**state["onset"], "sizes": tuple(state["onset"]["sizes"])})
    band, recent = Band(**state["band"]), tuple(state["recent"])
    return Detector(state["metric"], threshold, band, recent, onset, state.get("ceiling"))
