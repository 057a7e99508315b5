"""Workers that die, freeze or fall silent in the middle of a push: who notices, and what is left of the push.

One run per transaction: four workers, each a process that pauses between its pushes. One is killed and one is
stopped (SIGSTOP) while the server has a part of their third push; two survive. The broken pushes go through a
proxy, which passes on just so many bytes. The gradients are whole numbers, so that the parameters tell which
pushes are in them.

In another run two fall silent: one is stopped with the answer to its push unread, and over the link of one
nothing comes any more, either way.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import offbeat
from support.command import Command, command, running
from support.fault_plan import Blackhole, Bytes, Hold, inside, plan
from support.fault_proxy import FaultProxy
from support.freezing import freeze

# Each run starts a process with torch, and the server takes ten seconds to give a silent peer up.
pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE_S = 60
PACE_S = 0.1
WHOLE_PUSHES = 2  # of those that come to grief, before the one that breaks
NUM_ELEMENTS = 2 << 20
PUSH_BYTES = 4 * NUM_ELEMENTS
FRAGMENT_ELEMENTS = 64 << 10
# Into the third push, and into one of its frames: 0.6 of a fragment, less the headers' few bytes.
LIMIT_BYTES = int(2.4 * PUSH_BYTES)
GRADIENTS = {"first": 1, "second": 1, "killed": 1 << 12, "stopped": 1 << 14, "unread": 1, "unreachable": 1}
SURVIVORS = ("first", "second")
BROKEN = ("killed", "stopped")

# A pause ends early when the test closes the pipe. After `calm` pushes a word is waited for.
PACED = textwrap.dedent("""
    import select, sys, time
    import numpy as np, offbeat
    address, name, value, pace_s, calm, _, _ = sys.argv[1:]
    with offbeat.Client(address, worker_id=name) as client:
        out = client.pull()
        gradient = {"weight": np.full_like(out["weight"], float(value))}
        number = 0
        while not select.select([sys.stdin], [], [], float(pace_s))[0]:
            receipt = client.push_pull(gradient, out=out)
            print("pushed", time.monotonic(), receipt.applied, receipt.weight, flush=True)
            number += 1
            if number == int(calm):
                sys.stdin.readline()
""")

# The same with torch, and two loader processes, which outlive it: what they fetch ahead takes its time.
LOADING = textwrap.dedent("""
    import sys, time
    import torch, offbeat
    from torch.utils.data import DataLoader, Dataset
    address, name, value, pace_s, calm, num_elements, long_s = sys.argv[1:]
    class Items(Dataset):
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            time.sleep(0 if index <= int(calm) else float(long_s))
            return torch.full((1,), float(value))
    worker = offbeat.AsyncWorker(address, torch.nn.Linear(1, int(num_elements), bias=False), worker_id=name)
    loader = DataLoader(Items(), batch_size=1, num_workers=2, multiprocessing_context="fork")
    for number, x in enumerate(loader):
        if number == int(calm):
            sys.stdin.readline()
        time.sleep(float(pace_s))
        worker.model(x).sum().backward()
        receipt = worker.step(samples=1)
        print("pushed", time.monotonic(), receipt.applied, receipt.weight, flush=True)
""")


class Worker(Command):
    """A worker's process."""

    def __init__(self, name, address, code=PACED, calm=0):
        self.name = name
        numbers = (GRADIENTS[name], PACE_S, calm, NUM_ELEMENTS, DEADLINE_S)
        arguments = (address, name, *map(str, numbers))
        super().__init__(*arguments, program=(sys.executable, "-c", code), stdin=subprocess.PIPE)

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    @property
    def pushed(self):
        """What it has said of each push: when it was answered, whether applied, with which weight."""
        said = [line.split()[1:] for line in self.out if line.startswith("pushed")]
        return [(float(when), applied == "True", float(weight)) for when, applied, weight in said]

    def children(self):
        told = subprocess.run(  # ends with 1 where there are none
            ["ps", "--ppid", str(self.process.pid), "-o", "pid="], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in told.stdout.split()]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What there was to see."""

    transaction: str
    survivors: list[Worker]
    began: float
    """When the two were broken."""
    noticed: dict[str, float]
    """How many seconds later the server knew of each."""
    num_loaders: int
    """Loader processes of the killed one that were alive then."""
    log: list[str]
    text: str
    """What `offbeat status` said."""
    status: dict
    """What `server.status()` said after the survivors had ended."""
    weight: np.ndarray
    """The parameters then."""

    @property
    def unanswered(self):
        """Each parameter's way beyond the pushes that were answered."""
        answered = sum(GRADIENTS[w.name] * len(w.pushed) for w in self.survivors)
        answered += sum(GRADIENTS[name] * WHOLE_PUSHES for name in BROKEN)
        return -self.weight.astype(np.int64).ravel() - answered


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition):
    waiting, end = threading.Event(), time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        waiting.wait(0.01)


