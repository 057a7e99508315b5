"""A tracker that writes TensorBoard's event files, by whichever writer of them is installed."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from offbeat.checks import refuse
from offbeat.errors import ClosedError, ConfigError
from offbeat.extras import lacks
from offbeat.tracking.base import checked, no_name

__all__ = ["TensorBoard"]

WHAT = "offbeat.tracking.TensorBoard"


class TensorBoard:
    """A tracker that writes scalars for TensorBoard: `tensorboard --logdir DIRECTORY` shows them.

    torch's own writer is used where `tensorboard` is installed, which is also what shows the files; else
    tensorboardX, a twentieth of its size, for machines that only write. What was logged is in the file when
    `log` returns.

    Args:
        directory: Where event files go, made where it is not there. Each tracker writes a file of its own,
            and TensorBoard shows those of one directory as one run: give each worker a directory.

    Raises:
        ConfigError: If neither writer is installed, or this is a file.
        OSError: If the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        refuse(no_name("a folder", directory=directory))
        self._directory = os.fspath(directory)
        if Path(self._directory).is_file():
            raise ConfigError(f"directory is {self._directory!r}, which is a file: give the name of a folder")
        self._writer: Any = _writer_class()(self._directory)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers down, each as a scalar under its name; `/` in a name makes groups.

        Args:
            values: By name.
            step: Where they belong.

        Raises:
            ConfigError: If something is no number; nothing is written then.
            ClosedError: After `finish()`.
        """
        numbers = checked(values, step)
        if self._writer is None:
            raise ClosedError(f"{self!r} was finished; make a new one, which writes beside it")
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file; finishing twice is fine."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> Self:
        """Use as a context manager: finished at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def __repr__(self) -> str:
        return f"{WHAT}({self._directory!r})"


def _writer_class() -> Any:  # noqa: ANN401  of one of two packages
    """Find a writer of event files.

    Raises:
        ConfigError: If there is none; it says what to install.
    """
    fault = lacks("tensorboard", WHAT)
    if fault is None:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    try:
        return importlib.import_module("tensorboardX").SummaryWriter
    except ModuleNotFoundError:
        raise ConfigError(f"{fault}; tensorboardX, which only writes, will do, too") from None
