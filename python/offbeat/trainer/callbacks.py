"""Who is told as training goes on."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offbeat.checks import objects, refuse
from offbeat.history import History, Record
from offbeat.naming import nearest, unknown
from offbeat.trained_by import Keeper

if TYPE_CHECKING:
    from offbeat.trainer.trainer import AsyncTrainer

__all__ = ["Callback", "Callbacks", "Step", "callbacks_of"]

METHODS = {"on_step": "step", "on_log": "record", "on_epoch_end": "epoch", "on_train_end": "history"}
"""Hooks, and what each is called with besides the trainer."""


@dataclass(frozen=True, slots=True)
class Step:
    """A batch that was trained on.

    Attributes:
        step: Steps of the optimizer since `train` began, with those that came of this batch. Where several
            batches make one, as under ``"accumulate"``, it is 0 before the first, and the same for several.
        epoch: Counted over the trainer's life, from 0.
        samples: In the batch.
        loss: Of the batch, as the loss function gave it; on its device, so that nobody waits who need not.
        gradient_norm: Of what the batch's step was made by, before it was clipped; None where there was no
            step, or nothing is clipped.
        is_skipped: Nothing came of it: its scaled gradients were not finite, or a monitor dropped them. Under
            ``"accumulate"``: an update, which was due in this batch, was skipped by the loss scale.
        is_update: The optimizer has stepped in this batch: for what is to be done once at a `step`.
    """

    step: int
    epoch: int
    samples: int
    loss: torch.Tensor
    gradient_norm: torch.Tensor | None
    is_skipped: bool
    is_update: bool


class Callback(Protocol):
    """Any of these methods, each of which may be left out. What one raises ends `train`."""

    def on_step(self, trainer: "AsyncTrainer", step: Step) -> None:
        """After each batch."""

    def on_log(self, trainer: "AsyncTrainer", record: Record) -> None:
        """After each log line."""

    def on_epoch_end(self, trainer: "AsyncTrainer", epoch: int) -> None:
        """After each whole pass; counted over the trainer's life, from 0.

        `trainer.strategy` is the one that it was trained with, until another is set.
        """

    def on_train_end(self, trainer: "AsyncTrainer", history: History) -> None:
        """When `train` is about to return; not where an exception ends it."""


class Callbacks:
    """Several, told in their order.

    Attributes:
        keepers: Those that have a state for checkpoints.
    """

    def __init__(self, trainer: "AsyncTrainer", callbacks: Iterable[object]) -> None:
        callbacks = list(callbacks)
        self._trainer = trainer
        self.keepers: list[Keeper] = [one for one in callbacks if isinstance(one, Keeper)]
        self._by_method = {
            name: [method for one in callbacks if callable(method := getattr(one, name, None))]
            for name in METHODS
        }

    def tell(self, method: str, what: object) -> None:
        """Call a method of all that have it."""
        for call in self._by_method[method]:
            call(self._trainer, what)

    def has(self, method: str) -> bool:
        """Whether anybody has it."""
        return bool(self._by_method[method])


def callbacks_of(given: object) -> list[Any]:
    """Make a list of what a user gave as `callbacks`.

    Raises:
        ConfigError: Naming each that is none, each method that is named nearly as a hook is, which nobody
            would call, and each hook that cannot be called as it will be.
    """
    given = () if given is None else given
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else [given]
    faults = []
    for one in several:
        if wrong := objects(callbacks=one):
            faults += wrong
        elif mistyped := _mistyped(one):
            faults += [f"callbacks has {one!r:.100}: {unknown('hook', name, METHODS)}" for name in mistyped]
        elif not any(callable(getattr(one, name, None)) for name in METHODS):
            faults.append(f"callbacks has {one!r:.100}: give objects with any of {', '.join(METHODS)}")
        faults += [] if wrong else _uncallable(one)
    refuse(faults)
    return several


def _uncallable(one: object) -> list[str]:
    """Word of each hook that takes other arguments than it will get, which would come out as it is called."""
    faults = []
    for name, what in METHODS.items():
        if not callable(hook := getattr(one, name, None)):
            continue
        try:
            signature = inspect.signature(hook)
        except (TypeError, ValueError):  # of a builtin, nobody knows
            continue
        try:
            signature.bind(None, None)
        except TypeError:
            faults.append(
                f"callbacks has {one!r:.100}, whose {name}{signature} cannot be called with (trainer, "
                f"{what}), as it will be: let it take both"
            )
    return faults


def _mistyped(one: object) -> list[str]:
    """Give the names of methods that look like hooks, and are none."""
    return [
        name
        for name in dir(one)
        if name.lower().startswith("on")
        and name not in METHODS
        and nearest(name, METHODS) is not None
        and callable(getattr(one, name, None))
    ]
