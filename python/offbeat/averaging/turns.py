"""One member's rounds, one after another: when each begins, when it ends, and what follows from it."""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from offbeat import log, trained_by
from offbeat.averaging.arrivals import guided
from offbeat.averaging.course import Course
from offbeat.averaging.gauge import Gauge
from offbeat.averaging.loaded import Untrained
from offbeat.averaging.meeting import Joined
from offbeat.averaging.methods import Method
from offbeat.averaging.pace import Seconds
from offbeat.averaging.rounds import Outcome, Progress, Rounds
from offbeat.averaging.served import Served
from offbeat.averaging.timing import Agreement, Asked, Timing
from offbeat.averaging.unshared import Unshared
from offbeat.errors import ConnectionLostError, NonFiniteError
from offbeat.local import LocalOptimizer
from offbeat.local.lr_scale import largest_rate
from offbeat.local.parameters import check_same, each_once

__all__ = ["FLUSH_AGAIN", "Owner", "Turns", "setting_of"]

FLUSH_AGAIN = "call flush() again when the server is there, or go on with this model"
"""What to do where the server is away at the end; who has no `flush` to offer words this anew."""


MOST_TRIES = 3
"""Times that what is left is averaged anew, where a server has not taken it as it was."""

FEW_ROUNDS = 3
"""Rounds in a row without members who have ended: fewer are the end of all, to which they come one by one."""


class Owner(Protocol):
    """The averager that takes these turns, for a user's function and the log.

    It is handed over where it is needed, and not kept: so it goes, with its connections, as soon as its user
    lets go of it, and a copy of it has turns of its own.

    Attributes:
        model: That is averaged.
    """

    model: nn.Module


