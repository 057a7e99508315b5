"""The token of `offbeat server --new-token`, kept beside the checkpoints: the next start takes it again.

Else a server that is started again by the same command would shut out the workers that wait for it.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

from offbeat.errors import CheckpointError

__all__ = ["FILES", "is_kept", "made_up", "read", "write"]

TOKEN = "token"  # noqa: S105  a file's name
UNFINISHED = "token.new"
FILES = (TOKEN, UNFINISHED)
"""What there may be of it in a server's directory."""

TOKEN_BYTES = 16
"""Of a token that we make up: too many to guess."""
WRITTEN = re.compile(rb"[0-9a-f]{%d}\n" % (2 * TOKEN_BYTES))
"""How it stands in its file."""

BEYOND_ITS_OWNER = 0o077
REMEDY = "remove it, and the next start makes a new one, which all workers must then have"


def made_up() -> str:
    """Make a token."""
    return secrets.token_hex(TOKEN_BYTES)


def is_kept(directory: str) -> bool:
    """Whether there is something in a token's place, of whatever worth."""
    return os.path.lexists(Path(directory) / TOKEN)


def read(directory: str) -> str | None:
    """Read the token that is kept in a directory; None if there is none.

    Raises:
        CheckpointError: If there is something that nobody should trust: a file that others can read or own,
            or that holds anything else.
    """
    path = Path(directory) / TOKEN
    try:
        # A link may lead anywhere, and a FIFO would be waited for.
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a symbolic link, and no token of ours: {REMEDY}") from error
        raise CheckpointError(
            f"{path}, the token of --new-token, cannot be read: {error.strerror}"
        ) from error
    try:
        _check(path, os.fstat(number))
        text = os.read(number, 1024)
    finally:
        os.close(number)
    if not WRITTEN.fullmatch(text):
        raise CheckpointError(
            f"{path} is damaged: it does not hold a token as --new-token makes one; {REMEDY}"
        )
    return text.decode().strip()


def write(directory: str, token: str) -> None:
    """Keep a token in a directory, which is there and is locked for us, and has none yet.

    Raises:
        CheckpointError: If it cannot be written, or if this disk shows it to others; none is kept then. Or if
            there is one by now: of a start beside this one, whose workers may wait for it.
    """
    path, unfinished = Path(directory) / TOKEN, Path(directory) / UNFINISHED
    try:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()  # of a start that was broken off
        number = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(number, "wb") as file:
            file.write(f"{token}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        os.link(unfinished, path)  # which replaces nothing
        unfinished.unlink()
        _sync(Path(directory))
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, FileExistsError):
            raise CheckpointError(
                f"{path} has come since this start looked for it, of another start: start again, to take "
                "that one"
            ) from error
        raise CheckpointError(
            f"{path}, where the token of --new-token is kept for the next start, cannot be written: "
            f"{error.strerror}; give a token of your own instead, in OFFBEAT_TOKEN"
        ) from error
    try:
        read(directory)  # now, and not when workers wait: some disks keep neither owner nor mode
    except CheckpointError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _check(path: Path, told: os.stat_result) -> None:
    if not stat.S_ISREG(told.st_mode):
        raise CheckpointError(f"{path} is no file, and so no token of ours: {REMEDY}")
    if told.st_uid != os.geteuid():
        raise CheckpointError(
            f"{path} belongs to another user (uid {told.st_uid}), who may know this token: {REMEDY}. Where "
            f"the disk gives all files to that user, give a token of your own, in OFFBEAT_TOKEN"
        )
    if told.st_mode & BEYOND_ITS_OWNER:
        raise CheckpointError(
            f"{path} may be read or changed by others (mode {stat.S_IMODE(told.st_mode):04o}), who may know "
            f"this token by now: {REMEDY}; or, where nobody has seen it, chmod 600 it. Where the disk "
            f"keeps no modes, give a token of your own, in OFFBEAT_TOKEN"
        )


def _sync(directory: Path) -> None:
    """Get the names in a directory to the disk."""
    number = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
