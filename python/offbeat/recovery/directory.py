"""A directory of checkpoints: who has it, what is in it, what is kept.

A checkpoint is built in a folder that no reader takes for one, and gets its name when it is whole. One that
is removed loses its name first.
"""

import errno
import fcntl
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat import log
from offbeat.errors import CheckpointError, ConfigError, DamagedError
from offbeat.recovery.folder import read_manifest, sync
from offbeat.recovery.manifest import MANIFEST, Manifest

__all__ = ["Directory", "Entry", "entries", "fault_of_name", "is_servers", "is_trainers", "name_of", "names"]

LOCK = "lock"
"""As a server's, so that neither takes the other's directory."""
BUILT, REMOVED, DAMAGED = ".saving-", ".removing-", "damaged-"
TRIED = f"{BUILT}000000"
"""A folder that is made to see that one can be; a save's number is higher."""
HALF_DONE = re.compile(r"\.saving-\d{6,}|\.removing-(damaged-)?save-\d{6,}-step-\d+")
NAME = re.compile(r"save-(\d{6,})-step-(\d+)")
SERVERS = re.compile(r"life\.json|(damaged-|earlier-)?checkpoint-\d{6,}")
"""What a server leaves in a directory."""

NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""What a file system says that has no locks, as Lustre mounted without them, or NFS without its daemon."""

_held: "weakref.WeakSet[_Lock]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in a directory.

    Attributes:
        name: Of its folder.
        manifest: What it says; None where that is damaged.
        damage: Then, in which way; else None. Its other files have not been read.
    """

    name: str
    manifest: Manifest | None
    damage: str | None


def name_of(number: int, step: int) -> str:
    """Name a checkpoint's folder: by its save, since a step may be saved twice after a return to an older."""
    return f"save-{number:06}-step-{step}"


def fault_of_name(folder: Path, manifest: Manifest) -> str | None:
    """Say if a folder of a directory has not the name of its own checkpoint."""
    own = name_of(manifest.number, manifest.step)
    return None if folder.name == own else f"{folder}: the manifest is of {own}"


def names(path: Path) -> list[str]:
    """List the checkpoints of a directory, newest first.

    Raises:
        CheckpointError: If it cannot be read.
    """
    found = [(_number(name), name) for name in _listed(path) if NAME.fullmatch(name)]
    return [name for _, name in sorted(found, reverse=True)]


def entries(path: Path) -> list[Entry]:
    """Tell of each checkpoint what its manifest says, newest first; one that is gone by then is left out.

    Raises:
        CheckpointError: If one cannot be read, or is of another format.
    """
    return [entry for name in names(path) if (entry := _entry(path, name)) is not None]


def is_trainers(path: Path) -> bool:
    """Whether a folder is a trainer's checkpoint, or a directory of them."""
    from offbeat.recovery.manifest import kind_of

    manifest = path / MANIFEST
    try:
        with manifest.open("rb") as file:
            return kind_of(file.read(1024)) is not None
    except OSError:
        return bool(names(path))


def is_servers(path: Path) -> bool:
    """Whether a folder is a server's checkpoint, as its name and its manifest tell."""
    own = Path(os.path.realpath(path)).name  # a link may have any, or lead back to itself
    return SERVERS.fullmatch(own) is not None and (path / MANIFEST).is_file() and not is_trainers(path)


