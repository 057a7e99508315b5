"""What members make of the mean of their models: the methods of averaging.

A method works on flat memory (`offbeat.local.flat`), in place, and knows nothing of the network: it gets the
members' mean and what it has kept of the rounds before, and gives where each member is to go.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from offbeat.checks import at_least_one, is_count, is_number, refuse
from offbeat.errors import ConfigError
from offbeat.naming import a_class, strict_keywords, unknown

__all__ = [
    "BMUF",
    "EASGD",
    "METHODS",
    "Average",
    "DiLoCo",
    "Gossip",
    "Kept",
    "Memory",
    "Method",
    "SlowMo",
    "as_method",
    "shown",
    "worded",
]


Kept: TypeAlias = Literal["reference", "velocity"]
"""What a method keeps from round to round, the same in all members.

The reference is where members began, or EASGD's centre; the velocity is the momentum of the steps from
reference to reference, in units of the parameters.
"""

Memory: TypeAlias = Mapping[Kept, torch.Tensor]
"""What a method keeps, of flat memory of one dtype; changed in place."""


class Method(ABC):
    """One way to average.

    Attributes:
        name: As a user gives it.
        keeps: What it keeps.
        weighs: What a member counts by: its samples since the last round, or as one of all members, whether
            it has had samples or not.
        is_nothing_alone: Where there is one member, every round leaves its model as it is.
        has_centre: Members keep models of their own, and the result is the reference.
        scales_velocity: The velocity follows the learning rate of the members' own steps.
        is_pairwise: Members meet in twos, and each goes halfway to the other; targets are for where all meet.
        reads_mean: It leaves the mean that it gets as it is, which saves a copy of it at a server.
    """

    name: ClassVar[str]
    keeps: ClassVar[tuple[Kept, ...]] = ()
    weighs: ClassVar[Literal["samples", "members"]] = "samples"
    is_nothing_alone: ClassVar[bool] = False
    has_centre: ClassVar[bool] = False
    scales_velocity: ClassVar[bool] = False
    is_pairwise: ClassVar[bool] = False
    reads_mean: ClassVar[bool] = False

    def check_for(self, num_members: int) -> None:
        """See that its numbers go with so many members.

        Raises:
            ConfigError: If they do not.
        """
        del num_members  # most go with any

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are averaged in rounds of their own, in turn."""
        return 1

    @property
    def share_kept(self) -> float | None:
        """Of a member's own model, where it went on during the round; None: all that it has learnt since."""
        return None

    @abstractmethod
    def target(self, mean: torch.Tensor, own: torch.Tensor, memory: Memory, num_members: int) -> torch.Tensor:
        """Say where this member is to go from where it was when the round began, and keep what has to be.

        Args:
            mean: Of the members, weighted; its memory may be used for what is given, but for `reads_mean`.
            own: Where this member was.
            memory: Of the rounds before.
            num_members: How many there are.
        """


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class Average(Method):
    """Local SGD: go to the mean (Stich, 2019, algorithm 1), weighted by samples."""

    name: ClassVar = "average"
    is_nothing_alone: ClassVar = True
    reads_mean: ClassVar = True

    def target(self, mean: torch.Tensor, own: torch.Tensor, memory: Memory, num_members: int) -> torch.Tensor:
        """Go to the mean."""
        del own, memory, num_members
        return mean


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class EASGD(Method):
    """Elastic averaging: members and a centre z are drawn to one another by springs.

    Zhang, Choromanska and LeCun (2015), equations 5 and 6, synchronous: with E_i = alpha (x_i - z) each x_i
    becomes x_i - E_i, and z becomes z + the sum of all E_i. Members explore around the centre, which is what
    `flush` leaves in all of them.

    There each E_i counts by the samples that its member has had since the last round, in proportion to their
    mean; for members of equal speed it is the paper's sum. Else the centre would go to the mean of equals,
    in which a member that has seen a tenth of the samples counts for a quarter. A member that has ended moves
    the centre no more, and is drawn to it like the others.

    Attributes:
        alpha: Strength of a spring, above 0 and, for the centre to come to rest, below 2 / (num_members + 1):
            a round leaves 1 - alpha (num_members + 1) times the way from the centre to the members' mean,
            since both go it. None: 0.9 / num_members, as in the paper's experiments (its beta is alpha times
            num_members). As strong are springs in rounds of more members than an alpha is for, as may come
            to a server.
    """

    alpha: float | None = None

    name: ClassVar = "easgd"
    keeps: ClassVar[tuple[Kept, ...]] = ("reference",)
    is_nothing_alone: ClassVar = True
    has_centre: ClassVar = True
    reads_mean: ClassVar = True

    def __post_init__(self) -> None:
        """Check the number."""
        refuse(_outside(0.0, 2.0, alpha=self.alpha))

    def check_for(self, num_members: int) -> None:
        """See that the centre comes to rest."""
        if num_members > 1 and self._is_too_strong(num_members):
            raise ConfigError(
                f"alpha is {self.alpha} and there are {num_members} members: the centre would be thrown ever "
                f"further; give less than {2.0 / (num_members + 1):g}, or None for {0.9 / num_members:g}"
            )

    def target(self, mean: torch.Tensor, own: torch.Tensor, memory: Memory, num_members: int) -> torch.Tensor:
        """Draw this member to the centre, and the centre to the mean."""
        alpha = self.alpha
        if alpha is None or self._is_too_strong(num_members):
            alpha = 0.9 / num_members
        centre = memory["reference"]
        drawn = torch.lerp(own, centre, alpha)
        # The (weighted) sum of all alpha (x_i - z) is alpha times num_members times (mean - z).
        centre.lerp_(mean, alpha * num_members)
        return drawn

    def _is_too_strong(self, num_members: int) -> bool:
        return self.alpha is not None and self.alpha * (num_members + 1) >= 2.0  # noqa: PLR2004


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class Gossip(Method):
    """Gossip: in each round members meet in twos, and both of a pair go to their mean.

    Nobody computes the mean of all, and it stays where it is: what one of a pair gains the other gives up,
    the very same numbers. Members come ever nearer to it, and it moves by what they learn alone. Who meets
    whom is a random matching, anew in each round, of which all know from its number (`partner`); where their
    number is odd, one meets nobody. With n members and nothing learnt, a round leaves of their square
    distance from the mean (n - 2) / (2 (n - 1)), on average, for an even n, and half for an odd one.

    A pair is one of equals, whatever its samples: with weights the mean would not stay. The same holds for
    BatchNorm's statistics. Where members end they all go to their mean, of equals as well.

    Boyd, Ghosh, Prabhakar and Shah (2006) have gossip and its rate; Lian, Zhang, Zhang and Liu (2018,
    AD-PSGD, algorithm 1) train with it, and add to the pair's mean what was learnt meanwhile, as here.
    A mean that both of a pair go to has no bias; where messages go one way, as in Assran et al. (2019, SGP),
    what has been sent has to be counted and divided by.
    """

    name: ClassVar = "gossip"
    weighs: ClassVar[Literal["samples", "members"]] = "members"
    is_nothing_alone: ClassVar = True
    is_pairwise: ClassVar = True

    def target(self, mean: torch.Tensor, own: torch.Tensor, memory: Memory, num_members: int) -> torch.Tensor:
        """Go to the mean, where all meet."""
        del own, memory, num_members
        return mean


