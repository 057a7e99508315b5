"""What a command says: output, which is to be kept, and lines on stderr, read by somebody or by nobody."""

import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["flush_output", "forget", "say", "write_all"]


def say(text: str) -> None:
    """Write a line to stderr, with the program's name before it.

    That it cannot be written is no error: Ctrl-C ends the reader of a pipe (`… 2>&1 | tee log`), too, and
    what the command still has to do is to be done all the same.
    """
    line = f"offbeat: {text}\n"
    with suppress(OSError):
        try:
            number = sys.stderr.fileno()
        except (AttributeError, io.UnsupportedOperation):  # a stand-in of a program that calls us
            sys.stderr.write(line)
            return
        # Not by Python's stream: a thread whose write to it waits holds its lock, past every signal.
        write_all(number, line.encode(sys.stderr.encoding, "backslashreplace"))


def write_all(number: int, text: bytes) -> None:
    """Write all of it to a descriptor, also to one that another program has left not blocking.

    Raises:
        OSError: If it cannot be written.
    """
    while text:
        try:
            text = text[os.write(number, text) :]
        except BlockingIOError:
            select.select([], [number], [])


def flush_output() -> None:
    """See that all output is written.

    Raises:
        OSError: If it cannot be; it names stdout.
        KeyboardInterrupt: It is dropped: this is what a signal has broken off, and would again be waited for.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "stdout"
        raise
    except KeyboardInterrupt:
        forget(sys.stdout)
        raise


def forget(stream: TextIO) -> None:
    """Let what a stream could not be rid of, and all that comes, go nowhere."""
    with suppress(AttributeError, io.UnsupportedOperation):  # a stand-in, as above
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
