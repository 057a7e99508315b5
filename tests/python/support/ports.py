"""Ports that nobody listens on."""

import random
import socket

FIRST, END = 10_000, 32_000
"""Linux gives out ports from 32768 on by itself: one of those may be anybody's before it is used here."""


def free_port():
    while True:
        port = random.SystemRandom().randrange(FIRST, END)  # in no other test's process the same
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
