"""Who adds to a sum of gradients: this process alone, or all of a process group of torch's."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import distributed, nn

from offbeat import log
from offbeat.accumulator.parcel import Parcel
from offbeat.accumulator.window import Sum
from offbeat.errors import ConfigError, StateError
from offbeat.local.group import (
    begin_alike,
    check_alike,
    check_device,
    check_made,
    check_settings,
    differing,
    digest,
    gathered,
    held_by_all,
    is_alike,
    is_other,
    listed,
    words_of_apart,
)
from offbeat.local.mean_alike import make_alike
from offbeat.local.sums import Sums

__all__ = ["Alone", "Group", "Members", "Total", "words_of_left_out"]

T = TypeVar("T")

Settings = Mapping[str, object]
"""As JSON can have them, by names for people."""

TRAINED = "requires_grad of "

REMEDIES = {
    "learning rate": "a scheduler has to step once per update in every member, also in those that flush() "
    "makes: optimizer.register_step_post_hook(lambda *_: scheduler.step()) sees to it, and so does "
    "AsyncTrainer.train(scheduler_interval='step'); what sets it otherwise, as a monitor's reduce_lr, has "
    "to do so in all of them",
    "updates": "load states of the same update in all of them",
    "scale of grad_scaler": "make all scalers with the same init_scale, or load the same state",
    "what monitors do": 'an AsyncTrainingMonitor that may "clip", "reject", "reduce_lr" or "pause" has to be '
    "in every member, set alike, until flush() is through",
}
"""What to do where members differ in what may change from update to update; in all else: set it alike."""


@dataclass(frozen=True, slots=True)
class Total:
    """An update's gradient, over all members.

    Attributes:
        gradients: By parameter, divided; None where no member had one.
        samples: Of all members.
        num_at_work: Members that had something to add.
        told: Numbers besides, each added up over members.
    """

    gradients: list[torch.Tensor | None]
    samples: int
    num_at_work: int
    told: Sequence[float] = ()


class Members(Protocol):
    """Adds sums up over members. One total may be under way at a time."""

    size: int
    rank: int

    @property
    def unit(self) -> float | None:
        """What a window's gradients are to be over; None: whatever it likes."""

    def begin(
        self,
        own: Sum | None,
        settings: Mapping[str, object],
        told: Sequence[float] = (),
        *,
        rates: object = None,
    ) -> None:
        """Send what this member has.

        Args:
            own: None takes part with nothing, having ended.
            settings: How it is set: alike for all members.
            told: Numbers to be added up with it; as many in all members.
            rates: How its optimizer is set, likewise; None where it has none yet, and nothing to say of it.
        """

    def is_there(self) -> bool:
        """Tell whether the total of what was begun can be had without waiting."""

    def finish(self) -> Total:
        """Wait for the total of what was begun."""

    def telling(self) -> AbstractContextManager[None]:
        """Say for whom this member waits, where what is done within takes long; once for all of it."""

    def agreed(self) -> dict[str, Any] | None:
        """Tell what members have agreed upon, as plain values, where there is anybody to agree with."""

    def agree(self, agreed: Mapping[str, Any] | None) -> None:
        """Go on from what all members had agreed upon when a state was taken."""

    def is_alike(self, value: object) -> bool:
        """Tell in all members at once whether a value is the same in all; no sum is under way then."""

    def gathered(self, value: T) -> list[T]:
        """Give what each member has, as JSON can have it, by rank; no sum is under way then."""

    def end(self, buffers: Mapping[str, torch.Tensor], samples: int) -> None:
        """Make the buffers of all members alike, by name; this one's have seen so many samples."""

    def close(self) -> None:
        """Take part no more."""


