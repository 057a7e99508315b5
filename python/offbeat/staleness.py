"""Staleness policies: what a late push is worth, and which one is too late.

A push that nobody overtook (staleness τ = 0) counts in full, to the bit. To the others a policy gives a
weight in (0, 1] that scales everything the push will ever do; several multiply. Each policy also has a name:
``staleness_policy="adaptive_lr"`` is ``AdaptiveLR()`` with `ParameterServer`'s keywords filled in.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.checks import Faults, is_count, is_number, refuse
from offbeat.errors import ConfigError
from offbeat.naming import strict_keywords, unknown

__all__ = [
    "AdaptiveLR",
    "Constant",
    "GradientFiltering",
    "Hinge",
    "Inverse",
    "MomentumCorrection",
    "Polynomial",
    "StalenessPolicy",
    "resolve",
]

DEFAULT_LR_FACTOR = 0.9
"""`staleness_lr_factor`'s default. It counts as not said: only another value can disagree with an object."""


class StalenessPolicy:
    """What the policies share; not used by itself."""

    name: ClassVar[str]
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if faults := self._faults() + no_bound(self.max_staleness):
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(faults))

    def weight(self) -> dict[str, Any] | None:
        """Write the weight as the Rust core's `Weight`; None if this policy weighs nothing."""
        return self._weight()

    def _faults(self) -> list[str]:
        return []

    def _weight(self) -> dict[str, Any] | None:
        return None


@strict_keywords
@dataclass(frozen=True)
class Constant(StalenessPolicy):
    """Every push counts in full, however late: weight 1."""

    name = "constant"

    def _weight(self) -> dict[str, Any]:
        return {"name": self.name}


@strict_keywords
@dataclass(frozen=True)
class AdaptiveLR(StalenessPolicy):
    """Weight factor^τ: each update missed takes off the same share.

    Attributes:
        factor: In (0, 1].
        max_staleness: A push staler than this is rejected; None rejects none.
    """

    factor: float = DEFAULT_LR_FACTOR
    max_staleness: int | None = None
    name = "adaptive_lr"

    def _faults(self) -> list[str]:
        return _no_factor("factor", self.factor)

    def _weight(self) -> dict[str, Any]:
        return {"name": self.name, "factor": float(self.factor)}


@strict_keywords
@dataclass(frozen=True)
class Inverse(StalenessPolicy):
    """Weight 1 / (1 + τ)."""

    name = "inverse"

    def _weight(self) -> dict[str, Any]:
        return {"name": self.name}


@strict_keywords
@dataclass(frozen=True)
class Polynomial(StalenessPolicy):
    """Weight (1 + τ)^−a.

    Attributes:
        a: Exponent, 0 or more; 0 damps nothing.

    Source: Xie, Koyejo, Gupta 2019, "Asynchronous Federated Optimization", section 5.2.
    """

    a: float = 0.5
    name = "polynomial"

    def _faults(self) -> list[str]:
        return _not_negative("a", self.a)

    def _weight(self) -> dict[str, Any]:
        return {"name": self.name, "a": float(self.a)}


@strict_keywords
@dataclass(frozen=True)
class Hinge(StalenessPolicy):
    """Weight 1 up to τ = b, then 1 / (a (τ − b) + 1).

    Attributes:
        a: How steep it falls, 0 or more.
        b: Updates that a push may be late at no cost, 0 or more.

    Source: Xie, Koyejo, Gupta 2019, section 5.2.
    """

    a: float = 10.0
    b: int = 4
    name = "hinge"

    def _faults(self) -> list[str]:
        wrong = [] if is_count(self.b) else [f"b is {self.b!r}: it is a whole number, 0 or more"]
        return _not_negative("a", self.a) + wrong

    def _weight(self) -> dict[str, Any]:
        return {"name": self.name, "a": float(self.a), "b": self.b}


@strict_keywords
@dataclass(frozen=True)
class GradientFiltering(StalenessPolicy):
    """Rejects a push that is too late, and on request one that is too large; weighs nothing.

    Attributes:
        max_staleness: A push staler than this is rejected.
        max_norm: A push whose gradient has a larger L2 norm is rejected, which can only be told of a whole
            push: it makes the transaction "model".
    """

    max_staleness: int | None = None
    max_norm: float | None = None
    name = "gradient_filtering"

    def _faults(self) -> list[str]:
        good = self.max_norm is None or (is_number(self.max_norm) and self.max_norm > 0)
        return (
            [] if good else [f"max_norm is {self.max_norm!r}: it is a number above 0, or None for no limit"]
        )


@strict_keywords
@dataclass(frozen=True)
class MomentumCorrection(StalenessPolicy):
    """SGD's momentum lives in the workers, where stale pushes cannot make it diverge: the default, said.

    Source: Hakimi, Barkai, Gabel, Schuster 2019, "Taming Momentum in a Distributed Asynchronous
    Environment", algorithm 6 (DANA-Slim).
    """

    name = "momentum_correction"


