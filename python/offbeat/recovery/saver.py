"""Saves: when one is due, its snapshot on the training thread, and its writing behind it."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as concurrent_wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offbeat import log
from offbeat.errors import CheckpointError
from offbeat.frequency import Every
from offbeat.module.table import unwrap
from offbeat.recovery.choice import preferred
from offbeat.recovery.directory import Directory, entries, name_of
from offbeat.recovery.files import Parts, write
from offbeat.recovery.folder import write_synced
from offbeat.recovery.manifest import MANIFEST, Manifest
from offbeat.recovery.snapshot import Buffers, are_finite

__all__ = [
    "Delays",
    "Draft",
    "Saver",
    "is_due",
    "words_of_delay",
    "words_of_failure",
    "words_of_last_failure",
]

RETRY_S = 10.0
"""From a save that failed to the next try, at least; a server waits as long."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be saved.

    Attributes:
        parts: The state; its tensors are where training goes on changing them.
        manifest: All that is known before it is written.
        parameters: Names of the model's, which are to be finite.
    """

    parts: Parts
    manifest: Manifest
    parameters: frozenset[str]


def is_due(
    every: Every, *, step: int, saved_step: int, since_s: float, failed_s: float | None = None
) -> bool:
    """Whether a save is due.

    Args:
        every: What is between two: steps, counted from the run's first, or a time.
        step: Of the run.
        saved_step: Of the last save, or of the start.
        since_s: Seconds since then.
        failed_s: Seconds since it was known that this save has failed; None if it has not.
    """
    if failed_s is not None and failed_s < RETRY_S:
        return False
    if every.count is not None:
        return step // every.count > saved_step // every.count
    return step > saved_step and since_s >= (every.seconds or 0.0)


def words_of_delay(every: Every, *, due_s: float, took_s: float) -> str:
    """Say that saves take longer than what is to be between them, and what would be enough.

    Args:
        every: What is to be between two.
        due_s: Seconds after a save at which the next was due.
        took_s: Seconds that the save took, until it was on the disk.
    """
    if every.count is None:
        given, enough = f"{every.seconds:g}s", f"'{math.ceil(took_s)}s'"
    else:
        given, enough = (
            f"{every.count} steps",
            str(math.ceil(every.count * max(took_s / max(due_s, 1e-9), 1))),
        )
    return (
        f"a checkpoint took {took_s:.3g} s to write, and the next one was due {due_s:.3g} s after it was "
        f"begun (checkpoint_frequency, {given}): saves are put off until the disk is done; "
        f"checkpoint_frequency={enough}, or more, asks no more of it than it gives"
    )


def words_of_failure(error: object, *, num: int, to_go_on: str) -> str:
    """Say that a save in mid-run has failed, and when the next one is tried.

    Args:
        error: Which file, and why.
        num: How many have failed, one after the other.
        to_go_on: What to do after a crash.
    """
    what = "a checkpoint" if num == 1 else f"the {num} newest checkpoints"
    return (
        f"{what} could not be written: {error}; training goes on, and the next save that is due, "
        f"{RETRY_S:g} s from now at the earliest, is the next try; after a crash until then, {to_go_on}"
    )


def words_of_last_failure(error: object, *, to_go_on: str) -> str:
    """Say that the save at the end has failed, and what to do.

    Args:
        error: Which file, and why.
        to_go_on: What to do then.
    """
    return (
        f"the last checkpoint could not be written: {error}; mend that (a full disk needs space), and "
        f"{to_go_on}"
    )


def words_to_go_on(newest: Path | None, again: str, *, needs_good: bool) -> str:
    """Say what to run, and what that goes on from.

    Args:
        newest: The checkpoint that there is; None without.
        again: What to run, as "the same command".
        needs_good: It goes on from one that is good, which the newest need not be.
    """
    found = "the newest checkpoint that is good" if needs_good else newest
    then = "begins anew, since there is no checkpoint" if newest is None else f"goes on from {found}"
    return f"run {again}, which {then}"


class Failures:
    """Saves that failed one after the other: told of at doubling distances, and logged as debug between."""

    def __init__(self) -> None:
        self.num = 0

    def tell(self, error: CheckpointError, to_go_on: str) -> None:
        """Take one more down."""
        self.num += 1
        words = words_of_failure(error, num=self.num, to_go_on=to_go_on)
        if self.num & (self.num - 1) == 0:
            log.warn(f"{words}; this is said again when as many more have failed")
        else:
            log.debug("%s", words)

    def end(self, newest: Path) -> None:
        """Take down that one was written."""
        if self.num:
            log.announce(f"{newest} was written: saving goes on again, after {self.num} that could not be")
        self.num = 0


class Delays:
    """Saves that were put off, in all calls of `train`: the first is warned of, all are counted."""

    def __init__(self) -> None:
        self._num = 0

    def tell(self, words: str) -> None:
        """Take one more down."""
        self._num += 1
        if self._num == 1:
            log.warn(f"{words}; later ones are logged as debug")
        else:
            log.debug("%s (for the time number %d)", words, self._num)


class Saver:
    """Writes checkpoints on a thread of its own, one at a time.

    The snapshot lies in memory that the next one is put into. So a save that is due while one is being
    written is put off until that is done: training waits for no disk, and no two are queued. One that fails
    in mid-run ends no training: it is warned of, and the next that is due is the next try.

    Args:
        directory: Where to; locked.
        every: What is between two.
        step: Of the run as it starts.
        newest: The checkpoint that the run goes on from; None where it begins.
        again: What a user is to run to go on.
        needs_good: That goes on from a checkpoint that is good.
        chosen: Which checkpoints stay, from the manifests, newest first.
        delays: Is told of saves that are put off.
        waits: A save that is due is not put off: the one before is waited for.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        directory: Directory,
        every: Every,
        *,
        step: int,
        newest: Path | None,
        again: str,
        needs_good: bool,
        chosen: Callable[[Sequence[Manifest]], set[int]],
        delays: Delays,
        waits: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waits = waits
        self._directory = directory
        self._every = every
        self._chosen = chosen
        self._clock = clock
        self._saved = step, clock()
        self._number = directory.next_number()
        self._buffers = Buffers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offbeat-save")
        self._writing: Future[Path] | None = None
        self._written_s = 0.0  # when the newest save was on the disk
        self._due_s: float | None = None  # seconds after the save under way at which the next one was due
        self._delays = delays
        self._has_told = False  # of what could not be removed
        self._newest = newest
        self._again, self._needs_good = again, needs_good
        self._failures = Failures()
        self._failed_s: float | None = None  # when it was known that the newest save has failed

    @property
    def to_go_on(self) -> str:
        """What to run after this life, in words."""
        return words_to_go_on(self._newest_there, self._again, needs_good=self._needs_good)

    @property
    def _newest_there(self) -> Path | None:
        """The newest checkpoint, or what a start would take in its place if somebody has removed it."""
        newest, path = self._newest, self._directory.path
        try:
            if newest is None or newest.exists():
                return newest
            found = entries(path) if path.exists() else []
        except (OSError, CheckpointError):  # what cannot be looked at is not known to be gone
            return newest
        left = preferred([entry.manifest for entry in found if entry.manifest is not None])
        return path / name_of(left[0].number, left[0].step) if left else None

    @property
    def has_failed(self) -> bool:
        """Whether the newest save that has ended could not be written."""
        return self._failed_s is not None

    def is_wanted(self, step: int) -> bool:
        """Whether to save after this step."""
        if self._writing is not None and self._writing.done():
            self.settle()
        step_before, time_s = self._saved
        now = self._clock()
        failed_s = None if self._failed_s is None else now - self._failed_s
        if not is_due(
            self._every, step=step, saved_step=step_before, since_s=now - time_s, failed_s=failed_s
        ):
            return False
        if self._waits and self._writing is not None:
            self.settle()
            return self._failed_s is None  # one that has failed just now is tried again later
        if self._writing is None:
            return True
        if self._due_s is None:
            self._due_s = now - time_s
        return False

    def save(self, draft: Draft) -> None:
        """Take a snapshot, and write it behind what comes next; waits for the one before."""
        self.settle()
        model, rest = draft.parts.model, draft.parts.rest
        both = {f"model/{k}": t for k, t in model.tensors.items()}
        both |= {f"rest/{k}": t for k, t in rest.tensors.items()}
        copies = iter(self._buffers.take(both).values())
        parts = Parts(
            replace(model, tensors={name: next(copies) for name in model.tensors}),
            replace(rest, tensors={name: next(copies) for name in rest.tensors}),
        )
        number, self._number = self._number, self._number + 1
        self._saved = draft.manifest.step, self._clock()
        manifest = replace(draft.manifest, number=number)
        self._writing = self._thread.submit(self._write, parts, manifest, draft.parameters)

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            CheckpointError: If it cannot be.
        """
        try:
            self._end()
        except CheckpointError as error:
            raise CheckpointError(words_of_last_failure(error, to_go_on=self.to_go_on)) from error

    def settle(self) -> None:
        """Wait until nothing is being written, and tell if it has failed: the run has more saves to come."""
        try:
            self._end()
        except CheckpointError as error:
            self._failures.tell(error, self.to_go_on)
            self._failed_s = self._clock()

    def _end(self) -> None:
        if self._writing is None:
            self._due_s = None
            return
        concurrent_wait([self._writing])  # what breaks this off leaves it to be waited for
        writing, self._writing = self._writing, None
        due_s, self._due_s = self._due_s, None
        self._newest = writing.result()
        self._failures.end(self._newest)
        self._failed_s = None
        if due_s is not None:  # told of now, as what it took is known now
            took_s = self._written_s - self._saved[1]
            self._delays.tell(words_of_delay(self._every, due_s=due_s, took_s=took_s))

    def close(self) -> None:
        """End the thread, after what it is writing; if that fails, nobody else will be told."""
        self._thread.shutdown()
        if self._writing is not None and (error := self._writing.exception()) is not None:
            log.warn(words_of_last_failure(error, to_go_on=self.to_go_on))

    def _write(self, parts: Parts, manifest: Manifest, parameters: Iterable[str]) -> Path:
        is_good = manifest.is_good and all(are_finite(parts.model.tensors[name]) for name in parameters)

        def fill(folder: Path) -> None:
            files = write(folder, parts)
            whole = replace(manifest, files=files, is_good=is_good, written_unix_s=time.time())
            write_synced(folder / MANIFEST, whole.to_bytes())

        name = self._directory.add(manifest.number, manifest.step, fill)
        self._clean()
        self._written_s = self._clock()
        return self._directory.path / name

    def _clean(self) -> None:
        """Remove old checkpoints. The new one is safe, and so is the run, where one cannot be removed."""
        try:
            self._directory.keep(self._chosen)
        except CheckpointError as error:
            if self._has_told:
                log.debug("%s", error)
                return
            self._has_told = True
            log.warn(
                f"a checkpoint was saved, and old ones stay that should be gone: {error}; training goes on, "
                f"and each save tries again, so that the disk may fill up: look at what keeps them"
            )


def parameters_of(module: torch.nn.Module, tensors: Iterable[str]) -> frozenset[str]:
    """Name those tensors of a module's state that are its parameters."""
    return frozenset(dict(unwrap(module).named_parameters(remove_duplicate=False))) & frozenset(tensors)
