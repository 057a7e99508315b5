"""What an update's noise and times are, measured, and told to whoever decides by it."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from offbeat import log
from offbeat.accumulator.adaptation import Adaptation, Measurement
from offbeat.accumulator.members import Members, Total
from offbeat.accumulator.window import Sum
from offbeat.local.norm import square_norm

__all__ = ["Meter"]

TOLD_BEFORE = 0.1
"""Relative: a gain is logged when it has changed by more."""


class Meter:
    """Measures updates. All that it decides by is a sum over members, so that all decide alike.

    The squared norm of an update's gradient is known when that has come; it, and how long it took to come,
    travel with the next sum, and what was measured is whole then: decisions are one update late.

    Totals are means: what is divided by nothing grows with its micro-batches by itself.

    Attributes:
        adaptation: What was decided.
        gain: Of the newest update.
    """

    def __init__(self, adaptation: Adaptation, members: Members) -> None:
        self.adaptation = adaptation
        self.gain = 1.0
        self._members = members
        self._compute_s = 0.0  # of the window that is gathered
        self._began_s, self._sum_s = math.nan, math.inf  # of a sum: none yet, and not yet there
        self._big = math.nan  # squared norm of the newest update's gradient
        self._waiting: list[float] | None = None  # what is known of that update besides
        self._told_gain = 1.0

    def work(self, since_s: float) -> None:
        """Take down that a micro-batch was worked at since then, by `time.perf_counter`."""
        now_s = time.perf_counter()
        self._compute_s += now_s - since_s
        if math.isinf(self._sum_s) and self._members.is_there():
            self._sum_s = now_s - self._began_s

    def told(self, own: Sum | None, scale: float) -> list[float]:
        """Give what this member adds to what all know of an update.

        Args:
            own: Its window; None where it has ended.
            scale: What the window's losses were multiplied by.
        """
        batches, counts, squares = (0, 0.0, 0.0) if own is None else own.measured
        compute_s, self._compute_s = self._compute_s, 0.0
        slots = [0.0] * self._members.size
        slots[self._members.rank] = self._sum_s
        self._began_s, self._sum_s = time.perf_counter(), math.inf
        return [float(batches), counts, _unscaled(squares, scale), compute_s, self._big, *slots]

    def take(self, total: Total, told: Iterable[float], scale: float) -> None:
        """Take what all members told, and decide."""
        if math.isinf(self._sum_s):
            self._sum_s = time.perf_counter() - self._began_s
        batches, counts, squares, compute_s, bigs, *sums_s = told
        if self._waiting is not None:
            self._decide(*self._waiting, big=bigs / self._members.size, sum_s=min(sums_s))
        self._waiting = [batches, counts, squares / counts, compute_s / batches] if counts else None
        if batches:
            self.gain = self.adaptation.gain(batches)
        usual = self.adaptation.decided * self._members.size
        gain = self.adaptation.gain(usual)
        if abs(gain - self._told_gain) > TOLD_BEFORE * self._told_gain:
            self._told_gain = gain
            log.info("the gain of an update of %d micro-batches is %.3g", usual, gain)
        self._big = _unscaled(square_norm(total.gradients), scale) if counts else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Give what was measured and learnt, as plain values; of times, only what is learnt."""
        return {
            "adaptation": self.adaptation.state(),
            "gain": self.gain,
            "big": None if math.isnan(self._big) else self._big,
            "waiting": self._waiting,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.adaptation = self.adaptation.resumed(state["adaptation"])
        self.gain = state["gain"]
        self._big = math.nan if state["big"] is None else state["big"]
        self._waiting = state["waiting"]
        self._compute_s, self._began_s, self._sum_s = 0.0, math.nan, math.inf

    def _decide(
        self, batches: float, counts: float, small: float, compute_s: float, *, big: float, sum_s: float
    ) -> None:
        has_time = self._members.size > 1 and math.isfinite(sum_s)
        measured = Measurement(
            batches=batches,
            counts=counts,
            small=small,
            big=big,
            compute_s=compute_s,
            communication_s=sum_s if has_time else None,
        )
        before, self.adaptation = self.adaptation, self.adaptation.after(measured)
        if self.adaptation.decided != before.decided:
            noise = self.adaptation.noise_scale
            compute, communication = self.adaptation.compute.value, self.adaptation.communication.value
            log.info(
                "an update is of %d micro-batches per member instead of %d, by a noise scale of %.4g%s",
                self.adaptation.decided, before.decided, noise,
                "" if communication is None
                else f", {communication:.3g} s of a sum and {compute:.3g} s of a micro-batch",
            )  # fmt: skip


def _unscaled(square: float, scale: float) -> float:
    """Give a squared norm without the scale, which is 0 where every update was skipped for long."""
    return square / scale**2 if scale else math.nan
