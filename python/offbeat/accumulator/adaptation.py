"""How many micro-batches an update takes, and by how much its learning rate is larger than one's.

Pure: what was measured comes in, and what to do goes out.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

__all__ = ["Adaptation", "Mean", "Measurement", "pair"]

MICRO_BATCHES_REMEMBERED = 1000
"""A mean forgets what is so many micro-batches ago: AdaScale's smoothing, 1 - S/1000 in an update of S."""
SHARE_OF_TIMES = 0.1
"""Of the newest time in the mean of times."""
UPDATES_TO_BEGIN_WITH = 5
"""Whose noise has to be measured before anything is changed by it."""
EXPOSED = 0.1
"""What others may be waited for, at most, as a share of the time that computes, if a larger window helps."""
PROBE_EVERY = 8
"""Updates of one micro-batch, alone, where one more is of two: of one alone there is no noise to be seen."""
SLACK = 0.1
"""As a share of the micro-batches per update: by less they are not changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Of an update, over all members.

    Attributes:
        batches: Micro-batches in it.
        counts: Samples in it, or what a normalizer counts.
        small: Squared norm of a micro-batch's mean gradient; the mean of it, weighted by counts.
        big: Squared norm of the update's mean gradient.
        compute_s: Seconds that a micro-batch takes.
        communication_s: Seconds that the sum takes, from when the last member has begun it; None where
            nobody knows.
    """

    batches: float
    counts: float
    small: float
    big: float
    compute_s: float
    communication_s: float | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """An exponential mean, without the bias of its beginning.

    Attributes:
        total: Weighted sum of what was seen.
        weight: Of all of it.
    """

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        """The mean; None before there is one."""
        return self.total / self.weight if self.weight else None

    def after(self, value: float, share: float) -> "Mean":
        """Give the mean with one more value, which has this share in it."""
        keep = 1.0 - share
        return Mean(keep * self.total + share * value, keep * self.weight + share)