class Alone:
    """Nobody else."""

    size = 1
    rank = 0
    unit = None

    def __init__(self) -> None:
        self._own: Sum | None = None
        self._told: Sequence[float] = ()

    def begin(
        self,
        own: Sum | None,
        settings: Mapping[str, object],
        told: Sequence[float] = (),
        *,
        rates: object = None,
    ) -> None:
        """Keep it."""
        del settings, rates
        self._own, self._told = own, told

    def is_there(self) -> bool:
        """Tell that it is."""
        return True

    def finish(self) -> Total:
        """Divide it."""
        own, self._own = self._own, None
        if own is None:
            return Total([], 0, 0, self._told)
        if own.counts:
            # By 1 where there was one micro-batch, which so keeps its bits.
            _divide([g for g in own.gradients if g is not None], own.counts / own.unit)
        return Total(own.gradients, own.samples, 1, self._told)

    def telling(self) -> AbstractContextManager[None]:
        """For nobody."""
        return nullcontext()

    def agreed(self) -> dict[str, Any] | None:
        """Tell that there is nobody."""
        return None

    def agree(self, agreed: Mapping[str, Any] | None) -> None:
        """Go on alone."""

    def is_alike(self, value: object) -> bool:
        """It is."""
        del value
        return True

    def gathered(self, value: T) -> list[T]:
        """Give this one's."""
        return [value]

    def end(self, buffers: Mapping[str, torch.Tensor], samples: int) -> None:
        """Leave them."""

    def close(self) -> None:
        """Nobody has to be told."""


