"""Waiting for what nobody announces."""

import multiprocessing
import os
import signal
import threading
import time

AT_ONCE_S = 3
"""On a loaded machine. By silence alone a worker is lost after 10 s, and torch's loader processes, which may
hold its sockets, see after 5 s that it is gone."""


SHOWS_STACKS = signal.SIGUSR2
"""By which a process of `support.fault_tolerant` writes to its stderr where its threads are; others end."""


def wait_for(condition, timeout_s=20):
    """Look until it is so; the server tells nobody when a worker is gone."""
    waiting, end = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end:
            for child in multiprocessing.active_children():
                # Daemons are of `support.host` and `support.group`, for tests to come, too.
                if not child.daemon:
                    os.kill(child.pid, SHOWS_STACKS)
            waiting.wait(0.5)  # until they have been captured
            raise AssertionError("it never came true")
        waiting.wait(0.005)
