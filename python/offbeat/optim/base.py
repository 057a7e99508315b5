"""What every spec of an optimizer shares: keywords, checks, groups, and its form for the Rust core."""

import importlib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from offbeat.errors import ConfigError
from offbeat.naming import unknown

__all__ = ["IGNORED", "Groups", "OptimizerSpec", "make", "spec_class"]

Groups = Sequence[Mapping[str, Any]]

IGNORED = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Keywords of torch.optim that choose how torch computes, not what: accepted, and without effect here."""


class OptimizerSpec:
    """What the specs share: filling, checking, groups, and the form in which the Rust core reads them.

    `groups` gives tensors values of their own by name: ``groups=[{"pattern": "*.bias", "weight_decay": 0}]``.
    Patterns are shell patterns (`*`, `?`) over the names in `state_dict()`; the first that matches counts.
    What a group does not name is the spec's; so is all of a tensor that no pattern matches.
    """

    _limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Least value and first value beyond, of a number that may not be anything from 0 up."""
    groups: Groups

    def __init__(self, **keywords: object) -> None:
        defaults = _defaults(type(self))
        faults = [
            unknown(f"keyword of {type(self).__name__}", name, list(defaults))
            for name in keywords
            if name not in defaults and name not in IGNORED
        ]
        values = {name: keywords.get(name, default) for name, default in defaults.items()}
        given = values.pop("groups")
        cleaned, wrong = self._clean(values, "")
        faults += wrong
        groups: list[dict[str, Any]] = []
        if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
            faults.append(f"groups is {given!r}: it is a list of dicts, each with a 'pattern'")
            given = ()
        for position, group in enumerate(given):
            if not isinstance(group, Mapping) or not isinstance(group.get("pattern"), str):
                faults.append(
                    f"groups[{position}] is {group!r}: it is a dict with a 'pattern', such as '*.bias'"
                )
                continue
            own = {name: value for name, value in group.items() if name != "pattern"}
            own, wrong = self._clean(own, f"groups[{position}].")
            groups.append({"pattern": group["pattern"], **own})
            faults += wrong
        if not faults:
            faults += self._clash(cleaned) or [
                f"groups[{i}]: {c}" for i, g in enumerate(groups) for c in self._clash(cleaned | g)
            ]
        if faults:
            raise ConfigError("; ".join(faults))
        for name, value in (cleaned | {"groups": tuple(groups)}).items():
            object.__setattr__(self, name, value)

    def spec(self, *, momentum_correction: bool | None = None) -> dict[str, Any]:
        """Write the spec as the Rust core's `OptimizerSpec`, every default filled in.

        Args:
            momentum_correction: Whether SGD's momentum lives in the workers. None: where it can.

        Returns:
            What JSON carries: ``{"groups": [{"pattern", "lr", "rule": {"name", …}}], …}``.

        Raises:
            ConfigError: If it is True and there is no momentum that could live in the workers.
        """
        base = {name: getattr(self, name) for name in _defaults(type(self)) if name != "groups"}
        groups = [base | dict(group) for group in (*self.groups, {"pattern": "*"})]
        able = self._correctable(groups)
        if momentum_correction and not able:
            raise ConfigError(
                f"momentum_correction=True needs SGD with momentum > 0 and dampening = 0; it is {self!r}"
            )
        return {
            "groups": [
                {"pattern": g.pop("pattern"), "lr": g.pop("lr"), "rule": self._rule(g)} for g in groups
            ],
            "momentum_correction": able if momentum_correction is None else momentum_correction,
        }

    def _rule(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"name": type(self).__name__} | values

    def _correctable(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        del groups
        return False

    def _clash(self, values: Mapping[str, Any]) -> list[str]:
        """What is wrong with values that are each right by themselves."""
        del values
        return []

    def _clean(self, given: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
        """Bring each value to its field's type; what cannot be is told instead."""
        defaults = _defaults(type(self))
        del defaults["groups"]
        values, faults = {}, []
        for name, value in given.items():
            if name in defaults:
                try:
                    values[name] = self._value(name, value, defaults[name])
                except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                    faults.append(f"{where}{name} is {value!r}: {error}")
            elif name not in IGNORED:
                # Not with `where` before each name: so much that is the same makes any two near.
                kind = f"keyword of {type(self).__name__} in {where.rstrip('.')}"
                faults.append(unknown(kind, name, list(defaults)))
        return values, faults

    def _value(self, name: str, value: object, default: object) -> object:
        if isinstance(default, bool):
            if value not in (True, False):
                raise TypeError("it is True or False")
            return bool(value)
        if isinstance(default, int):
            number = self._number(name, value)
            if not number.is_integer():
                raise ValueError("it is a whole number")
            return int(number)
        if isinstance(default, tuple):
            first, second = cast(Sequence[object], value)
            return self._number(name, first), self._number(name, second)
        return self._number(name, value)

    def _number(self, name: str, value: object) -> float:
        low, high = self._limits.get(name, (0.0, math.inf))
        number = (
            math.nan if isinstance(value, bool | str) else float(cast(float, value))
        )  # also takes 0-d tensors
        if not (low <= number < high and math.isfinite(number)):
            bounds = (
                f"from {low:g} to below {high:g}" if math.isfinite(high) else f"{low:g} or more, and finite"
            )
            raise ValueError(f"it is a number, {bounds}")
        return number


Spec = TypeVar("Spec", bound=type[OptimizerSpec])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def spec_class(cls: Spec) -> Spec:
    """Make a frozen dataclass with the shared constructor, and a signature that shows its keywords."""
    made = cast(Spec, dataclass(frozen=True, init=False)(cls))
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter(name, keyword, default=value) for name, value in _defaults(made).items()]
    made.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # `inspect` reads it
    return made


def _defaults(cls: type[OptimizerSpec]) -> dict[str, Any]:
    return {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]  # each subclass is a dataclass


def make(cls: type[OptimizerSpec], args: tuple[object, ...], keywords: Mapping[str, object]) -> object:
    """Make a spec of keywords alone; of parameters and keywords torch's optimizer of that name."""
    if not args:
        return object.__new__(cls)
    if not isinstance(args[0], Iterable):
        raise ConfigError(
            f"{cls.__name__}({args[0]!r}): give keywords by name, as {cls.__name__}(lr=0.1); before them "
            f"comes nothing, or for a live optimizer model.parameters()"
        )
    made_by_torch = getattr(importlib.import_module("torch.optim"), cls.__name__, None)
    if made_by_torch is None:
        raise ConfigError(f"{cls.__name__} runs on the server alone: give keywords, and no parameters")
    return made_by_torch(*args, **keywords)
