"""What a user gives a monitor, checked: all that is wrong is told at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offbeat import log
from offbeat.checks import Faults, at_least_one, is_number, objects, refuse, seconds
from offbeat.errors import ConfigError
from offbeat.monitor.alert import Alert
from offbeat.monitor.detector import METRICS, Metric
from offbeat.monitor.going_back import Rollback
from offbeat.monitor.remedies import NEEDS, REMEDIES, Numbers, make
from offbeat.monitor.remedy import Find, Remedy
from offbeat.naming import unknown
from offbeat.trained_by import trainers_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LR_FACTOR", "Callback", "Given", "Settings", "resolve"]

Callback = Callable[[Alert], object]

LR_FACTOR = 0.5
"""What "reduce_lr" multiplies by where nothing else is given."""

ON_GRADIENTS = frozenset({"clip", "reject"})
"""Remedies that act on the gradients of the model."""

ON_UPDATES = ON_GRADIENTS | {"reduce_lr"}
"""Remedies that let the update of one member of an accumulator's group be another one than the others'."""

OF_UPDATES = frozenset({"gradient_norm", "update_ratio", "non_finite"})
"""Metrics that are the same for all members of an accumulator's group, as their updates are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The keywords of `AsyncTrainingMonitor`, as given; its docstring says what they mean."""

    model: object
    divergence_metrics: object
    alert_threshold: object
    remediation_strategy: object
    acts_on: object
    callbacks: object
    warm_up: object
    patience: object
    quiet_steps: object
    lr_factor: object
    grad_scaler: object
    pause_timeout_s: object

    def faults(self) -> list[str]:
        """Tell which cannot be used, each by itself."""
        faults = objects(model=self.model, acts_on=self.acts_on)
        faults += at_least_one(warm_up=self.warm_up, patience=self.patience, quiet_steps=self.quiet_steps)
        if self.pause_timeout_s is not None:
            faults += seconds(pause_timeout_s=self.pause_timeout_s)
        if not (self.model is None or isinstance(self.model, type) or _is_module(self.model)):
            faults.append(f"model is of type {type(self.model).__name__}: give an nn.Module, or None")
        if not _is_between(0, self.alert_threshold):
            faults.append(
                f"alert_threshold is {self.alert_threshold!r}: give a share of the range's edge, 0 or more"
            )
        if not _is_between(0, self.lr_factor, 1) or self.lr_factor in (0, 1):
            faults.append(f"lr_factor is {self.lr_factor!r}: give a number between 0 and 1")
        if isinstance(self.grad_scaler, type):
            faults.append(
                f"grad_scaler is the class {self.grad_scaler.__name__}: give the one that multiplies the loss"
            )
        elif not (self.grad_scaler is None or hasattr(self.grad_scaler, "get_scale")):
            faults.append(f"grad_scaler is {self.grad_scaler!r}: give a torch.amp.GradScaler, or None")
        return faults


@dataclass(frozen=True, slots=True)
class Settings:
    """What was given, as it is used.

    Attributes:
        metrics: What is judged.
        names: The remedies in their order, by name.
        remedies: The remedies themselves.
        callbacks: Who is told of alerts.
        can_roll_back: Tells whether "rollback" would have something to act on now.
    """

    metrics: tuple[Metric, ...]
    names: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    callbacks: tuple[Callback, ...]
    can_roll_back: Callable[[], bool]

    @property
    def act_on_updates(self) -> bool:
        """Whether the update that all members of an accumulator's group make may be changed by it."""
        pauses = "pause" in self.names and not OF_UPDATES.isdisjoint(self.metrics)  # which drops it
        return pauses or not ON_UPDATES.isdisjoint(self.names)

    @property
    def parts_members(self) -> str:
        """Word what lets members of an accumulator's group part: who sees it changes its update, alone."""
        return _parts_members(set(self.metrics), set(self.names))


def resolve(given: Given) -> Settings:
    """Check what was given, and make the remedies.

    Raises:
        ConfigError: Naming everything that cannot be used.
    """
    faults = Faults(given.faults())
    metrics = faults.catch(lambda: _names("divergence_metrics", given.divergence_metrics, "metric", METRICS))
    names = faults.catch(
        lambda: _names("remediation_strategy", given.remediation_strategy, "remedy", REMEDIES)
    )
    if metrics and len(set(metrics)) < len(metrics):
        faults.append(f"divergence_metrics is {given.divergence_metrics!r}: name each metric once")
    if names and len(set(names)) < len(names):
        faults.append(
            f"remediation_strategy is {given.remediation_strategy!r}: name each remedy once; the last is "
            f"taken again where it does more each time"
        )
    told = (given.callbacks,) if callable(given.callbacks) else given.callbacks
    if not isinstance(told, list | tuple) or not all(map(callable, told)):
        faults.append(f"callbacks is {given.callbacks!r}: give a function of an Alert, or a list of them")
    refuse(faults + _of_members(given, set(metrics or ()), set(names or ())))
    remedies = _remedies(given, cast(tuple[str, ...], names))
    for warning in _warnings(given, set(names or ())):
        log.warn(warning)
    callbacks = tuple(cast(Sequence[Callback], told))
    find = _finds(given)
    return Settings(
        cast(tuple[Metric, ...], metrics),
        cast(tuple[str, ...], names),
        remedies,
        callbacks,
        lambda: any(Rollback(find).acts_on(thing) for thing in find()),
    )


