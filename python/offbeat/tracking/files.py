"""Trackers that write plain files, which any tool reads: JSON lines, and CSV.

A file only grows, by whole calls of `log`, and each is with the system when the call returns: a process that
is killed costs nothing that was logged. What is opened again is gone on with. It has one tracker at a time:
of two, whose numbers have the same names and steps, nobody could tell afterwards which said what.
"""

import csv
import errno
import fcntl
import io
import json
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from offbeat import plain_json
from offbeat.checks import refuse
from offbeat.errors import ClosedError, ConfigError
from offbeat.tracking.base import checked, no_name

__all__ = ["CSV", "JSONL"]

NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""What a file system says that has no locks, as Lustre mounted without them, or NFS without its daemon."""


def _take(file: BinaryIO, path: Path) -> None:
    """Keep other trackers out of a file until it is closed, however its process ends.

    A file system without locks, as clusters have, is written to all the same: nearly always by one alone.

    Raises:
        ConfigError: If another tracker has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{path} is being written by another tracker, of this process or another one: give each a file "
            f"of its own, as by the worker's name or rank, or finish() that one before"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


class _File(ABC):
    """A file of lines that only grows."""

    _head: bytes
    """What the first line of every such file begins with."""
    _kind: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        refuse(no_name("a file", path=path))
        self._path = Path(path)
        if self._path.is_dir():
            raise ConfigError(f"path is {str(path)!r}, which is a folder: give the name of a file in it")
        self._turn = threading.Lock()  # a lock of the file's keeps other trackers out, and not other threads
        self._is_inherited = False
        self._torn_at: int | None = None  # where what was left half written begins, as on a full disk
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered and for appending: each call is one write, also where a file system has no locks.
        self._file: BinaryIO | None = self._path.open("ab+", buffering=0)
        try:
            _take(self._file, self._path)
            self._take_up(self._file)
        except BaseException:
            self._file.close()
            raise
        _open.add(self)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers down.

        Args:
            values: By name.
            step: Where they belong.

        Raises:
            ConfigError: If something is no number; nothing is written then.
            ClosedError: After `finish()`.
            OSError: If the file cannot be written; nothing of the call stays in it then.
        """
        numbers = checked(values, step)
        with self._turn:
            if self._file is None:
                raise ClosedError(
                    f"{self!r} is of the process that forked this one: make one here, of another file"
                    if self._is_inherited
                    else f"{self!r} was finished; make a new one, which goes on with the file"
                )
            if not numbers:
                return
            text = self._text(numbers, step, time.time())
            self._mend(self._file)
            self._torn_at = self._file.seek(0, os.SEEK_END)
            try:
                _write(self._file, text)
            except BaseException:
                with suppress(OSError, ConfigError):  # then before the next call, which says so
                    self._mend(self._file)
                raise
            self._torn_at = None

    def finish(self) -> None:
        """Close the file; finishing twice is fine."""
        with self._turn:
            if self._file is not None:
                try:
                    self._mend(self._file)
                finally:
                    self._file.close()
                    self._file = None

    def forget(self) -> None:
        """In a forked child: let go of what is the parent's, which alone writes and has the lock.

        A loader's worker, which outlives a killed trainer by seconds, would else keep the next one out.
        """
        if self._file is not None:
            self._file.close()  # our descriptor alone
            self._file, self._is_inherited = None, True
        self._turn = threading.Lock()  # which a thread of the parent's may have had

    def __enter__(self) -> Self:
        """Use as a context manager: finished at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def __repr__(self) -> str:
        return f"offbeat.tracking.{type(self).__name__}({str(self._path)!r})"

    @abstractmethod
    def _text(self, numbers: Mapping[str, float], step: int, now: float) -> bytes:
        """Give what is written down of numbers."""

    def _begin(self, file: BinaryIO) -> None:
        """Write what an empty file begins with."""
        del file  # most begin with nothing

    def _mend(self, file: BinaryIO) -> None:
        """Take off what a call has left half written: who logged was told that it is not there."""
        if self._torn_at is not None:
            file.truncate(min(self._torn_at, file.seek(0, os.SEEK_END)))
            self._take_up(file)
            self._torn_at = None

    def _take_up(self, file: BinaryIO) -> None:
        """Go on with a file of ours: a line that a killed process has left half written is taken off.

        Raises:
            ConfigError: If the file holds something else, which is left as it is.
        """
        file.seek(0)
        first = file.read(len(self._head))
        if not self._head.startswith(first):
            raise ConfigError(
                f"{self._path} holds something else than {self._kind} of ours: give another path"
            )
        end = _end_of_lines(file)
        file.seek(end)
        if (rest := file.read()) and self._is_whole(rest):
            _write(file, b"\n")
        elif rest:
            file.truncate(end)
        if end == 0:
            self._begin(file)

    def _is_whole(self, line: bytes) -> bool:  # noqa: ARG002  of those that can tell
        """Whether a line without its end lacks nothing else."""
        return False


class JSONL(_File):
    """A tracker that writes one JSON object a line, by `{"step": …, "time_unix_s": …, "values": {…}}`.

    What is NaN or infinite is null, since JSON has no word for it.

    Args:
        path: The file; one that is there is gone on with. Its folder is made where it is not there.

    Raises:
        ConfigError: If the file holds something else, or another tracker writes it.
        OSError: If it cannot be opened, or its folder not be made.

    Example:
        >>> with offbeat.tracking.JSONL("run.jsonl") as log:
        ...     worker.train(dataset=data, loss_fn=loss_fn, trackers=log)
    """

    _head = b'{"step": '
    _kind = "JSON lines"

    def _is_whole(self, line: bytes) -> bool:
        try:
            json.loads(line)
        except ValueError:
            return False
        return True

    def _text(self, numbers: Mapping[str, float], step: int, now: float) -> bytes:
        line = {"step": step, "time_unix_s": now, "values": dict(numbers)}
        return f"{plain_json.dumps(line)}\n".encode()


class CSV(_File):
    """A tracker that writes one number a line, under the columns step, time_unix_s, name and value.

    Long, and not one column a name: names may come later (a metric of the second epoch, a worker that joins),
    and a file whose header is written again does not only grow. A table is made of it by
    `pandas.read_csv(path).pivot_table(index="step", columns="name", values="value")`. Numbers are as Python
    writes them, `nan` and `inf` among them, so that `float()` gives the same bits back.

    Args:
        path: The file; one that is there is gone on with. Its folder is made where it is not there.

    Raises:
        ConfigError: If the file holds something else, or another tracker writes it.
        OSError: If it cannot be opened, or its folder not be made.
    """

    _head = b"step,time_unix_s,name,value\n"
    _kind = "CSV"

    def _begin(self, file: BinaryIO) -> None:
        _write(file, self._head)

    def _text(self, numbers: Mapping[str, float], step: int, now: float) -> bytes:
        text = io.StringIO(newline="")
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows((step, repr(now), name, repr(value)) for name, value in numbers.items())
        return text.getvalue().encode()


def _write(file: BinaryIO, text: bytes) -> None:
    while text:  # a disk that fills up takes a part
        text = text[file.write(text) :]


def _end_of_lines(file: BinaryIO, chunk_bytes: int = 1 << 16) -> int:
    """Tell where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - chunk_bytes)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


_open: weakref.WeakSet[_File] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_open):
        file.forget()


os.register_at_fork(after_in_child=_after_fork)
