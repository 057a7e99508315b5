"""What a person sees while the demo runs: one bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Never, Protocol, Self

from tqdm import tqdm

from offbeat.terminal import on_terminal

__all__ = ["Bar", "Lines", "Progress", "Silent", "choose"]

LINE_EVERY_S = 5.0


class Progress(Protocol):
    """Shows one run; used as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def begin(self, title: str, num_samples: int) -> None:
        """A run of so many samples begins; what went before is over."""

    def update(self, samples: int, note: str = "") -> None:
        """So many are done; `note` says more."""


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, title: str, num_samples: int) -> None:
        """Begin."""

    def update(self, samples: int, note: str = "") -> None:
        """Show nothing."""


class Lines(Silent):
    """For a file or a pipe."""

    def __init__(self) -> None:
        self._title = ""
        self._num_samples = 1
        self._last_s = self._began_s = 0.0

    def begin(self, title: str, num_samples: int) -> None:
        """Begin, with a line."""
        self._title, self._num_samples = title, num_samples
        self._last_s = self._began_s = time.monotonic()
        self._write(f"{title}: {num_samples:,} samples")

    def update(self, samples: int, note: str = "") -> None:
        """Print a line, if the last one was long enough ago."""
        now = time.monotonic()
        if now - self._last_s < LINE_EVERY_S:
            return
        self._last_s = now
        rate = samples / (now - self._began_s)
        share = samples / self._num_samples
        text = f"{self._title}: {share:4.0%}, {rate:,.0f} samples/s"
        self._write(f"{text}; {note}" if note else text)

    def _write(self, line: str) -> None:
        with suppress(OSError):  # the training goes on, whether or not anybody reads how far it is
            print(line, file=sys.stderr, flush=True)


class Bar(Silent):
    """For a terminal: one bar for all workers."""

    def __init__(self) -> None:
        self._bar: tqdm[Never] | None = None
        self._total = 0

    def __exit__(self, *_: object) -> None:
        self._close()

    def begin(self, title: str, num_samples: int) -> None:
        """Put a new bar below the ones before."""
        self._close()
        self._total = num_samples
        self._bar = tqdm(desc=title, total=num_samples, unit=" samples", unit_scale=True, dynamic_ncols=True)

    def update(self, samples: int, note: str = "") -> None:
        """Move the bar."""
        if self._bar is None:
            return
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(min(samples, self._total) - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def choose() -> Progress:
    """Choose by whether stderr is a terminal."""
    return Bar() if on_terminal() else Lines()