def _finds(given: Given) -> Find:
    """Give what finds what there is to act on: as given, or what trains the model by then."""
    model = cast("nn.Module | None", given.model)
    things = [thing for thing in _acts_on(given) if thing is not None]
    return lambda: things if things or model is None else trainers_of(model)


def _acts_on(given: Given) -> list[object]:
    return list(given.acts_on) if isinstance(given.acts_on, list | tuple) else [given.acts_on]


def _of_members(given: Given, metrics: set[str], names: set[str]) -> list[str]:
    """Tell so where there is such a group already; one that is made later looks at its watchers."""
    trainers = trainers_of(given.model) if given.model is not None and _is_module(given.model) else []  # type: ignore[arg-type]  # looked at
    are_shared = any(getattr(trainer, "shares_updates", False) for trainer in trainers)
    parts = _parts_members(metrics, names) if are_shared else ""
    return [parts] if parts else []


def _parts_members(metrics: set[str], names: set[str]) -> str:
    others, doing = sorted(metrics - OF_UPDATES), sorted(names & ON_UPDATES)
    if not (others and doing):
        return ""
    return (
        f"divergence_metrics has {', '.join(others)}, which each member of the accumulator's group has of "
        f"its own, and {' and '.join(doing)} would change one member's update alone: name only such as are "
        f"of the update ({', '.join(sorted(OF_UPDATES))}), and judge the others by a monitor with another "
        f"remedy"
    )


def _remedies(given: Given, names: Sequence[str]) -> tuple[Remedy, ...]:
    """Make the remedies of a ladder.

    Raises:
        ConfigError: If one has nothing to act on, or something is given on which none acts.
    """
    model = cast("nn.Module | None", given.model)
    things = [thing for thing in _acts_on(given) if thing is not None]
    find = _finds(given)
    numbers = Numbers(float(cast(float, given.lr_factor)), cast("float | None", given.pause_timeout_s))
    made = {name: make(name, find, numbers) for name in names}
    found = find()
    faults = []
    for name, remedy in made.items():
        has = model is not None if name in ON_GRADIENTS else any(remedy.may_act_on(thing) for thing in found)
        if name in NEEDS and not has:
            there = f" ({', '.join(type(thing).__name__ for thing in found)} will not do)" if found else ""
            faults.append(
                f"remediation_strategy has {name!r}, which has nothing to act on{there}: it needs "
                f"{NEEDS[name]}{_where_from(given, name, found)}"
            )
    faults += [
        f"acts_on has one of type {type(thing).__name__}, and none of the remedies ({', '.join(names)}) acts "
        f"on it: leave it out"
        for thing in things
        if not any(remedy.may_act_on(thing) for remedy in made.values())
    ]
    refuse(faults)
    return tuple(made[name] for name in names)


def _warnings(given: Given, names: set[str]) -> list[str]:
    """Word what can be used and has no effect, or perhaps not the one that was meant."""
    warnings = []
    if given.lr_factor != LR_FACTOR and "reduce_lr" not in names:
        warnings.append(f"lr_factor={given.lr_factor!r} has no effect: no remedy is 'reduce_lr'")
    if given.pause_timeout_s is not None and "pause" not in names:
        warnings.append(f"pause_timeout_s={given.pause_timeout_s!r} has no effect: no remedy is 'pause'")
    if given.model is not None and (others := _of_other_models(given)):
        warnings.append(
            f"acts_on has {' and '.join(others)} with none of this model's parameters, and no optimizer with "
            f"any: what is reduced is not the rate of what is judged"
        )
    return warnings


def _of_other_models(given: Given) -> list[str]:
    """Name the optimizers that are given, where none of them has a parameter of the model."""
    from torch.optim import Optimizer

    optimizers = [thing for thing in _acts_on(given) if isinstance(thing, Optimizer)]
    ours = {id(p) for p in cast("nn.Module", given.model).parameters()}
    theirs = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    return [] if ours & theirs else [f"the optimizer {type(one).__name__}" for one in optimizers]


def _where_from(given: Given, name: str, found: Sequence[object]) -> str:
    """Say how a remedy comes by what it needs."""
    if name in ON_GRADIENTS or given.acts_on is not None:
        return ""
    if given.model is None:
        return "; give it as acts_on=, or the model=, by which what trains it is found"
    if found:
        return "; give it as acts_on="
    return (
        "; nothing has said yet that it trains this model: make the trainer, averager, accumulator or worker "
        "before the monitor, or give what the remedy is to act on as acts_on="
    )


def _names(keyword: str, given: object, kind: str, known: Sequence[str]) -> tuple[str, ...]:
    """Give names as a tuple; one alone is one of a list.

    Raises:
        ConfigError: If there is none, or one is not known.
    """
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names:
        raise ConfigError(f"{keyword} is {given!r}: give a name or a list of them: {', '.join(known)}")
    refuse(unknown(kind, name, known) for name in names if name not in known)
    return tuple(names)


def _is_between(least: float, value: object, most: float = float("inf")) -> bool:
    return is_number(value) and least <= cast(float, value) <= most


def _is_module(model: object) -> bool:
    from torch import nn

    return isinstance(model, nn.Module)
