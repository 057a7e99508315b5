"""Which of our objects trains a module, and who watches it: found from the module, which knows neither.

A user hands a monitor the model; what is to be asked to average more often is the averager of that model.
References are weak: nothing here keeps a model, a trainer or a watcher. A module and what `torch.compile` or
DDP made of it are one here: each side may be given either.
"""

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from offbeat.wrappers import inside

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Keeper",
    "Watcher",
    "act_on_updates",
    "admits",
    "averaged",
    "has_dropped",
    "is_lost",
    "is_wanted",
    "is_watched",
    "keepers_of",
    "moved",
    "moves",
    "part_members",
    "pulled_by",
    "register",
    "skipped",
    "tell",
    "trainers_of",
    "unregister",
    "unwatch",
    "was_set",
    "watch",
    "went_back",
]


@runtime_checkable
class Keeper(Protocol):
    """Keeps a state that a run's checkpoint is to have."""

    def state_dict(self) -> Any:  # noqa: ANN401  its own
        """Give what it takes to go on, as plain data and tensors."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401  as `state_dict` gave it
        """Go on from there."""


class Watcher(Protocol):
    """Hears of a module's training, on the thread that trains.

    Attributes:
        acts_on_updates: By what settings it may scale or drop gradients, or change their update's rate, as
            JSON can have them; empty where it does none of that.
        parts_members: Why it must not be where members share their updates, in words for who made it; empty
            where it may.
        has_dropped: Whether it let no gradient of the batch be used whose loss it was told last.
        is_lost: Whether parameters are not finite, as far as it has seen.
        wants: Names of the numbers that it makes something of.
    """

    acts_on_updates: Sequence[object]
    parts_members: str
    has_dropped: bool
    wants: Collection[str]

    @property
    def is_lost(self) -> bool:
        """See there; waits for nothing."""

    def told(self, readings: Mapping[str, Any]) -> None:
        """Take numbers of the step under way: a float, or a tensor of one element, by the metric's name."""

    def admits(self) -> bool:
        """Judge the gradients that are on the module now; it may scale them. False: they are not to be used.

        Whoever asks drops them then. The module's buffers are as they were when it last said yes.
        """

    def skipped(self) -> None:
        """Hear that nothing comes of what was computed since the last step: its gradients are dropped."""

    def went_back(self) -> None:
        """Hear that the module's values are those of a checkpoint now, and none of a step that was made."""

    def moves(self) -> None:
        """Hear that the parameters are about to be moved by what is no optimizer's step."""

    def moved(self) -> None:
        """Hear that this is done; of buffers, too."""

    def averaged(self, readings: Mapping[str, Any]) -> None:
        """Take numbers of a round of averaging, between two steps: of the one that was made last."""

    def was_set(self, thing: object, name: str) -> None:
        """Hear that an attribute of what trains the module is not as the watcher may have set it any more."""


class _Known:
    """Weak references by plain module, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is collected in here, in any line, may be a trainer that leaves
        self._by_module: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]
        self._by_module = weakref.WeakKeyDictionary()

    def add(self, module: "nn.Module", thing: object) -> None:
        with self._lock:
            known = self._by_module.setdefault(inside(module), [])
            known[:] = [reference for reference in tuple(known) if reference() is not None]
            if not any(reference() is thing for reference in tuple(known)):
                known.append(weakref.ref(thing))

    def remove(self, module: "nn.Module", thing: object) -> None:
        with self._lock:
            known = self._by_module.get(inside(module), [])
            known[:] = [reference for reference in tuple(known) if reference() is not thing]

    def of(self, module: "nn.Module") -> list[Any]:
        references = self._by_module.get(inside(module))
        if references is None:  # nearly always, and this is asked at each step
            return []
        return [thing for reference in list(references) if (thing := reference()) is not None]


_trainers = _Known()
_pullers = _Known()
_watchers = _Known()


def register(module: "nn.Module", trainer: object, *, is_puller: bool = False) -> None:
    """Note that an object trains a module, as long as both live.

    Args:
        module: That is trained.
        trainer: The object.
        is_puller: It brings the module to what a server has, and what another has made of it is lost then.
    """
    _trainers.add(module, trainer)
    if is_puller:
        _pullers.add(module, trainer)


def unregister(module: "nn.Module", trainer: object) -> None:
    """Note that it does so no more."""
    _trainers.remove(module, trainer)
    _pullers.remove(module, trainer)


def trainers_of(module: "nn.Module") -> list[Any]:
    """Give what trains a module, oldest first."""
    return _trainers.of(module)


def pulled_by(module: "nn.Module") -> list[Any]:
    """Give what brings a module to what a server has."""
    return _pullers.of(module)


def watch(module: "nn.Module", watcher: Watcher) -> None:
    """Let a watcher hear of a module's training, as long as both live."""
    _watchers.add(module, watcher)