class Turns:
    """Takes a member from round to round, iteration by iteration, and to the end of all.

    Attributes:
        members: All of them.
        named: The model's parameters, each once, as they were when all met.
        optimizer: Of the model, with its state.
        timing: When a round begins and ends.
        longest: Of the pace that this began with: what a pace of time may not exceed later.
        gauge: What an adaptive pace goes by.
        rounds: What is made of the models.
        course: How far this member is.
        unshared: What the others do not have of it.
        untrained: Whether it has joined others, and not trained since.
    """

    def __init__(
        self,
        model: nn.Module,
        joined: Joined,
        method: Method,
        timing: Timing,
        gauge: Gauge,
        *,
        is_guided: bool,
    ) -> None:
        """Begin, where all have met.

        Args:
            model: That is averaged.
            joined: The members, and which this is.
            method: What is made of the mean.
            timing: As all members have it.
            gauge: Likewise.
            is_guided: The server takes the method's step, for each member that arrives.
        """
        self._rank = joined.rank
        self._outer = method if is_guided else None
        self.members = joined.members
        self.named = each_once(model)
        self.optimizer = LocalOptimizer(model)
        self.timing = timing
        self.longest = timing.pace.every
        self.gauge = gauge
        self.rounds = Rounds(
            model,
            [parameter for _, parameter in self.named],
            self.members,
            method if self._outer is None else guided(self._outer),
            goes_on=timing.overlap is not False,
            measures_drift=gauge.needs_drift,
        )
        self.course = Course()  # now: its clock counts from when all have met
        self.unshared = Unshared(self._rank)
        self.untrained = Untrained(self.members)
        self._agreement = Agreement()
        self._num_few = 0  # rounds in a row in which not all were at work
        self._brought_at: int | None = None  # iterations, all of which are averaged: only the end is to come

    @property
    def is_guided(self) -> bool:
        """Whether the method's step is the server's."""
        return self._outer is not None

    @property
    def method(self) -> Method:
        """What is made of the mean, at present, here or at the server."""
        return self.rounds.method if self._outer is None else self._outer

    def advance(self, owner: Owner, samples: int, loss: float | None) -> None:
        """Count an iteration; end a round and begin one where it is time to.

        Args:
            owner: Whose turns these are.
            samples: In its batch.
            loss: Of it; None: it is not asked for.

        Raises:
            StateError: If the model has other parameters than at first, or members average differently.
            NonFiniteError: If no member's parameters are finite.
            ConnectionLostError: If a member is lost.
        """
        self.untrained.end()
        self.course.advance(samples, loss)
        if not self.members.is_alone:
            num_fragments = self.rounds.num_fragments
            self.unshared.count(
                self.course.iterations, num_members=self.members.size, num_fragments=num_fragments
            )
            self.members.note_progress(self.course.iterations)
        if self.rounds.is_under_way and self._is_to_end():
            self.finish(owner)
        if self.rounds.is_under_way and not self.members.is_waited_for:
            self._look_behind()
            return
        if self._is_due() and self.rounds.is_under_way:
            self.finish(owner)  # after which it may be due later, as in members that have ended it before
        if self._is_due():
            self._average(owner)

    def bring(self, owner: Owner) -> None:
        """Average what is left, as `flush` does first, which does it still where the others have it not.

        Raises:
            StateError: As `advance`.
            NonFiniteError: As `advance`.
            ConnectionLostError: As `advance`, but not where the members' server was not reached.
        """
        self.untrained.train()
        for _ in range(MOST_TRIES):
            try:
                with self.members.telling():
                    self._average_what_is_left(owner)
            except ConnectionLostError:
                if not isinstance(self.members, Served) or self.members.away is None:
                    raise
                if not self.members.has_just_lost_it:  # else there may be one in its place
                    return
            if self.members.away is None and self.rounds.has_brought(self.course.samples):
                self._brought_at = self.course.iterations
                return

    def flush(self, owner: Owner, *, lingers: bool = True) -> None:
        """Average what is left, and leave the same model in all members, who all call this.

        Args:
            owner: Whose turns these are.
            lingers: At a server, wait for one that has just come, and was in no round yet.

        Raises:
            StateError: As `advance`.
            NonFiniteError: As `advance`.
            ConnectionLostError: As `advance`, or if the members' server was not reached.
        """
        self.untrained.train()
        if isinstance(self.members, Served):
            self.members.lingers = lingers
        with self.members.telling():
            try:
                self._end_together(owner)
            except ConnectionLostError:
                if not (isinstance(self.members, Served) and self.members.has_just_lost_it):
                    raise
                self._end_together(owner)  # at the server that is there by now, as the next round would be
        self.unshared.end(self.course.iterations)

    def _average_what_is_left(self, owner: Owner) -> None:
        if self.rounds.is_under_way:
            self.finish(owner)
        if isinstance(self.members, Served):
            self.members.wait_for_those_before()
            self._check_there()
        if self.rounds.is_to_change:
            self._average(owner, waits=True)
            self._check_there()
        for _ in range(self.rounds.num_fragments):
            self._average(owner, waits=True)
            self._check_there()

    def _end_together(self, owner: Owner) -> None:
        brought_at, self._brought_at = self._brought_at, None
        if brought_at != self.course.iterations:
            self._average_what_is_left(owner)
        if not self.members.is_alone:
            num_at_work = 1
            while num_at_work:  # once more where one has come as the others were about to be through
                while num_at_work:
                    self._begin(owner, self._progress(owner, is_at_work=False))
                    num_at_work = self.finish(owner).num_at_work
                    self._check_there()
                while self.rounds.are_apart:
                    self._begin(owner, self._progress(owner, is_at_work=False), meets_all=True)
                    outcome = self.finish(owner)
                    if outcome.is_averaged:
                        self.course.count_round(outcome.drift)
                    self._check_there()
                trained_by.moves(owner.model)
                num_at_work = self.rounds.end_alike()
                trained_by.moved(owner.model)
                self._check_there()

    def drop(self) -> None:
        """Take no notice of what comes of the round under way."""
        self.unshared.leave()
        self.rounds.drop()
        self.course.end_round()

    def finish(self, owner: Owner) -> Outcome:
        """End the round under way, waiting for the others if need be, and do what follows from it.

        Raises:
            StateError: As `advance`.
            NonFiniteError: As `advance`.
            ConnectionLostError: As `advance`.
        """
        before, fragment = self.method, (self.rounds.number - 1) % self.rounds.num_fragments
        optimizers = self.rounds.optimizers()  # of which the round's end forgets some
        trained_by.moves(owner.model)
        try:
            outcome = self.rounds.finish(self.course.iterations)
        except Exception:
            self.unshared.leave()  # who averages is told now
            raise
        finally:
            if not self.rounds.is_under_way:  # as it is where Ctrl-C has broken off the wait
                self.course.end_round()
        trained_by.moved(owner.model)
        if outcome.is_averaged and not self.rounds.are_apart:
            self.unshared.end_round(fragment, self.course.begun_at)
        if outcome.num_at_work:
            if outcome.is_averaged:
                self.course.count_round(outcome.drift)
            self._adapt(outcome.metric)
        self._tell_of_few(outcome.num_at_work)
        if not outcome.is_finite:
            self._recover(optimizers, is_mended=outcome.is_mended)
        if self.method != before:
            log.info("from round %d on the method is %r", self.rounds.number, self.method)
        if outcome.are_agreed and outcome.asked is not None:
            self._agree(owner, outcome.asked)
        if outcome.are_agreed is not None:
            self._agreement.count(
                are_agreed=outcome.are_agreed, kept=before, rank=self._rank, wishes=self.wishes()
            )
        _tell_variance(owner, outcome)  # last: who hears of it may end the run, or want another frequency
        return outcome

    def wishes(self) -> list[str]:
        """Say what this member wants that is not in force, since not all others want it."""
        found: dict[str, tuple[object, object]] = {}
        if self.rounds.wanted_method != self.rounds.method:
            found["method"] = self.rounds.wanted_method, self.rounds.method
        found |= self.timing.wishes()
        words = [f"{name}={wanted!r} (in force: {now!r})" for name, (wanted, now) in found.items()]
        if self.rounds.trains_others:
            words.append("other parameters to be trained (requires_grad)")
        return words

    # ------------------------------------------------------------------ inside

    @property
    def _is_idle(self) -> bool:
        """Whether a round would leave everything as it is."""
        has_wish = self.rounds.wanted_method != self.method
        return self.members.is_alone and self.method.is_nothing_alone and not has_wish

    def _is_finite(self) -> bool:
        trained = [parameter for _, parameter in self.named if parameter.requires_grad]
        return not trained or bool(torch.stack([p.isfinite().all() for p in trained]).all())

    def _is_due(self) -> bool:
        return self.timing.pace.is_due(
            iterations=self.course.since_begin,
            seconds=0.0 if self.rounds.is_under_way else self.course.seconds,
            num_fragments=self.rounds.num_fragments,
            number=self.rounds.number,
        )

    def _look_behind(self) -> None:
        """Warn of a round that takes many times as long as it is from average to average."""
        pace, course = self.timing.pace, self.course
        passed: float = course.since_begin
        done = f"has done {course.since_begin} iterations"
        if isinstance(pace, Seconds):
            passed = course.seconds_since_begin
            done = f"has trained for {passed:.3g} s"
        policy = str(pace.setting()[0])
        self.unshared.look_behind(passed / pace.every, done, policy=policy, seek=self.members.sought)

    def _is_to_end(self) -> bool:
        overlap = self.timing.overlap
        if isinstance(overlap, bool):
            return self.rounds.is_there()
        return self.course.since_begin >= overlap

    def _check_there(self) -> None:
        """See that the members' server was reached.

        Raises:
            ConnectionLostError: If it was not.
        """
        if self.members.away is not None:
            num = self.unshared.num
            own = (
                f"the last {num} iteration(s) of member {self._rank} are in its own model alone, which stays"
                if num
                else f"all that member {self._rank} has trained is averaged, and its model stays"
            )
            raise ConnectionLostError(
                f"the members' server is away, and this one cannot end together with the others: "
                f"{self.members.away}; {own} as it is: {FLUSH_AGAIN}"
            )

    def _average(self, owner: Owner, *, waits: bool = False) -> None:
        if self.rounds.is_under_way:
            self.finish(owner)
        check_same(self.named, owner.model)
        progress, has_trained = self._progress(owner, is_at_work=True), self.course.since_begin > 0
        self.course.begin_round()
        if self._is_idle:
            if not self._is_finite():  # as where there would have been a mean
                self.course.end_round()
                self._recover((), is_mended=False)
            if has_trained:
                self.course.count_round(None)
                self._adapt(progress.metric)
            self.course.end_round()
            self._agree(owner, self.timing.asked())
            return
        self._begin(owner, progress)
        if waits or self.timing.overlap is False:
            self.finish(owner)

    def _begin(self, owner: Owner, progress: Progress, *, meets_all: bool = False) -> None:
        has_mean = not (self.members.is_alone or self.members.arrives_alone)
        is_wanted = has_mean and trained_by.is_wanted(owner.model, "parameter_variance")
        self.rounds.measures_drift = self.gauge.needs_drift or is_wanted
        self.rounds.begin(progress, meets_all=meets_all)

    def _agree(self, owner: Owner, asked: Asked) -> None:
        """Follow what all members have wanted."""
        before = self.timing.setting()
        self.timing.agree(asked)
        self.rounds.goes_on = self.timing.overlap is not False
        if self.timing.setting() != before:
            log.info("from round %d on: %r", max(self.rounds.number, self.course.rounds), owner)

    def _recover(self, optimizers: Iterable[torch.optim.Optimizer], *, is_mended: bool) -> None:
        """Go on after what is averaged was not finite: without what optimizers kept that is not either.

        Args:
            optimizers: That have stepped it, of a user's own loop.
            is_mended: Whether there are others', which it has been brought to.

        Raises:
            NonFiniteError: If there was no member's mean to go on from.
        """
        text = (
            f"parameters or statistics of member {self._rank} were not finite in iteration "
            f"{self.course.begun_at}"
        )
        remedy = "look at its learning rate and its data"
        if not is_mended:
            whose = "" if self.members.is_alone else ", nor any member's"
            raise NonFiniteError(f"{text}{whose}, so there is nothing to go on from: {remedy}")
        own = {id(parameter) for _, parameter in self.named}
        live = self.optimizer.live
        others = [one for one in optimizers if one is not live]
        for optimizer in others if live is None else [live, *others]:
            for kept in [one for one in optimizer.state if id(one) in own]:
                state = optimizer.state[kept]
                found = state.values() if isinstance(state, Mapping) else ()
                values = [value for value in found if isinstance(value, torch.Tensor)]
                if not all(bool(value.isfinite().all()) for value in values):
                    del optimizer.state[kept]
        log.warn(
            f"{text}: it adds nothing to round {self.course.rounds} and goes on from the newest "
            f"mean; {remedy}"
        )

    def _tell_of_few(self, num_at_work: int) -> None:
        """Warn once where a momentum over rounds steps along the way of some, while others have ended.

        Where a server takes the method's step for each that arrives, a round is one member's, always.
        """
        if self.is_guided:
            return
        num = self.members.size
        self._num_few = self._num_few + 1 if 0 < num_at_work < num else 0
        if self._num_few == FEW_ROUNDS and "velocity" in self.method.keeps:
            log.warn(
                f"{num - num_at_work} of {num} members have ended, and the others have trained on for "
                f"{FEW_ROUNDS} rounds: {self.method!r} steps along their way alone, with as much momentum as "
                f"along all members', and the model may get worse by it; give members as many batches as one "
                f"another, and overlap=False or a number, so that all do as many in each round; or take "
                f"'average', which goes no further than they do"
            )

    def _adapt(self, metric: float | None) -> None:
        before = self.timing.pace
        pace = self.timing.pace = before.after(metric)
        if pace.every != before.every:
            log.info(
                "after round %d, by a metric of %.4g, averaging every %d iterations instead of %d",
                self.course.rounds, metric, pace.every, before.every,
            )  # fmt: skip

    def _progress(self, owner: Owner, *, is_at_work: bool) -> Progress:
        live = self.optimizer.live
        return Progress(
            iterations=self.course.iterations,
            samples=self.course.samples,
            is_at_work=is_at_work,
            rate=0.0 if live is None else largest_rate(live),
            metric=self._measured(owner) if is_at_work else None,
            setting=setting_of(self.timing, self.gauge),
            wish=[*self.timing.wish(), self.gauge.name],
            asked=self.timing.asked(),
        )

    def _measured(self, owner: Owner) -> float | None:
        """Give the metric that the pace goes by, of what was trained since the last round began."""
        return self.gauge.measure(owner, self.course, (parameter for _, parameter in self.named))


def _tell_variance(owner: Owner, outcome: Outcome) -> None:
    if outcome.variance is not None:
        trained_by.averaged(owner.model, parameter_variance=outcome.variance)


def setting_of(timing: Timing, gauge: Gauge) -> list[object]:
    """Give what has to be the same for all members, as JSON can have it."""
    return [*timing.setting(), gauge.name]
