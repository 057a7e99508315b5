"""The extension: Rust's server, client and build record. Private; the classes beside it are what users hold.

Settings and tables cross as JSON, tensors as memory. What waits releases the GIL and answers Ctrl-C.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from offbeat.receipt import Receipt

__all__ = [
    "ArrayTable",
    "Server",
    "Session",
    "Snapshot",
    "build_info",
    "checkpoint_model",
    "checkpoint_names",
    "fetch_status",
    "forget_after_fork",
    "inspect_checkpoints",
    "set_log_level",
    "take_log_records",
    "verify_checkpoint",
    "verify_lives",
    "wait_for_log_records",
]

_Tell: TypeAlias = Callable[[int, int], object]
"""Is told now and then how many bytes were read, and of how many; what it raises ends the reading."""

_Memory: TypeAlias = NDArray[Any] | tuple[object, int, int]
"""A C-contiguous array, or (owner, address, number of bytes) of memory that `owner` keeps alive."""

@final
class ArrayTable:
    """The tensor table as numpy knows it: puts named arrays into its order."""

    def __new__(cls, tensors: Sequence[tuple[Sequence[str], Sequence[int], np.dtype[Any]]]) -> ArrayTable: ...
    def values(
        self, given: dict[str, object], adapt: Callable[[str, object], NDArray[Any]]
    ) -> list[NDArray[Any] | None]:
        """Give a push's arrays, None where there is none; `adapt` makes one of others, or raises."""

    def memories(
        self, given: dict[str, NDArray[Any]], adapt: Callable[[str, object], NDArray[Any]]
    ) -> list[NDArray[Any]]:
        """Give the arrays to be written; `adapt` makes one of what is not plain or None, or raises."""

@final
class Snapshot:
    """A model's values, copied; the server that it is given to takes them."""

    def __new__(cls, table: str, values: Sequence[NDArray[Any]]) -> Snapshot: ...

@final
class Server:
    address: str
    """Where it listens, "HOST:PORT"."""

    def __new__(cls, config: str, model: Snapshot | None) -> Server:
        """Bind and serve. `config` is `ServerConfig` as JSON; a snapshot serves one server."""

    def wait_for_workers(self, n: int, timeout_s: float | None) -> bool: ...
    def wait_until_joined(self, n: int, timeout_s: float | None) -> bool: ...
    def status(self) -> str: ...
    def set_lr(self, lr: float, group: int | None) -> None: ...
    def set_optimizer(self, optimizer: str) -> None: ...
    def set_max_staleness(self, most: int | None) -> None: ...
    def tensors(self) -> tuple[str, list[bytearray]] | None:
        """Copy the model: its table as JSON, and the bytes of each tensor; None as long as there is none."""

    def load_tensors(self, values: Sequence[NDArray[Any]]) -> None: ...
    def roll_back(self, version: int | None) -> int: ...
    def stop(self, is_over: bool) -> None: ...

