"""Optimizers that run on the server: torch.optim's names, keywords, defaults and numerics, as plain values.

`offbeat.optim.SGD(lr=0.1)` is a spec: it holds no tensors, and the server computes with it, in Rust.
`offbeat.optim.SGD(model.parameters(), lr=0.1)` is the live `torch.optim.SGD` of that call: it computes on
the worker, which then pushes differences. These are two algorithms: log and status say which one runs.

torch is imported only for the second form.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, dataclass_transform, overload

from offbeat.errors import ConfigError
from offbeat.naming import unknown

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import ParamsT

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "OptimizerSpec", "RMSprop", "as_spec", "is_live"]

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
                except (TypeError, ValueError, RuntimeError) as error:
                    faults.append(f"{where}{name} is {value!r}: {error}")
            elif name not in IGNORED:
                faults.append(
                    unknown(f"keyword of {type(self).__name__}", where + name, [where + d for d in defaults])
                )
        return values, faults

    def _value(self, name: str, value: object, default: object) -> object:
        if isinstance(default, bool):
            if value not in (True, False):
                raise TypeError("it is True or False")
            return bool(value)
        if isinstance(default, tuple):
            first, second = cast(Sequence[object], value)
            return self._number(name, first), self._number(name, second)
        return self._number(name, value)

    def _number(self, name: str, value: object) -> float:
        low, high = self._limits.get(name, (0.0, math.inf))
        number = (
            math.nan if isinstance(value, bool | str) else float(cast(float, value))
        )  # also takes 0-d tensors
        if not low <= number < high:
            raise ValueError(f"it is a number from {low:g} to below {high:g}")
        return number


Spec = TypeVar("Spec", bound=type[OptimizerSpec])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _spec(cls: Spec) -> Spec:
    """Make a frozen dataclass with the shared constructor, and a signature that shows its keywords."""
    made = cast(Spec, dataclass(frozen=True, init=False)(cls))
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [inspect.Parameter(name, keyword, default=value) for name, value in _defaults(made).items()]
    made.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # `inspect` reads it
    return made


def _defaults(cls: type[OptimizerSpec]) -> dict[str, Any]:
    return {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]  # each subclass is a dataclass


@_spec
class SGD(OptimizerSpec):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    With momentum > 0 and dampening = 0 the momentum lives in the workers, unless the server says
    ``momentum_correction=False``: one worker alone then computes what torch computes with ``nesterov=True``.

    Example:
        >>> offbeat.optim.SGD(lr=0.1, momentum=0.9, groups=[{"pattern": "*.bias", "lr": 0.2}]).momentum
        0.9
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    groups: Groups = field(default=(), hash=False)

    _limits: ClassVar = {"dampening": (-math.inf, math.inf)}

    @overload
    def __new__(
        cls,
        /,
        *,
        lr: float = ...,
        momentum: float = ...,
        dampening: float = ...,
        weight_decay: float = ...,
        nesterov: bool = ...,
        maximize: bool = ...,
        groups: Groups = ...,
    ) -> Self: ...
    @overload
    def __new__(cls, params: "ParamsT", /, **keywords: object) -> "torch.optim.SGD": ...  # type: ignore[misc]
    def __new__(cls, /, *args: Any, **keywords: Any) -> Any:
        """Make a spec, or torch's optimizer where parameters are given."""
        return _make(cls, args, keywords)

    def _clash(self, values: Mapping[str, Any]) -> list[str]:
        if values["nesterov"] and (values["momentum"] <= 0 or values["dampening"] != 0):
            return ["nesterov=True needs momentum > 0 and dampening = 0"]
        return []

    def _correctable(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        return any(g["momentum"] > 0 for g in groups) and all(g["dampening"] == 0 for g in groups)


@_spec
class Adam(OptimizerSpec):
    """Adam, as `torch.optim.Adam`; moments and step counts are the server's, shared by all workers."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    groups: Groups = field(default=(), hash=False)

    _limits: ClassVar = {"betas": (0.0, 1.0)}

    @overload
    def __new__(
        cls,
        /,
        *,
        lr: float = ...,
        betas: tuple[float, float] = ...,
        eps: float = ...,
        weight_decay: float = ...,
        amsgrad: bool = ...,
        maximize: bool = ...,
        decoupled_weight_decay: bool = ...,
        groups: Groups = ...,
    ) -> Self: ...
    @overload
    def __new__(cls, params: "ParamsT", /, **keywords: object) -> "torch.optim.Adam": ...  # type: ignore[misc]
    def __new__(cls, /, *args: Any, **keywords: Any) -> Any:
        """Make a spec, or torch's optimizer where parameters are given."""
        return _make(cls, args, keywords)


@_spec
class AdamW(OptimizerSpec):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False
    groups: Groups = field(default=(), hash=False)

    _limits: ClassVar = {"betas": (0.0, 1.0)}

    @overload
    def __new__(
        cls,
        /,
        *,
        lr: float = ...,
        betas: tuple[float, float] = ...,
        eps: float = ...,
        weight_decay: float = ...,
        amsgrad: bool = ...,
        maximize: bool = ...,
        groups: Groups = ...,
    ) -> Self: ...
    @overload
    def __new__(cls, params: "ParamsT", /, **keywords: object) -> "torch.optim.AdamW": ...  # type: ignore[misc]
    def __new__(cls, /, *args: Any, **keywords: Any) -> Any:
        """Make a spec, or torch's optimizer where parameters are given."""
        return _make(cls, args, keywords)

    def _rule(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"name": "Adam", "decoupled_weight_decay": True} | values


@_spec
class Adagrad(OptimizerSpec):
    """Adagrad, as `torch.optim.Adagrad`."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    groups: Groups = field(default=(), hash=False)

    @overload
    def __new__(
        cls,
        /,
        *,
        lr: float = ...,
        lr_decay: float = ...,
        weight_decay: float = ...,
        initial_accumulator_value: float = ...,
        eps: float = ...,
        maximize: bool = ...,
        groups: Groups = ...,
    ) -> Self: ...
    @overload
    def __new__(cls, params: "ParamsT", /, **keywords: object) -> "torch.optim.Adagrad": ...  # type: ignore[misc]
    def __new__(cls, /, *args: Any, **keywords: Any) -> Any:
        """Make a spec, or torch's optimizer where parameters are given."""
        return _make(cls, args, keywords)


@_spec
class RMSprop(OptimizerSpec):
    """RMSprop, as `torch.optim.RMSprop`."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False
    groups: Groups = field(default=(), hash=False)

    @overload
    def __new__(
        cls,
        /,
        *,
        lr: float = ...,
        alpha: float = ...,
        eps: float = ...,
        weight_decay: float = ...,
        momentum: float = ...,
        centered: bool = ...,
        maximize: bool = ...,
        groups: Groups = ...,
    ) -> Self: ...
    @overload
    def __new__(cls, params: "ParamsT", /, **keywords: object) -> "torch.optim.RMSprop": ...  # type: ignore[misc]
    def __new__(cls, /, *args: Any, **keywords: Any) -> Any:
        """Make a spec, or torch's optimizer where parameters are given."""
        return _make(cls, args, keywords)


_SPECS: Mapping[str, type[OptimizerSpec]] = {
    cls.__name__: cls for cls in (SGD, Adam, AdamW, Adagrad, RMSprop)
}


def as_spec(optimizer: object) -> OptimizerSpec:
    """Turn what a user may give for a server-side optimizer into its spec.

    Args:
        optimizer: A spec; a class of `offbeat.optim` or `torch.optim`, which means its defaults; or
            ``functools.partial(torch.optim.X, lr=…)``.

    Raises:
        ConfigError: If it is none of these, a live optimizer included, or of a class the server lacks.
    """
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    if isinstance(optimizer, functools.partial):
        if optimizer.args:
            raise ConfigError(
                f"{optimizer!r} holds parameters: leave them out, or call it and pass the live optimizer"
            )
        return _class_of(optimizer.func)(**optimizer.keywords)
    if is_live(optimizer):
        raise ConfigError(
            f"a live {type(optimizer).__name__} runs on the worker and cannot be the server's optimizer; "
            "give a spec instead, such as offbeat.optim.SGD(lr=0.1)"
        )
    return _class_of(optimizer)()


def is_live(optimizer: object) -> bool:
    """Whether this is a `torch.optim.Optimizer`, told without importing torch."""
    names = ("param_groups", "step", "zero_grad", "state_dict")
    return not isinstance(optimizer, type) and all(hasattr(optimizer, name) for name in names)


def _class_of(made_by: object) -> type[OptimizerSpec]:
    if isinstance(made_by, type):
        if issubclass(made_by, OptimizerSpec) and made_by.__name__ in _SPECS:
            return made_by
        if made_by.__module__.partition(".")[0] == "torch" and made_by.__name__ in _SPECS:
            return _SPECS[made_by.__name__]
        raise ConfigError(
            f"{made_by.__module__}.{made_by.__qualname__} does not run on the server, which has "
            f"{', '.join(_SPECS)}; pass a live optimizer, which runs on the worker: "
            f"{made_by.__qualname__}(model.parameters(), …)"
        )
    if isinstance(made_by, str):
        raise ConfigError(
            f"{unknown('optimizer', made_by, list(_SPECS))}. Give an object: offbeat.optim.SGD(lr=0.1)"
        )
    raise ConfigError(
        f"{made_by!r} is no optimizer; give offbeat.optim.SGD(lr=0.1) or its like, or a live one"
    )


def _make(cls: type[OptimizerSpec], args: tuple[object, ...], keywords: Mapping[str, object]) -> object:
    if not args:
        return object.__new__(cls)
    if not isinstance(args[0], Iterable):
        raise ConfigError(
            f"{cls.__name__}({args[0]!r}): give keywords by name, as {cls.__name__}(lr=0.1); before them "
            f"comes nothing, or for a live optimizer model.parameters()"
        )
    return getattr(importlib.import_module("torch.optim"), cls.__name__)(*args, **keywords)