_POLICIES: Mapping[str, type[StalenessPolicy]] = {
    cls.name: cls
    for cls in (Constant, AdaptiveLR, Inverse, Polynomial, Hinge, GradientFiltering, MomentumCorrection)
}
Policy = str | StalenessPolicy | Sequence[str | StalenessPolicy]


def resolve(
    policy: Policy,
    *,
    lr_factor: float = DEFAULT_LR_FACTOR,
    max_staleness: int | None = None,
    momentum_correction: bool | None = None,
) -> tuple[dict[str, Any], bool | None]:
    """Bring policies and the keywords beside them to one specification.

    Args:
        policy: A name, an object of this module, or a list of them; their order does not matter.
        lr_factor: `AdaptiveLR`'s factor where that is given by name; other policies do not ask for it.
        max_staleness: The admission bound, in updates.
        momentum_correction: The server's keyword.

    Returns:
        The Rust core's `StalenessSpec` as JSON carries it, and the momentum correction wished for (None:
        where the optimizer can have it).

    Raises:
        ConfigError: If a name is unknown, or a keyword and an object disagree; it names both values.
    """
    given = policy if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    faults = Faults(no_bound(max_staleness))
    is_asked_for = any(isinstance(p, str) and p == AdaptiveLR.name for p in given)
    wrong = _no_factor("staleness_lr_factor", lr_factor) if is_asked_for else []
    faults += wrong
    factor = DEFAULT_LR_FACTOR if wrong else lr_factor
    found = [faults.catch(lambda p=p: _named(p, factor)) for p in given]  # type: ignore[misc]
    refuse(dict.fromkeys(faults))
    policies = [policy for policy in found if policy is not None]
    kinds = [type(p) for p in policies]
    twice = [kind.name for kind in dict.fromkeys(kinds) if kinds.count(kind) > 1]
    faults += [f"{name!r} is among the policies twice" for name in twice]
    _warn_of_unheard_factor(kinds, lr_factor)
    for p in policies:
        if isinstance(p, AdaptiveLR) and lr_factor not in (DEFAULT_LR_FACTOR, p.factor):
            faults.append(f"staleness_lr_factor is {lr_factor!r} but the policy is {p!r}: say one of the two")
        if p.max_staleness is not None and max_staleness not in (None, p.max_staleness):
            faults.append(f"max_staleness is {max_staleness!r} but the policy is {p!r}: say one of the two")
        if isinstance(p, MomentumCorrection) and momentum_correction is False:
            faults.append(f"momentum_correction is False but {p!r} is among the policies: say one of the two")
    bounds = sorted({p.max_staleness for p in policies if p.max_staleness is not None})
    if len(bounds) > 1:
        faults.append(f"the policies give max_staleness {' and '.join(map(str, bounds))}: say one of them")
    bound = max_staleness if max_staleness is not None or not bounds else bounds[0]
    norms = [p.max_norm for p in policies if isinstance(p, GradientFiltering)]
    if norms == [None] and bound is None:
        faults.append(
            "gradient_filtering has nothing to filter by: give max_staleness=, or an object with max_norm="
        )
    if faults:
        raise ConfigError("; ".join(faults))
    weights = {p.name: p.weight() for p in policies}
    ordered = [weights[name] for name in _POLICIES if weights.get(name) is not None]
    spec = {
        "weights": ordered,
        "max_staleness": bound,
        "max_norm": float(norms[0]) if norms and norms[0] else None,
    }
    return spec, True if MomentumCorrection in kinds else momentum_correction


def _named(policy: object, lr_factor: float) -> StalenessPolicy:
    if isinstance(policy, StalenessPolicy):
        return policy
    if isinstance(policy, type) and issubclass(policy, StalenessPolicy):
        return policy()
    if isinstance(policy, str) and policy in _POLICIES:
        cls = _POLICIES[policy]
        return AdaptiveLR(factor=lr_factor) if cls is AdaptiveLR else cls()
    if isinstance(policy, str):
        raise ConfigError(unknown("staleness policy", policy, list(_POLICIES)))
    raise ConfigError(
        f"{policy!r} is no staleness policy: give a name ({', '.join(_POLICIES)}), or an object"
    )


def _warn_of_unheard_factor(kinds: Sequence[type], lr_factor: float) -> None:
    if AdaptiveLR not in kinds and lr_factor != DEFAULT_LR_FACTOR:
        given = f"staleness_lr_factor={lr_factor!r}"
        warnings.warn(f"{given} has no effect: no staleness policy is 'adaptive_lr'", stacklevel=4)


def no_bound(max_staleness: object) -> list[str]:
    good = max_staleness is None or is_count(max_staleness)
    return [] if good else [f"max_staleness is {max_staleness!r}: it is 0 or more updates, or None"]


def _no_factor(name: str, value: float) -> list[str]:
    good = is_number(value) and 0 < value <= 1
    return [] if good else [f"{name} is {value!r}: it is a number above 0 and at most 1"]


def _not_negative(name: str, value: float) -> list[str]:
    good = is_number(value) and value >= 0
    return [] if good else [f"{name} is {value!r}: it is a number, 0 or more"]
