"""Which parameters rounds average: what is trained, and what was and differs in members still."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from offbeat.local.stepped import Stepped

__all__ = ["Trained", "Writes", "gained_of", "left_of", "trained_of"]


@dataclass(frozen=True, slots=True)
class Writes:
    """What has been written to parameters so far.

    Attributes:
        versions: Torch's counts of writes to each, by whomever.
        num_steps: Of optimizers; those that are fused, or write by `.data`, are not in the others.
    """

    versions: list[int]
    num_steps: int


class Trained:
    """A model's parameters, by their places, and which of them members have agreed to average.

    A user freezes and unfreezes (requires_grad) as training goes. What is frozen has been trained all the
    same, and is averaged on until all members have met with it; what is unfrozen was in no round before.

    Attributes:
        parameters: All of them, each once.
        are_agreed: Of each, whether it is trained, as all members have wanted it at once.
        gained: Places of what is agreed and in no round yet, with the samples that this member had before it
            was trained here.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin with those that are trained now."""
        self.parameters = list(parameters)
        self.are_agreed = [parameter.requires_grad for parameter in self.parameters]
        self.gained: dict[int, int] = {}
        self._wished: dict[int, int] = {}  # likewise of what this member wants, and others do not yet
        self._left: set[int] = set()  # of what is not trained any more, and differs in members still
        self._stepped = Stepped(self.parameters)
        self._before = self.writes()  # what is training counts from there

    def of(self, places: Iterable[int]) -> list[nn.Parameter]:
        """Give those that rounds average: what is trained, or was, and all are still to meet with."""
        return [self.parameters[place] for place in places if self.are_agreed[place] or place in self._left]

    def places(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Give their places."""
        place_of = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        return [place_of[id(parameter)] for parameter in parameters]

    def wanted(self) -> list[bool]:
        """Tell of each whether this member wants it averaged: what is trained.

        That is also what was since the newest round and is frozen just now, as one of two networks that are
        trained in turn: it has a gradient still, and was written to. What was loaded has none.
        """
        wanted = [parameter.requires_grad for parameter in self.parameters]
        frozen = [n for n, p in enumerate(self.parameters) if not p.requires_grad and p.grad is not None]
        if frozen:
            stepped = self._stepped.since(self._before.num_steps)
            for place in frozen:
                parameter, before = self.parameters[place], self._before.versions[place]
                wanted[place] = _version(parameter) != before or id(parameter) in stepped
        return wanted

    def wish(self, samples: int) -> list[bool]:
        """Give what is `wanted` as a round begins, and note since when it is.

        Args:
            samples: That this member had as the round before began.
        """
        wanted = self.wanted()
        every = enumerate(zip(wanted, self.are_agreed, strict=True))
        news = [place for place, (is_wanted, is_agreed) in every if is_wanted and not is_agreed]
        self._wished = {place: self._wished.get(place, samples) for place in news}
        return wanted

    def writes(self) -> Writes:
        """Count what was written so far."""
        return Writes([_version(parameter) for parameter in self.parameters], self._stepped.number)

    def optimizers(self) -> list[Optimizer]:
        """Give those that have trained something here since what is training counts, and are there still."""
        return self._stepped.optimizers()

    def note_written(self, *, since: Writes | None = None, until: Writes | None = None) -> None:
        """Take as training what is written from here on, and what was between two counts.

        Args:
            since: The first of them; None: as now, so nothing was.
            until: The second.
        """
        now = self.writes()
        since, until = since or now, until or now
        every = zip(since.versions, until.versions, now.versions, strict=True)
        self._stepped.forget(since.num_steps)
        self._before = Writes([first + here - last for first, last, here in every], since.num_steps)

    def follow(self, wanted: Sequence[bool], *, differ: Collection[int], samples: int) -> bool:
        """Take what all members want by now.

        Args:
            wanted: Of each parameter, whether it is trained.
            differ: Places of those that members hold apart.
            samples: Of this member, for what is not known to be wanted since when.

        Returns:
            Whether something is trained from here on that was not.
        """
        changes = list(enumerate(zip(self.are_agreed, wanted, strict=True)))
        gained = [place for place, (was, is_one) in changes if is_one and not was]
        self._left.update(place for place, (was, is_one) in changes if was and not is_one and place in differ)
        self.gained |= {place: self._wished.pop(place, samples) for place in gained}
        self.are_agreed = list(wanted)
        return bool(gained)

    def note_met(self, parameters: Sequence[nn.Parameter], *, are_alike: bool) -> None:
        """Take note that a round has averaged these.

        Args:
            parameters: Of that round.
            are_alike: Its members hold them alike by now.
        """
        met = set(self.places(parameters))
        self.gained = {place: since for place, since in self.gained.items() if place not in met}
        if are_alike:
            self._left -= met

    def new_among(self, parameters: Sequence[nn.Parameter], samples: int) -> dict[int, int]:
        """Tell which of a round's parameters are in a round for the first time.

        Args:
            parameters: Of the round.
            samples: That this member has had.

        Returns:
            By their numbers among these: the samples that have led to each.
        """
        every = enumerate(self.places(parameters)) if self.gained else ()
        return {number: samples - self.gained[place] for number, place in every if place in self.gained}

    def apart(self, samples: int) -> dict[int, int]:
        """Give places of what may differ in members by now, though all have ended all rounds.

        Args:
            samples: That this member has had.

        Returns:
            By place: the samples that have led to it.
        """
        since = self._wished | self.gained
        agreed = enumerate(self.are_agreed)
        places = (place for place, is_one in agreed if not is_one or place in self.gained)
        return {place: samples - since.get(place, samples) for place in places}

    def note_alike(self, samples: int) -> None:
        """Take note that all members have the same of everything, as this one has had so many samples."""
        self._left.clear()
        self.gained.clear()
        self.count_from(samples)

    def count_from(self, samples: int) -> None:
        """Count the samples that lead to what is new from here on, as this member has had so many."""
        self.gained = dict.fromkeys(self.gained, samples)
        self._wished = dict.fromkeys(self._wished, samples)

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` takes."""
        return {
            "are_trained": list(self.are_agreed),
            "left": sorted(self._left),
            "gained_since": [list(pair) for pair in self.gained.items()],
            "wished_since": [list(pair) for pair in self._wished.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; older states have no samples."""
        self.are_agreed = trained_of(state)
        self._left = set(left_of(state))
        self.gained = gained_of(state)
        self._wished = {int(place): int(since) for place, since in state.get("wished_since", ())}


def trained_of(state: Mapping[str, Any]) -> list[bool]:
    """Read of a state which parameters are trained."""
    return [bool(is_one) for is_one in state["are_trained"]]


def left_of(state: Mapping[str, Any]) -> list[int]:
    """Read of a state places of what was, and differs still; older states do not tell."""
    return sorted(int(place) for place in state.get("left", ()))


def gained_of(state: Mapping[str, Any]) -> dict[int, int]:
    """Read of a state what is in no round yet, as `Trained.gained`; older states do not tell."""
    return {int(place): int(since) for place, since in state.get("gained_since", ())}


def _version(parameter: nn.Parameter) -> int:
    """Give torch's count of what was written to a parameter, by whomever."""
    return parameter._version  # noqa: SLF001  torch has no other way
