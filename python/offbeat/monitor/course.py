"""What a monitor does with readings: judge them, take remedies and let go of them, and write it all down."""

import copy
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias

from offbeat import log, process
from offbeat.errors import ClosedError, OffbeatError
from offbeat.monitor.alert import Alert, Recovery, Release
from offbeat.monitor.detector import Metric
from offbeat.monitor.judge import Excess, Judge
from offbeat.monitor.ladder import Ladder
from offbeat.monitor.remedy import Remedy, Taken
from offbeat.monitor.report import MonitorReport, Series, counted
from offbeat.monitor.settings import Settings
from offbeat.monitor.spell import Spell
from offbeat.tracking import alerts

__all__ = ["Course"]

_Ready: TypeAlias = Literal["begin", "note", "renew", "stay"]

MOST_KEPT = 1000
"""Alerts, recoveries, and releases, for the report."""

LONG = 100
"""Steps in a row whose gradients are dropped, after which that is told of; after as many more the level that
there is by then is taken for the range. Nothing has moved the parameters meanwhile: either the run is well,
and its range is of a past that does not come back, as after a warm restart; or what it trains on is broken,
and then to drop all of it trains no more than an end would. An end is not ours to make."""


class Course:
    """The course of one run. One thread at a time.

    Attributes:
        num_dropped: Gradients that were not used.
        num_clipped: Gradients that were scaled down.
        num_taken: How often each remedy was taken, by name.
        num_went_back: How often parameters went back to what they were before.
        is_lost: Whether they were seen not to be finite.
    """

    def __init__(
        self, settings: Settings, ladder: Ladder, *, threshold: float, warm_up: int, is_of_one: bool
    ) -> None:
        """Begin.

        Args:
            settings: Metrics and remedies.
            ladder: How remedies follow one another.
            threshold: The share by which a value may exceed the upper edge.
            warm_up: Values before there is a range.
            is_of_one: As the `Judge` has it.
        """
        self.num_dropped = self.num_clipped = self.num_went_back = 0
        self.num_taken: Counter[str] = Counter()
        self._settings = settings
        self._make_judge = partial(
            Judge, settings.metrics, ladder, threshold=threshold, warm_up=warm_up, is_of_one=is_of_one
        )
        self._judge = self._make_judge()
        self._in_effect: list[_InEffect] = []
        self._alerts: deque[Alert] = deque(maxlen=MOST_KEPT)
        self._recoveries: deque[Recovery] = deque(maxlen=MOST_KEPT)
        self._releases: deque[Release] = deque(maxlen=MOST_KEPT)
        self._num_alerts: Counter[str] = Counter()
        self._num_dropped_in_a_row = 0
        self.is_lost = False
        self._is_in_vain = False  # to have gone back: that was told, and is so still
        self._has_passed = True  # a gradient has, since it was gone back; else it is the data that is broken
        self._is_counted = False  # it is heard of gradients
        self._series = {metric: Series() for metric in settings.metrics}
        self._step = 0

    @property
    def in_effect(self) -> tuple[str, ...]:
        """The remedies in effect, in the order in which they were taken; not what could not be done."""
        return tuple(effect.name for effect in self._in_effect if effect.taken.is_done)

    @property
    def keeps_out_non_finite(self) -> bool:
        """Whether a remedy, in effect or still to come, does something about what is not finite.

        Then none of it is used, from the first on: it would end the run before that remedy's turn comes.
        """
        return any(remedy.keeps_out_non_finite for remedy in self._settings.remedies)

    def take(
        self,
        step: int,
        readings: Mapping[str, float],
        worker: str | None,
        *,
        may_drop: bool = False,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> tuple[Alert, ...]:
        """Judge readings of one step, and act on what is out of range.

        Args:
            step: Which.
            readings: What was measured in it.
            worker: Whose.
            may_drop: Whether the step's gradient is dropped where something is not finite and is kept out.
            is_lost: Tells whether parameters are not finite; asked where a reading is not.

        Returns:
            The alerts.
        """
        self._step = step
        self._resume()
        ends_soon = False
        if self._judge.begin(step, worker) is not None:
            self._release()
        variance = None if "loss_variance" in readings else self._judge.variance_with(readings)
        judged = dict(readings) if variance is None else {**readings, "loss_variance": variance}
        raised = []
        for metric, detector in self._judge.detectors.items():
            if metric in judged:
                self._series[metric].add(step, judged[metric], detector.expected)
                if (excess := self._judge.see(metric, judged[metric])) is not None:
                    alert, learnt = self._alert(excess, worker, may_drop=may_drop, is_lost=is_lost)
                    raised.append(alert)
                    ends_soon |= learnt.ends_soon
                elif (spell := self._judge.over) is not None:
                    self._recover(metric, judged[metric], detector.expected, spell, worker)
        if ends_soon:  # now that all of this step has been judged
            self._judge.end_all_soon()
        return tuple(raised)

    def take_unused(self, step: int, metric: Metric, value: float) -> None:
        """Hear of what a remedy, or a user's own bound, has kept out in a step: in its range, it is quiet."""
        self._step = step
        self._resume()
        if self._judge.begin(step) is not None:
            self._release()
        self._judge.see_unused(metric, value)

    def count(self, *, is_used: bool, is_finite: bool = True) -> None:
        """Count a step's gradient, used or dropped; where none passes for long, see that one does."""
        self.num_dropped += not is_used
        if not is_finite:
            self._judge.see_unusable()
        is_left_out = any(effect.taken.left_out is not None for effect in self._in_effect)
        self._is_counted = True
        self._has_passed |= is_used
        if is_used or is_left_out:  # that one is out for as long as its values are
            self._num_dropped_in_a_row = 0
            return
        self._num_dropped_in_a_row += 1
        if self._num_dropped_in_a_row == LONG:
            log.warn(
                f"step {self._step}: no gradient has passed for {LONG} steps, of which the model learns "
                f"nothing: each was dropped by what is in effect ({counted(self.in_effect)}). "
                f"{self._words_of_long()}"
            )
        elif self._num_dropped_in_a_row < 2 * LONG or self._is_broken():  # of which no level is to be learnt
            return
        elif metrics := self._judge.take_level():
            ends_soon = self._is_slowed()  # which had nothing to slow, and would from now on
            also = " what is in effect is let go of step by step," if ends_soon else ""
            log.warn(
                f"step {self._step}: no gradient has passed for {self._num_dropped_in_a_row} steps: what "
                f"{' and '.join(metrics)} is now is taken for usual; its range is learnt anew,{also} and "
                f"gradients are used meanwhile"
            )
            if ends_soon:
                self._judge.end_all_soon()

    def _words_of_long(self) -> str:
        """Say what helps where no gradient has passed for long."""
        is_one_missing = "rollback" not in self._settings.names and self._settings.can_roll_back()
        back = ', or put "rollback" behind "reject"' if is_one_missing else ""
        if self._is_broken():
            what = "Parameters are" if self.is_lost else "What is measured is, each time,"
            return (
                f"{what} not finite: where the data is sound, the parameters are what is broken, and no "
                f"range that is learnt anew lets any of it pass: {self._words_of_help()}{back}"
            )
        return (
            f"Where such values are right from now on, as after a warm restart or with harder data, call "
            f"monitor.reset(); else mend the data{back}. After {LONG} steps more, what is finite is taken "
            f"for the range"
        )

    def state(self) -> dict[str, Any]:
        """Give what it takes to go on in another process, as plain data; what was told stays here."""
        return {
            "judge": self._judge.state(),
            "in_effect": [effect.state() for effect in self._in_effect],
            "noted": self._noted(),
            "num_alerts": dict(self._num_alerts),
            "num_taken": dict(self.num_taken),
            "num_dropped": self.num_dropped,
            "num_dropped_in_a_row": self._num_dropped_in_a_row,
            "has_passed": self._has_passed,
            "num_clipped": self.num_clipped,
            "step": self._step,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what was in effect is so again as soon as there is what it acts on."""
        judge = self._make_judge()
        judge.load(state["judge"])
        remedies = dict(zip(self._settings.names, self._settings.remedies, strict=True))
        effects = [_InEffect.of(one, remedies[one["name"]]) for one in state["in_effect"]]
        num_alerts, num_taken = Counter(state["num_alerts"]), Counter(state["num_taken"])
        num_dropped, num_clipped, step = state["num_dropped"], state["num_clipped"], state["step"]
        in_a_row = state.get("num_dropped_in_a_row", 0)  # which states had not, once
        noted, has_passed = state.get("noted", {}), state.get("has_passed", True)  # likewise
        self.let_go(goes_on=False)
        self._judge, self._in_effect, self._step = judge, effects, step
        self._num_alerts, self.num_taken = num_alerts, num_taken
        self.num_dropped, self.num_clipped = num_dropped, num_clipped
        self._num_dropped_in_a_row, self.is_lost, self._is_in_vain = in_a_row, False, False
        self._has_passed = has_passed
        for name, what in noted.items():
            remedies[name].recall(what)
        self._resume()

    def _noted(self) -> dict[str, Any]:
        """Give what remedies have noted, by name: a later one goes by how it was before the first alert."""
        pairs = zip(self._settings.names, self._settings.remedies, strict=True)
        return {name: noted for name, remedy in pairs if (noted := remedy.noted()) is not None}

    def _resume(self) -> None:
        """Have in effect what was, as far as there is what it acts on: an optimizer may come with `train`."""
        for place, effect in enumerate(self._in_effect):
            if effect.waits is not None:
                try:
                    taken = effect.waits.resume(effect.taken.held)
                except OffbeatError as error:
                    log.debug("step %d: %s is not in effect again yet: %s", self._step, effect.name, error)
                    return  # one that came later may build on it
                except Exception as error:  # noqa: BLE001  of whatever it acts on; the run goes on
                    log.warn(f"step {self._step}: {effect.name} is not in effect again: {_words(error)}")
                    taken = Taken(f"is not in effect again: {_words(error)}", _nothing, is_done=False)
                self._in_effect[place] = effect._replace(taken=taken, waits=None)

    def begin_anew(self) -> None:
        """Let go of all remedies, and forget the ranges."""
        self.let_go()
        self._judge = self._make_judge()
        self._num_dropped_in_a_row = 0
        self.is_lost, self._is_in_vain, self._has_passed = False, False, True

    def let_go(self, *, goes_on: bool = True) -> None:
        """Let go of all remedies, the newest first.

        Args:
            goes_on: Whether training goes on from here, and not from a state that is loaded.
        """
        while self._in_effect:
            self._judge.end(len(self._in_effect) - 1)  # first: a Ctrl-C may end what is undone
            self._release(goes_on=goes_on)

    def was_set(self, thing: object, name: str) -> None:
        """Let go of what has set an attribute to which somebody else has a right, and which he set since."""
        for place in reversed(range(len(self._in_effect))):
            effect = self._in_effect[place]
            if effect.waits is None and effect.taken.is_done and effect.taken.forget(thing, name):
                del self._in_effect[place]
                self._judge.end(place)
                said = f"{name} was set to {getattr(thing, name)!r} since, and stays"
                self._releases.append(release := Release(self._step, effect.name, said))
                log.warn(str(release))

    def has_seen(self, metric: str) -> bool:
        """Tell whether a metric has had a value."""
        return any(series.num_seen for name, series in self._series.items() if name == metric)

    def report(self) -> MonitorReport:
        """Tell what was seen and done so far."""
        return MonitorReport(
            alerts=tuple(self._alerts),
            recoveries=tuple(self._recoveries),
            releases=tuple(self._releases),
            num_alerts=dict(self._num_alerts),
            num_dropped=self.num_dropped,
            num_clipped=self.num_clipped,
            in_effect=self.in_effect,
            effects=tuple(effect.taken.result for effect in self._in_effect if effect.taken.is_done),
            series={metric: series.copy() for metric, series in self._series.items()},
        )

    def _alert(
        self, excess: Excess, worker: str | None, *, may_drop: bool, is_lost: Callable[[], bool]
    ) -> "tuple[Alert, _Learnt]":
        """Act on a value that is out of range, if it is time to, and make the alert."""
        learnt = _Learnt()
        ours = self._left_out(worker)
        place, rung, back, told = None, None, None, ""
        if excess.is_first:
            was_lost, self.is_lost = self.is_lost, not excess.is_finite and is_lost()
            told = f"; {self._words_of_loss()}" if self.is_lost and not was_lost else ""
            place = None if ours is not None else self._to_do_anew(excess)
        self._make_ready(excess, place)
        if place is not None:
            rung = self._settings.names.index(self._in_effect[place].name)
            self._judge.wait()
        elif excess.is_first or not self._in_effect:  # which may have ended since this step's first alert
            rung, back = self._climb(worker, ours, excess)
        if self._do(rung, worker, place, back):
            told = ""
        elif excess.is_first:
            learnt = self._learn_level(excess)
            told += learnt.told or self._told_in_vain()
        effect, result, has_acted = self._done(rung, ours, place, back)
        action, is_done = effect.name, effect.taken.is_done
        # Nobody waits now, as "in effect" would say.
        is_past = action == "pause" and effect.taken.is_done and effect.step != self._step
        if is_past:
            result = self._words_of_pause(effect.step)
        is_said = self._is_kept_out() and not is_past
        if not excess.is_finite and may_drop and self.keeps_out_non_finite and not is_said:
            result += "; the step's gradient is dropped"
        result += told
        alert = Alert(
            self._step,
            excess.metric,
            excess.value,
            excess.expected,
            action,
            result,
            worker,
            num=excess.spell.num_alerts,
            is_news=has_acted or excess.spell.is_news or bool(told),
            limit=excess.limit,
            is_taken=has_acted and is_done,
        )
        self._num_alerts[alert.metric] += 1
        alerts.count(alert.metric, alert.action)
        if alert.is_news:
            self._alerts.append(alert)
            log.warn(str(alert))
        else:
            log.debug("%s", alert)
        return alert, learnt

    def _recover(
        self, metric: str, value: float, expected: tuple[float, float], spell: Spell, worker: str | None
    ) -> None:
        """Tell that a metric is in its range again, which may be another by then."""
        recovery = Recovery(
            self._step,
            metric,
            value,
            spell.begin,
            spell.num_alerts,
            worker,
            expected=expected,
            expected_then=spell.expected,
        )
        self._recoveries.append(recovery)
        log.warn(str(recovery))

    def _to_do_anew(self, excess: Excess) -> int | None:
        """Give the place of what was taken and is to be done anew, before anything else; None: there is none.

        What could not be done may be possible by now: it is tried where a new matter begins, and each time
        that something is not finite and nothing else is left. Where there was a step in the range after a
        rollback and the parameters are lost again, only another one helps, however often; without such a step
        a worker may still have the model of before, as for a step or two after its server has gone back.
        """
        newest = len(self._in_effect) - 1
        is_left = self._judge.is_at_end and not excess.is_finite
        is_left &= not (self._is_broken() and self._judge.may_go_back)
        if newest >= 0 and not self._in_effect[newest].taken.is_done and (excess.is_new or is_left):
            return newest
        if not (self.is_lost and (excess.is_new or self._judge.standing.quiet > 0)):
            return None
        return self._place_of_rollback()

    def _place_of_rollback(self) -> int | None:
        return max((n for n, effect in enumerate(self._in_effect) if effect.name == "rollback"), default=None)

    def _do(self, rung: int | None, worker: str | None, place: int | None, back: int | None) -> bool:
        """Take what it is time for; tell whether the model has gone back by it.

        Args:
            rung: The remedy.
            worker: Whose alert it is.
            place: Of what is done anew by it; None: it is the newest.
            back: The place of a rollback to take again, and first: what is next is for what is gone back to.
        """
        taken, is_mended = [], False
        if back is not None:
            if not self._in_effect[back].taken.is_done:  # whatever is kept is worth more than what is lost
                self._begin()
            elif rung is not None and not self._is_broken():
                self._make("rollback", "stay" if self._judge.is_to_stay else "renew")
            taken.append(self._act(self._settings.names.index("rollback"), worker, back))
        if rung is not None:
            if back is None and place is None and not self._is_broken():
                self._make(self._settings.names[rung], "renew")
            taken.append(self._act(rung, worker, place))
            is_mended = back is not None and taken[-1].is_done and self._settings.remedies[rung].is_mending
        went = [one for one in taken if one.goes_back]
        if not went:
            return False
        self.is_lost = False  # it is finite, as far as is known
        self._has_passed = not self._is_counted
        places = [int(place) for place in went[-1].held or () if isinstance(place, Integral)]  # if told
        self._judge.went_back(max(places, default=None), is_mended=is_mended)
        return True

    def _done(
        self, rung: int | None, ours: "_InEffect | None", place: int | None, back: int | None
    ) -> tuple["_InEffect", str, bool]:
        """Give the remedy that an alert names, what there is to say of it, and whether that is news."""
        if rung is None and back is not None:
            effect = self._in_effect[back]
            return effect, effect.taken.result, True
        effect = ours or self._in_effect[-1 if place is None else place]
        # That it failed once more is none.
        has_acted = rung is not None and (effect.taken.is_done or place is None)
        result = effect.taken.result if has_acted else effect.told
        if back is not None:
            result += f'; "rollback" once more: {self._in_effect[back].taken.result}'
        return effect, result, has_acted

    def _is_broken(self) -> bool:
        """Tell whether no gradient passes any more: parameters are not finite, or nothing measured is.

        Of parameters that are finite no loss may be, where they are so large. Where it was gone back to what
        was good, and not one gradient has passed since, it is not the parameters that are broken.
        """
        is_stuck = self._judge.is_stuck and self.keeps_out_non_finite
        return self.is_lost or (is_stuck and self._has_passed)

    def _learn_level(self, excess: Excess) -> "_Learnt":
        """Learn a level anew where no remedy is for it, or all were taken and one slows the run; say so."""
        num = self._judge.num_in_vain
        is_for_long = self._is_slowed() and num >= LONG and self._judge.has_waited
        if not excess.is_finite or self._is_broken() or not (self._judge.is_of_data or is_for_long):
            return _Learnt()
        if not self._judge.is_of_data and self._judge.await_fall(excess.metric):
            return _Learnt()
        # Else it may be the remedy that keeps the loss in its range, or lets it come back.
        is_of_loss = self._judge.is_loss_out(within=num) or "loss" not in self._judge.detectors
        ends_soon = self._judge.is_of_data or (is_of_loss and not self._judge.has_led_back)
        metrics = self._judge.take_level(also=self._judge.in_alert)
        when = " step by step" if ends_soon else " in its time"
        why = (
            "no loss was in the range on all that it went back to, so that it is the data and not the model"
            if self._judge.is_of_data
            else f"{num} more steps have had an alert in spite of all that there is"
        )
        told = (
            f"; {why}: what {' and '.join(metrics)} is now is taken for usual, its range is learnt anew, and "
            f"what is in effect is let go of{when}"
        )
        return _Learnt(told, ends_soon)

    def _is_slowed(self) -> bool:
        """Tell whether something in effect lets the run learn less for as long as it is."""
        return any(self._remedy(name).slows for name in self.in_effect)

    def _told_in_vain(self) -> str:
        """Say what helps where it was gone back as often as may be, once each time that this is so."""
        was_in_vain = self._is_in_vain
        is_broken = self._is_broken()
        self._is_in_vain = (is_broken and self._judge.has_gone_back) or self._judge.is_exhausted
        if was_in_vain or not self._is_in_vain:
            return ""
        name = "rollback" if self._judge.has_gone_back else self._settings.names[-1]
        said = f'"{name}" was taken as often as it may be, in vain'
        if is_broken:
            return f"; {said}: where the data is sound, {self._words_of_help()}"
        itself = f", as is done after {LONG} steps with an alert" if self._is_slowed() else ""
        return (
            f"; {said}: where such values are right from now on, monitor.reset() learns them{itself}; where "
            f"the model has gone astray, {self._words_of_help(is_cut='reduce_lr' in self._settings.names)}"
        )

    def _is_to_begin(self, excess: Excess, effect: "_InEffect") -> bool:
        """Tell whether what is done anew is to go by how it is now, and not as the matter began.

        Of a new matter, all that was kept until now is of before it. And lost parameters that could not be
        brought back by going further back are worth less than whatever is kept.
        """
        return excess.is_new or (self.is_lost and not effect.taken.is_done)

    def _climb(
        self, worker: str | None, ours: "_InEffect | None", excess: Excess
    ) -> tuple[int | None, int | None]:
        """Give the rung to take for a worker's alert, and the place of the rollback to take again, if any.

        Who is left out is measured, and does no harm: another remedy would be for nothing. Of the others each
        is left out at its first alert, as long as those are fewer than half: else it is the run that has gone
        astray, and what is next on the ladder is for that. Where parameters are not finite, it was gone back
        in vain, or no gradient has passed since, what would only do more of the same is not taken again.
        """
        if ours is not None:
            self._judge.wait()
            return None, None
        num_out = sum(effect.taken.left_out is not None for effect in self._in_effect)
        is_elsewhere = (
            worker is not None
            and num_out > 0
            and self._in_effect[-1].taken.left_out is not None
            and 2 * (num_out + 1) < self._judge.num_workers
        )
        is_broken = self._is_broken()
        is_data_broken = self._judge.is_stuck and not self._has_passed
        is_past_help = self.is_lost or is_data_broken or (is_broken and self._judge.has_gone_back)
        helps = self._settings.remedies[-1].helps_what_is_lost
        is_in_vain = is_past_help and self._judge.is_at_end and not helps
        if is_in_vain and not self._judge.may_go_back:
            self._judge.wait()
            return None, None
        is_urgent = not excess.is_finite and not self._is_kept_out()
        rung = self._judge.climb(
            is_elsewhere=is_elsewhere,
            is_urgent=is_urgent,
            is_lost=is_broken,
            is_in_vain=is_in_vain,
            is_astray=excess.is_finite and not excess.is_new,
            metric=excess.metric if excess.is_finite else None,
        )
        return rung, self._place_of_rollback() if self._may_go_again() else None

    def _may_go_again(self) -> bool:
        """Tell whether the alert that was climbed for last is one to go back for, and that may be."""
        if not self._judge.is_to_go_back or self._is_broken():
            return self._judge.is_to_go_back
        place = self._place_of_rollback()
        is_done = place is not None and self._in_effect[place].taken.is_done
        return place is not None and (not is_done or self._remedy("rollback").can_stay)

    def _remedy(self, name: str) -> Remedy:
        return self._settings.remedies[self._settings.names.index(name)]

    def _words_of_loss(self) -> str:
        """Say that parameters are lost, and what there is to do about it here."""
        if "rollback" in self._settings.names:
            return 'parameters are not finite: no remedy but "rollback" helps'
        start = (
            "a member that averages with others goes on from their mean in the next round; else start again "
            "from a checkpoint, as with FaultTolerantTrainer(recovery_strategy='last_good')"
        )
        instead = 'put "rollback" on the ladder' if self._settings.can_roll_back() else start
        return f"parameters are not finite, and none of these remedies helps: {instead}"

    def _words_of_help(self, *, is_cut: bool = False) -> str:
        """Say what mends a model that no remedy here does, though its rate was cut or was not."""
        again = "start again from a checkpoint, as with FaultTolerantTrainer(recovery_strategy='last_good')"
        if self._settings.can_roll_back():
            back = "call trainer.rollback() from a callback, or server.rollback() of a ParameterServer, or "
            again = f"{back}{again}"
        return again if is_cut else f"{again}; with a lower learning rate"

    def _words_of_pause(self, step: int) -> str:
        """Say that there was a pause, and when there is none before: training goes on at this alert."""
        num_quiet, num_alerts = self._judge.until_again
        quiet = f"{num_quiet} step{'s are' if num_quiet > 1 else ' is'} in the range with no alert in between"
        said = f"training was paused at step {step}, and is not again before {quiet}"
        if num_alerts is None:
            return said
        return f"{said}, or {num_alerts} more {'have' if num_alerts > 1 else 'has'} an alert"

    def _is_kept_out(self) -> bool:
        """Tell whether a remedy that is in effect does something about what is not finite."""
        remedies = dict(zip(self._settings.names, self._settings.remedies, strict=True))
        done = [effect.name for effect in self._in_effect if effect.taken.is_done]
        return any(remedies[name].keeps_out_non_finite for name in done)

    def _left_out(self, worker: str | None) -> "_InEffect | None":
        """Give what has left a worker out, if something has."""
        effects = (effect for effect in self._in_effect if effect.taken.left_out is not None)
        return next((effect for effect in effects if effect.taken.left_out == worker), None)

    def _make_ready(self, excess: Excess, place: int | None) -> None:
        """Let remedies note how it is, where what is to be gone by is not what they know of already."""
        if not self._in_effect or (place is not None and self._is_to_begin(excess, self._in_effect[place])):
            self._begin()
        elif excess.is_first and excess.is_new and self._place_of_rollback() is not None:
            self._each("note")

    def _begin(self) -> None:
        """Let remedies note what they need of how it was before the alert."""
        self._each("begin")

    def _each(self, what: _Ready) -> None:
        for name in self._settings.names:
            self._make(name, what)

    def _make(self, name: str, what: _Ready) -> None:
        """Make a remedy ready for what comes."""
        try:
            getattr(self._remedy(name), what)()
        except Exception as error:  # noqa: BLE001  of whatever it acts on; the run goes on
            log.warn(f"step {self._step}: {name} cannot be made ready: {_words(error)}")

    def _act(self, rung: int, worker: str | None, place: int | None) -> Taken:
        """Take a remedy, as the newest in effect, or anew in the place of what was; give what came of it."""
        name, remedy = self._settings.names[rung], self._settings.remedies[rung]
        taken = Taken("was broken off", _nothing)
        try:
            taken = remedy.take(worker)
        except Exception as error:  # noqa: BLE001  of whatever it acts on; the run goes on, and the next rung may do
            said = f"could not be done: {_words(error)}"
            taken = Taken(said, _nothing, is_done=False)
        finally:  # the ladder has it as taken, be it by Ctrl-C that it ended
            begin = len(self._in_effect) if place is None else place
            self._in_effect[begin : begin + 1] = [_InEffect(name, self._step, taken)]
            self.num_taken[name] += 1
            self.num_went_back += taken.goes_back
        if name == "rollback" and (taken.is_done or place is None):  # else it did before, if not now
            self._judge.see_way_back(is_there=taken.is_done)
        return taken

    def _release(self, *, goes_on: bool = True) -> None:
        effect = self._in_effect.pop()
        is_undone = True
        try:
            result = effect.taken.undo()
        except ClosedError as error:
            result = f"what it acted on has ended: {error}"
        except Exception as error:  # noqa: BLE001  of whatever it acts on; the run goes on
            result, is_undone = f"could not be taken back, and stays: {_words(error)}", False
        release = Release(self._step, effect.name, result)
        self._releases.append(release)
        if is_undone:
            log.info("%s", release)
        else:
            log.warn(str(release))
        if goes_on and is_undone:
            self._settle(effect)

    def _settle(self, effect: "_InEffect") -> None:
        try:
            effect.taken.settle()
        except Exception as error:  # noqa: BLE001  of whatever it acts on; the run goes on
            log.warn(f"step {self._step}: what {effect.name} has led to meanwhile stays: {_words(error)}")


class _Learnt(NamedTuple):
    """What there is to say of a level that is learnt anew, and whether all in effect is let go of soon."""

    told: str = ""
    ends_soon: bool = False


class _InEffect(NamedTuple):
    """A remedy that was taken and not let go of."""

    name: str
    step: int
    taken: Taken
    waits: Remedy | None = None
    """The remedy, where it was in effect when a checkpoint was written, and is not so yet again."""

    def state(self) -> dict[str, Any]:
        """Give it as plain data."""
        taken = self.taken
        plain = {
            "result": taken.result,
            "left_out": taken.left_out,
            "is_done": taken.is_done,
            "held": copy.deepcopy(taken.held),  # which follows what another monitor lets go of
        }
        return {"name": self.name, "step": self.step, **plain}

    @classmethod
    def of(cls, state: Mapping[str, Any], remedy: Remedy) -> "_InEffect":
        """Take what `state` gave."""
        said, is_done = state["result"], state["is_done"]
        taken = Taken(said, _nothing, left_out=state["left_out"], is_done=is_done, held=state["held"])
        return cls(state["name"], state["step"], taken, remedy if is_done else None)

    @property
    def told(self) -> str:
        """What there is to say of it at a later alert."""
        if self.taken.is_done and not self.taken.goes_back:  # which was done once, and lasts
            return f"in effect since step {self.step}"
        return f"at step {self.step} it {self.taken.result}"


def _nothing() -> str:
    return "nothing had been done"


def _words(error: Exception) -> str:
    """Word an error: ours says what to do, of another its kind is half of what it says."""
    return str(error) if isinstance(error, OffbeatError) else process.cause_of(error)
