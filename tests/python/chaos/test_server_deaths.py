"""A server that is killed (SIGKILL) and started again by the same command holds what its checkpoint says.

A run: three workers that go on by themselves, and two deaths of their server. In the first, one of them is
held in the middle of a push, so that under "fragment" the checkpoint has a part of it. The model is a ledger
(`support.ledger`).
"""

import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from threading import Event

import pytest
from safetensors.numpy import load_file, save_file

import offbeat
from support import ledger
from support.command import command
from support.fault_plan import Hold, inside, plan
from support.fault_proxy import FaultProxy
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEEDS = list(range(6))
"""For each transaction."""
NUM_DEATHS = 2
NUM_WORKERS = 3
HELD = NUM_WORKERS - 1
"""The worker that is held in mid-push when the server dies for the first time."""
NUM_CELLS = 3000
PACE_S = 0.01
FREQUENCY = "20"
"""Updates between two checkpoints."""
AT_LEAST = 5
"""Pushes of each worker in a life of the server."""


@dataclass(frozen=True)
class Worker:
    """What a worker knows of its pushes."""

    number: int
    sent: list[int] = field(default_factory=list)
    """The cell of each push; what was rejected is made again under another number."""
    told: dict[int, int] = field(default_factory=dict)
    """Cells whose push it was told of as applied, and the term in which it was."""
    num_rolled_back: list[int] = field(default_factory=list)

    @property
    def name(self):
        return f"worker-{self.number}"

    def work(self, address, over):
        first = ledger.lane(self.number, NUM_CELLS)
        with offbeat.Client(address, worker_id=self.name, reconnect_timeout_s=40) as client:
            out = client.pull()
            for cell in range(first, first + NUM_CELLS):
                while not self._is_applied(client, cell, out):
                    client.pull(out)
                if over.wait(PACE_S):
                    return
        raise AssertionError("there is no cell left")

    def _is_applied(self, client, cell, out):
        self.sent.append(cell)
        gradient = ledger.push_of(cell)
        # Of a push that pulls, what was answered does not come again; of the other, all of it does.
        pulls = len(self.sent) % 2
        receipt = client.push_pull(gradient, out=out) if pulls else client.push(gradient)
        if receipt.applied:
            assert (receipt.weight, receipt.reason) == (1, None)
            self.told[cell] = receipt.term
        else:
            assert receipt.reason == "server_rolled_back", receipt
            self.num_rolled_back.append(receipt.term)
        return receipt.applied


@dataclass(frozen=True)
class Checkpoint:
    """What a dead server has left."""

    rows: object
    book: dict

    def unfinished(self):
        """Give the pushes that it names as not whole: worker, sequence number, the fragments that have it."""
        for page in self.book["workers"]:
            for sequence, answer in page["recent"]:
                if "unfinished" in answer:
                    reached = {fragment for fragment, *_ in answer["unfinished"]["reached"]}
                    yield page["worker_id"], sequence, reached


def newest(directory):
    names = sorted(path.name for path in directory.glob("checkpoint-*"))
    text = (directory / names[-1] / "manifest.json").read_text()
    return Checkpoint(
        ledger.read(load_file(directory / names[-1] / "model.safetensors")), json.loads(text)["book"]
    )


def names_a_part(directory):
    """Whether the newest checkpoint has a part of the held worker's push."""
    with suppress(FileNotFoundError):  # the server has removed it
        return any(
            name == f"worker-{HELD}" and 0 < len(reached) < ledger.NUM_FRAGMENTS
            for name, _, reached in newest(directory).unfinished()
        )
    return False


@dataclass(frozen=True, kw_only=True)
class Run:
    """What there was to see."""

    num_lost: int
    num_named: int
    """Pushes that a checkpoint named as not whole, and had a part of."""


