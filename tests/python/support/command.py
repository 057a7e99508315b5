"""The command line, or another program, as a process of its own, with its output watched line by line."""

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

TIMEOUT_S = 40
OFFBEAT = (sys.executable, "-m", "offbeat.cli.main")

# A script that waits for a signal does so by `while not threading.Event().wait(0.2): pass`. Python calls its
# handlers between two instructions: of a signal that comes just before the lock is waited for, a wait without
# a timeout knows nothing until the next one.

SIGNALLED_IN_THE_SAVE = (
    sys.executable,
    "-c",
    """
import signal, sys
from offbeat.cli import main, model_file

def save(*arguments, **keywords):
    for _ in range(int(sys.argv[1])):
        signal.raise_signal(signal.SIGTERM)
    written(*arguments, **keywords)

written, model_file.save = model_file.save, save
sys.exit(main.main(sys.argv[2:]))
""",
)
"""`offbeat`, to which as many SIGTERMs as the first argument says come when it begins to save."""

SIGNALLED_AT_THE_END = (
    sys.executable,
    "-c",
    """
import atexit, signal
from offbeat.cli import main
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    atexit.register(signal.raise_signal, number)
raise SystemExit(main.main())
""",
)
"""`offbeat`, to which SIGTERM and SIGINT come when its command has ended."""


class Command:
    """A running `offbeat …`, or another program."""

    def __init__(
        self,
        *arguments,
        program=OFFBEAT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=None,
        **environment,
    ):
        # Without PYTHONUNBUFFERED, which hides what is still to be written when a process ends.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("OFFBEAT_") and name != "PYTHONUNBUFFERED"
        }
        self.process = subprocess.Popen(
            [*program, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            cwd=cwd,
            env=inherited | environment,
        )
        self.out, self.err = [], []
        self._heard = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read, args=stream)
            for stream in ((self.process.stdout, self.out), (self.process.stderr, self.err))
            if stream[0] is not None
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            lines.append(line)
            self._heard.put(line)
        self._heard.put(None)

    def line(self, text, timeout_s=TIMEOUT_S):
        """Wait for a line that has `text` in it, on either stream, and return it."""
        ended = 0
        while ended < len(self._readers):
            line = self._heard.get(timeout=timeout_s)
            if line is None:
                ended += 1
            elif text in line:
                return line
        raise AssertionError(f"{text!r} was not said:\n{self.said}")

    def signal(self, number=signal.SIGINT):
        self.process.send_signal(number)

    def signal_another_thread(self, number):
        """Give a signal to a thread that is not the main one, as the system may do with any."""
        task = next(
            int(t.name)
            for t in Path(f"/proc/{self.process.pid}/task").iterdir()
            if int(t.name) != self.process.pid
        )
        assert ctypes.CDLL(None).tgkill(self.process.pid, task, number) == 0

    def ends(self):
        """Wait for the end and return the exit code."""
        code = self.process.wait(TIMEOUT_S)
        for reader in self._readers:
            reader.join(TIMEOUT_S)
        return code

    def ends_by(self, number, at_most):
        """Signal it until it ends, so many times at most; return the exit code."""
        for sent in range(1, at_most + 1):
            self.signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(2 if sent < at_most else TIMEOUT_S)
                return self.ends()
        raise AssertionError(f"it does not end by {at_most} signals:\n{self.said}")

    @property
    def said(self):
        return "".join((*self.out, *self.err))


@contextmanager
def running(command):
    """Leave nothing of a command behind."""
    process = command.process
    try:
        yield command
    finally:
        if process.poll() is None:
            process.kill()
        command.ends()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def unread():
    """Give a descriptor to write to whose reader is gone, as where Ctrl-C has ended the reader of a pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


@contextmanager
def stalled():
    """Give a descriptor to write to that takes no more, as of a pipe whose reader stands still."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(reading)


def command(*arguments, **keywords):
    """Run a command, and leave nothing of it behind."""
    return running(Command(*arguments, **keywords))