class Group:
    """A process group: the gradients of all are reduced on its own threads; see `Parcel`."""

    def __init__(
        self,
        group: distributed.ProcessGroup,
        named: Sequence[tuple[str, nn.Parameter]],
        buffers: Mapping[str, torch.Tensor],
        *,
        is_divided: bool,
        setting: Settings,
    ) -> None:
        """Begin with the first member's values.

        Args:
            group: Of the members.
            named: The parameters, each once, with its name.
            buffers: By name; those begin alike, too, that all hold in one shape.
            is_divided: Totals are, by the counts of all.
            setting: What else has to be the same in all members: it says how much they send one another.

        Raises:
            ConfigError: If the group has no backend for the parameters' device.
            ModelMismatchError: If members hold different models.
            StateError: If they train different parameters, or are set differently, or make something else.
            ConnectionLostError: If a member is lost.
        """
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)
        self._named = named
        self._is_divided = is_divided
        self._device = named[0][1].device
        self._is_half = any(parameter.dtype == torch.float16 for _, parameter in named)
        self._parcel: Parcel | None = None
        self._gained: Parcel | None = None
        self._unsent: list[torch.Tensor | None] = []  # by parameter, of those that the sum is not of
        self._unsent_scale = 1.0
        self._unit: float | None = None  # of the next sum
        self._counts = 0.0  # of the newest one
        self._sent_in = 1.0
        self._facts = torch.empty(0)
        self._apart: list[str] = []  # buffers that stay each member's own, as was told
        self._settings: Settings = {}  # said with them, as is which parameters are `_wanted`
        check_device(group, self._device)
        # Frozen parameters stay here. Which these are members agree upon one sum ahead: they would send one
        # another sums of different sizes otherwise, and torch ends a process to which that happens. What has
        # a gradient besides, trained anew or frozen by now, comes in a sum of its own: all know of it then.
        self._is_sent = self._wanted = self._are_trained()
        self._sums = Sums.among(group, of="the gradients", device=self._device)
        with self._sums.together() as own:
            check_made(own, "AsyncGradientAccumulator", self._device)
            check_alike(own, named, self._device)
            alike = {**setting, **self._by_name(self._is_sent)}
            check_settings(own, alike, self._device, how="members accumulate differently")
            held, apart = held_by_all(own, buffers, self._device)
            begin_alike(own, (*(parameter for _, parameter in named), *held.values()))
        self._tell_of_apart(apart)

    @property
    def unit(self) -> float | None:
        """The counts of the newest sum that all knew when the one before began: as many as in most sums.

        A total that is a mean of as many is what was sent, and no pass over memory multiplies or divides it.
        None before there is one, and where gradients are of float16, in which they would vanish.
        """
        return None if self._is_half else self._unit

    def begin(
        self,
        own: Sum | None,
        settings: Mapping[str, object],
        told: Sequence[float] = (),
        *,
        rates: object = None,
    ) -> None:
        """Start the reduction of the sums, which are nobody's until `finish`.

        Raises:
            ConfigError: If a gradient is sparse.
        """
        gradients: Sequence[torch.Tensor | None] = [None] * len(self._named)
        facts, unit = [0.0, 0.0, 0.0], 1.0
        if own is not None:
            gradients, unit = own.gradients, own.unit
            facts = [own.counts or 0.0, float(own.samples), 1.0]
        self._check_dense(gradients)
        self._sent_in, self._unit = self.unit or 1.0, self._counts or None
        every = list(zip(gradients, self._is_sent, strict=True))
        there = [gradient for gradient, is_one in every if is_one]
        self._unsent = [None if is_one else gradient for gradient, is_one in every]
        self._unsent_scale = unit / self._sent_in
        self._parcel = Parcel(_where(self._named, self._is_sent), there, scale=self._unsent_scale)
        self._wanted = self._are_trained()
        self._settings = settings if rates is None else {**settings, "learning rate": rates}
        marks = _marks([settings, self._wanted]) + _marks(rates)
        presence = [0.0 if gradient is None else 1.0 for gradient in gradients]
        numbers = [*facts, *marks, *presence, *told]
        self._facts = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self._sums.begin([self._facts, *self._parcel.sums])

    def finish(self) -> Total:
        """Wait for all members, divide, and give each parameter its part.

        Raises:
            StateError: If members' optimizers are set differently, or they train different parameters.
            ConnectionLostError: If a member is lost.
        """
        self._sums.finish()
        counts, samples, num_at_work, *rest = self._facts.tolist()
        settings, rates, rest = rest[:3], rest[3:6], rest[6:]
        presence, told = rest[: len(self._named)], rest[len(self._named) :]
        if num_at_work and (is_other(*settings) or is_other(*rates)):
            self._raise_unlike()
        self._send_gained(presence)
        parcels = [one for one in (self._parcel, self._gained) if one is not None]
        self._parcel = self._gained = None
        if num_at_work:  # else nobody has looked whether all want the same
            self._is_sent = self._wanted
        if self._is_divided and counts:
            for parcel in parcels:
                parcel.divide(counts / self._sent_in)
            self._counts = self._sent_in = counts
        parts = {id(p): part for one in parcels for p, part in zip(one.like, one.open(), strict=True)}
        there = zip(self._named, presence, strict=True)
        gradients = [parts.get(id(parameter)) if is_there else None for (_, parameter), is_there in there]
        return Total(gradients, round(samples), round(num_at_work), told)

    def is_there(self) -> bool:
        """Tell whether the sums are."""
        return self._sums.is_there()

    def telling(self) -> AbstractContextManager[None]:
        """For the others of the group."""
        return self._sums.telling()

    def agreed(self) -> dict[str, Any] | None:
        """Tell which parameters the next sum is of, and in what units the next two are."""
        return {"sent": list(self._is_sent), "unit": self._unit, "counts": self._counts}

    def agree(self, agreed: Mapping[str, Any] | None) -> None:
        """Let the next sums be so."""
        assert agreed is not None  # noqa: S101  a state of as many members has it
        self._is_sent = list(agreed["sent"])
        self._unit, self._counts = agreed["unit"], agreed["counts"]

    def is_alike(self, value: object) -> bool:
        """Tell in all members whether a value, as JSON can have it, is the same in all of them.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        with self._sums.together() as group:
            return is_alike(group, value, self._device)

    def gathered(self, value: T) -> list[T]:
        """Give what each member has, in all of them; what is alike travels as a digest.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        with self._sums.together() as group:
            return [value] * self.size if is_alike(group, value, self._device) else gathered(group, value)

    def end(self, buffers: Mapping[str, torch.Tensor], samples: int) -> None:
        """Give buffers that differ their mean over members; see `make_alike`.

        What training has made of another shape in one member than in others, or in some of them alone, as a
        bank that grows, stays each one's own.

        Raises:
            ConnectionLostError: If a member is lost.
        """
        with self._sums.together() as group:
            held, apart = held_by_all(group, buffers, self._device)
            out = make_alike(group, held, dict.fromkeys(held, samples), self._device)
        self._tell_of_apart(apart)
        if out:
            log.warn(words_of_left_out(out))

    def close(self) -> None:
        """Destroy the group of one's own."""
        self._sums.close()

    def _send_gained(self, presence: Sequence[float]) -> None:
        """Add up what else has a gradient, as all know now; once, also where a wait is broken off."""
        if self._gained is not None:
            return
        every = zip(self._is_sent, presence, strict=True)
        are_gained = [not is_sent and bool(is_there) for is_sent, is_there in every]
        if not any(are_gained):
            return
        theirs = [gradient for gradient, is_one in zip(self._unsent, are_gained, strict=True) if is_one]
        self._gained = Parcel(_where(self._named, are_gained), theirs, scale=self._unsent_scale)
        self._unsent = []
        self._sums.begin(self._gained.sums)
        self._sums.finish()

    def _tell_of_apart(self, names: list[str]) -> None:
        if names and names != self._apart:
            log.warn(words_of_apart(names))
        self._apart = names

    def _raise_unlike(self) -> NoReturn:
        """Tell in what members differ; all of them come here, as they have heard the same."""
        with self._sums.together() as group:
            everybody = gathered(group, {**self._settings, **self._by_name(self._wanted)})
        found = differing(everybody)
        remedies = "; ".join(dict.fromkeys(map(_remedy, found)))
        raise StateError(f"members are set differently: {listed(found)}: {remedies}")

    def _by_name(self, are_trained: Sequence[bool]) -> dict[str, bool]:
        every = zip(self._named, are_trained, strict=True)
        return {f"{TRAINED}{name!r}": is_trained for (name, _), is_trained in every}

    def _are_trained(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._named]

    def _check_dense(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for (name, _), gradient in zip(self._named, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"the gradient of {name!r} is sparse and cannot be reduced: build its layer without "
                    f"sparse=True"
                )


def _remedy(name: str) -> str:
    if name.startswith(TRAINED):
        return (
            "freeze and unfreeze after the same update in all of them; who waits for others in flush() "
            "cannot, so give members as many batches as one another"
        )
    return REMEDIES.get(name, "give the same to all of them")


def _where(named: Sequence[tuple[str, nn.Parameter]], are_meant: Sequence[bool]) -> list[nn.Parameter]:
    return [parameter for (_, parameter), is_meant in zip(named, are_meant, strict=True) if is_meant]


def words_of_left_out(out: Mapping[str, Sequence[int]]) -> str:
    """Say which buffers of which members were left out of their mean."""
    ranks = sorted({rank for its in out.values() for rank in its})
    whose = f"member {ranks[0]}" if len(ranks) == 1 else f"members {', '.join(map(str, ranks))}"
    more = f" and {len(out) - 1} more" if len(out) > 1 else ""
    return (
        f"in {whose} buffers are NaN or infinite ({next(iter(out))!r}{more}): flush() left these out of the "
        f"mean over members, and gave the others' mean to all. Look at the data there, and at what else "
        f"writes to these buffers"
    )


def _marks(value: object) -> list[float]:
    """Give what is to be added up for `is_other`; of None, nothing."""
    if value is None:
        return [0.0, 0.0, 0.0]
    mark = digest(value)
    return [mark, mark**2, 1.0]


def _divide(tensors: list[torch.Tensor], by: float) -> None:
    if by == 1.0:
        return
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    if dense:
        torch._foreach_div_(dense, by)
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            tensor.div_(by)
