"""Rounds of averaging: what is taken of a model, and what is made of it when the others' has come."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat import log
from offbeat.averaging.members import DIFFERENT, NEXT_TO_NOTHING, Heard, Members, Said, terms_of
from offbeat.averaging.memory import FragmentMemory
from offbeat.averaging.methods import Method, shown, worded
from offbeat.averaging.pairs import Met
from offbeat.averaging.statistics import Statistics, Taken
from offbeat.averaging.timing import Asked
from offbeat.averaging.trained import Trained, Writes, gained_of, left_of, trained_of
from offbeat.errors import ConfigError, ConnectionLostError, StateError
from offbeat.local.flat import Flat, Room, add_way, pack, slices
from offbeat.local.group import digest

__all__ = ["Outcome", "Progress", "Rounds"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this member is.

    Attributes:
        iterations: Since the start.
        samples: Since the start.
        is_at_work: It has not ended.
        rate: The largest learning rate of its optimizer's groups; 0 where there is none yet.
        metric: What the pace goes by; None where there is none.
        setting: What else has to be the same in all members, as JSON can have it.
        wish: What else is followed once it is the same in all members, likewise.
        asked: What this member does then.
    """

    iterations: int
    samples: int
    is_at_work: bool = True
    rate: float = 0.0
    metric: float | None = None
    setting: object = None
    wish: object = None
    asked: Asked | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round has come to.

    Attributes:
        num_at_work: Members that have not ended.
        is_averaged: Somebody had something to add; in a round of twos, this member or its partner.
        metric: Mean over the members that had one; None likewise where nothing was added.
        drift: Square distance of this member's parameters from the members' mean, over all fragments.
        variance: Mean over members of the drifts of the round before, at a server this member's own; None:
            nobody has told one.
        is_finite: This member's parameters were, or may still be brought to those of one whose are.
        is_mended: There were others', which they have been brought to.
        are_agreed: All members want the same: the method, which parameters are trained, and their `wish`.
            None: that is not known yet.
        asked: What this member does where they are: of the round in which it was asked.
    """

    num_at_work: int
    is_averaged: bool
    metric: float | None
    drift: float | None
    variance: float | None
    is_finite: bool
    is_mended: bool
    are_agreed: bool | None
    asked: Asked | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What members do in a round, and so what they send: agreed upon in a round before.

    Were it this round's own affair, members that differ would send one another sums of different sizes, and
    torch ends a process to which that happens.
    """

    method: Method
    are_trained: list[bool]

    def shown(self) -> list[object]:
        return [shown(self.method), self.are_trained]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What this member wanted when a round began.

    Attributes:
        plan: Of rounds.
        asked: What else; see `Progress`.
    """

    plan: _Plan
    asked: Asked | None


@dataclass(slots=True)
class _UnderWay:
    fragment: int
    parameters: list[nn.Parameter]
    wanted: _Wanted
    own: Flat | None
    statistics: Taken
    iterations: int
    is_finite: bool
    is_at_work: bool
    is_pairwise: bool
    samples_before: int
    iterations_before: int
    was_apart: bool
    writes: Writes
    measures_drift: bool
    has_trained: bool
    untold: float | None


class Rounds:
    """Averages a model's fragments in turn.

    Attributes:
        number: Rounds begun.
        num_bytes: Sent by this member, in all rounds: what it has added to the sums, or sent to its partners.
        goes_on: The model is trained on while a round is under way; of those that begin from here on.
        measures_drift: Outcomes are to have a drift; likewise.
        wanted_method: What is to be made of the mean after the round in which all members have come to want
            it. What the method before has kept is forgotten then; a reference is, to begin with, the first
            mean, and velocities begin at 0.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        members: Members,
        method: Method,
        *,
        goes_on: bool,
        measures_drift: bool,
    ) -> None:
        """Begin where all members have the same model.

        Args:
            model: Whose statistics are averaged with it.
            parameters: Each once.
            members: Who takes part.
            method: What is made of their mean.
            goes_on: See there.
            measures_drift: See there.
        """
        self.number = self.num_bytes = 0
        self.wanted_method = method
        self._trained = Trained(parameters)
        self._members = members
        self.goes_on = goes_on
        self.measures_drift = measures_drift
        self._statistics = Statistics(model)
        self._under_way: _UnderWay | None = None
        self._room = Room(3)  # for what this member was, what it sends, and a server's mean
        self._rate = 0.0
        self._method = method
        self._samples: list[int] = [0]
        self._iterations = 0
        self._drifts: list[float | None] = []
        self._untold: float | None = None  # drift of the newest round, which the next one tells the others
        self._are_apart = [False]
        self._lay_out(is_begun=True)

    @property
    def method(self) -> Method:
        """What is made of the mean, at present."""
        return self._method

    @property
    def num_fragments(self) -> int:
        """Rounds that average the whole model once."""
        return len(self._fragments)

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._under_way is not None

    @property
    def are_apart(self) -> bool:
        """Whether each member holds a part of what is learnt.

        They have met in twos, or been drawn to a centre that is forgotten, and not all have met since.
        """
        return any(self._are_apart)

    @property
    def is_to_change(self) -> bool:
        """Whether this member wants another plan than the one in force."""
        return self._wanted().shown() != self._plan().shown()

    @property
    def trains_others(self) -> bool:
        """Whether this member trains other parameters (requires_grad) than those that are averaged."""
        return self._trained.wanted() != self._trained.are_agreed

    def optimizers(self) -> list[Optimizer]:
        """Give those that have stepped since the newest round ended, or began where it is under way."""
        return self._trained.optimizers()

    def is_there(self) -> bool:
        """Tell whether the round under way can be ended without waiting."""
        return self._members.is_there()

    def begin(self, progress: Progress, *, meets_all: bool = False) -> None:
        """Take the next fragment as it is and send it.

        Args:
            progress: How far this member is.
            meets_all: Go to the mean of all, also with a method whose members meet in twos; in all of them.

        Raises:
            StateError: If the model has other BatchNorm layers than when this was made; nothing is sent.
            ConnectionLostError: If a member is lost.
        """
        is_pairwise = self.method.is_pairwise and not meets_all
        partner = self._members.partner(self.number) if is_pairwise else None
        fragment = self.number % len(self._fragments)
        trained = self._of(fragment)
        statistics = self._statistics.take(self._device)
        self._memories[fragment].fit(trained)
        own = pack(trained, trained, room=self._room) if trained else {}
        is_finite = all(_is_finite(flat) for flat in (*own.values(), statistics.values))
        samples = float(progress.samples - self._samples[fragment]) if is_finite else 0.0
        new: dict[int, float] = {}
        if self._are_apart[fragment] and not is_pairwise:
            samples = float(is_finite)  # what each has learnt is in all of them
        elif not self._count_alike:
            led_to = self._trained.new_among(trained, progress.samples).items()
            new = {number: max(num, NEXT_TO_NOTHING) * is_finite for number, num in led_to}
        needs_own = is_pairwise or self.goes_on or self.measures_drift or self.method.has_centre
        is_apart = needs_own and not is_pairwise  # who meet in twos write to neither
        plan = _Plan(self.wanted_method, self._trained.wish(max(self._samples)))
        wanted = _Wanted(plan, progress.asked)
        said = Said(
            parameters=trained,
            values=own,
            room=self._room.empty(trained) if trained and is_apart else own,
            weight=float(is_finite) if self.method.weighs == "members" else samples,
            weights=new,
            samples=samples,
            is_at_work=progress.is_at_work,
            metric=progress.metric,
            rate=progress.rate,
            statistics=statistics.values,
            mark=digest([self._plan().shown(), self.number, progress.setting]),
            want=digest([wanted.plan.shown(), progress.wish]),
            terms=terms_of(shown(self.method), progress.setting, self._trained.are_agreed),
            wish=terms_of(shown(wanted.plan.method), progress.wish, wanted.plan.are_trained),
            wanted=wanted,
            is_pairwise=is_pairwise,
            partner=partner,
            iterations=progress.iterations - self._iterations,
            is_finite=is_finite,
            keeps=bool(self.method.keeps),
            are_means_read=self.method.reads_mean,
            drift=self._untold,
        )
        with _told_of(self.number + 1):
            self._members.begin(said)
        self._under_way = _UnderWay(
            fragment,
            trained,
            wanted,
            own if needs_own else None,
            statistics,
            progress.iterations,
            is_finite,
            progress.is_at_work,
            is_pairwise,
            self._samples[fragment],
            self._iterations,
            self._are_apart[fragment],
            self._trained.writes(),
            self.measures_drift,
            progress.is_at_work and progress.samples > self._samples[fragment],
            self._untold,
        )
        self._untold = None
        if not is_pairwise or partner is not None:
            self.num_bytes += sum(flat.nbytes for flat in (*own.values(), said.statistics))
        self._samples[fragment], self._iterations = progress.samples, progress.iterations
        self._are_apart[fragment] = is_pairwise
        self.number += 1

    def has_brought(self, samples: int) -> bool:
        """Whether what so many samples have made of each fragment was in a round, or is in that under way."""
        return all(brought == samples for brought in self._samples)

    def finish(self, iterations: int) -> Outcome:
        """Wait for the others' and bring the model to where the method leads it.

        What breaks off the wait, as Ctrl-C does, leaves the round under way.

        Args:
            iterations: How far this member is by now; what it has learnt since the round began stays.

        Raises:
            StateError: If members are set differently.
            ConnectionLostError: If a member is lost.
        """
        round_ = self._under_way
        assert round_ is not None  # noqa: S101  one has begun
        with _told_of(self.number):
            heard = self._members.finish()
        self._under_way, before = None, self._trained.writes()
        if not heard.is_same or (heard.met is not None and not heard.met.is_same):
            raise StateError(DIFFERENT)
        if not heard.is_brought:
            self._samples[round_.fragment] = round_.samples_before
            self._iterations = round_.iterations_before
            self._are_apart[round_.fragment] = round_.was_apart
            self._untold = round_.untold
        if heard.has_missed:
            self._memories[round_.fragment].begin_anew()
        wanted = heard.wanted if isinstance(heard.wanted, _Wanted) else round_.wanted
        if round_.is_pairwise:
            outcome = self._go_halfway(round_, heard, wanted)
        else:
            outcome = self._go_with_all(round_, heard, wanted, has_moved=iterations > round_.iterations)
        if outcome.drift is not None and self._is_to_tell(round_):
            self._untold = outcome.drift
        if heard.is_brought and heard.weight:
            are_alike = not round_.is_pairwise and not self.method.has_centre
            self._trained.note_met(round_.parameters, are_alike=are_alike)
        if heard.are_agreed:
            self._follow(wanted.plan, round_, is_brought=heard.is_brought)
        # What was written meanwhile is training, and what was here is none.
        self._trained.note_written(since=round_.writes, until=before)
        return outcome

    def end_alike(self) -> int:
        """Leave the same model in all members, also of what has not been averaged of late.

        That is the centre, where the method has one; and of what no round has brought together, as it was
        trained for the first time since the last, or is frozen and was changed all the same, the mean. Where
        the members cannot be reached, this one's model stays as it is.

        Returns:
            How many members have not ended by now.
        """
        own: list[tuple[nn.Parameter, torch.Tensor]] = []
        are_alike = False
        try:
            with torch.no_grad():
                for number, memory in enumerate(self._memories if self.method.has_centre else ()):
                    trained = self._of(number)
                    memory.fit(trained)
                    for parameter, part in zip(trained, memory.parts("reference"), strict=True):
                        own.append((parameter, parameter.detach().clone()))
                        parameter.copy_(part)
            apart = self._trained.apart(max(self._samples))
            num_at_work = self._members.make_alike(
                [*self._trained.parameters, *self._statistics.buffers()],
                apart=dict.fromkeys(apart, 0) if self._count_alike else apart,
            )
            are_alike = self._members.away is None
            if are_alike:
                self._trained.note_alike(max(self._samples))
            return num_at_work
        finally:
            if not are_alike:
                with torch.no_grad():
                    for parameter, value in own:
                        parameter.copy_(value)
            self._trained.note_written()

    def state_dict(self) -> dict[str, Any]:
        """Give what is kept from round to round, as if the one under way had not begun; it goes on."""
        round_, samples, are_apart = self._under_way, list(self._samples), list(self._are_apart)
        if round_ is not None:
            samples[round_.fragment] = round_.samples_before
            are_apart[round_.fragment] = round_.was_apart
        return {
            "number": self.number - (round_ is not None),
            "rate": self._rate,
            "samples": samples,
            "iterations": self._iterations if round_ is None else round_.iterations_before,
            "method": shown(self.method),
            "drifts": list(self._drifts),
            "untold": self._untold if round_ is None else round_.untold,
            "memories": [memory.state_dict() for memory in self._memories],
            "kept_of": [self._trained.places(memory.parameters) for memory in self._memories],
            "are_apart": are_apart,
            "heard": self._members.state(),
            **self._trained.state_dict(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """See that a state fits.

        Raises:
            ConfigError: If it is of another method or model.
        """
        theirs, own = list(state["method"]), shown(self.method)
        if theirs != own:
            raise ConfigError(
                f"the state is of method {worded(theirs)}, and here it is {worded(own)}: make the averager "
                f"with that one, load, and change the method then"
            )
        num, num_here = len(state["are_trained"]), len(self._trained.parameters)
        if num != num_here:
            raise ConfigError(f"the state is of a model of {num} parameters, and here are {num_here}")
        for places, kept in zip(self._kept_of(state), state["memories"], strict=True):
            FragmentMemory.check(self.method, [self._trained.parameters[place] for place in places], kept)

    def drop(self) -> None:
        """Take no notice of what comes of the round under way."""
        self._under_way = None

    def load_state_dict(
        self, state: Mapping[str, Any], *, strict: bool = True, setting: object = None
    ) -> bool:
        """Take over a state that `check` has let pass.

        Args:
            state: As `state_dict` gave it.
            setting: What else was in force when it was made, as JSON can have it.
            strict: False: where members' states are of different rounds, all begin with rounds anew, and with
                what the method keeps.

        Returns:
            Whether the members' states are of the same round, with the same setting.

        Raises:
            StateError: If they are not.
        """
        plan = _Plan(self.method, trained_of(state))
        are_apart = [bool(is_one) for is_one in state["are_apart"]]
        numbers = [int(state["number"]), len(state["heard"])]
        apart = [left_of(state), sorted(gained_of(state))]
        if not self._members.is_alike([plan.shown(), *numbers, *apart, are_apart, setting]):
            if strict:
                raise StateError(
                    f"members load states of different rounds, this one of round {state['number']}: each "
                    f"has to load its own, of one call of state_dict in all of them, before which all call "
                    f"flush() where they may be in different rounds, as with averaging_policy='time'; or "
                    f"give load_state_dict(state, strict=False), with which what {self.method!r} has kept "
                    f"begins anew"
                )
            log.warn(
                f"members were saved in different rounds, this one in round {state['number']}: what "
                f"{self.method!r} has kept begins anew with the mean of the next"
            )
            self._take_counts(state)
            self._untold = None
            self._trained.count_from(max(self._samples))
            self._lay_out(is_begun=False)
            return False
        self._trained.load_state_dict(state)
        self.number, self._rate = int(state["number"]), float(state["rate"])
        self._are_apart = are_apart
        self._members.resume(state["heard"])
        self._take_counts(state)
        self._drifts = list(state["drifts"])
        self._untold = state.get("untold")  # which older states do not have
        for memory, places, kept in zip(self._memories, self._kept_of(state), state["memories"], strict=True):
            memory.fit([self._trained.parameters[place] for place in places])
            memory.load_state_dict(kept)
        return True

    def count_from(self, *, samples: int, iterations: int) -> None:
        """Let rounds have what is trained from here on: the model is what others have made.

        Args:
            samples: That this member has trained on, since the start; in its lives before, too.
            iterations: Likewise.
        """
        self._samples = [samples] * self.num_fragments
        self._iterations = iterations
        self._trained.count_from(samples)

    # ------------------------------------------------------------------ inside

    def _take_counts(self, state: Mapping[str, Any]) -> None:
        self._samples = [int(samples) for samples in state["samples"]]
        self._iterations = int(state.get("iterations", 0))  # which older states do not have

    @property
    def _device(self) -> torch.device:
        return self._trained.parameters[0].device

    def _plan(self) -> _Plan:
        """Give what is in force."""
        return _Plan(self._method, list(self._trained.are_agreed))

    def _wanted(self) -> _Plan:
        """Give what this member wants."""
        return _Plan(self.wanted_method, self._trained.wanted())

    @property
    def _count_alike(self) -> bool:
        """Whether members count the same, whatever their samples."""
        return self._method.is_pairwise or self._method.weighs == "members"

    def _of(self, fragment: int) -> list[nn.Parameter]:
        """Give what a fragment's rounds average."""
        return self._trained.of(self._fragments[fragment])

    def _follow(self, plan: _Plan, round_: _UnderWay, *, is_brought: bool) -> None:
        """Do from the next round on what all members want by now.

        What is trained from here on was in no round yet: the next one has it, or else the end. And what is
        trained no more is averaged on until all have met with it.

        Args:
            plan: What they want.
            round_: In which they have told it.
            is_brought: Whether what this member has of that was in it.
        """
        has_other_method, had_centre = plan.method != self._method, self._method.has_centre
        this = round_.fragment
        differ = {
            place
            for number, fragment in enumerate(self._fragments)
            if number != this or self._are_apart[number] or had_centre or not is_brought
            for place in fragment
        }
        self._method = plan.method
        has_gained = self._trained.follow(plan.are_trained, differ=differ, samples=max(self._samples))
        if has_gained and self._members.arrives_alone:  # no round of all brings it
            self._samples[this] = min(self._samples[this], round_.samples_before)
            self._iterations = min(self._iterations, round_.iterations_before)  # as its batches are so large
        if has_other_method:
            # Around a centre, which is forgotten, each member has kept a model of its own: as after rounds of
            # twos, all of them count in the next, whatever samples have come since.
            self._are_apart = [self.are_apart or had_centre]
            self._lay_out(is_begun=False)

    def _lay_out(self, *, is_begun: bool) -> None:
        num, every = self.method.num_fragments, self._trained.parameters
        self._fragments = _split(range(len(every)), [p.numel() for p in every], num)
        self._memories = [
            FragmentMemory(self.method, self._of(number), is_begun=is_begun) for number in range(num)
        ]
        # Fragments of another cut count from where the first of the old ones was averaged last.
        self._samples = [min(self._samples)] * num
        self._are_apart = [self.are_apart] * num
        self._drifts = [None] * num

    def _kept_of(self, state: Mapping[str, Any]) -> list[list[int]]:
        """Tell for which parameters each fragment's memory is in a state.

        It follows what is trained with the fragment's next round alone; older states do not tell.
        """
        trained = [[p for p in fragment if state["are_trained"][p]] for fragment in self._fragments]
        return [list(places) for places in state.get("kept_of", trained)]

    def _is_to_tell(self, round_: _UnderWay) -> bool:
        """Whether the others are to hear how far this member was from the mean.

        Not of one that has trained nothing, nor where it was the only one: its 0 would be what is usual, and
        whoever joins it an alert. Where each arrives alone there is no mean.
        """
        return round_.has_trained and self._members.size > 1 and not self._members.arrives_alone

    def _drift(self, round_: _UnderWay, means: Flat) -> float | None:
        """Measure how far this member was from the mean, with what was last found of the other fragments."""
        assert round_.own is not None  # noqa: S101  it is kept where drift is measured
        own = round_.own
        self._drifts[round_.fragment] = sum(torch.dist(own[k], means[k]).item() ** 2 for k in means)
        known = [drift for drift in self._drifts if drift is not None]
        return sum(known) if len(known) == len(self._drifts) else None

    def _follow_rate(self, fragment: int, rate: float) -> None:
        """Scale the velocity with the learning rate of the members at work."""
        if self.method.scales_velocity and rate and self._rate and rate != self._rate:
            self._memories[fragment].scale_velocity(rate / self._rate)
        self._rate = rate or self._rate

    def _go_with_all(self, round_: _UnderWay, heard: Heard, wanted: _Wanted, *, has_moved: bool) -> Outcome:
        drift = None
        if heard.weight:
            if not round_.measures_drift:
                self._drifts[round_.fragment] = None  # what is known of it would be of long ago
            elif round_.is_finite:
                drift = self._drift(round_, heard.means)
            if heard.samples:
                self._follow_rate(round_.fragment, heard.rate)
            agreed = wanted.plan.are_trained if heard.are_agreed else self._trained.are_agreed
            self._move(round_, heard.means, has_moved=has_moved, are_trained=agreed)
            if heard.samples:
                self._statistics.settle(heard.statistics, round_.statistics)
        can_go_back = not heard.weight and heard.num_not_finite > 0 and self._go_back(round_, heard)
        return Outcome(
            num_at_work=heard.num_at_work,
            is_averaged=heard.weight > 0 or can_go_back,
            metric=heard.metric if heard.weight else None,
            drift=drift,
            variance=heard.drift,
            is_finite=round_.is_finite or not heard.is_brought,  # the server is away: the mean is to come
            is_mended=heard.weight > 0 or can_go_back,
            are_agreed=heard.are_agreed,
            asked=wanted.asked,
        )

    def _go_back(self, round_: _UnderWay, heard: Heard) -> bool:
        """Bring a model that is not finite to where rounds have led: others have ended, and add nothing.

        Nobody makes a step of that, nor moves what the method keeps.

        Returns:
            Whether there is one who is finite.
        """
        trained = round_.parameters
        values = pack(trained, trained, room=self._room) if trained else {}
        statistics = self._statistics.take(self._device).values
        found = self._members.of_before(heard, values, statistics, is_finite=round_.is_finite)
        if found is not None and not round_.is_finite:
            theirs, statistics = found
            parts = self._memories[round_.fragment].led_to(theirs)
            with torch.no_grad():
                for parameter, part in zip(trained, parts, strict=True):
                    parameter.copy_(part)
            self._statistics.settle(statistics, round_.statistics)
        return found is not None

    def _go_halfway(self, round_: _UnderWay, heard: Heard, wanted: _Wanted) -> Outcome:
        """Go halfway to the partner, if there is one, and it has what to go to."""
        met = heard.met if heard.met is not None and heard.met.is_finite else None
        drift = None
        if met is not None and round_.is_finite:
            drift = self._add_half(round_, met)
        elif met is not None:
            with torch.no_grad():
                for parameter, part in zip(
                    round_.parameters, slices(round_.parameters, met.values), strict=True
                ):
                    parameter.copy_(part)
            self._statistics.settle(met.statistics, round_.statistics)
        # Who has met nobody that could mend it may do so in a later round, as long as there are such.
        is_to_wait = met is None and heard.weight > 0
        return Outcome(
            num_at_work=heard.num_at_work,
            is_averaged=met is not None and (round_.is_at_work or met.is_at_work),
            metric=heard.metric,
            drift=drift,
            variance=heard.drift,
            is_finite=round_.is_finite or is_to_wait,
            is_mended=met is not None,
            are_agreed=heard.are_agreed,
            asked=wanted.asked,
        )

    def _add_half(self, round_: _UnderWay, met: Met) -> float | None:
        """Go to the pair's mean, from wherever this member is by now; give what it says of the drift.

        What is added here is what the partner subtracts, bit for bit: a difference and its half are the same
        from either side.
        """
        assert round_.own is not None  # noqa: S101  it is kept where members meet in twos
        ways = {kind: theirs.sub_(round_.own[kind]).mul_(0.5) for kind, theirs in met.values.items()}
        with torch.no_grad():
            for parameter, way in zip(round_.parameters, slices(round_.parameters, ways), strict=True):
                parameter.add_(way)
        taken = round_.statistics.values
        self._statistics.settle(taken + (met.statistics - taken) * 0.5, round_.statistics)
        if not round_.measures_drift:
            return None
        # Of two that are drawn at random this is by so much less than of each one from the mean of all.
        num = self._members.size
        return 2.0 * (num - 1) / num * sum(way.square().sum().item() for way in ways.values())

    def _move(self, round_: _UnderWay, means: Flat, *, has_moved: bool, are_trained: Sequence[bool]) -> None:
        memory, method, size = self._memories[round_.fragment], self.method, self._members.size
        memory.begin_with(means)
        targets = {
            kind: method.target(mean, mean if round_.own is None else round_.own[kind], memory.of(kind), size)
            for kind, mean in means.items()
        }
        if not round_.is_finite and method.has_centre:
            targets = {kind: memory.of(kind)["reference"] for kind in means}
        parts = slices(round_.parameters, targets)
        share = method.share_kept
        # Where it was not to go on, and has after a wait was broken off, what it has learnt since is dropped.
        is_kept = has_moved and round_.is_finite
        adds = is_kept and round_.own is not None
        places = self._trained.places(round_.parameters)
        own = parts if round_.own is None else slices(round_.parameters, round_.own)
        with torch.no_grad():
            for place, parameter, part, before in zip(places, round_.parameters, parts, own, strict=True):
                # A share of what is trained no more would keep members apart in it: no round has it again.
                if is_kept and share is not None and are_trained[place]:
                    parameter.lerp_(part.to(parameter.dtype), 1.0 - share)
                elif adds:
                    add_way(parameter, before, part)
                else:
                    parameter.copy_(part)


@contextmanager
def _told_of(number: int) -> Iterator[None]:
    """Say of a member that is lost in which round that is."""
    try:
        yield
    except ConnectionLostError as error:
        raise ConnectionLostError(
            f"averaging cannot go on in round {number}: {error}. With communication_backend='tcp' the others "
            f"go on where one dies"
        ) from None


def _split(places: Sequence[int], sizes: Sequence[int], num: int) -> list[list[int]]:
    """Cut a list into so many runs, each of about as many numbers, and none of them empty."""
    total = sum(sizes)
    runs: list[list[int]] = [[]]
    done = 0
    for place in places:
        num_missing = num - len(runs)
        is_full = done * num >= total * len(runs)
        if runs[-1] and num_missing and (is_full or len(places) - place <= num_missing):
            runs.append([])
        runs[-1].append(place)
        done += sizes[place]
    return runs


def _is_finite(flat: torch.Tensor) -> bool:
    # A sum is one pass without memory; where it overflows, each is looked at.
    return bool(torch.isfinite(flat.sum())) or bool(torch.isfinite(flat).all())
