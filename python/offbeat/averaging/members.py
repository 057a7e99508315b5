"""Who takes part in a round: this process alone, or all of a process group of torch's."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed

from offbeat import log
from offbeat.averaging.methods import worded
from offbeat.averaging.pairs import Later, Met, Pairs, lag, partner
from offbeat.errors import ConnectionLostError
from offbeat.local.flat import Flat, slices
from offbeat.local.group import (
    begin_alike,
    carries,
    check_alike,
    check_device,
    check_made,
    check_settings,
    held_by_all,
    is_alike,
    is_other,
    words_of_apart,
)
from offbeat.local.mean_alike import make_alike as give_mean
from offbeat.local.sums import Sums

__all__ = [
    "DIFFERENT",
    "NEXT_TO_NOTHING",
    "Alone",
    "Group",
    "Heard",
    "Members",
    "Said",
    "differing_terms",
    "terms_of",
    "worded_terms",
]

PACE_NAMES = "averaging_policy", "averaging_frequency", "min_averaging_frequency", "max_averaging_frequency"
"""Keywords of the numbers that a pace's setting has, in their order."""

TRAINED = "trained parameters"
"""What says which parameters are, among the terms that members tell a server."""

NUM_MARKS = 4
"""Numbers by which members tell whether they are set alike, and whether they want the same."""

MOST_TERMS = 1000
"""Characters of the terms that members tell a server, which takes 1024 bytes."""


DIFFERENT = (
    "members average differently: method, averaging_policy with its frequency and bounds, adaptation_metric, "
    "overlap, BatchNorm layers, and which parameters are trained (requires_grad) have to be the same "
    "in all of "
    "them when they are made"
)
"""What to say where members' settings have come to differ since they were made."""


NEXT_TO_NOTHING = 1e-15
"""Samples that a member counts which has had none: where nobody has had any, all count as much."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a member says in a round.

    Attributes:
        parameters: Of which it speaks.
        values: What they are, in flat memory, which is not to be written to while it is not `room`.
        room: As much memory, which is nobody's: for what is sent, and for the answer. That of `values` itself
            where this member has no need of them from here on.
        weight: Of these; 0 adds nothing, whatever they are.
        weights: By the numbers of those that count otherwise, as they are in a round for the first time: the
            same numbers in all members. At a server the most of them counts for all of these; in a round
            of twos no heed is paid to it.
        samples: It has had since the round before; weigh all but the parameters.
        is_at_work: It has not ended.
        metric: What the pace goes by; None where there is none.
        rate: Learning rate of its optimizer.
        statistics: Of its BatchNorm layers.
        mark: Digest of what has to be the same in all members.
        want: Digest of what is followed once it is the same in all members.
        wanted: That itself, which is nobody else's to read.
        is_pairwise: It is said to `partner` alone.
        partner: Whom it is for; None: nobody.
        terms: The method and settings in force, as a server is told them.
        wish: Those wanted.
        iterations: It has had since the round before.
        is_finite: Its parameters are.
        keeps: The method keeps something, which is old where rounds go by without this member.
        are_means_read: The means that are heard are read alone, and may go on being another's.
        drift: Square distance of its parameters from the members' mean in the round before; None: it was not
            measured.
    """

    parameters: Sequence[torch.Tensor]
    values: Flat
    room: Flat
    weight: float
    weights: Mapping[int, float]
    samples: float
    is_at_work: bool
    metric: float | None
    rate: float
    statistics: torch.Tensor
    mark: float
    want: float
    terms: str
    wish: str
    wanted: object = None
    is_pairwise: bool = False
    partner: int | None = None
    iterations: int = 0
    is_finite: bool = True
    keeps: bool = False
    are_means_read: bool = False
    drift: float | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """What all members together have said.

    Attributes:
        means: Of the parameters, by weight; nothing that makes sense where that is 0.
        weight: Of all.
        samples: Of all.
        num_at_work: Members that have not ended.
        metric: Mean over those that had one; None where nobody had. At a server this member's own.
        rate: Mean by samples; 0 where there are none.
        statistics: Mean by samples; likewise nothing that makes sense.
        is_same: All gave the same mark.
        are_agreed: All want the same; None: that is not known yet.
        wanted: What this member wanted in the round that is known; None: in the one that ends.
        met: In a round of twos, what the partner has said; None: there was none. Of the others is then known
            what they have said some rounds ago, and nothing where `are_agreed` is None.
        is_brought: What this member said is in it; else it is still to be said, and counts in a later round.
        has_missed: Rounds have gone by without this member since it has heard the means of one.
        num_not_finite: Members whose parameters are not, as far as this one is told: at a server itself.
        drift: Mean over those that had one, as the metric.
    """

    means: Flat
    weight: float
    samples: float
    num_at_work: int
    metric: float | None
    rate: float
    statistics: torch.Tensor
    is_same: bool = True
    are_agreed: bool | None = True
    wanted: object = None
    met: Met | None = None
    is_brought: bool = True
    has_missed: bool = False
    num_not_finite: int = 0
    drift: float | None = None