class Directory:
    """A trainer's directory, locked for it alone.

    Attributes:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: _Lock | None = None  # inside `locked`
        self._has_warned = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have it for this process alone, and remove what one that died has left half-done.

        What cannot be removed is tried again with the next `keep`, which tells of it. On a file system
        without locks nobody is kept out, which is warned of.

        Raises:
            CheckpointError: If another process has it, or it cannot be used.
            ConfigError: If it is a server's.
        """
        self._lock = self._locked()
        if not self._lock.is_held and not self._has_warned:
            self._has_warned = True
            log.warn(
                f"checkpoint_dir {self.path} is on a file system without locks: nothing keeps a second "
                f"trainer out, and two would remove each other's checkpoints; see to it "
                f"that this is the only one"
            )
        try:
            if theirs := sorted(name for name in _listed(self.path) if SERVERS.fullmatch(name)):
                raise ConfigError(
                    f"checkpoint_dir is {str(self.path)!r}, and a server keeps its checkpoints there "
                    f"({theirs[0]}): give another directory"
                    + ("; or, if no server needs them, remove them" if names(self.path) else "")
                )
            with suppress(CheckpointError):
                self._sweep()
            self._try()
            yield
        finally:
            self._release()

    def _locked(self) -> "_Lock":
        """Make it where it is not there, and lock it.

        Raises:
            CheckpointError: If another process has it, or it cannot be used.
        """
        try:
            _make(self.path)
            return _Lock(self.path / LOCK)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"checkpoint_dir {self.path} cannot be used: {error.strerror}") from error

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _have_again(self) -> None:
        """Make it again, and lock that, where somebody has removed it: the lock has gone with its file.

        Raises:
            CheckpointError: If another process has come there since, whose checkpoints are no business of
                this run's; or if it cannot be used.
        """
        place = self.path / LOCK
        if self._lock is not None and self._lock.is_of(place):
            return
        was_there = self.path.exists()
        if (holder := _holder(place)) not in (None, os.getpid()):
            raise CheckpointError(
                f"checkpoint_dir {self.path} was removed or moved in mid-run, and another trainer or server "
                f"(process {holder}) has come there since: what is there is not this run's"
            )
        self._release()  # first: should it be the same file after all, nobody else keeps it from us
        self._lock = self._locked()
        if not was_there:
            log.warn(
                f"checkpoint_dir {self.path} was removed or moved in mid-run, with all that was in it, and "
                f"is made again"
            )

    def others(self) -> list[str]:
        """List what is there besides the lock."""
        return sorted(name for name in _listed(self.path) if name != LOCK)

    def next_number(self) -> int:
        """Give the number of the next save: above all that are there, damaged ones and half-done ones too."""
        return 1 + max((_number_in(name) for name in _listed(self.path)), default=0)

    def add(self, number: int, step: int, write: Callable[[Path], None]) -> str:
        """Add a checkpoint; where somebody has removed the directory, it is made again.

        Args:
            number: Of the save.
            step: Of the run.
            write: Fills a folder with files that are on the disk when it returns, the manifest last.

        Returns:
            The name of its folder.

        Raises:
            CheckpointError: If it cannot be written; then nothing is left of it.
        """
        name = name_of(number, step)
        self._have_again()
        built = self.path / f"{BUILT}{number:06}"
        try:
            built.mkdir()
            write(built)
            sync(built)
            built.rename(self.path / name)
            sync(self.path)
        except BaseException as error:
            with suppress(OSError):  # which was tried, and what went wrong is told
                shutil.rmtree(built, ignore_errors=True)
                # A name that may not have got to the disk is no checkpoint that anybody was told of.
                shutil.rmtree(self.path / name, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                what = error.strerror or str(error)
                raise CheckpointError(f"{self.path / name} cannot be written: {what}") from error
            raise
        return name

    def keep(self, chosen: Callable[[Sequence[Manifest]], set[int]]) -> None:
        """Remove all checkpoints but those that are chosen, and what was left half-done before.

        Args:
            chosen: From the manifests, newest first, to the numbers of those that stay. One whose manifest is
                damaged stays, too: it is a start's to set aside. So does one that cannot be read.

        Raises:
            CheckpointError: Naming all that could not be read or removed; all others were.
        """
        faults: list[str] = []
        found: list[tuple[str, Manifest]] = []
        for name in names(self.path):
            try:
                entry = _entry(self.path, name)
            except CheckpointError as error:
                faults.append(str(error))
                continue
            if entry is not None and entry.manifest is not None:
                found.append((name, entry.manifest))
        stay = chosen([manifest for _, manifest in found])
        for name, manifest in found:
            if manifest.number not in stay:
                try:
                    self.remove(name)
                except CheckpointError as error:
                    faults.append(str(error))
        try:
            self._sweep()
        except CheckpointError as error:
            faults.append(str(error))
        if faults:
            raise CheckpointError("; ".join(dict.fromkeys(faults)))

    def remove(self, name: str) -> None:
        """Remove a checkpoint.

        Raises:
            CheckpointError: If it cannot be.
        """
        gone = self.path / f"{REMOVED}{name}"
        try:
            (self.path / name).rename(gone)
            _delete(gone)
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be removed: {error.strerror}") from error

    def clear(self) -> None:
        """Remove all checkpoints, those that were set aside, too; what is not ours stays.

        Raises:
            CheckpointError: If one cannot be removed.
        """
        for name in _listed(self.path):
            if NAME.fullmatch(name.removeprefix(DAMAGED)):
                self.remove(name)

    def _sweep(self) -> None:
        """Remove what is half-done; to be called where nothing is under way."""
        faults = []
        for name in _listed(self.path):
            if HALF_DONE.fullmatch(name):
                try:
                    _delete(self.path / name)
                except OSError as error:
                    faults.append(f"{self.path / name} cannot be removed: {error.strerror}")
        if faults:
            raise CheckpointError("; ".join(faults))

    def _try(self) -> None:
        """See that a save can begin: in mid-run one that fails ends no training.

        Raises:
            CheckpointError: If it cannot.
        """
        try:
            (self.path / TRIED).mkdir(exist_ok=True)
            (self.path / TRIED).rmdir()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir {self.path} cannot be written to: {error.strerror}"
            ) from error

    def set_aside(self, name: str) -> None:
        """Give a damaged checkpoint a name that no start looks at.

        Raises:
            CheckpointError: If it cannot be.
        """
        try:
            (self.path / name).rename(self.path / f"{DAMAGED}{name}")
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be set aside: {error.strerror}") from error


