"""Rounds of averaging: what is taken of a model, and what is made of it when the others' has come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offbeat.averaging.members import DIFFERENT, Members
from offbeat.averaging.memory import FragmentMemory
from offbeat.averaging.methods import Method, shown
from offbeat.averaging.statistics import Statistics, Taken
from offbeat.errors import ConfigError, StateError
from offbeat.local.flat import Flat, pack, slices
from offbeat.local.group import digest, is_other

__all__ = ["Outcome", "Progress", "Rounds"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this member is.

    Attributes:
        iterations: Since the start.
        samples: Since the start.
        is_at_work: It has not ended.
        rate: Learning rate of its optimizer's first group; 0 where it has none yet.
        metric: What the pace goes by; None where there is none.
        setting: What else has to be the same in all members, as JSON can have it.
    """

    iterations: int
    samples: int
    is_at_work: bool = True
    rate: float = 0.0
    metric: float | None = None
    setting: object = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round has come to.

    Attributes:
        num_at_work: Members that have not ended.
        samples: What it was weighted by, of all members.
        metric: Mean over the members that had one.
        drift: Mean square distance of this member's parameters from the members' mean.
        is_finite: This member's parameters were.
    """

    num_at_work: int
    samples: int
    metric: float | None
    drift: float | None
    is_finite: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """What members do in a round, and so what they send: agreed upon in the round before.

    Were it this round's own affair, members that differ would send one another sums of different sizes, and
    torch ends a process to which that happens.
    """

    method: Method
    are_trained: list[bool]


@dataclass(slots=True)
class _UnderWay:
    fragment: int
    parameters: list[nn.Parameter]
    wanted: "_Plan"
    own: Flat | None
    statistics: Taken
    iterations: int
    is_finite: bool


class Rounds:
    """Averages a model's fragments in turn.

    Attributes:
        number: Rounds begun.
        wanted_method: What is made of the mean after the next round, in which members agree on it. What the
            method before has kept is forgotten; a reference is, to begin with, the first mean, and velocities
            begin at 0.
        num_bytes: Sent by this member, in all rounds: what it has added to the sums.
        goes_on: The model is trained on while a round is under way; of those that begin from here on.
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
            measures_drift: Outcomes are to have a drift.

        """
        self.number = self.num_bytes = 0
        self._parameters = list(parameters)
        self._members = members
        self.goes_on = goes_on
        self._measures_drift = measures_drift
        self._statistics = Statistics(model)
        self._under_way: _UnderWay | None = None
        self._rate = 0.0
        self.wanted_method = method
        self._plan = self._wanted()
        self._lay_out(is_begun=True)

    @property
    def _method(self) -> Method:
        return self._plan.method

    @property
    def num_fragments(self) -> int:
        """Rounds that average the whole model once."""
        return len(self._fragments)

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._under_way is not None

    def is_there(self) -> bool:
        """Tell whether the round under way can be ended without waiting."""
        return self._members.is_there()

    def begin(self, progress: Progress) -> None:
        """Take the next fragment as it is and send it."""
        fragment = self.number % len(self._fragments)
        trained = self._trained(fragment)
        self._memories[fragment].fit(trained)
        own = pack(trained, trained) if trained else {}
        statistics = self._statistics.take(self._parameters[0].device)
        is_finite = all(_is_finite(flat) for flat in (*own.values(), statistics.values))
        samples = float(progress.samples - self._samples[fragment]) if is_finite else 0.0
        weight = samples if self._method.weighs == "samples" else float(is_finite)
        needs_own = self.goes_on or self._measures_drift or self._method.has_centre
        sent = own if not needs_own else {kind: flat.clone() for kind, flat in own.items()}
        for flat in sent.values():
            # Zero times what is not finite would not be zero.
            flat.mul_(weight) if is_finite else flat.zero_()
        shared = statistics.values * samples if is_finite else torch.zeros_like(statistics.values)
        wanted = self._wanted()
        mark = digest([shown(wanted.method), wanted.are_trained, progress.setting])
        metric = (0.0, 0.0) if progress.metric is None else (progress.metric, 1.0)
        facts = [weight, samples, float(progress.is_at_work), *metric, samples * progress.rate, mark, mark**2]
        self._members.begin(sent, facts, shared)
        self.num_bytes += sum(flat.nbytes for flat in (*sent.values(), shared)) + 8 * len(facts)
        self._samples[fragment] = progress.samples
        self._under_way = _UnderWay(
            fragment, trained, wanted, own if needs_own else None, statistics, progress.iterations, is_finite
        )
        self.number += 1

    def finish(self, iterations: int) -> Outcome:
        """Wait for the others' and bring the model to where the method leads it.

        Args:
            iterations: How far this member is by now; what it has learnt since the round began stays.

        Raises:
            StateError: If members are set differently, or train different parameters.
            ConnectionLostError: If a member is lost.
        """
        round_, self._under_way = self._under_way, None
        assert round_ is not None  # noqa: S101  one has begun
        sums, facts, statistics = self._members.finish()
        weight, samples, num_at_work, metrics, num_metrics, rate, marks, squares = facts
        if is_other(marks, squares, self._members.size):
            raise StateError(DIFFERENT)
        drift = None
        if weight:
            memory = self._memories[round_.fragment]
            for flat in sums.values():
                flat.div_(weight)
            memory.begin_with(sums)
            if self._measures_drift and round_.is_finite and round_.own is not None:
                drift = _square_distance(round_.own, sums)
            if samples:
                self._follow_rate(memory, rate / samples)
            self._move(round_, sums, has_moved=iterations > round_.iterations)
            if samples:
                self._statistics.settle(statistics / samples, round_.statistics)
        self._follow(round_.wanted)
        metric = metrics / num_metrics if num_metrics else None
        return Outcome(round(num_at_work), round(samples), metric, drift, round_.is_finite)

    def end_alike(self) -> None:
        """Leave in all members what they have in common, where a method lets each have its own model."""
        if not self._method.has_centre:
            return
        with torch.no_grad():
            for number, memory in enumerate(self._memories):
                trained = self._trained(number)
                memory.fit(trained)
                for parameter, part in zip(trained, memory.parts("reference"), strict=True):
                    parameter.copy_(part)

    def state_dict(self) -> dict[str, Any]:
        """Give what is kept from round to round; of no round under way."""
        return {
            "number": self.number,
            "rate": self._rate,
            "samples": list(self._samples),
            "method": shown(self._method),
            "memories": [memory.state_dict() for memory in self._memories],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """See that a state fits.

        Raises:
            ConfigError: If it is of another method or model.
        """
        if list(state["method"]) != shown(self._method) or len(state["memories"]) != len(self._memories):
            raise ConfigError(
                f"the state is of method {state['method']}, and here it is {shown(self._method)}: make the "
                f"averager with that one, load, and change the method then"
            )
        for memory, kept in zip(self._memories, state["memories"], strict=True):
            memory.check(kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `check` has let pass."""
        self.number, self._rate = int(state["number"]), float(state["rate"])
        self._samples = [int(samples) for samples in state["samples"]]
        for memory, kept in zip(self._memories, state["memories"], strict=True):
            memory.load_state_dict(kept)

    # ------------------------------------------------------------------ inside

    def _wanted(self) -> _Plan:
        return _Plan(self.wanted_method, [p.requires_grad for p in self._parameters])

    def _follow(self, plan: _Plan) -> None:
        """Do in the next round what all members have agreed upon in this one."""
        has_other_method = plan.method != self._method
        self._plan = plan
        if has_other_method:
            self._lay_out(is_begun=False)

    def _lay_out(self, *, is_begun: bool) -> None:
        num = self._method.num_fragments
        self._fragments = _split(range(len(self._parameters)), [p.numel() for p in self._parameters], num)
        self._memories = [
            FragmentMemory(self._method, self._trained(number), is_begun=is_begun) for number in range(num)
        ]
        # Fragments of another cut count from where the last of the old ones was averaged.
        self._samples = [0 if is_begun else max(self._samples)] * num

    def _trained(self, fragment: int) -> list[nn.Parameter]:
        are_trained = self._plan.are_trained
        return [self._parameters[place] for place in self._fragments[fragment] if are_trained[place]]

    def _follow_rate(self, memory: FragmentMemory, rate: float) -> None:
        """Scale the velocity with the learning rate of the members at work."""
        if self._method.scales_velocity and rate and self._rate and rate != self._rate:
            memory.scale_velocity(rate / self._rate)
        self._rate = rate or self._rate

    def _move(self, round_: _UnderWay, means: Flat, *, has_moved: bool) -> None:
        memory, method = self._memories[round_.fragment], self._method
        share = method.share_kept
        targets = {
            kind: method.target(
                mean, mean if round_.own is None else round_.own[kind], memory.of(kind), self._members.size
            )
            for kind, mean in means.items()
        }
        if not round_.is_finite and method.has_centre:
            targets = {kind: memory.of(kind)["reference"] for kind in means}
        adds = has_moved and round_.is_finite and share is None
        if adds:
            assert round_.own is not None  # noqa: S101  it goes on
            for kind, target in targets.items():
                target.sub_(round_.own[kind])
        with torch.no_grad():
            for parameter, part in zip(round_.parameters, slices(round_.parameters, targets), strict=True):
                if adds:
                    parameter.add_(part)
                elif has_moved and round_.is_finite and share is not None:
                    parameter.lerp_(part.to(parameter.dtype), 1.0 - share)
                else:
                    parameter.copy_(part)


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


def _square_distance(one: Flat, other: Flat) -> float:
    return float(sum(torch.dist(one[kind], other[kind]).item() ** 2 for kind in one))