@final
class Session:
    address: str
    run_id: str
    worker_id: str
    incarnation: int
    term: int
    version: int
    """Of the model, as last heard."""
    table: str | None
    """The tensors in order, as JSON; None as long as the server has no model."""
    blueprint: str | None
    run: str
    """The run's configuration as the server has it, as JSON."""
    patience_s: float
    """How long a call waits for a server that is lost: as given, or by whether it keeps checkpoints."""
    finished: str | None
    """Why the run is over, if the server has said so: "budget" or "stopped"."""

    def __new__(
        cls,
        address: str,
        worker_id: str | None,
        token: str | None,
        run_id: str | None,
        in_flight: int,
        connect_timeout_s: float,
        reconnect_timeout_s: float | None,
        table: str | None,
    ) -> Session: ...
    def wait_for_model(self) -> str:
        """Wait until the server has a model; return its table."""

    def init(self, table: str, values: Sequence[_Memory], blueprint: str | None) -> bool:
        """Bring a model; False if another worker's was there first."""

    def replace(self, table: str, values: Sequence[_Memory], since: tuple[int, int] | None) -> bool:
        """Bring values for the model there is, if it is still that of that term and version.

        None: if nobody has trained what the server's owner gave it. False: it is another, and stays.
        """

    def configure(self, contribution: str, optimizer: str | None) -> str:
        """Say what this worker pushes ("gradient" or "delta") and with which optimizer; return the run."""

    def pull(self, out: Sequence[_Memory], incremental: bool) -> tuple[int, int]:
        """Write the newest model into `out`, one memory per tensor; return (term, version).

        With `incremental`, `out` still holds what the last pull wrote, so what has not changed need not come.
        """

    def push(self, values: Sequence[_Memory | None], samples: int) -> Receipt:
        """Push one memory per tensor: gradient or delta; of a buffer its new value; None is left out."""

    def push_pull(
        self, values: Sequence[_Memory | None], samples: int, out: Sequence[_Memory], incremental: bool
    ) -> tuple[Receipt | None, bool]:
        """Push and pull at once. With two in flight the receipt is the push's before this; first, None.

        Also whether parameters were written into `out`: where none was under way, as at the first and after a
        lost connection, none were.
        """

    def flush(self, out: Sequence[_Memory] | None) -> list[Receipt]:
        """Wait for what is in flight; return its receipts."""

    def enter(
        self,
        samples: tuple[float, tuple[float, int] | None],
        at_work: bool,
        times_s: tuple[float | None, float | None],
        at_least: int,
        words: tuple[str | None, str | None],
    ) -> tuple[int, float, int, int, bool, float | None]:
        """Enter a round with samples, (grace, linger), by (terms, wish), and wait until it closes.

        Samples are those of all and (samples, of which part) of what is new.

        Returns (round, share, members, members at work, whether all have agreed, share of what is new).
        """

    def gather(self, round: int) -> tuple[int, int]:  # noqa: A002  as `Entered` calls it
        """Wait until all of a round have gathered; return (shares missing, the model's version)."""

    def set_progress(self, steps: int) -> None:
        """Tell the next heartbeats how far this worker is."""

    def status(self) -> str:
        """Ask the server for its status, JSON."""

    def close(self, parting: Literal["finished", "left", "withdrawn"], cause: str | None = None) -> None:
        """Say goodbye and close. May be called twice.

        Args:
            parting: "withdrawn": it joined and could not begin, and is no member any more.
            cause: Why, if it is not finished.
        """

    def leave(self, parting: Literal["finished", "left", "withdrawn"], cause: str | None = None) -> None:
        """Close, as the process ends: another thread's call is broken off, and none follows.

        Args:
            parting: As for `close`.
            cause: As for `close`.
        """

def forget_after_fork() -> None:
    """In a forked child: close what was inherited, without a word to the other side."""

def fetch_status(address: str, token: str | None, timeout_s: float) -> str:
    """Ask the server at `address` for its status, JSON, without joining."""

def checkpoint_names(path: str | PathLike[str]) -> list[str] | None:
    """Name the checkpoints in a directory, newest first; None if the path leads to one itself."""

def inspect_checkpoints(path: str | PathLike[str]) -> str:
    """Tell what lies at a path, JSON: a checkpoint, or a directory of them with all that are in it.

    Manifests are read; of the other files it is only looked whether they are as long as they should be.
    """

def verify_lives(directory: str | PathLike[str]) -> None:
    """Read what the servers of a directory have reserved, as a start does first."""

def verify_checkpoint(folder: str | PathLike[str], tell: _Tell | None) -> bool:
    """Do with a checkpoint what a server's start would do; False if it is gone, an error if not good."""

def checkpoint_model(
    path: str | PathLike[str], tell: _Tell | None
) -> tuple[str, int, list[str], str, list[bytearray]]:
    """Copy the model of a checkpoint, or of the newest good one in a directory.

    Returns:
        The checkpoint's name and version, what is wrong with each newer one, the model's table as JSON, and
        the bytes of each tensor.
    """

def build_info() -> dict[str, Any]:
    """Tell version, profile, target, compiler features and wire protocol of this build."""

def set_log_level(level: int) -> None:
    """Say from which level on records are wanted; at first 20, INFO."""

def take_log_records() -> list[tuple[int, str, str]]:
    """Take what Rust has to log: (level, target, text)."""

def wait_for_log_records(timeout_s: float) -> None:
    """Wait until Rust has something to log, and leave it there."""