class _Outer(Method, ABC):
    """An outer step of SGD with momentum, for which the members' mean way is the (negative) gradient.

    What it keeps is the same in all members that began together. At a server, which holds the mean alone, one
    that comes later, or back after rounds of the others, begins with that mean for a reference and a velocity
    of 0: its outer steps differ from the others' at first, and the difference shrinks with the rounds. Where
    members come and go often, DiLoCo with ``asynchronous=True`` keeps all of it at the server.
    """

    keeps: ClassVar[tuple[Kept, ...]] = ("reference", "velocity")

    @abstractmethod
    def _numbers(self, num_members: int) -> tuple[float, float, bool]:
        """Give the outer step's learning rate, momentum, and whether it looks ahead (Nesterov)."""

    def target(self, mean: torch.Tensor, own: torch.Tensor, memory: Memory, num_members: int) -> torch.Tensor:
        """Step from the reference along the mean way and the velocity."""
        del own
        lr, momentum, looks_ahead = self._numbers(num_members)
        reference = memory["reference"]
        way = mean.sub_(reference)
        velocity = memory["velocity"].mul_(momentum).add_(way)
        way = way.add_(velocity, alpha=momentum) if looks_ahead else velocity
        reference.add_(way, alpha=lr)
        return mean.copy_(reference)


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class DiLoCo(_Outer):
    """DiLoCo (Douillard et al., 2023, algorithm 1): outer SGD with Nesterov momentum on their mean way.

    Its inner optimizer is the user's; the paper's is AdamW, which keeps its state in each member.

    A member that comes later, at a server, begins with the mean and a velocity of 0, and is apart from the
    others until the difference has faded.

    Attributes:
        lr: Of the outer step.
        momentum: Of the outer step, 0 to below 1.
        nesterov: As torch.optim.SGD's, whose formula the outer step has.
        merge_alpha: Where members go on while a round is under way: the share of a member's own model, 0 to
            below 1, that is kept when it ends (Streaming DiLoCo, Douillard et al., 2025; their choice is .5).
            None: the outer step is added to it, and all that it has learnt since is kept.
        fragments: Parts of the model, each averaged in rounds of its own, in turn, so that a round has that
            part to send (the same paper). Each is averaged once in `averaging_frequency`.
        delay: With ``asynchronous=True``: members' arrivals from one step of the momentum to the next
            (delayed Nesterov: Liu et al., 2024, algorithm 3, N). None: as the server has it, else
            `world_size`.
        activation: Likewise: how much of the momentum's step comes with each arrival rather than with the
            last of `delay`, 0 to 1 / delay (their c).
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    merge_alpha: float | None = None
    fragments: int = 1
    delay: int | None = None
    activation: float = 0.0

    name: ClassVar = "diloco"

    def __post_init__(self) -> None:
        """Check the numbers."""
        refuse(
            [
                *_outside(0.0, 10.0, lr=self.lr),
                *_outside(0.0, 1.0, is_zero_in=True, momentum=self.momentum),
                *_no_flag(nesterov=self.nesterov),
                *_outside(0.0, 1.0, is_zero_in=True, merge_alpha=self.merge_alpha),
                *at_least_one(fragments=self.fragments),
                *([] if self.delay is None else at_least_one(delay=self.delay)),
                *self._of_activation(),
            ]
        )

    def _of_activation(self) -> list[str]:
        given, most = self.activation, 1.0
        if is_count(self.delay, least=1):
            most /= self.delay  # type: ignore[operator]  # looked at
        if is_number(given) and 0.0 <= given <= most:
            return []
        return [f"activation is {given!r}: give a number from 0 to 1 / delay, which is {most:g} at most"]

    @property
    def num_fragments(self) -> int:
        """As given."""
        return self.fragments

    @property
    def share_kept(self) -> float | None:
        """As given."""
        return self.merge_alpha

    def _numbers(self, num_members: int) -> tuple[float, float, bool]:
        del num_members
        return self.lr, self.momentum, self.nesterov


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class SlowMo(_Outer):
    """SlowMo (Wang et al., 2020, algorithm 1): a slow momentum over the members' mean way.

    The paper divides each way by the learning rate and multiplies the step by it. Here the velocity is in
    units of the parameters and is scaled when the learning rate changes, which is the same; of an optimizer
    with several groups, by how the largest of their rates does.

    A member that comes later, at a server, begins with the mean and a velocity of 0, and is apart from the
    others until the difference has faded.

    Attributes:
        alpha: The slow learning rate.
        beta: The slow momentum, 0 to below 1; the paper's own choices are .4 to .8, more for more members.
    """

    alpha: float = 1.0
    beta: float = 0.5

    name: ClassVar = "slowmo"
    scales_velocity: ClassVar = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        refuse(
            [
                *_outside(0.0, 10.0, alpha=self.alpha),
                *_outside(0.0, 1.0, is_zero_in=True, beta=self.beta),
            ]
        )

    def _numbers(self, num_members: int) -> tuple[float, float, bool]:
        del num_members
        return self.alpha, self.beta, False


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class BMUF(_Outer):
    """Blockwise model-update filtering (Chen and Huo, 2016, equations 6 to 11): momentum over blocks of data.

    A member that comes later, at a server, begins with the mean and a velocity of 0, and is apart from the
    others until the difference has faded.

    Attributes:
        block_momentum: 0 to below 1; None: 1 - 1 / num_members, as in the paper.
        block_lr: What each block's way counts.
        nesterov: Members go on from where the momentum leads (NBM), not from the filtered model (CBM).
    """

    block_momentum: float | None = None
    block_lr: float = 1.0
    nesterov: bool = True

    name: ClassVar = "bmuf"

    def __post_init__(self) -> None:
        """Check the numbers."""
        refuse(
            [
                *_outside(0.0, 1.0, is_zero_in=True, block_momentum=self.block_momentum),
                *_outside(0.0, 10.0, block_lr=self.block_lr),
                *_no_flag(nesterov=self.nesterov),
            ]
        )

    def _numbers(self, num_members: int) -> tuple[float, float, bool]:
        # The paper's Delta is block_lr times this velocity. NBM broadcasts W + momentum Delta, from which the
        # next block's way is measured: what is broadcast so steps as outer Nesterov does.
        momentum = 1.0 - 1.0 / num_members if self.block_momentum is None else self.block_momentum
        return self.block_lr, momentum, self.nesterov


METHODS: Mapping[str, type[Method]] = {
    kind.name: kind for kind in (Average, EASGD, DiLoCo, SlowMo, BMUF, Gossip)
}


def as_method(given: object) -> Method:
    """Take a method by its name, with its defaults, or as an object.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(given, Method):
        if not is_dataclass(given):
            raise ConfigError(f"method is {a_class(given)}, which is no dataclass: make it one, frozen")
        return given
    if isinstance(given, str) and given in METHODS:
        return METHODS[given]()
    if isinstance(given, str):
        raise ConfigError(unknown("method", given, list(METHODS)))
    if isinstance(given, type) and issubclass(given, Method):
        raise ConfigError(f"method is the class {given.__name__}: give {given.__name__}() or {given.name!r}")
    names = ", ".join(map(repr, METHODS))
    raise ConfigError(f"method is {given!r}: give one of {names}, or an object such as DiLoCo(lr=0.7)")