def unwatch(module: "nn.Module", watcher: Watcher) -> None:
    """Let it hear no more."""
    _watchers.remove(module, watcher)


def is_watched(module: "nn.Module") -> bool:
    """Tell whether anybody hears of a module's training."""
    return bool(_watchers.of(module))


def is_wanted(module: "nn.Module", reading: str) -> bool:
    """Tell whether anybody who hears of a module's training makes something of a number: it may be dear."""
    return any(reading in watcher.wants for watcher in _watchers.of(module))


def keepers_of(module: "nn.Module") -> list[Keeper]:
    """Give those that hear of a module's training and keep a state."""
    return [watcher for watcher in _watchers.of(module) if isinstance(watcher, Keeper)]


def tell(module: "nn.Module", **readings: object) -> None:
    """Tell a module's watchers what a trainer knows of the step under way."""
    for watcher in _watchers.of(module):
        watcher.told(readings)


def skipped(module: "nn.Module") -> None:
    """Tell a module's watchers that a loss scale skips the step under way, about which nobody asks them."""
    for watcher in _watchers.of(module):
        watcher.skipped()


def went_back(module: "nn.Module") -> None:
    """Tell a module's watchers that it has the values of a checkpoint, between two steps."""
    for watcher in _watchers.of(module):
        watcher.went_back()


def moves(module: "nn.Module") -> None:
    """Tell a module's watchers, between two steps, that a round of averaging is about to move it."""
    for watcher in _watchers.of(module):
        watcher.moves()


def moved(module: "nn.Module") -> None:
    """Tell a module's watchers that a round has moved it, with its buffers, and the next step is to come."""
    for watcher in _watchers.of(module):
        watcher.moved()


def averaged(module: "nn.Module", **readings: object) -> None:
    """Tell a module's watchers, between two steps, what a round of averaging has shown."""
    for watcher in _watchers.of(module):
        watcher.averaged(readings)


def was_set(module: "nn.Module", thing: object, name: str) -> None:
    """Tell a module's watchers that an attribute of what trains it was set anew, whatever they made it."""
    for watcher in _watchers.of(module):
        watcher.was_set(thing, name)


def admits(module: "nn.Module") -> bool:
    """Ask a module's watchers about the gradients on it; each is asked, and one that says no is enough."""
    said = [watcher.admits() for watcher in _watchers.of(module)]
    return all(said)


def has_dropped(module: "nn.Module") -> bool:
    """Tell whether a watcher has dropped the gradients of the batch whose loss was told last.

    An optimizer's step of its own asks the watchers in a hook, and its loop does not see what they said.
    """
    return any(watcher.has_dropped for watcher in _watchers.of(module))


def is_lost(module: "nn.Module") -> bool:
    """Tell whether parameters are not finite, as a watcher has seen and told. False: they are, or unknown."""
    return any(watcher.is_lost for watcher in _watchers.of(module))


def act_on_updates(module: "nn.Module") -> list[Sequence[object]]:
    """Tell by what settings a module's watchers may change its updates, in an order of its own."""
    return sorted((w.acts_on_updates for w in _watchers.of(module) if w.acts_on_updates), key=repr)


def part_members(module: "nn.Module") -> list[str]:
    """Word why a module's watchers must not be where members of a group are to share updates of it."""
    return [watcher.parts_members for watcher in _watchers.of(module) if watcher.parts_members]
