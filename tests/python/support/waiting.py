"""Waiting for what nobody announces."""

import threading
import time

AT_ONCE_S = 3
"""On a loaded machine. By silence alone a worker is lost after 10 s, and torch's loader processes, which may
hold its sockets, see after 5 s that it is gone."""


def wait_for(condition, timeout_s=20):
    """Look until it is so; the server tells nobody when a worker is gone."""
    waiting, end = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        waiting.wait(0.005)
