"""What strangers at the door cost the workers inside: pushes without them and with them, in turn.

    python benches/hostile.py --workers 2 --rounds 5

A server with a token, and workers that push as fast as they can. For every second measurement a process of
its own holds idle connections open, and others on which it sends a byte of a header now and then; what the
server cuts off comes back a second later. One line of JSON: updates a second of every round, without and with
strangers, and the median of the rounds' ratios; what the server had resident; how often it has cut a stranger
off. The ratio is to be 0.8 at least: whoever has no token takes a fifth of the workers' pace at most.
"""

import argparse
import collections
import itertools
import multiprocessing
import os
import resource
import selectors
import socket
import statistics
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING

import numpy as np

import harness
import offbeat
import offbeat_client
from harness import LEARNING_RATE, Announce, BenchError, Line, Load, System

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.sharedctypes import Synchronized

HEADER = b"OFBT\x01\x00\x01" + bytes(56)
"""A header but for its last byte, which never comes."""
DRIP_INTERVAL_S = 0.2
BACK_AFTER_S = 1.0
"""At once, all of them together would fill the kernel's queue for ever, and not only the server's places."""
SPARE_FILES = 200
STANDING_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Strangers:
    """Connections that prove nothing, held by a process of their own.

    Attributes:
        num_idle: How many say nothing.
        num_slow: How many send a byte now and then.
        address: Where the server says where it is.
        standing: Set when all have connected once.
        stop: Set when they are to go.
        num_cut: How often one was cut off.
    """

    num_idle: int
    num_slow: int
    address: "Queue[str]"
    standing: Event
    stop: Event
    num_cut: "Synchronized[int]"


def serve(load: Load, announce: Announce, stop: Event, *, token: str, strangers: Strangers | None) -> None:
    """Run a server that asks for a token; workers may come when the strangers stand at its door."""
    rule = offbeat.optim.SGD(lr=LEARNING_RATE)
    model = {offbeat_client.TENSOR: np.zeros(load.num_params, np.float32)}
    with offbeat.ParameterServer(model, host="127.0.0.1", token=token, optimizer=rule) as server:
        if strangers is not None:
            strangers.address.put(server.address)
            if not strangers.standing.wait(STANDING_TIMEOUT_S):
                raise BenchError("the strangers did not get as far as the door")
        announce(server.address)
        stop.wait()


class Crowd:
    """The strangers' connections, each opened anew where it was cut off."""

    def __init__(self, strangers: Strangers) -> None:
        self._strangers = strangers
        self._num_all = strangers.num_idle + strangers.num_slow
        host, port = strangers.address.get().rsplit(":", 1)
        self._address = (host, int(port))
        self._selector = selectors.DefaultSelector()
        self._connected: set[int] = set()
        self._slow: dict[int, tuple[socket.socket, itertools.cycle[int]]] = {}
        self._drip_s = time.monotonic()
        self._cut: collections.deque[tuple[float, int]] = collections.deque()
        for number in range(self._num_all):
            self._open(number)

    def stand(self) -> None:
        """Wait for what happens to them, until it is time to go."""
        while not self._strangers.stop.is_set():
            for key, events in self._selector.select(DRIP_INTERVAL_S):
                assert isinstance(key.fileobj, socket.socket)
                self._look(key.fileobj, key.data, events)
            if len(self._connected) == self._num_all:
                self._strangers.standing.set()
            while self._cut and time.monotonic() - self._cut[0][0] >= BACK_AFTER_S:
                self._open(self._cut.popleft()[1])
            if time.monotonic() - self._drip_s >= DRIP_INTERVAL_S:
                self._drip_s = time.monotonic()
                for stream, header in self._slow.values():
                    drip(stream, next(header))

    def _open(self, number: int) -> None:
        stream = socket.socket()
        stream.settimeout(0)
        stream.connect_ex(self._address)
        self._selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE, number)

    def _look(self, stream: socket.socket, number: int, events: int) -> None:
        if events & selectors.EVENT_READ and is_over(stream):
            self._selector.unregister(stream)
            stream.close()
            self._slow.pop(number, None)
            self._strangers.num_cut.value += 1
            self._cut.append((time.monotonic(), number))
        elif events & selectors.EVENT_WRITE:  # it has connected
            self._selector.modify(stream, selectors.EVENT_READ, number)
            self._connected.add(number)
            if number >= self._strangers.num_idle:
                self._slow[number] = (stream, itertools.cycle(HEADER))


