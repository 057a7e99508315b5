"""Whether somebody sees a bar: what decides it is known without torch."""

import os
import sys

__all__ = ["on_terminal"]


def on_terminal() -> bool:
    """Whether stderr is a terminal that a bar can be drawn on; one of 0 columns shows nothing of it."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # one that only says so
        return True
