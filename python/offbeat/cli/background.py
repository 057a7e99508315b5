"""Lines of our own on stderr while a command is at work: whoever has one to say never waits for a reader."""

import logging
import queue
import threading
from typing import TYPE_CHECKING

from offbeat.cli.copying import READER_S, Output
from offbeat.cli.options import typed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background", "LogHandler"]

MOST_WAITING = 10_000
"""Where nobody reads them, later lines of the log are dropped."""

START = ("the server listens ", "parameter server on ")
"""How the lines begin by which a server's start is logged: the extension's and `ParameterServer`'s."""


class Background(threading.Thread):
    """Writes lines to an output on a thread of its own, in their order, above the bar if there is one.

    Attributes:
        output: The one that it writes to.
    """

    def __init__(self, output: Output) -> None:
        super().__init__(name="offbeat-say", daemon=True)
        self.output = output
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_read = True
        self.start()

    def say(self, text: str) -> None:
        """Write a line with the program's name before it, as `offbeat.cli.say.say` does."""
        self.write(f"offbeat: {text}")

    def write(self, line: str) -> None:
        """Write a line, later."""
        text = f"{line}\n".encode(errors="backslashreplace")
        self._waiting.put(lambda: self.output.write(b"", text))

    def drop_bar(self) -> None:
        """Leave the bar where it is, and go on below it, later."""
        self._waiting.put(self.output.drop_bar)

    def has_room(self) -> bool:
        """Whether few enough lines wait for their reader."""
        return self._waiting.qsize() < MOST_WAITING

    def flush(self) -> None:
        """Leave what was said before this some time to be written, once where nobody reads it."""
        written = threading.Event()
        self._waiting.put(written.set)
        self._is_read = written.wait(READER_S if self._is_read else 0)

    def run(self) -> None:
        """Write; the thread's work, until the process ends."""
        while True:
            self._waiting.get()()


class LogHandler(logging.Handler):
    """Hands the log to a `Background`, worded for who has typed options.

    Who logs does not wait for a reader: it may be about to save a model, or hold a lock.

    It leaves out the server's start, which the commands tell in their own way or not.
    """

    def __init__(self, background: Background, prefix: str) -> None:
        super().__init__()
        self._background = background
        # Not by a level for that while: the extension's records come from another thread, and later.
        self.addFilter(lambda record: not record.getMessage().startswith(START))
        self.setFormatter(logging.Formatter(f"{prefix}%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on."""
        try:
            if self._background.has_room():
                self._background.write(typed(self.format(record)))
        except Exception:  # noqa: BLE001  as every handler does
            self.handleError(record)

    def flush(self) -> None:
        """Leave the last records some time; `logging` calls it as the process ends."""
        self._background.flush()
