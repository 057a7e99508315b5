"""The update rules that the server runs, one class each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, overload

from offbeat.optim.base import Groups, OptimizerSpec, make, spec_class

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import ParamsT

__all__ = ["SGD", "SPECS", "Adagrad", "Adam", "AdamW", "DelayedNesterov", "RMSprop"]


@spec_class
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
        return make(cls, args, keywords)

    def _clash(self, values: Mapping[str, Any]) -> list[str]:
        if values["nesterov"] and (values["momentum"] <= 0 or values["dampening"] != 0):
            return ["nesterov=True needs momentum > 0 and dampening = 0"]
        return []

    def _correctable(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        return any(g["momentum"] > 0 for g in groups) and all(g["dampening"] == 0 for g in groups)


@spec_class
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
        return make(cls, args, keywords)


@spec_class
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
        return make(cls, args, keywords)

    def _rule(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"name": "Adam", "decoupled_weight_decay": True} | values


@spec_class
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
        return make(cls, args, keywords)


@spec_class
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
        return make(cls, args, keywords)


@spec_class
class DelayedNesterov(OptimizerSpec):
    """SGD with Nesterov momentum for pushes that come one by one: the outer step of asynchronous DiLoCo.

    Each push steps by its share, ``gradient / delay``; the momentum steps once in `delay` pushes, on their
    mean, so that it is not slowed down by stale ones. With ``delay=1`` it is
    ``torch.optim.SGD(nesterov=True)``; torch has nothing for more. It runs on the server alone, and keeps two
    numbers for each parameter.

    Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (2024), algorithm 3: `delay` is their
    N, best the number of members, and `activation` their c, 0 to 1 / delay: how much of the momentum's step
    comes with each push rather than with the last of `delay`.

    Example:
        >>> offbeat.optim.DelayedNesterov(lr=0.7, delay=4).delay
        4
    """

    lr: float = 0.7
    momentum: float = 0.9
    delay: int = 1
    activation: float = 0.0
    groups: Groups = field(default=(), hash=False)

    _limits: ClassVar = {"momentum": (0.0, 1.0), "delay": (1.0, 2.0**53)}

    def __new__(cls, /, *args: object, **keywords: object) -> Self:
        """Make a spec."""
        return cast(Self, make(cls, args, keywords))

    def _clash(self, values: Mapping[str, Any]) -> list[str]:
        if values["activation"] * values["delay"] > 1.0:
            most = 1.0 / values["delay"]
            return [
                f"activation is {values['activation']}, and delay {values['delay']}: it is at most {most:g}"
            ]
        return []


SPECS: Mapping[str, type[OptimizerSpec]] = {
    cls.__name__: cls for cls in (SGD, Adam, AdamW, Adagrad, RMSprop, DelayedNesterov)
}
