"""Waiting for what nobody announces."""

import threading
import time


def wait_for(condition, timeout_s=20):
    """Look until it is so; the server tells nobody when a worker is gone."""
    waiting, end = threading.Event(), time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        waiting.wait(0.005)
