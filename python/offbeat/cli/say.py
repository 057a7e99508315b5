"""What a command says: output, which is to be kept, and lines on stderr, read by somebody or by nobody."""

import io
import os
import sys
from contextlib import suppress

__all__ = ["flush_output", "say"]


def say(text: str) -> None:
    """Write a line to stderr, with the program's name before it.

    That it cannot be written is no error: Ctrl-C ends the reader of a pipe (`… 2>&1 | tee log`), too, and
    what the command still has to do is to be done all the same.
    """
    line = f"offbeat: {text}\n"
    with suppress(OSError):
        try:
            number = sys.stderr.fileno()
        except io.UnsupportedOperation:  # a stand-in of a program that calls us
            sys.stderr.write(line)
            return
        # Not by Python's stream: a thread whose write to it waits holds its lock, past every signal.
        rest = line.encode(sys.stderr.encoding, "backslashreplace")
        while rest:
            rest = rest[os.write(number, rest) :]


def flush_output() -> None:
    """See that all output is written.

    Raises:
        OSError: If it cannot be; it names stdout.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        error.filename = "stdout"
        raise