class Members(Protocol):
    """Puts together what members say. One round may be under way at a time.

    Attributes:
        is_alone: There can be no others.
        is_waited_for: A member waits for a round's end before it begins the next; else it begins that later.
        meets_in_twos: A round may be one of twos.
        arrives_alone: A round is one member's.
        has_gone_on: Others had made rounds before this member came, and it has begun with what they made.
    """

    is_alone: bool
    is_waited_for: bool
    meets_in_twos: bool
    arrives_alone: bool
    has_gone_on: bool

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def away(self) -> str | None:
        """Why the server could not be reached when that was tried last; None: it could, or there is none."""

    def sought(self) -> str | None:
        """Look anew, and give as `away` why the server cannot be reached, where a round waits for it."""

    def partner(self, number: int) -> int | None:
        """Say whom this member meets in a round of twos; None: nobody."""

    def begin(self, said: Said) -> None:
        """Begin a round with what this member says."""

    def is_there(self) -> bool:
        """Tell whether what all have said is known, without waiting."""

    def finish(self) -> Heard:
        """Wait for it."""

    def of_before(
        self, heard: Heard, values: Flat, statistics: torch.Tensor, *, is_finite: bool
    ) -> "tuple[Flat, torch.Tensor] | None":
        """Give what members had before a round to which nobody added, and in which one was not finite.

        All who heard of that call it.

        Args:
            heard: In that round.
            values: What this member has, in memory that is written to.
            statistics: Likewise.
            is_finite: They are.

        Returns:
            Values and statistics of one who is finite; None: nobody is.
        """

    def telling(self) -> AbstractContextManager[None]:
        """Say for whom this member waits, where what is done within takes long; once for all of it."""

    def is_alike(self, value: object) -> bool:
        """Tell in all members at once whether a value, as JSON can have it, is the same in all of them."""

    def make_alike(self, tensors: Sequence[torch.Tensor], *, apart: Mapping[int, int]) -> int:
        """Give all members the same values, in place; where the server is `away`, nobody anything.

        Args:
            tensors: Which are the same already, up to rounding, or by now this one's alone.
            apart: Places of those that may differ, and get their mean, with the samples that this member's
                part in that counts; where nobody has any, all count as much.

        Returns:
            How many of them have not ended by now.
        """

    def state(self) -> list[list[float]]:
        """Give what all said before the round under way and is not known here yet; after a loss, nothing."""

    def resume(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from what `state` gave."""

    def note_progress(self, iterations: int) -> None:
        """Take note that this member has trained so far."""

    def end_by(self, failure: BaseException | None) -> None:
        """Take part no more, by a failure perhaps."""


class Alone:
    """Nobody else: what is said is heard, and keeps its bits."""

    size = 1
    is_alone = True
    is_waited_for = True
    meets_in_twos = True
    arrives_alone = False
    has_gone_on = False
    away: str | None = None

    def __init__(self) -> None:
        self._said: Said | None = None

    def sought(self) -> None:
        """There is none."""

    def partner(self, number: int) -> int | None:
        """Nobody."""
        del number
        return None

    def begin(self, said: Said) -> None:
        """Keep it."""
        for kind, flat in said.values.items():
            if said.room[kind] is not flat:
                said.room[kind].copy_(flat)
        self._said = said

    def is_there(self) -> bool:
        """It is."""
        return True

    def finish(self) -> Heard:
        """Give it back."""
        said, self._said = self._said, None
        assert said is not None  # noqa: S101  something was begun
        return Heard(
            said.room,
            said.weight,
            said.samples,
            int(said.is_at_work),
            said.metric,
            said.rate,
            said.statistics,
            drift=said.drift,
        )

    def of_before(
        self, heard: Heard, values: Flat, statistics: torch.Tensor, *, is_finite: bool
    ) -> tuple[Flat, torch.Tensor] | None:
        """Nobody has any."""
        del heard, values, statistics, is_finite
        return None

    def telling(self) -> AbstractContextManager[None]:
        """For nobody."""
        return nullcontext()

    def is_alike(self, value: object) -> bool:
        """It is."""
        del value
        return True

    def make_alike(self, tensors: Sequence[torch.Tensor], *, apart: Mapping[int, int]) -> int:
        """They are."""
        del tensors, apart
        return 0

    def state(self) -> list[list[float]]:
        """Nothing: all is known."""
        return []

    def resume(self, state: Sequence[Sequence[float]]) -> None:
        """From nothing."""

    def note_progress(self, iterations: int) -> None:
        """Nobody asks."""

    def end_by(self, failure: BaseException | None) -> None:
        """Nobody has to be told."""


@dataclass(frozen=True, slots=True)
class _Twos:
    """What rounds of twos take.

    Attributes:
        sums: Of a group that carries the CPU's tensors.
        pairs: Exchanges models.
        later: Tells what all have said.
    """

    sums: Sums
    pairs: Pairs
    later: Later


class Group:
    """A process group: all-reduces on its own threads, or exchanges in twos, while this one goes on."""

    is_alone = False
    is_waited_for = True
    meets_in_twos = True
    arrives_alone = False
    has_gone_on = False
    away: str | None = None

    def __init__(
        self,
        group: distributed.ProcessGroup,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        buffers: Mapping[str, torch.Tensor],
        setting: Mapping[str, object],
        more_time: timedelta,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the first member's values.

        Args:
            group: The members.
            named: What rounds average, each once, with its name.
            buffers: Others, by name; those begin alike, too, that all hold in one shape.
            setting: What has to be the same in all members, as JSON can have it, by its name for people.
            more_time: How much longer a round waits for others than the group given does.
            check: Raises if `setting` cannot be used by so many; called once it is the same in all members,
                who all raise then. One that did so before would leave the others to wait for it.

        Raises:
            ConfigError: If the group has no backend for the parameters' device, or from `check`.
            ModelMismatchError: If members hold different models.
            StateError: If they are set differently.
            ConnectionLostError: If a member is lost.
        """
        self.size = distributed.get_world_size(group)
        self._rank = distributed.get_rank(group)
        self._device = named[0][1].device
        check_device(group, self._device)
        self._sums = Sums.among(group, of="the models", more=more_time, device=self._device)
        with self._sums.together() as own:
            check_made(own, "AsyncModelAverager", self._device)
            check_alike(own, named, self._device)
            check_settings(own, setting, self._device, how="members average differently", show=_said)
            check()
            held, apart = held_by_all(own, buffers, self._device)
            begin_alike(own, (*(tensor for _, tensor in named), *held.values()))
        if apart:  # as training has made them
            log.warn(words_of_apart(apart))
        self._twos: _Twos | None = None
        self._values: Flat = {}
        self._facts = self._statistics = torch.empty(0)
        self._said: Said | None = None

    def sought(self) -> None:
        """There is none."""

    def partner(self, number: int) -> int | None:
        """Look it up in the round's matching."""
        return partner(number, self._rank, self.size)

    def begin(self, said: Said) -> None:
        """Start to add up, or to exchange.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        self._said = said
        if said.is_pairwise:
            self._begin_pair(said)
            return
        if self._twos is not None:
            self._twos.later.forget()  # of a round of all everything is known in it
        facts = [*_facts(said), *said.weights.values()]
        self._facts = torch.tensor(facts, dtype=torch.float64, device=self._device)
        new = [part.clone() for part in _others(said, said.values)]
        self._values = {k: _times(flat, said.weight, out=said.room[k]) for k, flat in said.values.items()}
        others = _others(said, self._values)
        for value, weight, part in zip(new, said.weights.values(), others, strict=True):
            _times(value, weight, out=part)
        self._statistics = _times(said.statistics, said.samples, out=torch.empty_like(said.statistics))
        self._sums.begin([self._facts, self._statistics, *self._values.values()])

    def is_there(self) -> bool:
        """Ask the group's threads."""
        said, twos = self._said, self._twos
        if said is not None and said.is_pairwise and twos is not None:
            return twos.pairs.is_there() and twos.later.is_there()
        return self._sums.is_there()

    def finish(self) -> Heard:
        """Wait for all members, and divide; or for the partner.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        said = self._said
        assert said is not None  # noqa: S101  something was begun
        if said.is_pairwise:
            heard = self._finish_pair(said)
            self._said = None
            return heard
        self._sums.finish()
        self._said = None  # whose memory the next round is to have again
        means, self._values = self._values, {}
        told = self._facts.tolist()
        facts, weights = told[: len(told) - len(said.weights)], told[len(told) - len(said.weights) :]
        weight, samples = facts[:2]
        others = _others(said, means)
        sums = [part.clone() for part in others]
        for flat in means.values():
            flat.div_(weight or 1.0)
        for part, total, its in zip(others, sums, weights, strict=True):
            torch.div(total, its or 1.0, out=part)
        return self._heard(facts, means, self._statistics.div_(samples or 1.0))

    def of_before(
        self, heard: Heard, values: Flat, statistics: torch.Tensor, *, is_finite: bool
    ) -> tuple[Flat, torch.Tensor] | None:
        """Broadcast what the first member has that is finite.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        if heard.num_not_finite >= self.size:
            return None
        first = torch.tensor([self._rank if is_finite else self.size], device=self._device)
        with self._sums.together() as group:
            distributed.all_reduce(first, op=distributed.ReduceOp.MIN, group=group)
            for tensor in (*values.values(), statistics):
                distributed.broadcast(tensor, group=group, group_src=int(first.item()))
        return values, statistics

    def telling(self) -> AbstractContextManager[None]:
        """For the others of the group."""
        return self._sums.telling()

    def is_alike(self, value: object) -> bool:
        """Compare over the group.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        with self._sums.together() as group:
            return is_alike(group, value, self._device)

    def make_alike(self, tensors: Sequence[torch.Tensor], *, apart: Mapping[int, int]) -> int:
        """Give the mean of what is apart, and broadcast the rest.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        differ = {str(place): tensors[place] for place in sorted(apart)}
        counts = {str(place): max(samples, NEXT_TO_NOTHING) for place, samples in apart.items()}
        with self._sums.together() as group:
            give_mean(group, differ, counts, self._device)
            begin_alike(group, (tensor for place, tensor in enumerate(tensors) if place not in apart))
        return 0

    def state(self) -> list[list[float]]:
        """Wait for what is still to be known; where a member is lost nobody comes to know it."""
        if self._twos is None:
            return []
        is_under_way = self._said is not None and self._said.is_pairwise
        try:
            return self._twos.later.state(but=int(is_under_way))
        except ConnectionLostError as error:
            log.info("what members have said of late is not saved: %s", error)
            return []

    def resume(self, state: Sequence[Sequence[float]]) -> None:
        """Know it when it is time to."""
        if state or self._twos is not None:
            self._in_twos().later.resume(state)

    def note_progress(self, iterations: int) -> None:
        """Nobody asks."""

    def end_by(self, failure: BaseException | None) -> None:
        """Destroy the groups of one's own, once the others have come to the round under way."""
        del failure  # who waits for this member in the next sum is told that it is gone
        if self._twos is not None:
            self._twos.sums.close()
        self._sums.close()

    # ------------------------------------------------------------------ inside

    def _in_twos(self) -> "_Twos":
        """Give what rounds of twos take; made in the first of them, in all members."""
        if self._twos is None:
            group, sums = self._sums.group, self._sums
            if not carries(group, "cpu"):  # as NCCL's: another one beside it
                sums = Sums.among(group, of="the models", backend="gloo")
            self._twos = _Twos(sums, Pairs(sums, self._device), Later(sums, lag(self.size)))
        return self._twos

    def _begin_pair(self, said: Said) -> None:
        twos = self._in_twos()
        if said.partner is not None:
            twos.pairs.begin(
                said.partner,
                values=said.values,
                statistics=said.statistics,
                is_finite=said.weight > 0.0,
                is_at_work=said.is_at_work,
                mark=said.mark,
            )
        twos.later.say(_facts(said), said.wanted)

    def _finish_pair(self, said: Said) -> Heard:
        twos = self._in_twos()
        twos.pairs.wait()  # what breaks off either wait leaves both to be had
        known = twos.later.take()
        met = twos.pairs.take()
        if known is None:
            return Heard({}, 1.0, 0.0, self.size, None, 0.0, said.statistics, are_agreed=None, met=met)
        facts, wanted = known
        heard = self._heard(facts, {}, said.statistics)
        is_known = wanted is not None  # by a member that has loaded a state it is not
        return replace(heard, are_agreed=heard.are_agreed if is_known else None, wanted=wanted, met=met)

    def _heard(self, facts: Sequence[float], means: Flat, statistics: torch.Tensor) -> Heard:
        weight, samples, num_at_work, num_not_finite, metrics, num_metrics, rates, *marks = facts
        drifts, num_drifts = (*marks[NUM_MARKS:], 0.0, 0.0)[:2]  # which older states of pairs do not have
        return Heard(
            means,
            weight,
            samples,
            round(num_at_work),
            metrics / num_metrics if num_metrics else None,
            rates / (samples or 1.0),
            statistics,
            is_same=not is_other(marks[0], marks[1], self.size),
            are_agreed=not is_other(marks[2], marks[3], self.size),
            num_not_finite=round(num_not_finite),
            drift=drifts / num_drifts if num_drifts else None,
        )


def _facts(said: Said) -> list[float]:
    """Give what members add up besides their models."""
    metric = (0.0, 0.0) if said.metric is None else (said.metric, 1.0)
    drift = (0.0, 0.0) if said.drift is None else (said.drift, 1.0)  # in all members: sums are of one size
    marks = said.mark, said.mark**2, said.want, said.want**2
    sizes = said.weight, said.samples, float(said.is_at_work), float(not said.is_finite)
    return [*sizes, *metric, said.samples * said.rate, *marks, *drift]


def _said(name: str, value: object) -> str:
    """Give a setting's value, as JSON can have it, as a user writes it."""
    if name == "method" and isinstance(value, list):
        return worded(value)
    if name == "averaging_frequency" and isinstance(value, float):  # a time
        return repr(f"{value!r}s".replace(".0s", "s"))
    return repr(value)


def worded_terms(terms: str) -> str:
    """Give what `terms_of` gave as a user writes it; what was cut off, or is of another version, as it is."""
    if (named := _named(terms)) is None:
        return terms
    trained = named.pop(TRAINED)
    return f"{', '.join(f'{name}={value}' for name, value in named.items())}, {trained} parameters trained"


def differing_terms(own: str, theirs: str) -> str:
    """Word in what two members average differently, and what to do.

    Args:
        own: This member's, as `terms_of` gave them.
        theirs: Of those at the server.
    """
    here, there = _named(own) or {}, _named(theirs) or {}
    differing = {name: value for name, value in here.items() if there.get(name, value) != value}
    remedy = "give the same to all of them"
    if TRAINED in differing:
        remedy += ", and train the same parameters (requires_grad)"
    if not differing.keys().isdisjoint(PACE_NAMES) and here[PACE_NAMES[0]] != repr("time"):
        remedy += "; where machines differ in speed, averaging_policy='time' suits all"
    told = "; ".join(
        f"{name} {'are' if name == TRAINED else 'is'} {value} here and {there[name]} there"
        for name, value in differing.items()
    )
    if not told:  # what was cut off, or is of another version
        told = f"here by {worded_terms(own)}, and there by {worded_terms(theirs)}"
    return f"this member averages otherwise than those at the server: {told}: {remedy}"


def _named(terms: str) -> dict[str, str] | None:
    """Give what `terms_of` gave by keyword, as a user writes it; None where that is not known."""
    try:
        found = json.loads(terms)
        pace, overlap, metric = found["frequency, overlap, metric"]
        named = {"method": found["method"], **dict(zip(PACE_NAMES, pace, strict=False))}
        named |= {"overlap": overlap, "adaptation_metric": metric}
        settings = {name: _said(name, value) for name, value in named.items() if value is not None}
        return {**settings, TRAINED: str(found[TRAINED])}
    except (ValueError, KeyError, TypeError):
        return None


def terms_of(method: object, setting: object, are_trained: Sequence[bool]) -> str:
    """Say by what a member averages, in words that are the same where that is.

    Args:
        method: As JSON can have it.
        setting: Likewise.
        are_trained: Of each parameter, whether it is.
    """
    trained = f"{sum(are_trained)} of {len(are_trained)}"
    if not all(are_trained):  # as many others are not the same
        trained += f", {hashlib.sha256(bytes(are_trained)).hexdigest()[:8]}"
    terms = {"method": method, "frequency, overlap, metric": setting, TRAINED: trained}
    text = json.dumps(terms)  # in ASCII
    if len(text) <= MOST_TERMS:
        return text
    return f"{text[: MOST_TERMS - 64]}{hashlib.sha256(text.encode()).hexdigest()}"


def _others(said: Said, flats: Flat) -> list[torch.Tensor]:
    """Give the parts of flat memory whose `weights` are others."""
    parts = slices(said.parameters, flats) if said.weights else []
    return [parts[number] for number in said.weights]


def _times(flat: torch.Tensor, weight: float, *, out: torch.Tensor) -> torch.Tensor:
    """Multiply; by 0 what is not finite as well."""
    return torch.mul(flat, weight, out=out) if weight else out.zero_()
