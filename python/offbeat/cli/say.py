"""What a command says: output, which is to be kept, and lines on stderr, read by somebody or by nobody."""

import errno
import os
import select
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

__all__ = ["descriptor", "flush_output", "forget", "output", "say", "takes_more", "write_all"]


def say(text: str) -> None:
    """Write a line to stderr, with the program's name before it.

    That it cannot be written is no error: Ctrl-C ends the reader of a pipe (`… 2>&1 | tee log`), too, and
    what the command still has to do is to be done all the same.
    """
    line = f"offbeat: {text}\n"
    number = descriptor(sys.stderr)
    with suppress(OSError):
        if number is None:
            sys.stderr.write(line)
        else:
            # Not by Python's stream: a thread whose write to it waits holds its lock, past every signal.
            write_all(number, line.encode(sys.stderr.encoding, "backslashreplace"))


def write_all(number: int, text: bytes) -> None:
    """Write all of it to a descriptor, also to one that another program has left not blocking.

    Raises:
        BrokenPipeError: If whoever read it has gone, a terminal too.
        OSError: If it cannot be written.
    """
    while text:
        try:
            text = text[os.write(number, text) :]
        except BlockingIOError:
            _poll(number, None)
        except OSError as error:
            if _has_gone(number, error):
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
            raise


def _has_gone(number: int | None, error: OSError) -> bool:
    """Whether an error says that nobody is there to read: a pipe broken, a terminal closed."""
    if isinstance(error, BrokenPipeError):
        return True
    return error.errno == errno.EIO and number is not None and stat.S_ISCHR(os.fstat(number).st_mode)


def output(text: str, end: str = "\n") -> None:
    """Print what the command was asked for.

    A reader that has gone (`offbeat status … | head`) is no error, and does not change how the command ends.

    Raises:
        OSError: If it cannot be written; it names stdout.
    """
    _to_stdout(lambda: print(text + end, end=""))  # at once: the log writes to the same terminal


def flush_output() -> None:
    """See that all output is written; the rest as in `output`."""
    _to_stdout(sys.stdout.flush)


def _to_stdout(do: Callable[[], object]) -> None:
    try:
        do()
    except OSError as error:
        if _has_gone(descriptor(sys.stdout), error):
            forget(sys.stdout)
            return
        error.filename = "stdout"
        raise


def takes_more(stream: TextIO) -> bool:
    """Whether something can be written to it at once, as to any file, but not to a full pipe."""
    number = descriptor(stream)
    return number is None or _poll(number, 0)


def descriptor(stream: TextIO) -> int | None:
    """Give a stream's descriptor, if it has one: it may be a stand-in of a program that calls us."""
    try:
        return stream.fileno()
    except (AttributeError, ValueError):  # io.UnsupportedOperation is one, and so is that it is closed
        return None


def forget(stream: TextIO) -> None:
    """Let what a stream could not be rid of, and all that comes, go nowhere."""
    if (number := descriptor(stream)) is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


def _poll(number: int, timeout_ms: int | None) -> bool:
    room = select.poll()
    room.register(number, select.POLLOUT)
    return bool(room.poll(timeout_ms))
