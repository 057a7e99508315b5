"""Something that a remedy has set to something else, and that goes back to what was before.

Two monitors may act on the same thing, and let go of it in any order: who lets go first leaves to the other
what was before both.
"""

import itertools
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from offbeat.monitor.attribute import Attribute
from offbeat.monitor.protocols import ServesLearningRate

__all__ = ["AttributeChange", "Change", "RateChange", "make_all", "rates_of", "undo_all"]


class Change(ABC):
    """From one value to another.

    Attributes:
        entry: Where, and last the value before and the value after: plain data, as it is now.
    """

    def __init__(self, *entry: Any) -> None:  # noqa: ANN401  of values of any type
        self.entry = list(entry)

    @property
    def before(self) -> Any:  # noqa: ANN401  as above
        """What it was."""
        return self.entry[-2]

    @property
    def after(self) -> Any:  # noqa: ANN401  as above
        """What it was set to."""
        return self.entry[-1]

    def make(self) -> None:
        """Set it."""
        self._set(self.after)
        self.note()

    def note(self) -> None:
        """Count it as set."""
        with _lock:
            _in_effect.append(weakref.ref(self))

    def undo(self) -> str | None:
        """Set what was before; where somebody has set something else since, leave that, and say so."""
        with _lock:
            changes = [change for one in _in_effect if (change := one()) is not None]
            _in_effect[:] = [weakref.ref(change) for change in changes if change is not self]
        later = itertools.dropwhile(lambda change: change is not self, changes)
        for change in later:
            if change is not self and change.is_of(self) and _are_same(change.before, self.after):
                change.entry[-2] = self.before
                return None
        if _are_same(now := self.now(), self.after):
            self._set(self.before)
            return None
        return self._is_left(now)

    @abstractmethod
    def is_of(self, other: "Change") -> bool:
        """Tell whether another one is of the same thing."""

    @abstractmethod
    def now(self) -> Any:  # noqa: ANN401  as above
        """Tell what it is."""

    @abstractmethod
    def _set(self, value: Any) -> None:  # noqa: ANN401  as above
        """Set it to a value."""

    @abstractmethod
    def _is_left(self, now: Any) -> str | None:  # noqa: ANN401  as above
        """Word that it is left as somebody has set it since, if there is something to say."""


class AttributeChange(Change):
    """Of an attribute; `entry` begins with the place where its object was found."""

    def __init__(self, attribute: Attribute, place: int, before: object, after: object) -> None:
        super().__init__(place, before, after)
        self.attribute = attribute

    def is_of(self, other: Change) -> bool:
        """Tell whether another one is of the same attribute."""
        return isinstance(other, AttributeChange) and other.attribute is self.attribute

    def now(self) -> Any:  # noqa: ANN401  of any type
        """Tell what it is, or is to be."""
        return self.attribute.wanted()

    def _set(self, value: object) -> None:
        self.attribute.want(value)

    def _is_left(self, now: object) -> None:
        """Say nothing: who lets go says what each attribute is."""


class RateChange(Change):
    """Of a server's rate; `entry` begins with the place where the server was found, and the group."""

    def __init__(
        self, server: ServesLearningRate, place: int, group: int, before: float, after: float
    ) -> None:
        super().__init__(place, group, before, after)
        self.server, self.group = server, group

    def is_of(self, other: Change) -> bool:
        """Tell whether another one is of the same group of the same server."""
        return isinstance(other, RateChange) and other.server is self.server and other.group == self.group

    def now(self) -> float:
        """Tell what it is."""
        rates = rates_of(self.server)
        return rates[self.group] if self.group < len(rates) else math.nan

    def _set(self, value: float) -> None:
        self.server.set_lr(value, self.group)

    def _is_left(self, now: float) -> str:
        return f"that of group {self.group} was set to {now:g} since, and stays"


_lock = threading.Lock()
_in_effect: list[weakref.ref[Change]] = []
"""Of all monitors of this process, oldest first; each is kept by whoever is to take it back."""


def make_all(changes: Sequence[Any]) -> None:
    """Make all of them, or none: what would stay of one that failed halfway, nobody would take back."""
    for num_made, change in enumerate(changes):
        try:
            change.make()
        except BaseException:
            undo_all(changes[:num_made])
            raise


def undo_all(changes: Sequence[Any]) -> list[str]:
    """Undo all of them, the newest first, and give what there is to say; one that fails holds up no other.

    Raises:
        Exception: The first by which one of them failed, when the others are undone.
    """
    said, failed = [], []
    for change in reversed(changes):
        try:
            said.append(change.undo())
        except Exception as error:  # noqa: BLE001  of whatever it acts on
            failed.append(error)
    if failed:
        raise failed[0]
    return [words for words in said if words is not None]


def rates_of(server: ServesLearningRate) -> list[float]:
    """Give the learning rates of a server's groups, as they are set; none where it has no optimizer."""
    groups = (server.status()["optimizer"] or {}).get("spec", {}).get("groups", [])
    return [group["lr"] for group in groups]


def _are_same(one: object, other: object) -> bool:
    """Tell whether two values are the same, but for a rate's last bits."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