@contextlib.contextmanager
def recorded():
    """Collect what Offbeat logs."""
    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("offbeat").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("offbeat").removeHandler(handler)


def serving(transaction):
    model = {"weight": np.zeros((NUM_ELEMENTS, 1), np.float32)}
    return offbeat.ParameterServer(model, transaction=transaction, optimizer=offbeat.optim.SGD(lr=1.0))


def play(transaction, stack):
    log = stack.enter_context(recorded())
    server = stack.enter_context(serving(transaction))
    held = plan(Hold(Bytes(LIMIT_BYTES)))
    proxies = [stack.enter_context(FaultProxy(server.address, held)) for _ in BROKEN]

    def workers():
        return {worker["id"]: worker for worker in server.status()["workers"]}

    def start(name, *arguments, **keywords):
        return stack.enter_context(running(Worker(name, *arguments, **keywords)))

    killed = start("killed", proxies[0].address, LOADING, calm=WHOLE_PUSHES)
    stopped = start("stopped", proxies[1].address, calm=WHOLE_PUSHES)
    survivors = [start(name, server.address) for name in SURVIVORS]
    for worker in (killed, stopped, *survivors):
        for _ in range(WHOLE_PUSHES):
            worker.line("pushed")
    loaders = killed.children()
    stack.callback(kill, loaders)

    for worker, proxy in zip((killed, stopped), proxies, strict=True):
        worker.go()
        proxy.wait_for("holds", timeout_s=DEADLINE_S)
    freeze(stopped)
    began = time.monotonic()
    killed.process.kill()
    for proxy in proxies:
        proxy.lose_the_rest()
    wait_for(lambda: workers()["killed"]["state"] == "lost")
    noticed = {"killed": time.monotonic() - began}
    num_loaders = sum(Path(f"/proc/{pid}").exists() for pid in loaders)
    wait_for(lambda: workers()["stopped"]["state"] == "lost")
    noticed["stopped"] = time.monotonic() - began
    wait_for(lambda: server.status()["connections"] == 2 * len(SURVIVORS))  # theirs are closed
    before = workers()
    wait_for(lambda: all(workers()[name]["pushes"] > before[name]["pushes"] for name in SURVIVORS))
    with command("status", server.address) as told:
        assert told.ends() == 0, told.said
    for worker in survivors:
        worker.process.stdin.close()
        assert worker.ends() == 0, worker.said
    status, weight = server.status(), server.state_dict()["weight"]
    server.stop()  # and with it what there was to log
    return Run(
        transaction=transaction,
        survivors=survivors,
        began=began,
        noticed=noticed,
        num_loaders=num_loaders,
        log=log,
        text=told.said,
        status=status,
        weight=np.asarray(weight),
    )


@contextlib.contextmanager
def without_settings():
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as shell:
        for name in ("OFFBEAT_SERVER", "OFFBEAT_TOKEN", "OFFBEAT_HOST"):
            shell.delenv(name, raising=False)
        yield stack


@pytest.fixture(scope="module", params=["fragment", "model"])
def run(request):
    with without_settings() as stack:
        yield play(request.param, stack)


def test_no_survivor_waits_longer_than_two_seconds_between_two_pushes(run):
    assert_no_gap(run.survivors, run.began, run.began + max(run.noticed.values()))


def assert_no_gap(survivors, began, noticed):
    for worker in survivors:
        times = [when for when, _, _ in worker.pushed]
        assert times[0] < began < noticed < times[-1]
        assert max(after - before for before, after in pairwise(times)) < 2
        assert all(applied and weight == 1 for _, applied, weight in worker.pushed)


def test_a_worker_killed_in_mid_push_is_seen_in_less_than_a_second_with_its_loader_processes_alive(run):
    assert run.noticed["killed"] < 1
    assert run.num_loaders == 2


