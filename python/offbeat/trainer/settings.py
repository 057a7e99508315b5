"""What a trainer is told when it is made: checked together, and what of it holds in which epoch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from offbeat.averaging.methods import METHODS, Method, as_method
from offbeat.averaging.settings import overlap_faults
from offbeat.checks import Faults, at_least_one, is_count, is_number
from offbeat.errors import ConfigError
from offbeat.naming import unknown

__all__ = [
    "AMP",
    "REGULAR_EVERY",
    "WARM_UP_EVERY",
    "Amp",
    "Given",
    "Kind",
    "Sync",
    "Syncs",
    "as_kind",
    "faults_of",
    "kind_at",
    "kinds_in",
    "schedule_of",
    "shown_kind",
]

Amp: TypeAlias = Literal["none", "bf16", "fp16"]
Kind: TypeAlias = str | Method
"""A strategy: "local", "accumulate", "parameter_server", or a method of averaging."""

Given: TypeAlias = Kind | Mapping[int, Kind]
"""As a user gives it; or one by the epoch that it begins with, counted from 0."""

AMP = ("none", "bf16", "fp16")
NAMES = ("local", *METHODS, "accumulate", "parameter_server")
WARM_UP_EVERY = 10
"""Batches from meeting to meeting, where nothing is said: in the warm-up."""
REGULAR_EVERY = 100
"""Likewise, after it."""


@dataclass(frozen=True, slots=True)
class Sync:
    """How often members meet.

    Attributes:
        every: Batches from one meeting to the next.
        overlap: Whether they go on meanwhile, as `AsyncModelAverager` has it.
    """

    every: int
    overlap: bool | int


@dataclass(frozen=True, slots=True)
class Syncs:
    """How often members meet in which epoch.

    Attributes:
        warm_up_epochs: Epochs that are more synchronous.
        warm_up: In these.
        regular: In all others.
    """

    warm_up_epochs: int
    warm_up: Sync
    regular: Sync

    def at(self, epoch: int) -> Sync:
        """Give what holds in an epoch, counted from 0."""
        return self.warm_up if epoch < self.warm_up_epochs else self.regular

    def within(self, begin: int, end: float) -> list[Sync]:
        """Give all that hold from one epoch on, up to another."""
        found = [self.warm_up] if begin < min(self.warm_up_epochs, end) else []
        return [*found, self.regular] if end > max(begin, self.warm_up_epochs) else found

    def given(self) -> list[str]:
        """Give what is known to have been set, for it is other than where nothing is said; as it was said."""
        usual = {
            "warm_up_epochs": (self.warm_up_epochs, 0),
            "warm_up_sync_frequency": (self.warm_up.every, WARM_UP_EVERY),
            "regular_sync_frequency": (self.regular.every, REGULAR_EVERY),
        }
        return [f"{name}={value}" for name, (value, other) in usual.items() if value != other]


def as_kind(given: object) -> Kind:
    """Take a strategy by its name, or a method of averaging as an object.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(given, str):
        if given in METHODS:
            return as_method(given)
        if given not in NAMES:
            raise ConfigError(unknown("strategy", given, NAMES))
        return given
    if isinstance(given, Method) or (isinstance(given, type) and issubclass(given, Method)):
        return as_method(given)
    names = ", ".join(map(repr, NAMES))
    raise ConfigError(
        f"strategy is {given!r}: give one of {names}, an object such as offbeat.averaging.DiLoCo(lr=0.7), or "
        f"a dict of these by the epoch that each begins with"
    )


def schedule_of(given: object) -> dict[int, Kind]:
    """Take a strategy, or several by the epochs that they begin with, in the order of these.

    Raises:
        ConfigError: Naming each epoch and strategy that is none, and where epoch 0 has none.
    """
    if not isinstance(given, Mapping):
        return {0: as_kind(given)}
    faults = Faults()
    found = {}
    for epoch, one in given.items():
        kind = faults.catch(lambda one=one: as_kind(one))  # type: ignore[misc]
        if not is_count(epoch):
            faults.append(f"strategy has the epoch {epoch!r}: give whole numbers, from 0 on")
        elif kind is not None:
            found[epoch] = kind
    if 0 not in given:
        faults.append(
            'strategy says nothing of epoch 0, which is the first: give one for it, as in {0: "local", …}'
        )
    if faults:
        raise ConfigError("; ".join(faults))
    return dict(sorted(found.items()))


def kind_at(schedule: Mapping[int, Kind], epoch: int) -> Kind:
    """Give the strategy of an epoch: the one that has begun last."""
    return schedule[max(begin for begin in schedule if begin <= epoch)]


def kinds_in(schedule: Mapping[int, Kind], first: int, epochs: int) -> list[Kind]:
    """Give the strategies of so many epochs."""
    return [kind_at(schedule, first), *(kind for e, kind in schedule.items() if first < e < first + epochs)]


def shown_kind(kind: Kind) -> str:
    """Give a strategy as a user would."""
    return repr(kind)


def faults_of(
    *,
    warm_up_epochs: object,
    counts: Mapping[str, object],
    max_grad_norm: object,
    amp: object,
    compiles: object,
    overlap: object,
    loss_reduction: object,
) -> list[str]:
    """Tell what is wrong with the settings that need neither model nor device to be looked at."""
    faults = [*at_least_one(**counts), *overlap_faults(overlap)]
    if not is_count(warm_up_epochs):
        faults.append(f"warm_up_epochs is {warm_up_epochs!r}: give a whole number, 0 or more")
    if max_grad_norm is not None and not (is_number(max_grad_norm) and _is_positive(max_grad_norm)):
        faults.append(f"max_grad_norm is {max_grad_norm!r}: give a number above 0, or None")
    if amp not in AMP:
        faults.append(unknown("amp", amp, AMP))
    if not isinstance(compiles, bool | str):
        faults.append(f"compile is {compiles!r}: give True, False, or the name of a backend of torch.compile")
    if loss_reduction not in ("mean", "sum"):
        faults.append(unknown("loss_reduction", loss_reduction, ("mean", "sum")))
    return faults


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and number > 0 and math.isfinite(number)
