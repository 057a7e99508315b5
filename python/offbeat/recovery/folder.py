"""One checkpoint as a folder: written so that it is there whole or not at all, and read with its digests."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from offbeat.errors import CheckpointError, DamagedError
from offbeat.recovery.manifest import MANIFEST, FileEntry, Manifest

__all__ = ["Tell", "read_manifest", "survey", "sync", "verify", "write_synced"]

Tell = Callable[[int, int], object]
"""Hears how many bytes of how many have been read."""

CHUNK_BYTES = 2**22
LARGEST_MANIFEST_BYTES = 2**20
DAMAGES = {errno.ENOENT: "there is no {}", errno.ELOOP: "{} is a link"}
"""What the system says of a file that is no plain one; anything else says nothing of the checkpoint."""


def read_manifest(folder: Path) -> Manifest:
    """Read what a checkpoint says of itself.

    Raises:
        DamagedError: If it is not as it was written.
        CheckpointError: If it cannot be read, or is of another format.
    """
    raw = b""
    with _opened(folder, MANIFEST) as file:
        if os.fstat(file.fileno()).st_size <= LARGEST_MANIFEST_BYTES:
            raw = file.read()
    try:
        return Manifest.from_bytes(raw)
    except DamagedError as error:
        raise DamagedError(f"{folder}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def survey(folder: Path) -> Manifest:
    """Read what a checkpoint says of itself, and of its other files how long they are.

    Raises:
        DamagedError: If one is missing, or of another length.
        CheckpointError: If the manifest cannot be read. That of other files is not tried.
    """
    manifest = read_manifest(folder)
    for entry in manifest.files:
        try:
            told = (folder / entry.name).stat(follow_symlinks=False)
        except FileNotFoundError as error:
            raise DamagedError(f"{folder}: there is no {entry.name}") from error
        except OSError as error:
            raise CheckpointError(f"{folder / entry.name} cannot be read: {error.strerror}") from error
        _check_kind(folder, entry.name, told)
        _check_length(folder, entry, told)
    return manifest


def verify(folder: Path, tell: Tell = lambda *_: None) -> Manifest:
    """Read a checkpoint to its end.

    Args:
        folder: Where it is.
        tell: Told how far it is.

    Returns:
        Its manifest.

    Raises:
        DamagedError: If any file is not as it was written.
        CheckpointError: If one cannot be read.
    """
    manifest = read_manifest(folder)
    total, done = sum(entry.bytes for entry in manifest.files), 0
    for entry in manifest.files:
        with _opened(folder, entry.name) as file:
            _check_length(folder, entry, os.fstat(file.fileno()))
            digest = hashlib.sha256()
            while chunk := _read(file, folder / entry.name):
                digest.update(chunk)
                done += len(chunk)
                tell(done, total)
        if digest.hexdigest() != entry.sha256:
            raise DamagedError(
                f"{folder}: {entry.name} is not as it was written: its SHA-256 is {digest.hexdigest()}, the "
                f"manifest says {entry.sha256}"
            )
    return manifest


def write_synced(path: Path, raw: bytes) -> FileEntry:
    """Write a new file and get it to the disk."""
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, len(raw), hashlib.sha256(raw).hexdigest())


def sync(folder: Path) -> None:
    """Get a folder's names to the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _check_kind(folder: Path, name: str, told: os.stat_result) -> None:
    if stat.S_ISLNK(told.st_mode):
        raise DamagedError(f"{folder}: {name} is a link")
    if not stat.S_ISREG(told.st_mode):
        raise DamagedError(f"{folder}: {name} is no file")


def _check_length(folder: Path, entry: FileEntry, told: os.stat_result) -> None:
    if told.st_size != entry.bytes:
        raise DamagedError(
            f"{folder}: {entry.name} has {told.st_size} bytes where the manifest says {entry.bytes}"
        )


def _opened(folder: Path, name: str) -> FileIO:
    """Open a plain file of a checkpoint, and nothing that a link leads to."""
    path = folder / name
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise DamagedError(f"{folder} is no folder") from error
    except OSError as error:
        if (fault := DAMAGES.get(error.errno or 0)) is not None:
            leads_nowhere = folder.is_symlink() and not folder.exists()
            what = " is a link to nothing" if leads_nowhere else f": {fault.format(name)}"
            raise DamagedError(f"{folder}{what}") from error
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        _check_kind(folder, name, os.fstat(number))
    except DamagedError:
        os.close(number)
        raise
    return FileIO(number)


def _read(file: FileIO, path: Path) -> bytes:
    try:
        return file.read(CHUNK_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