def play(transaction, seed, place):
    numbers = random.Random(f"deaths/{transaction}/{seed}")  # noqa: S311  nobody is to guess it
    place.mkdir()
    save_file(ledger.MODEL, place / "model.safetensors")
    kept = place / "kept"
    arguments = ["--model", str(place / "model.safetensors"), "--optimizer", ledger.OPTIMIZER]
    arguments += ["--checkpoint-dir", str(kept), "--checkpoint-frequency", FREQUENCY, "--port", "0"]
    arguments += ["--transaction", transaction, "--keep-running"]
    workers = [Worker(number) for number in range(NUM_WORKERS)]
    left, over = [], Event()
    held_in = inside("Fragment", numbers.randint(2, 3), push=numbers.randint(2, 8), payload_byte=1000)
    with ExitStack() as stack:

        def serve():
            server = stack.enter_context(command("server", *arguments))
            return server, server.line("OFFBEAT_SERVER=").split("OFFBEAT_SERVER=")[1].split()[0]

        server, address = serve()
        # Of the first connections one is for data.
        held = dict.fromkeys(range(2), plan(Hold(held_in)))
        proxy = stack.enter_context(FaultProxy(address, held))
        pool = stack.enter_context(ThreadPoolExecutor(NUM_WORKERS))
        stack.callback(over.set)
        working = [
            pool.submit(worker.work, proxy.address if worker.number == HELD else address, over)
            for worker in workers
        ]

        def has_pushed(worker, term, number):
            assert not any(future.done() for future in working), [future.exception() for future in working]
            return sum(of == term for of in list(worker.told.values())) >= number

        for term in range(1, NUM_DEATHS + 1):
            number = numbers.randint(AT_LEAST, 60)
            wait_for(lambda term=term, number=number: has_pushed(workers[0], term, number))
            if term == 1:
                proxy.wait_for("holds")
                if transaction == "fragment":
                    wait_for(lambda: names_a_part(kept))
            else:
                wait_for(lambda term=term: all(has_pushed(worker, term, AT_LEAST) for worker in workers))
            server.signal(signal.SIGKILL)
            server.ends()
            left.append(newest(kept))
            server, again = serve()
            assert again == address
        last = NUM_DEATHS + 1
        wait_for(lambda: all(has_pushed(worker, last, AT_LEAST) for worker in workers))
        over.set()
        for future in working:
            future.result()
        with offbeat.Client(address, worker_id="reader") as reader:
            rows, status = ledger.read(reader.pull()), reader.status()
    assert proxy.counts["holds"] == 1
    assert status["term"] == last
    assert set(status["rejected"]) <= {"server_rolled_back"}
    assert {worker["id"]: worker["state"] for worker in status["workers"]} == {
        "reader": "joined",
        **{worker.name: "finished" for worker in workers},
    }
    holes, named = set(), set()
    for term, checkpoint in enumerate(left, 1):
        named |= assert_prefixes(checkpoint, workers, term, holes)
    assert_ended(rows, status, workers, holes, named)
    return Run(num_lost=len(holes), num_named=len(named))


def assert_prefixes(checkpoint, workers, term, holes):
    """Look that a checkpoint has of each worker a prefix in every fragment, but for what it names.

    Args:
        checkpoint: It.
        workers: What they know.
        term: In which it was written.
        holes: Cells that a death before has lost; those that this one has are added.

    Returns:
        Cells that are there in parts.
    """
    ones = checkpoint.rows.sum(axis=0)
    named = {}
    for name, sequence, reached in checkpoint.unfinished():
        (worker,) = [worker for worker in workers if worker.name == name]
        cell = worker.sent[sequence - 1]
        named[cell] = reached
        assert set(checkpoint.rows[:, cell].nonzero()[0].tolist()) == reached, (cell, reached)
    for worker in workers:
        first = ledger.lane(worker.number, NUM_CELLS)
        cells = range(first, first + NUM_CELLS)
        there = [cell for cell in cells if ones[cell] > 0]
        whole = {cell for cell in there if ones[cell] == ledger.NUM_FRAGMENTS}
        assert set(there) - whole <= named.keys(), "in parts, and not named"
        until = max(there, default=first - 1) + 1
        assert set(range(first, until)) <= set(there) | holes, f"no prefix: {worker.name}"
        holes |= {cell for cell, of in worker.told.items() if of <= term} - set(there)
    return {cell for cell, reached in named.items() if 0 < len(reached) < ledger.NUM_FRAGMENTS}


def assert_ended(rows, status, workers, holes, named):
    """Look that of what workers were told all is there, but for what is reported as lost or as partial.

    A push that a checkpoint has in parts stays so where its worker was told, after that, that it is whole.
    """
    ones, tickets = rows.sum(axis=0), status["tickets"]
    told = {cell for worker in workers for cell in worker.told}
    assert set(ones.nonzero()[0].tolist()) <= told, "something is there of which nobody was told"
    missing = {cell for cell in told if ones[cell] == 0}
    in_parts = {cell for cell in told - missing if ones[cell] < ledger.NUM_FRAGMENTS}
    assert missing == holes
    assert len(missing) == status["lost_updates"]
    assert in_parts <= named
    assert tickets["partial"] == len(in_parts)
    assert tickets["applied"] == len(told) - len(missing) - len(in_parts)


@pytest.mark.parametrize("transaction", ["fragment", "model"])
def test_what_a_killed_server_goes_on_with_is_a_prefix_of_each_worker_and_what_is_missing_is_reported(
    transaction, some_of, tmp_path
):
    runs = [play(transaction, seed, tmp_path / str(seed)) for seed in some_of(SEEDS, 1)]
    num_lost, num_named = sum(run.num_lost for run in runs), sum(run.num_named for run in runs)
    print(f"{transaction}: {len(runs)} runs of {NUM_DEATHS} deaths; {num_lost} lost, {num_named} in parts")  # noqa: T201
    assert num_lost > 0
    assert num_named >= (len(runs) if transaction == "fragment" else 0)