def test_each_departure_shows_its_cause_in_log_and_status(run):
    causes = {
        "killed": r"the peer closed the (control )?connection",
        "stopped": r"no heartbeat for 10 s|no byte for 10 s in the middle of a frame",
    }
    for name, cause in causes.items():
        assert [
            line
            for line in run.log
            if re.search(rf"^WARNING a worker is lost.*worker={name}.*({cause})", line)
        ]
        (departure,) = [d for d in run.status["departures"] if d["worker"] == name and d["state"] == "lost"]
        assert re.search(cause, departure["cause"])
        (worker,) = [w for w in run.status["workers"] if w["id"] == name]
        assert worker["state"] == "lost"
        assert worker["cause"] == departure["cause"]
        assert re.search(rf"^{name} +lost .*{re.escape(departure['cause'])}", run.text, re.MULTILINE)


def test_of_a_broken_push_nothing_is_applied_under_model_and_whole_fragments_under_fragment(run):
    if run.transaction == "model":
        assert not run.unanswered.any()
        return
    stopped, rest = np.divmod(run.unanswered, GRADIENTS["stopped"])
    killed, rest = np.divmod(rest, GRADIENTS["killed"])
    assert not rest.any()
    for times in (stopped, killed):
        end = int(times.sum())
        assert 0 < end < NUM_ELEMENTS
        assert end % FRAGMENT_ELEMENTS == 0
        assert (times[:end] == 1).all()
        assert not times[end:].any()


def test_what_is_counted_of_a_broken_push_is_said(run):
    answered = sum(len(worker.pushed) for worker in run.survivors) + len(BROKEN) * WHOLE_PUSHES
    broken = 0 if run.transaction == "model" else len(BROKEN)
    tickets = run.status["tickets"]
    assert tickets == {
        "issued": answered + broken,
        "applied": answered,
        "partial": broken,
        "dropped": 0,
        "open": 0,
    }
    assert (run.status["version"], run.status["samples"]) == (tickets["issued"], tickets["issued"])
    workers = {worker["id"]: worker for worker in run.status["workers"]}
    assert {name: workers[name]["pushes"] for name in BROKEN} == dict.fromkeys(BROKEN, WHOLE_PUSHES)
    assert f"{broken} partial, 0 dropped" in run.text
    assert run.status["memory"]["staging_bytes"] == 0


# ---------------------------------------------------------------------------------------- silent


@pytest.mark.parametrize("transaction", ["fragment", "model"])
def test_no_survivor_waits_longer_than_two_seconds_where_others_do_not_read_or_cannot_be_reached(transaction):
    with without_settings() as stack:
        server = stack.enter_context(serving(transaction))
        faults = {
            "unread": Hold(inside("Root", 1, push=WHOLE_PUSHES + 1, payload_byte=1000)),
            "unreachable": Blackhole(Bytes(LIMIT_BYTES)),
        }
        proxies = {
            name: stack.enter_context(FaultProxy(server.address, plan(fault)))
            for name, fault in faults.items()
        }
        silent = {
            name: stack.enter_context(running(Worker(name, proxy.address, calm=WHOLE_PUSHES)))
            for name, proxy in proxies.items()
        }
        survivors = [stack.enter_context(running(Worker(name, server.address))) for name in SURVIVORS]
        for worker in (*silent.values(), *survivors):
            for _ in range(WHOLE_PUSHES):
                worker.line("pushed")
        for worker in silent.values():
            worker.go()
        proxies["unread"].wait_for("holds", timeout_s=DEADLINE_S)
        proxies["unreachable"].wait_for("blackholes", timeout_s=DEADLINE_S)
        began = time.monotonic()
        freeze(silent["unread"])

        def pushes():
            workers = {worker["id"]: worker for worker in server.status()["workers"]}
            assert all(workers[name]["state"] == "joined" for name in SURVIVORS)
            if all(workers[name]["state"] == "lost" for name in silent):
                return [workers[name]["pushes"] for name in SURVIVORS]
            return []

        wait_for(pushes)
        noticed, before = time.monotonic(), pushes()
        # Of those that are not waited for any more nothing holds the others up either.
        wait_for(lambda: all(now > then for now, then in zip(pushes(), before, strict=True)))
        for worker in survivors:
            worker.process.stdin.close()
            assert worker.ends() == 0, worker.said
        assert_no_gap(survivors, began, noticed)
