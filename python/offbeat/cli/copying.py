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
from functools import partial

__all__ = ["LAST_WORDS_S", "Copy", "Output"]

LAST_WORDS_S = 2.0
"""Time after a process has ended for its children to speak, and for what it wrote last to come."""

CHUNK_BYTES = 65_536
CLEAR_LINE = b"\r\x1b[K"
CONTROL = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


class Output:
    """One stream of ours, shared by several processes: whole lines, each with its rank.

    A line that ends in a carriage return is a bar: it stays at the bottom, and other lines go above it.

    Attributes:
        lost: Why some of it could not be written; not that nobody reads it any more.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.lost: OSError | None = None
        self._write_all = write
        self._lock = threading.Lock()
        self._bar = b""

    def write(self, prefix: bytes, line: bytes) -> None:
        """Write a line with its end, a line feed, or a bar with its start, a carriage return."""
        with self._lock:
            is_bar, is_whole = line.startswith(b"\r"), line.endswith(b"\n")
            text = b"\r" + prefix + line[1:] if is_bar else prefix + line
            if is_bar:
                self._bar = b"" if is_whole else text
            elif self._bar and line == b"\n":  # the bar's own end
                text, self._bar = line, b""
            elif self._bar:
                text = CLEAR_LINE + text + self._bar
            self._write(text)

    def drop_bar(self) -> None:
        """Leave the bar where it is, and go on below it."""
        if self._lock.acquire(timeout=LAST_WORDS_S):  # somebody waits for whoever reads it
            try:
                if self._bar:
                    self._bar = b""
                    self._write(b"\n")
            finally:
                self._lock.release()

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

    Attributes:
        last_line: The process's own last line that said something.
        is_done: Set when all is copied that the process itself wrote.
    """

    def __init__(self, descriptor: int, output: Output, prefix: bytes) -> None:
        super().__init__(daemon=True)
        self.last_line = ""
        self.is_done = threading.Event()
        self._descriptor = descriptor
        self._output = output
        self._prefix = prefix
        self._hears, self._tells = os.pipe()
        self.start()

    def process_has_ended(self) -> None:
        """Tell it so: its children may hold the other end, and are not waited for."""
        os.close(self._tells)

    def run(self) -> None:
        """Copy; the thread's work."""
        try:
            self._copy_all_of(self._chunks_of_process())
        finally:
            self.is_done.set()
        self._copy_all_of(iter(partial(_read, self._descriptor), b""))
        for number in (self._descriptor, self._hears):
            os.close(number)

    def _chunks_of_process(self) -> Iterator[bytes]:
        """Give all that the process wrote: what is there when it has ended, and what comes a little later."""
        watched = select.poll()
        for number in (self._descriptor, self._hears):
            watched.register(number, select.POLLIN)
        # Once it has ended: how long nothing may come, and how many bytes may, which are those that were
        # there and as many as a terminal keeps back.
        quiet_s = num_left = math.inf
        while quiet_s > 0 and num_left > 0:
            begun = time.monotonic()
            ready = dict(watched.poll(None if math.isinf(quiet_s) else 1000 * quiet_s))
            quiet_s -= time.monotonic() - begun
            if self._hears in ready:
                watched.unregister(self._hears)
                quiet_s = LAST_WORDS_S
                num_left = _num_readable(self._descriptor) + CHUNK_BYTES
            elif self._descriptor in ready:
                if not (chunk := _read(self._descriptor)):
                    return
                num_left -= len(chunk)
                yield chunk

    def _copy_all_of(self, chunks: Iterator[bytes]) -> None:
        rest = b""
        for chunk in chunks:
            *lines, rest = re.split(rb"(?<=\n)|(?=\r(?!\n))", rest + chunk)
            for line in lines:
                self._write(line)
            if rest.startswith(b"\r"):  # a bar as it is now, which the next carriage return replaces
                self._write(rest)
                rest = b""
        if rest:
            self._write(rest + b"\n")

    def _write(self, line: bytes) -> None:
        said = CONTROL.sub(b"", line).strip()
        if said and not self.is_done.is_set():
            self.last_line = said.decode(errors="replace")
        if line:
            self._output.write(self._prefix, line)


def _num_readable(descriptor: int) -> int:
    number: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
    return number


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, CHUNK_BYTES)
    except OSError:  # how Linux says that a terminal's other side is closed
        return b""
