"""Going back to a checkpoint in mid-run: chosen and read when it is asked for, in place after the step.

A step that is under way has a graph of the values that there are; so those are replaced between two steps.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import CheckpointError, DamagedError, ModelMismatchError, StateError
from offbeat.frequency import Every
from offbeat.recovery.choice import left_behind, preferred, to_go_back_to
from offbeat.recovery.directory import Directory, entries, name_of
from offbeat.recovery.files import read
from offbeat.recovery.folder import verify
from offbeat.recovery.manifest import Manifest
from offbeat.recovery.saver import Saver
from offbeat.recovery.trainee import Trainee

__all__ = ["Back", "WayBack"]


@dataclass(frozen=True, slots=True)
class Back:
    """A checkpoint to go back to, read.

    Attributes:
        path: Its folder.
        manifest: What it says.
        state: Of what was trained.
        account: Of the run, then.
        behind: Numbers of those written since.
    """

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    account: dict[str, Any]
    behind: frozenset[int]


class WayBack:
    """The checkpoints of a run under way, for whoever goes back. For the thread that trains.

    Args:
        directory: Where they are.
        trainee: What is trained.
        saver: Writes them.
        every: What is between two.
        stay: Numbers of those that are to be kept, from the manifests, newest first.
        is_planned: Tells which may be chosen by itself.

    Attributes:
        is_open: Whether there is a step to come after which one could be put in place.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        trainee: Trainee,
        saver: Saver,
        every: Every,
        stay: Callable[[Sequence[Manifest]], set[int]],
        is_planned: Callable[[Manifest], bool],
    ) -> None:
        self._directory = directory
        self._trainee = trainee
        self._saver = saver
        self._every = every
        self._stay = stay
        self._is_planned = is_planned
        self.is_open = True
        self._thread = threading.get_ident()
        self._asked: Back | None = None
        # What the newest rollback has gone back from, whether or not a checkpoint says so by now.
        self._behind: frozenset[int] = frozenset()

    def steps(self) -> list[int]:
        """List the steps whose values there are to go back to, those written last first.

        Raises:
            CheckpointError: If a checkpoint cannot be read.
            StateError: On another thread.
        """
        return [m.values_step for m in self._candidates(self._found())]

    def ask(self, step: int | None) -> int:
        """Choose a checkpoint, and read it; the next `take` gives it.

        Args:
            step: Whose values are wanted; None: those of the newest that is good.

        Returns:
            That step.

        Raises:
            CheckpointError: If there is none, or it is damaged; it is set aside then.
            ModelMismatchError: If what is trained has become another since.
            StateError: On another thread.
        """
        found = self._found()
        manifest = self._of(found, step)
        path = self._directory.path / name_of(manifest.number, manifest.step)
        try:
            verify(path)
        except DamagedError as error:
            self._directory.set_aside(path.name)
            raise CheckpointError(f"{error}; it is set aside: go back to another one") from error
        model, rest = read(path)
        state = {"model": model} | rest["trained"]
        if differences := self._trainee.differences(state):
            raise ModelMismatchError(
                f"{path} does not fit what is trained by now: {'; '.join(differences)}: go back to one that "
                f"was written since"
            )
        behind = frozenset(m.number for m in found if m.number > manifest.number)
        self._asked = Back(path, manifest, state, rest["account"], behind)
        return manifest.values_step

    def close(self) -> None:
        """Let nobody go back any more: the end is saved."""
        self.is_open = False

    def take(self) -> Back | None:
        """Give out what was asked for last, once."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self._behind = asked.behind
        return asked

    def _found(self) -> list[Manifest]:
        """List what there is, newest first, with what is being written."""
        if threading.get_ident() != self._thread:
            raise StateError(
                "rollback() and checkpoint_steps() are called on another thread than the one that trains: "
                "call them from a callback or loss_fn, or let a monitor's remedy do so"
            )
        self._saver.settle()
        return [e.manifest for e in entries(self._directory.path) if e.manifest is not None]

    def _candidates(self, found: Sequence[Manifest]) -> list[Manifest]:
        wanted = to_go_back_to(found, stay=self._stay(found), is_planned=self._is_planned)
        return [m for m in wanted if m.number not in self._behind]

    def _of(self, found: Sequence[Manifest], step: int | None) -> Manifest:
        """Choose one.

        Raises:
            CheckpointError: If there is none such.
        """
        where = self._directory.path
        if not found:
            each = f"{self._every.seconds:g} s" if self._every.count is None else f"{self._every.count} steps"
            raise CheckpointError(
                f"{where} has no checkpoint yet to go back to: the first one is written after {each}, "
                f"checkpoint_frequency; give a smaller one"
            )
        wanted = preferred([m for m in found if m.values_step == step])
        if step is None and not (wanted := self._candidates(found)):
            raise CheckpointError(f"{where} has no good checkpoint to go back to: {_why_none(found)}")
        if not wanted:
            there = ", ".join(map(str, sorted({m.values_step for m in found})))
            raise CheckpointError(f"{where} has no checkpoint of step {step}: there are those of {there}")
        return wanted[0]


def _why_none(found: Sequence[Manifest]) -> str:
    """Say why none of several checkpoints is gone back to by itself, and what to do."""
    behind = left_behind(found)
    if good := sorted({m.values_step for m in found if m.is_good and m.number not in behind}):
        steps = ", ".join(map(str, good))
        return (
            f"what was saved at step {steps} is good, but at no time at which all runs save, as at SIGTERM, "
            f"and deterministic=True takes none such by itself: rollback({good[-1]}) goes back to it"
        )
    return (
        f"of the {len(found)} there none has finite parameters and a loss within its band; "
        f"rollback(step=...) goes back to one all the same"
    )
