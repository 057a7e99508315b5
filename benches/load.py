"""What the server does under many workers: who starves, what it holds, and how soon it answers.

    python benches/load.py                     everything, about eight minutes
    python benches/load.py --only control      one of fairness, many, control, joins
    python benches/load.py --quick             seconds of each, to see that it works

fairness   64 clients push 1e5 parameters for a minute: the slowest beside the mean, and the server's memory
           meanwhile; then all that one of its threads serves leave, and the rest is spread
many       256 clients beside 16, in turns: the pushes of all together, as a ratio within each round; and the
           same of the reference in C, which shows what part of it is the machine's: what 256 connections
           hold does not stay in its caches
control    how long connecting, proving oneself and asking for the status takes on the control thread, while
           four clients push 25e6 parameters with Adam under transaction="model", and while nobody pushes
joins      10,000 clients come, push once and leave, under fresh names: the server's memory over time

Clients are threads of a few processes: a push leaves the interpreter alone. One line of JSON each, then a
summary.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

import harness
import machine
import offbeat_client
import reference
from harness import BenchError, Line
from offbeat._offbeat import fetch_status

CLIENTS_PER_PROCESS = 32
TIMEOUT_S = 120.0
SAMPLE_S = 1.0
"""Between two looks at the server's memory."""
WARM_UP = 1 / 3
"""Of the time; what is held after that should not grow."""
STATUS_PAUSE_S = 0.02
MB = 1e6
OUT = machine.ROOT / ".out"
"""Where the reference is built."""

Status = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how much.

    Attributes:
        seconds: Of pushing by 64 clients.
        round_seconds: Of each of the turns of 256 and of 16.
        num_rounds: Turns of both.
        control_seconds: Of asking under load.
        control_params: Parameters that are pushed meanwhile.
        num_joins: Clients that come and go.
    """

    seconds: float
    round_seconds: float
    num_rounds: int
    control_seconds: float
    control_params: int
    num_joins: int


FULL = Plan(
    seconds=60, round_seconds=5, num_rounds=7, control_seconds=30, control_params=25_000_000, num_joins=10_000
)
QUICK = Plan(
    seconds=3, round_seconds=0.5, num_rounds=1, control_seconds=1, control_params=100_000, num_joins=200
)


# ---------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Server:
    """A server's process."""

    address: str
    process: SpawnProcess

    def go_on(self, seconds: float) -> None:
        """Let it work for so long.

        Raises:
            BenchError: If it ends before that.
        """
        if wait([self.process.sentinel], seconds):
            raise BenchError(f"the server ended early, with exit code {self.process.exitcode}")

    def resident_mb(self) -> float:
        """What it has resident now, in 10^6 bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MB

    def status(self) -> Status:
        """Ask how it is, over a connection of its own."""
        status: Status = json.loads(fetch_status(self.address, None, TIMEOUT_S))
        return status


@contextmanager
def serving(num_params: int, *, optimizer: str = "SGD", transaction: str = "fragment") -> Iterator[Server]:
    """Run a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    os.environ.update(harness.ONE_THREAD)
    stop = context.Event()
    pipe, remote = context.Pipe()
    load = harness.Load(num_params=num_params, num_workers=0, seconds=0)
    process = context.Process(target=_serve, args=(load, remote, stop, optimizer, transaction), name="server")
    process.start()
    remote.close()
    try:
        yield Server(_receive(pipe, process), process)
    finally:
        stop.set()
        process.join(TIMEOUT_S)
        process.kill()


def _serve(load: harness.Load, parent: Connection, stop: Event, optimizer: str, transaction: str) -> None:
    offbeat_client.serve(load, parent.send, stop, optimizer=optimizer, transaction=transaction)