def pair(measured: Measurement) -> tuple[float, float] | None:
    """Estimate |G|^2 and tr(S), the true gradient's squared norm and the trace of one sample's covariance.

    Both are without bias, and so may be negative (McCandlish et al., 2018, appendix A.1). There it is two
    batch sizes; here the small one is what a micro-batch has in the mean, which is exact for micro-batches of
    any sizes, as their squared norms are weighted by their counts.

    Returns:
        None where there is but one size, or what was measured is not finite.
    """
    values = (measured.counts, measured.small, measured.big)
    if measured.batches < 2 or not all(map(math.isfinite, values)) or measured.counts <= 0:  # noqa: PLR2004
        return None
    large, small = measured.counts, measured.counts / measured.batches
    square = (large * measured.big - small * measured.small) / (large - small)
    trace = (measured.small - measured.big) / (1.0 / small - 1.0 / large)
    return (square, trace) if math.isfinite(square) and math.isfinite(trace) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptation:
    """As many micro-batches as the gradient's noise is worth, and as it takes to hide communication.

    The noise scale tr(S) / |G|^2 is the batch beyond which more samples say little more (McCandlish et al.,
    2018). Of what is below, fewer micro-batches would be enough, but for the time that sums over members
    take: so many are made, too, that what is waited for them is at most a tenth of what is computed. The
    larger of the two counts, within the bounds; in an update it is halved or doubled at most.

    Attributes:
        most: Micro-batches per update and member, at most; the least is 1.
        num_members: How many members there are.
        overlaps: Sums are made behind the next window's work.
        decided: Micro-batches per update and member, at present.
        square: Mean of |G|^2.
        trace: Mean of tr(S).
        size: Mean counts of a micro-batch.
        compute: Mean seconds of a micro-batch.
        communication: Mean seconds of a sum.
        num_updates: Seen so far.
        num_measured: Of these, such whose noise could be told.
        since_measured: Micro-batches after the newest of them.
    """

    most: int
    num_members: int
    overlaps: bool
    decided: int
    square: Mean = field(default=Mean())
    trace: Mean = field(default=Mean())
    size: Mean = field(default=Mean())
    compute: Mean = field(default=Mean())
    communication: Mean = field(default=Mean())
    num_updates: int = 0
    num_measured: int = 0
    since_measured: float = 0.0

    @property
    def steps(self) -> int:
        """Micro-batches in the next update, of each member."""
        probes = self.decided == self.num_members == 1 < self.most and self.num_updates % PROBE_EVERY == 0
        return 2 if probes else self.decided

    @property
    def noise_scale(self) -> float | None:
        """In samples, or what a normalizer counts; infinite where all is noise; None before it is known."""
        square, trace = self.square.value, self.trace.value
        if square is None or trace is None or self.num_measured < UPDATES_TO_BEGIN_WITH:
            return None
        if trace <= 0.0:
            return 0.0
        return trace / square if square > 0.0 else math.inf

    def gain(self, batches: float) -> float:
        """Give AdaScale's gain of an update of so many micro-batches, in 1 to `batches`.

        (var + |g|^2) / (var / S + |g|^2), with the variance of a micro-batch's gradient (Johnson et al.,
        2020): how many updates of one micro-batch this one stands for. 1 before the noise is known.
        """
        noise, size = self.noise_scale, self.size.value
        if noise is None or size is None or batches <= 1.0:
            return 1.0
        # The same, divided by its numerator, where it cannot overflow.
        share = 1.0 if math.isinf(noise) else noise / (noise + size)
        return min(max(1.0 / (share / batches + (1.0 - share)), 1.0), batches)

    def after(self, measured: Measurement) -> "Adaptation":
        """Give what to do after an update."""
        batches = self.since_measured + measured.batches
        now = replace(self, num_updates=self.num_updates + 1, since_measured=batches)
        if (found := pair(measured)) is not None:
            share = min(1.0, batches / MICRO_BATCHES_REMEMBERED)
            now = replace(
                now,
                square=self.square.after(found[0], share),
                trace=self.trace.after(found[1], share),
                size=self.size.after(measured.counts / measured.batches, share),
                num_measured=self.num_measured + 1,
                since_measured=0.0,
            )
        if measured.communication_s is not None and measured.compute_s > 0.0:
            now = replace(
                now,
                compute=self.compute.after(measured.compute_s, SHARE_OF_TIMES),
                communication=self.communication.after(measured.communication_s, SHARE_OF_TIMES),
            )
        return replace(now, decided=_decided(now))

    def state(self) -> dict[str, Any]:
        """Give what was learnt, as plain values."""
        return {name: value for name, value in asdict(self).items() if name not in SETTINGS}

    def resumed(self, state: Mapping[str, Any]) -> "Adaptation":
        """Give the adaptation as it was in another life, within today's bounds."""
        means = {
            f.name: Mean(**state[f.name]) for f in fields(self) if isinstance(getattr(self, f.name), Mean)
        }
        return replace(self, **{**state, **means, "decided": min(state["decided"], self.most)})


def _decided(now: Adaptation) -> int:
    noise, size = now.noise_scale, now.size.value
    if noise is None or size is None:
        return now.decided
    wanted = min(max(noise / (size * now.num_members), _to_hide(now)), float(now.most))
    wanted = min(max(wanted, now.decided / 2, 1.0), now.decided * 2.0)
    is_bound = wanted in (1.0, float(now.most))
    if not is_bound and abs(wanted - now.decided) < max(0.75, SLACK * now.decided):
        return now.decided
    return round(wanted)


def _to_hide(now: Adaptation) -> float:
    """Give the micro-batches that it takes to hide communication, or to make little of it."""
    compute, communication = now.compute.value, now.communication.value
    if not compute or communication is None:
        return 0.0
    return communication / (((1.0 if now.overlaps else 0.0) + EXPOSED) * compute)


SETTINGS = frozenset({"most", "num_members", "overlaps"})
"""What is not learnt."""
