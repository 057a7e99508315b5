"""Measure one system under one load: a server process and W worker processes on loopback, one line of JSON.

A system is a function that runs in the server's process and a class whose objects run in the workers'.
Processes are spawned, so that each imports only what its system needs, and each computes with one thread.
"""

import itertools
import json
import multiprocessing
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-6
BYTES_PER_UPDATE = 8
"""Of one parameter: 4 for the gradient, 4 for the value."""
START_TIMEOUT_S = 120.0
"""Importing torch in five processes at once takes long on two busy cores."""
STOP_TIMEOUT_S = 15.0

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

Line = dict[str, Any]
Announce = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a system is put under.

    Attributes:
        num_params: float32 parameters, in one tensor.
        num_workers: Worker processes, each pushing as fast as it can.
        seconds: How long.
    """

    num_params: int
    num_workers: int
    seconds: float


class Worker(ABC):
    """What a worker process does, over and over."""

    num_warm_ups = 3
    """Steps before the clock starts."""

    @abstractmethod
    def step(self) -> object:
        """Push the gradients and pull the updated parameters, once."""

    def num_steps(self, seconds: float) -> int | None:
        """Say how many steps to make; None means as many as there is time for.

        Workers that wait for one another need a number, on which they have to agree.
        """
        del seconds
        return None

    def report(self) -> Line:
        """Add to the line what only a worker knows; asked of the first one, after the last step."""
        return {}

    def close(self) -> None:  # noqa: B027  most have nothing to do
        """Leave the server."""


@dataclass(frozen=True, kw_only=True)
class System:
    """Something to measure.

    Attributes:
        name: What the line calls it.
        serve: Runs in the server's process with the load, a function to call with the address as soon as
            workers may come, and an event on which it ends.
        worker: Makes a `Worker` from the load, that address and the worker's rank.
        num_params: The number of parameters, where the system itself decides that.
        has_server: Whether workers push to that process; else it only hands out what they share.
    """

    name: str
    serve: Callable[[Load, Announce, Event], None]
    worker: Callable[[Load, str, int], Worker]
    num_params: int | None = None
    has_server: bool = True


class BenchError(Exception):
    """A system did not do what it was started for."""


@dataclass(frozen=True)
class _Timing:
    """One worker's steps: when the first began and the last ended, and how long each took (monotonic)."""

    start_s: float
    end_s: float
    latencies_s: list[float]


def measure(system: System, load: Load) -> Line:
    """Run a system under a load.

    Returns:
        system, n_params, workers; updates_per_s of all workers together, gb_per_s in both directions, p50_ms,
        p99_ms, samples (updates made); server_cpu_s_per_gb; server_peak_mb, the most that the server ever had
        resident, and server_load_peak_mb, the most under load (10^6 bytes); and what the worker adds.

    Raises:
        BenchError: If a process ended early, or nothing was heard of it for too long.
    """
    context = multiprocessing.get_context("spawn")
    os.environ.update(ONE_THREAD)
    go, done, stop = context.Event(), context.Event(), context.Event()
    pipe, remote = context.Pipe()
    holder = context.Process(target=_server_main, args=(system, load, remote, stop), name="server")
    with _running(stop) as processes:
        _start(holder, remote, processes)
        address = receive(pipe, holder, START_TIMEOUT_S)
        workers: list[tuple[SpawnProcess, Connection]] = []
        for rank in range(load.num_workers):
            pipe, remote = context.Pipe()
            worker = context.Process(
                target=_worker_main,
                args=(system, load, address),
                kwargs={"rank": rank, "parent": remote, "go": go, "done": done},
                name=f"worker {rank}",
            )
            _start(worker, remote, processes)
            workers.append((worker, pipe))
        for worker, pipe in workers:
            receive(pipe, worker, START_TIMEOUT_S)
        usage = _Usage(holder.pid)
        go.set()
        timings = [receive(pipe, worker, load.seconds * 3 + START_TIMEOUT_S) for worker, pipe in workers]
        cpu_s, peak_mb, load_peak_mb = usage.cpu_s(), usage.peak_mb(), usage.load_peak_mb()
        done.set()
        reports = [receive(pipe, worker, STOP_TIMEOUT_S) for worker, pipe in workers]
        for worker, _ in workers:
            worker.join(STOP_TIMEOUT_S)
    num_updates = sum(len(timing.latencies_s) for timing in timings)
    gb = num_updates * load.num_params * BYTES_PER_UPDATE / 1e9
    server = {
        "server_cpu_s_per_gb": round(cpu_s / gb, 4),
        "server_peak_mb": round(peak_mb),
        "server_load_peak_mb": round(load_peak_mb),
    }
    return {
        "system": system.name,
        "n_params": load.num_params,
        "workers": load.num_workers,
        **_rates(timings, load.num_params),
        "samples": num_updates,
        **(server if system.has_server else {}),
        **reports[0],
    }


