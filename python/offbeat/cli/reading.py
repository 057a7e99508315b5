"""How far the reading of a checkpoint is, for somebody who looks at a terminal: seconds of every GB."""

from types import TracebackType
from typing import Any, Self

from offbeat.terminal import on_terminal

__all__ = ["Reading"]


class Reading:
    """Shows a bar while something is read, if it is long enough for that; used as a context manager.

    Args:
        what: What is read.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_shown = on_terminal()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, read_bytes: int, all_bytes: int) -> None:
        """Show that so many bytes are read, and of how many."""
        if not self._is_shown:
            return
        if self._bar is None:
            self._bar = _bar(self._what)
        self._bar.total = all_bytes
        self._bar.update(read_bytes - self._bar.n)


def _bar(what: str) -> Any:  # noqa: ANN401  a class that is made here
    from tqdm import tqdm

    class Quiet(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no thread of its own

    return Quiet(desc=what, unit="B", unit_scale=True, unit_divisor=1024, leave=False, dynamic_ncols=True)
