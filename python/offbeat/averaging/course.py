"""How far a member is: what it has trained, and how long ago its last rounds began and ended."""

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Course"]


class Course:
    """Counts of iterations, samples and rounds, and a clock that counts from the end of a round.

    Attributes:
        iterations: Since the start.
        samples: Since the start.
        rounds: That have changed this member's model.
        losses: Since the last round began, of those that were given.
        drift: As the newest round that told it has it; None before.
        begun_at: After how many iterations the last round began; 0 before the first.
    """

    def __init__(self) -> None:
        """Begin, with the clock at 0."""
        self.iterations = self.samples = self.rounds = self.begun_at = 0
        self.losses: list[float] = []
        self.drift: float | None = None
        self._averaged_at = 0
        self._before_round: tuple[int, list[float]] | None = None  # what the one under way has begun with
        self._begun_s = self._ended_s = time.monotonic()

    def advance(self, samples: int, loss: float | None) -> None:
        """Count an iteration; None: its loss is not asked for."""
        self.iterations += 1
        self.samples += samples
        if loss is not None:
            self.losses.append(float(loss))

    def begin_round(self) -> None:
        """Take note that a round begins."""
        self._before_round = self.begun_at, self.losses
        self.begun_at, self._begun_s = self.iterations, time.monotonic()
        self.losses = []

    def end_round(self) -> None:
        """Take note that it has ended, whatever came of it."""
        self._before_round = None
        self._ended_s = time.monotonic()

    def count_round(self, drift: float | None) -> None:
        """Take note that a round has changed the model; and of the drift, where it tells one."""
        self.rounds += 1
        self._averaged_at = self.iterations
        self.drift = drift if drift is not None else self.drift

    @property
    def since_begin(self) -> int:
        """Iterations since the last round began, or since the start."""
        return self.iterations - self.begun_at

    @property
    def since_average(self) -> int:
        """Iterations since the model was averaged last, or since the start."""
        return self.iterations - self._averaged_at

    @property
    def seconds(self) -> float:
        """Seconds since the last round ended, or since the start.

        Members begin a round one by one and end it together: counted from its end, the next begins at about
        the same time in all of them, however long each has waited for the others in this one.
        """
        return time.monotonic() - self._ended_s

    @property
    def seconds_since_begin(self) -> float:
        """Seconds since the last round began, or since the start."""
        return time.monotonic() - self._begun_s

    def state_dict(self) -> dict[str, Any]:
        """Give what it takes to go on; where a round is under way, as if it had not begun."""
        begun_at, losses = self._before_round or (self.begun_at, [])
        return {
            "iterations": self.iterations,
            "samples": self.samples,
            "averaging_round": self.rounds,
            "since_begin": self.iterations - begun_at,
            "since_average": self.since_average,
            "seconds": self.seconds,
            "losses": [*losses, *self.losses],
            "drift": self.drift,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.iterations, self.samples = state["iterations"], state["samples"]
        self.rounds = state["averaging_round"]
        self.begun_at = self.iterations - state["since_begin"]
        self._averaged_at = self.iterations - state["since_average"]
        self._begun_s = self._ended_s = time.monotonic() - state["seconds"]
        self._before_round = None
        self.losses, self.drift = list(state["losses"]), state["drift"]