def free_port() -> int:
    """Find a port for a system that cannot bind port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def show(line: Line) -> None:
    """Print a line of JSON."""
    print(json.dumps(line), flush=True)


def _rates(timings: list[_Timing], num_params: int) -> Line:
    latencies_s = sorted(itertools.chain.from_iterable(timing.latencies_s for timing in timings))
    updates_per_s = sum(len(t.latencies_s) / (t.end_s - t.start_s) for t in timings)

    def quantile_ms(q: float) -> float:
        return round(latencies_s[min(len(latencies_s) - 1, int(len(latencies_s) * q))] * 1e3, 4)

    return {
        "updates_per_s": round(updates_per_s, 3),
        "gb_per_s": round(updates_per_s * num_params * BYTES_PER_UPDATE / 1e9, 4),
        "p50_ms": quantile_ms(0.5),
        "p99_ms": quantile_ms(0.99),
    }


# ---------------------------------------------------------------------------------------------- processes


def _server_main(system: System, load: Load, parent: Connection, stop: Event) -> None:
    system.serve(load, parent.send, stop)


def _worker_main(
    system: System, load: Load, address: str, *, rank: int, parent: Connection, go: Event, done: Event
) -> None:
    worker = system.worker(load, address, rank)
    for _ in range(worker.num_warm_ups):
        worker.step()
    num_steps = worker.num_steps(load.seconds)
    parent.send("ready")
    go.wait()
    parent.send(_work(worker, load.seconds, num_steps))
    done.wait()
    parent.send(worker.report() if rank == 0 else {})
    worker.close()


def _work(worker: Worker, seconds: float, num_steps: int | None) -> _Timing:
    latencies_s: list[float] = []
    start_s = end_s = time.monotonic()
    while True:
        begin_s = time.monotonic()
        if len(latencies_s) == num_steps or (
            num_steps is None and latencies_s and begin_s - start_s >= seconds
        ):
            return _Timing(start_s, end_s, latencies_s)
        worker.step()
        end_s = time.monotonic()
        latencies_s.append(end_s - begin_s)


@contextmanager
def _running(stop: Event) -> Iterator[list[SpawnProcess]]:
    """Hold the processes that were started; at the end all of them have ended, one way or another."""
    processes: list[SpawnProcess] = []
    try:
        yield processes
        stop.set()
        for process in processes:
            process.join(STOP_TIMEOUT_S)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _start(process: SpawnProcess, its_end: Connection, processes: list[SpawnProcess]) -> None:
    process.start()
    processes.append(process)
    its_end.close()  # so that the pipe ends with the process


def receive(pipe: Connection, process: SpawnProcess, timeout_s: float) -> Any:  # noqa: ANN401  whatever it sent
    """Wait for what a process sends.

    Raises:
        BenchError: If it ended first, or nothing was heard of it for too long.
    """
    ready = wait([pipe, process.sentinel], timeout_s)
    if pipe in ready:
        try:
            return pipe.recv()
        except EOFError:
            process.join(STOP_TIMEOUT_S)
    if not ready:
        raise BenchError(f"nothing was heard of the {process.name} for {timeout_s:.0f} s")
    raise BenchError(f"the {process.name} ended early, with exit code {process.exitcode}")


# ---------------------------------------------------------------------------------------------- /proc


class _Usage:
    """What a process uses from now on, read from /proc."""

    def __init__(self, pid: int | None) -> None:
        self._root = Path(f"/proc/{pid}")
        self._peak_before_mb = self.load_peak_mb()
        (self._root / "clear_refs").write_text("5")  # the peak starts anew
        self._cpu_before_s = self._cpu_s()

    def cpu_s(self) -> float:
        """Seconds of processor time, in user and system mode."""
        return self._cpu_s() - self._cpu_before_s

    def peak_mb(self) -> float:
        """The most it ever had resident, in 10^6 bytes."""
        return max(self._peak_before_mb, self.load_peak_mb())

    def load_peak_mb(self) -> float:
        """The most it had resident from now on, in 10^6 bytes."""
        for line in (self._root / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise BenchError(f"{self._root}/status does not tell VmHWM")

    def _cpu_s(self) -> float:
        fields = (self._root / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