def _delete(path: Path) -> None:
    """Delete a folder, or the file or link that somebody has put in its place; not what that leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _make(path: Path) -> None:
    """Make a directory and get its name to the disk, with those of all above it that were not there."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync(place.parent)


class _Lock:
    """A lock that ends with this process, however it ends, and that a child does not hold on to.

    Attributes:
        is_held: Whether it keeps others out, which it does not on a file system without locks.
    """

    def __init__(self, path: Path) -> None:
        self._number: int | None = None
        self.is_held = True
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self.is_held = False
            os.ftruncate(number, 0)
            os.write(number, f"{os.getpid()}\n".encode())
        except BlockingIOError as error:
            holder = os.read(number, 32).decode(errors="replace").strip()
            os.close(number)
            by = f" (process {holder})" if holder.isdecimal() else ""
            raise CheckpointError(
                f"checkpoint_dir {path.parent} is in use by another trainer or server{by}: wait for it, or "
                f"give another directory"
            ) from error
        except BaseException:
            os.close(number)
            raise
        self._number = number
        _close_in_children()
        _held.add(self)

    def is_of(self, path: Path) -> bool:
        """Whether it is on the file that is there."""
        try:
            return self._number is not None and os.path.samestat(os.fstat(self._number), path.stat())
        except OSError:
            return False

    def release(self) -> None:
        if self._number is not None:
            os.close(self._number)
            self._number = None
        _held.discard(self)


def _holder(path: Path) -> int | None:
    """Give the process that has a lock, or had it last; None where nobody knows."""
    try:
        told = path.read_bytes()[:32].strip()
    except OSError:
        return None
    return int(told) if told.isdigit() else None


_is_hooked = False


def _close_in_children() -> None:
    """Let a loader's worker, which outlives a killed trainer by seconds, not keep the next one out."""
    global _is_hooked  # noqa: PLW0603  there is one process
    if not _is_hooked:
        _is_hooked = True
        os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for lock in list(_held):
        lock.release()  # closes our descriptor alone: the parent's holds the lock


def _entry(path: Path, name: str) -> Entry | None:
    try:
        manifest = read_manifest(path / name)
    except DamagedError as error:
        return Entry(name, None, str(error)) if os.path.lexists(path / name) else None
    fault = fault_of_name(path / name, manifest)
    return Entry(name, None if fault else manifest, fault)


def _number(name: str) -> int:
    found = NAME.fullmatch(name)
    return int(found[1]) if found else 0


def _number_in(name: str) -> int:
    """Give the number of the save that a folder is of, or was to be, or 0."""
    if name.startswith(BUILT):
        number = name.removeprefix(BUILT)
        return int(number) if number.isdecimal() else 0
    return _number(name.removeprefix(DAMAGED).removeprefix(REMOVED))


def _listed(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.iterdir()]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