def shown(method: Method) -> list[object]:
    """Give what says which method this is, as JSON can have it: its name and all numbers."""
    numbers: Any = method  # a dataclass, as all of them are
    return [method.name, *(getattr(numbers, field.name) for field in fields(numbers))]


def worded(method: Sequence[object]) -> str:
    """Give what `shown` gave as a user writes it; of a method that is not known here, as it is."""
    name, *numbers = method
    kind = METHODS.get(str(name))
    plain: Any = kind  # a dataclass, as all of them are
    if kind is None or len(numbers) != len(fields(plain)):
        return repr(method)
    given = (f"{field.name}={number!r}" for field, number in zip(fields(plain), numbers, strict=True))
    return f"{kind.__name__}({', '.join(given)})"


def _outside(low: float, high: float, *, is_zero_in: bool = False, **values: float | None) -> Sequence[str]:
    first = "0" if is_zero_in else "above 0"
    return [
        f"{name} is {value!r}: give a number from {first} to below {high:g}"
        for name, value in values.items()
        if value is not None
        and not (is_number(value) and (low < value < high or (is_zero_in and value == low)))
    ]


def _no_flag(**values: object) -> Sequence[str]:
    return [f"{name} is {v!r}: give True or False" for name, v in values.items() if not isinstance(v, bool)]