class Clients:
    """Clients that push until they are told to stop, in as few processes as that takes."""

    def __init__(self, server: Server, num_clients: int, num_params: int, *, first: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[tuple[SpawnProcess, Connection]] = []
        for begin in range(0, num_clients, CLIENTS_PER_PROCESS):
            ranks = range(first + begin, first + min(begin + CLIENTS_PER_PROCESS, num_clients))
            pipe, remote = context.Pipe()
            process = context.Process(
                target=_clients, args=(server.address, ranks, num_params, remote), name="clients"
            )
            process.start()
            remote.close()
            self._processes.append((process, pipe))
        self._ask(None)

    def start(self) -> None:
        """Let them push."""
        for _, pipe in self._processes:
            pipe.send(("start", []))

    def counts(self) -> dict[str, int]:
        """Ask for the pushes of each so far, by name."""
        return self._ask("counts")

    def leave(self, names: list[str]) -> dict[str, int]:
        """Let some of them stop and say goodbye; the pushes of all."""
        return self._ask("leave", names)

    def close(self) -> None:
        """Let all of them stop and say goodbye."""
        self._ask("close")
        for process, _ in self._processes:
            process.join(TIMEOUT_S)

    def kill(self) -> None:
        """End what is left of them."""
        for process, _ in self._processes:
            process.kill()
            process.join()

    def _ask(self, what: str | None, names: list[str] | None = None) -> dict[str, int]:
        if what is not None:
            for _, pipe in self._processes:
                pipe.send((what, names or []))
        answers: dict[str, int] = {}
        for process, pipe in self._processes:
            answers.update(_receive(pipe, process))
        return answers


@contextmanager
def clients(server: Server, num_clients: int, num_params: int, *, first: int = 0) -> Iterator[Clients]:
    """Hold clients that have joined and pulled; at the end they have left."""
    some = Clients(server, num_clients, num_params, first=first)
    try:
        yield some
        some.close()
    finally:
        some.kill()


def _receive(pipe: Connection, process: SpawnProcess) -> Any:  # noqa: ANN401  whatever it sent
    ready = wait([pipe, process.sentinel], TIMEOUT_S)
    if pipe in ready:
        try:
            return pipe.recv()
        except EOFError:
            process.join(TIMEOUT_S)
    if not ready:
        raise BenchError(f"nothing was heard of the {process.name} for {TIMEOUT_S:.0f} s")
    raise BenchError(f"the {process.name} ended early, with exit code {process.exitcode}")


class _Pusher(threading.Thread):
    """One client, which pushes from `go` until `done`."""

    def __init__(self, address: str, rank: int, num_params: int, go: threading.Event) -> None:
        super().__init__(name=f"worker-{rank}", daemon=True)  # a failure of one ends all
        self._load = harness.Load(num_params=num_params, num_workers=1, seconds=0)
        self._address, self._rank, self._go = address, rank, go
        self.is_in, self.done = threading.Event(), threading.Event()
        self.num_pushes = 0

    def run(self) -> None:
        worker = offbeat_client.ClientWorker(self._load, self._address, self._rank)
        worker.step()
        self.is_in.set()
        self._go.wait()
        while not self.done.is_set():
            worker.step()
            self.num_pushes += 1
        worker.close()


def _clients(address: str, ranks: range, num_params: int, parent: Connection) -> None:
    go = threading.Event()
    threads = [_Pusher(address, rank, num_params, go) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        while not thread.is_in.wait(SAMPLE_S):
            if not thread.is_alive():
                sys.exit(f"{thread.name} could not join")
    parent.send({})
    while True:
        what, names = parent.recv()
        if what == "start":
            go.set()
            continue
        leaving = threads if what == "close" else [thread for thread in threads if thread.name in names]
        go.set()
        for thread in leaving:
            thread.done.set()
        for thread in leaving:
            thread.join()
        parent.send({thread.name: thread.num_pushes for thread in threads})
        if what == "close":
            return


# ---------------------------------------------------------------------------------------------- fairness


def fairness(plan: Plan) -> Line:
    """64 clients for a while, then those of one thread leave.

    Returns:
        slowest_of_mean: The pushes of the slowest client over the mean; resident_mb, once a second, with
        growth_mb of the part after the warm-up; before_leaving, after_leaving and spread: connections by
        thread, with the seconds that it took until no thread had twice as many as another.
    """
    num_clients, num_params = 64, 100_000
    with serving(num_params) as server, clients(server, num_clients, num_params) as some:
        some.start()
        resident_mb = []
        end_s = time.monotonic() + plan.seconds
        while time.monotonic() < end_s:
            server.go_on(min(SAMPLE_S, plan.seconds / 10))
            resident_mb.append(round(server.resident_mb(), 2))
        counts = list(some.counts().values())
        status = server.status()
        before = status["connections_by_thread"]
        busiest = before.index(max(before))
        some.leave([worker["id"] for worker in status["workers"] if worker["data_thread"] == busiest])
        left_s = time.monotonic()
        left = now = server.status()["connections_by_thread"]
        while len(now) > 1 and max(now) > 2 * min(now) and time.monotonic() < left_s + TIMEOUT_S:
            server.go_on(STATUS_PAUSE_S)
            now = server.status()["connections_by_thread"]
        spread_s = time.monotonic() - left_s
    steady = resident_mb[int(len(resident_mb) * WARM_UP) :]
    return {
        "bench": "fairness",
        "clients": num_clients,
        "n_params": num_params,
        "pushes": sum(counts),
        "slowest_of_mean": round(min(counts) / statistics.mean(counts), 3),
        "fastest_of_mean": round(max(counts) / statistics.mean(counts), 3),
        "growth_mb": round(max(steady) - steady[0], 2),
        "resident_mb": resident_mb,
        "before_leaving": before,
        "after_leaving": left,
        "spread": now,
        "spread_s": round(spread_s, 2),
    }


# ---------------------------------------------------------------------------------------------- many


def many(plan: Plan) -> Line:
    """256 clients beside 16, each on a server of its own, in turns.

    Returns:
        ratio: The median of the rounds' ratios, with the lowest and highest; the pushes per second of
        both; and all of that for the reference.
    """
    num_params = 100_000
    rates: dict[int, list[float]] = {16: [], 256: []}
    reference_rates: dict[int, list[float]] = {16: [], 256: []}
    reference.build(OUT)
    for number in range(plan.num_rounds):
        for num_clients in sorted(rates, reverse=number % 2 == 1):
            with serving(num_params) as server, clients(server, num_clients, num_params) as some:
                some.start()
                server.go_on(plan.round_seconds / 5)  # until all of them push
                begin_s, before = time.monotonic(), sum(some.counts().values())
                server.go_on(plan.round_seconds)
                end_s, after = time.monotonic(), sum(some.counts().values())
            rates[num_clients].append((after - before) / (end_s - begin_s))
            line = reference.measure(OUT, "sequential", num_params, num_clients, plan.round_seconds)
            reference_rates[num_clients].append(line["updates_per_s"])
    return {
        "bench": "many",
        "n_params": num_params,
        **_ratio(rates),
        **{f"reference_{what}": value for what, value in _ratio(reference_rates).items()},
    }


def _ratio(rates: dict[int, list[float]]) -> Line:
    ratios = [more / fewer for fewer, more in zip(rates[16], rates[256], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "lowest_ratio": round(min(ratios), 3),
        "highest_ratio": round(max(ratios), 3),
        "pushes_per_s_of_16": [round(rate) for rate in rates[16]],
        "pushes_per_s_of_256": [round(rate) for rate in rates[256]],
    }


# ---------------------------------------------------------------------------------------------- control


def control(plan: Plan) -> Line:
    """Ask for the status, over and over, while four clients push whole models, and before they do.

    Returns:
        p50_ms, p99_ms, max_ms under load; idle_p50_ms, idle_p99_ms without; the server's longest_poll_ms.
    """
    num_params = plan.control_params
    with serving(num_params, optimizer="Adam", transaction="model") as server:
        idle = _ask_for_a_while(server, plan.control_seconds / 5)
        with clients(server, 4, num_params) as some:
            some.start()
            server.go_on(plan.control_seconds / 10)
            loaded = _ask_for_a_while(server, plan.control_seconds)
            pushes = sum(some.counts().values())
            longest_poll_ms = server.status()["longest_poll_ms"]
    return {
        "bench": "control",
        "n_params": num_params,
        "pushes": pushes,
        "asked": len(loaded),
        "p50_ms": _quantile(loaded, 0.5),
        "p99_ms": _quantile(loaded, 0.99),
        "max_ms": _quantile(loaded, 1.0),
        "idle_p50_ms": _quantile(idle, 0.5),
        "idle_p99_ms": _quantile(idle, 0.99),
        "longest_poll_ms": longest_poll_ms,
    }


def _ask_for_a_while(server: Server, seconds: float) -> list[float]:
    times_s = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        begin_s = time.monotonic()
        fetch_status(server.address, None, TIMEOUT_S)
        times_s.append(time.monotonic() - begin_s)
        server.go_on(STATUS_PAUSE_S)
    return sorted(times_s)


def _quantile(times_s: list[float], q: float) -> float:
    return round(times_s[min(len(times_s) - 1, int(len(times_s) * q))] * 1e3, 3)


# ---------------------------------------------------------------------------------------------- joins


def joins(plan: Plan) -> Line:
    """Clients that come, push once and leave, one after the other, each under a name of its own.

    Returns:
        resident_mb at every tenth of the way; growth_mb over its second half; and how many came per second.
    """
    import offbeat

    num_params = 1000
    gradients = {offbeat_client.TENSOR: np.ones(num_params, np.float32)}
    resident_mb = []
    with serving(num_params) as server:
        begin_s = time.monotonic()
        for number in range(plan.num_joins):
            with offbeat.Client(server.address) as client:
                client.pull()
                client.push(gradients)
            if (number + 1) % (plan.num_joins // 10) == 0:
                resident_mb.append(round(server.resident_mb(), 2))
        seconds = time.monotonic() - begin_s
        status = server.status()
    return {
        "bench": "joins",
        "joins": plan.num_joins,
        "joins_per_s": round(plan.num_joins / seconds),
        "resident_mb": resident_mb,
        "growth_mb": round(resident_mb[-1] - resident_mb[len(resident_mb) // 2 - 1], 2),
        "workers_told_of": len(status["workers"]),
        "connections": status["connections"],
    }


# ---------------------------------------------------------------------------------------------- summary

BENCHES: dict[str, Callable[[Plan], Line]] = {
    "fairness": fairness,
    "many": many,
    "control": control,
    "joins": joins,
}


def summary(line: Line) -> list[str]:
    """Say what a line means beside its target."""
    say = partial("{:<44}{:>16}   {}".format)
    match line["bench"]:
        case "fairness":
            return [
                say("slowest client of the mean", line["slowest_of_mean"], "target: at least 0.5"),
                say("growth after the warm-up, MB", line["growth_mb"], "target: none"),
                say("threads after all of one left", str(line["after_leaving"]), ""),
                say(f"and {line['spread_s']} s later", str(line["spread"]), "target: even"),
            ]
        case "many":
            lowest, highest = line["lowest_ratio"], line["highest_ratio"]
            lowest_there, highest_there = line["reference_lowest_ratio"], line["reference_highest_ratio"]
            return [
                say("256 clients of 16", line["ratio"], f"target: at least 0.8 ({lowest} to {highest})"),
                say(
                    "the same of the reference in C",
                    line["reference_ratio"],
                    f"no target: what the machine gives ({lowest_there} to {highest_there})",
                ),
            ]
        case "control":
            return [
                say("connect, prove and ask, p99, ms", line["p99_ms"], "target: at most 20"),
                say("the same with nobody pushing, p99, ms", line["idle_p99_ms"], ""),
                say("longest poll, ms", line["longest_poll_ms"], "target: about 1"),
            ]
        case _:
            return [say(f"growth over {line['joins'] // 2} joins, MB", line["growth_mb"], "target: none")]


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=BENCHES, action="append", help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="seconds of each; what it finds means nothing")
    args = parser.parse_args()
    lines = []
    for name in args.only or BENCHES:
        lines.append(BENCHES[name](QUICK if args.quick else FULL))
        harness.show(lines[-1])
    print()
    for line in lines:
        print("\n".join(summary(line)))


if __name__ == "__main__":
    main()
