"""What a command has to say besides its output: lines on stderr, which somebody may read or nobody."""

import sys
from contextlib import suppress

__all__ = ["say"]


def say(text: str) -> None:
    """Write a line to stderr, with the program's name before it.

    That it cannot be written is no error: Ctrl-C ends the reader of a pipe (`… 2>&1 | tee log`), too, and
    what the command still has to do is to be done all the same.
    """
    with suppress(OSError):
        print(f"offbeat: {text}", file=sys.stderr, flush=True)