def stand(strangers: Strangers) -> None:
    """Hold the connections, in a process of their own."""
    allow_files(strangers.num_idle + strangers.num_slow + SPARE_FILES)
    Crowd(strangers).stand()


def is_over(stream: socket.socket) -> bool:
    """Say whether the server has ended a connection; what it says before that is read."""
    try:
        return not stream.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def drip(stream: socket.socket, byte: int) -> None:
    """Send a byte, unless the connection has ended."""
    try:
        stream.send(bytes([byte]))
    except OSError:
        return  # the selector tells, too


def allow_files(num_files: int) -> None:
    """Raise the limit on open files.

    Raises:
        BenchError: If the machine does not allow as many.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < num_files:
        raise BenchError(f"{num_files} open files are needed, the machine allows {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most))


def measure(load: Load, token: str, num_idle: int, num_slow: int, context: SpawnContext) -> Line:
    """Measure once, with strangers if there are any."""
    system = partial(System, name="offbeat", worker=offbeat_client.ClientWorker)
    if num_idle + num_slow == 0:
        return harness.measure(system(serve=partial(serve, token=token, strangers=None)), load)
    strangers = Strangers(
        num_idle=num_idle,
        num_slow=num_slow,
        address=context.Queue(),
        standing=context.Event(),
        stop=context.Event(),
        num_cut=context.Value("q", 0),
    )
    process = context.Process(target=stand, args=(strangers,), name="strangers")
    process.start()
    try:
        line = harness.measure(system(serve=partial(serve, token=token, strangers=strangers)), load)
        if not process.is_alive():
            raise BenchError(f"the strangers ended early, with exit code {process.exitcode}")
    finally:
        strangers.stop.set()
        process.join(harness.STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
    return {**line, "strangers_cut_off": strangers.num_cut.value}


def compare(load: Load, num_rounds: int, num_idle: int, num_slow: int) -> Line:
    """Measure without strangers and with them, in turn; whoever is first changes from round to round."""
    token = os.environ["OFFBEAT_TOKEN"] = os.urandom(16).hex()
    context = multiprocessing.get_context("spawn")
    alone, beside = [], []
    for number in range(num_rounds):
        for is_beside in (number % 2 == 1, number % 2 == 0):
            idle, slow = (num_idle, num_slow) if is_beside else (0, 0)
            (beside if is_beside else alone).append(measure(load, token, idle, slow, context))
    rates = [[line["updates_per_s"] for line in lines] for lines in (alone, beside)]
    return {
        "n_params": load.num_params,
        "workers": load.num_workers,
        "idle": num_idle,
        "slow": num_slow,
        "alone_updates_per_s": rates[0],
        "beside_updates_per_s": rates[1],
        "ratio": round(statistics.median(b / a for a, b in zip(*rates, strict=True)), 3),
        "alone_peak_mb": max(line["server_load_peak_mb"] for line in alone),
        "beside_peak_mb": max(line["server_load_peak_mb"] for line in beside),
        "strangers_cut_off": sum(line["strangers_cut_off"] for line in beside),
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=200)
    given = parser.parse_args()
    load = Load(num_params=int(given.params), num_workers=given.workers, seconds=given.seconds)
    harness.show(compare(load, given.rounds, given.idle, given.slow))


if __name__ == "__main__":
    main()
