"""What several processes write, copied to one stream: whole lines by rank, with one bar below them."""

import fcntl
import math
import os
import re
import select
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TextIO

from offbeat.cli.interrupts import Sieve
from offbeat.cli.say import descriptor, write_all

__all__ = ["READER_S", "Copy", "Output"]

READER_S = 2.0
"""How long it is waited for who reads our output where something else has to go on."""

TERMINAL_S = 1.0
"""How long a terminal may keep back what a process wrote before its end, which a pipe never does."""

SETTLE_S = 0.002
"""How long the rest of a bar is waited for: Python writes what one print is given piece by piece."""

CHUNK_BYTES = 65_536
LONGEST_LINE_BYTES = 2**20
"""A longer line is passed on in pieces, each as a line."""

CLEAR_LINE = b"\r\x1b[K"
CONTROL = re.compile(rb"\x1b\[\??[0-9;]*[A-Za-z]")
STYLE = re.compile(rb"\x1b\[\??[0-9;]*[mhl]")  # of colours and the like, which erase nothing
ERASING = re.compile(rb"\x1b\[\??[0-9;]*[JK]")
LINE_ENDS = re.compile(rb"(?<=\n)|(?=\r(?!\n))")


@dataclass(slots=True)
class Bottom:
    """What stands at the bottom of a terminal: nothing, or the bar of one of its outputs."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    bar: bytes = b""
    write: Callable[[bytes], object] = field(default=lambda _: None)  # of the output whose bar it is


class Output:
    """One stream of ours, shared by several processes: whole lines, each with its rank.

    A line that begins with a carriage return is a bar: it stays at the bottom, and other lines go above it,
    also those of another output on the same terminal.

    Attributes:
        bottom: Of where it writes; outputs on one terminal share it.
        is_terminal: Whether it goes to a terminal, where alone a bar has a place.
        lost: Why some of it could not be written; not that nobody reads it any more.
    """

    def __init__(
        self, write: Callable[[bytes], object], bottom: Bottom | None = None, *, is_terminal: bool = False
    ) -> None:
        self.bottom = bottom or Bottom()
        self.is_terminal = is_terminal
        self.lost: OSError | None = None
        self._write_all = write

    @classmethod
    def to(cls, stream: TextIO, number: int, *, beside: tuple[TextIO, "Output"] | None = None) -> Self:
        """Make one of a stream's descriptor; of a number where a stand-in of the stream has none.

        Not of Python's own stream: a write that waits would hold the lock of whatever we say.

        Args:
            stream: The stream.
            number: The descriptor that it should have.
            beside: Another stream with its output, which may go to the same terminal.
        """
        own = descriptor(stream)
        to = number if own is None else own
        bottom = None
        if beside is not None and (terminal := _terminal(stream)) and terminal == _terminal(beside[0]):
            bottom = beside[1].bottom
        return cls(partial(write_all, to), bottom, is_terminal=os.isatty(to))

    def write(self, prefix: bytes, line: bytes) -> None:
        """Write a line with its end, a line feed, or a bar with its start, a carriage return."""
        bottom = self.bottom
        with bottom.lock:
            is_bar, is_whole = line.startswith(b"\r"), line.endswith(b"\n")
            text = b"\r" + prefix + line[1:] if is_bar else prefix + line
            is_own = bottom.write == self._write
            if is_bar:
                if bottom.bar and not is_own:
                    bottom.write(CLEAR_LINE)
                bottom.bar, bottom.write = b"" if is_whole else text, self._write
            elif bottom.bar and is_own and line == b"\n" and bottom.bar[1:].startswith(prefix):  # its own end
                text, bottom.bar = line, b""
            elif bottom.bar and is_own:
                text = CLEAR_LINE + text + bottom.bar
            elif bottom.bar:
                bottom.write(CLEAR_LINE)
                self._write(text)
                bottom.write(bottom.bar)
                return
            self._write(text)

    def drop_bar(self) -> None:
        """Leave the bar where it is, and go on below it."""
        bottom = self.bottom
        if bottom.lock.acquire(timeout=READER_S):  # somebody waits for whoever reads it
            try:
                if bottom.bar:
                    bottom.bar = b""
                    bottom.write(b"\n")
            finally:
                bottom.lock.release()

    def _write(self, text: bytes) -> None:
        # The work goes on without a reader, or with a full disk.
        try:
            self._write_all(text)
        except BrokenPipeError:
            pass
        except OSError as error:
            self.lost = error


class Copy(threading.Thread):
    """Copies what a process writes, by lines, until nobody can write any more; then closes the descriptor.

    Args:
        descriptor: To read from.
        output: To write to.
        prefix: What each line begins with.
        has_bar: Whether a bar is shown as it moves; else as it is when its line ends.
        is_interrupted: Whether a traceback of KeyboardInterrupt says nothing new, and is left out.

    Attributes:
        last_line: The process's own last line that said something.
        is_done: Set when all is copied that the process itself wrote.
    """

    def __init__(
        self,
        descriptor: int,
        output: Output,
        prefix: bytes,
        *,
        has_bar: bool = True,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(daemon=True)
        self.last_line = ""
        self.is_done = threading.Event()
        self._descriptor = descriptor
        self._output = output
        self._prefix = prefix
        self._has_bar = has_bar
        self._sieve = Sieve(is_interrupted)
        self._state: bytes | None = None  # of a line that has begun
        self._is_bar_unshown = False
        self._hears, self._tells = os.pipe()
        self._reading = threading.Lock()
        self._num_read = 0
        self._num_of_process = math.inf
        self.start()

    def process_has_ended(self) -> None:
        """Tell it so: its children may hold the other end, and are not waited for."""
        with self._reading:
            if not self.is_done.is_set():  # else its descriptor may be closed
                self._num_of_process = self._num_read + _num_readable(self._descriptor)
        os.close(self._tells)

    def run(self) -> None:
        """Copy; the thread's work."""
        try:
            self._copy_all_of(self._chunks_of_process())
        finally:
            with self._reading:
                self.is_done.set()
        self._copy_all_of(iter(partial(_read, self._descriptor, CHUNK_BYTES), b""))
        for number in (self._descriptor, self._hears):
            os.close(number)

    def _chunks_of_process(self) -> Iterator[bytes]:
        """Give all that the process wrote; of a terminal also what comes a little later.

        Nothing is given too: when it is time to show an unfinished bar.
        """
        watched = select.poll()
        for number in (self._descriptor, self._hears):
            watched.register(number, select.POLLIN)
        later_bytes = CHUNK_BYTES if os.isatty(self._descriptor) else 0
        left_s = math.inf  # to wait, in all, once it has ended
        while left_s > 0 and self._num_read < self._num_of_process + later_bytes:
            begun = time.monotonic()
            wait_s = min(left_s, SETTLE_S) if self._is_bar_unshown else left_s
            ready = dict(watched.poll(None if math.isinf(wait_s) else 1000 * wait_s))
            left_s -= time.monotonic() - begun
            if self._hears in ready:
                watched.unregister(self._hears)
                left_s = TERMINAL_S
            elif self._descriptor in ready:
                if not (chunk := self._next(later_bytes)):
                    return
                yield chunk
            elif self._is_bar_unshown:
                yield b""

    def _next(self, later_bytes: int) -> bytes:
        with self._reading:  # else what is on its way is counted twice, or not at all
            num_left = self._num_of_process + later_bytes - self._num_read
            chunk = _read(self._descriptor, int(min(num_left, CHUNK_BYTES)))
            self._num_read += len(chunk)
            return chunk

    def _copy_all_of(self, chunks: Iterator[bytes]) -> None:
        rest = bytearray()
        for chunk in chunks:
            *lines, last = LINE_ENDS.split(chunk)
            for line in lines:
                self._write(bytes(rest) + line)
                rest.clear()
            rest += last
            self._is_bar_unshown = self._has_bar and rest.startswith(b"\r") and len(rest) > 1
            if self._is_bar_unshown and not chunk:  # a bar as it is now, which the next one replaces
                self._write(bytes(rest))
                rest.clear()
                self._is_bar_unshown = False
            elif len(rest) > LONGEST_LINE_BYTES:
                self._write(bytes(rest) + b"\n")
                rest.clear()
        self._is_bar_unshown = False
        if rest:
            self._write(bytes(rest) + b"\n")
        for line in self._sieve.rest():
            self._pass_on(line)

    def _write(self, line: bytes) -> None:
        said = CONTROL.sub(b"", line).strip()
        if said and not self.is_done.is_set():
            self.last_line = said.decode(errors="replace")
        for passed in self._sieve.pass_on(line):
            self._pass_on(passed)

    def _pass_on(self, line: bytes) -> None:
        if not self._has_bar:
            line = self._at_its_end(line)
        elif not line.endswith(b"\n"):  # a carriage return follows it: it is a bar, whatever it began with
            text = line.lstrip(b"\r")
            line = text and b"\r" + text
        if line:
            self._output.write(self._prefix, line)

    def _at_its_end(self, line: bytes) -> bytes:
        """Keep what a carriage return may begin anew until its line ends, and give what it is then."""
        is_begun_anew = line.startswith(b"\r")
        text = line.lstrip(b"\r")
        body = text.rstrip(b"\r\n")
        is_seen = bool(STYLE.sub(b"", body))
        is_cleared = is_begun_anew and is_seen and not CONTROL.sub(b"", body).strip()
        if not line.endswith(b"\n"):
            if is_seen:
                self._state = b"" if is_cleared else ERASING.sub(b"", body)
            elif body:
                self._state = (self._state or b"") + body
            return b""
        state, self._state = self._state, None
        if is_cleared:
            return b""
        if state is not None and not is_seen:
            return state and state + body + b"\n"
        return ERASING.sub(b"", body) + b"\n" if is_begun_anew else text


def _terminal(stream: TextIO) -> str | None:
    """Name the terminal that a stream goes to, if it goes to one."""
    number = descriptor(stream)
    try:
        return None if number is None else os.ttyname(number)
    except OSError:
        return None


def _num_readable(number: int) -> int:
    readable: int = struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))[0]
    return readable


def _read(number: int, most_bytes: int) -> bytes:
    try:
        return os.read(number, most_bytes)
    except OSError:  # how Linux says that a terminal's other side is closed
        return b""
