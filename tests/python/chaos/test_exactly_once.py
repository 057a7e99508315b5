"""Each push counts once, whatever breaks on its way and whoever is killed in it.

A run: two workers behind proxies that break their connections by a seed, and one, a process, that is killed
(SIGKILL) in the middle of a push and started again under its name. The model is a ledger (`support.ledger`),
which tells of each push how often it was applied. What the runs have hit is counted by the server.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

import offbeat
from support import ledger
from support.command import command
from support.fault_plan import (
    CALM,
    DOWN,
    UP,
    Bytes,
    Cut,
    HalfClose,
    Hold,
    LostReply,
    after,
    any_plan,
    before,
    inside,
    plan,
    seeded,
)
from support.fault_proxy import FaultProxy
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEEDS = [range(n, n + 3) for n in range(0, 33, 3)]
"""For each transaction. Of three, one loses replies, one breaks pushes off, one does all that a proxy can."""
NUM_PUSHES = 12
"""Of each process, had it not been killed."""
NUM_DISTURBED = 24
"""Connections of a worker: those after them are calm, so that it comes to an end."""
UNTIL_JOINED = 2
"""Connections that are disturbed in pushes alone: who is not in yet has nothing to come back to."""
FRAGMENT_BYTES = 4 * ledger.NUM_CELLS
"""Of the shortest fragment, so that any of these places is inside of it."""
RESULTS = {"whole", "partial", "absent"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What there was to see."""

    status: dict
    fate: str
    """Of the push in which the process was killed."""
    was_cut: bool
    """Whether the server had a part of that one when its process was killed."""
    num_told_again: int
    """Receipts that said of themselves that their push had been answered before."""

    @property
    def num_cut_short(self):
        """Pushes that broke off and were made again, as the server counts."""
        return self.status["cut_short"] - self.was_cut

    @property
    def num_lost_replies(self):
        """Pushes that had been answered when they were asked about again: so many at least, as it counts."""
        resumed = self.num_cut_short if self.status["transaction"] == "fragment" else 0
        return max(0, self.status["duplicates"] - resumed)


# ---------------------------------------------------------------------------------------- what breaks


def loses_replies(numbers):
    return plan(LostReply(numbers.randint(1, 4), reset=numbers.random() < 0.5))


def breaks_pushes_off(numbers):
    push, reset = numbers.randint(1, 4), numbers.random() < 0.5
    place = inside(
        "Fragment",
        numbers.randint(1, ledger.NUM_FRAGMENTS),
        push=push,
        payload_byte=numbers.randrange(FRAGMENT_BYTES),
    )
    return plan(numbers.choice([Cut(place, reset), Cut(after("Push", push), reset), HalfClose(place)]))


def does_anything(numbers):
    some_bytes = numbers.randrange(4 * NUM_PUSHES * len(ledger.MODEL["w"]))
    return numbers.choice(
        [
            loses_replies(numbers),
            breaks_pushes_off(numbers),
            plan(Cut(Bytes(some_bytes, numbers.choice([UP, DOWN])))),
            plan(Cut(Bytes(0))),
            any_plan(numbers),
        ]
    )


KINDS = (loses_replies, breaks_pushes_off, does_anything)


def disturbed(seed, worker):
    """Make the plans of one worker's connections."""
    kind = KINDS[seed % len(KINDS)]
    of_pushes = kind if kind is not does_anything else breaks_pushes_off
    first, later = (seeded(f"{seed}/{worker}", choose) for choose in (of_pushes, kind))

    def plan_of(number):
        if number >= NUM_DISTURBED:
            return CALM
        return first(number) if number < UNTIL_JOINED else later(number)

    return plan_of


# ---------------------------------------------------------------------------------------- a run


def work(server, seed, worker):
    """Push through a proxy; return the receipts."""
    with (
        FaultProxy(server.address, disturbed(seed, worker)) as proxy,
        offbeat.Client(proxy.address, worker_id=f"disturbed-{worker}") as client,
    ):
        return list(ledger.work(client, ledger.lane(worker), NUM_PUSHES))


def process(address, number):
    """Run the process that is killed, or the one after it, and let it push."""
    first = str(ledger.lane(2 + number))
    arguments = (address, "killed", first, str(NUM_PUSHES))
    return command(*arguments, program=ledger.PROGRAM, **ledger.ENVIRONMENT)


def die(server, numbers):
    """Kill a process in mid-push; return of how many pushes it was told, and whether one was cut short."""
    push = numbers.randint(1, NUM_PUSHES)
    was_cut = numbers.random() < 0.75
    fragment, byte = numbers.randint(1, ledger.NUM_FRAGMENTS), numbers.randrange(FRAGMENT_BYTES)
    sending = inside("Fragment", fragment, push=push, payload_byte=byte)
    held = plan(Hold(sending if was_cut else before("Receipt", push=push)))
    with FaultProxy(server.address, held) as proxy, process(proxy.address, 0) as killed:
        proxy.wait_for("holds")
        killed.process.kill()
        killed.ends()
        proxy.lose_the_rest()
        # Its successor comes when the server may not have noticed yet.
        with process(server.address, 1) as successor:
            assert successor.ends() == 0, successor.said
    told = killed.said.count("told of a push")
    assert told == push - 1, killed.said
    assert successor.said.count("told of a push") == NUM_PUSHES
    return told, was_cut


def play(transaction, seed):
    numbers = random.Random(f"killed/{transaction}/{seed}")  # noqa: S311  nobody is to guess it
    with ExitStack() as stack:
        server = stack.enter_context(
            offbeat.ParameterServer(
                ledger.MODEL, optimizer=offbeat.optim.SGD(lr=1), transaction=transaction, linger_s=0
            )
        )
        pool = stack.enter_context(ThreadPoolExecutor(3))
        working = [pool.submit(work, server, seed, worker) for worker in range(2)]
        dying = pool.submit(die, server, numbers)
        receipts = [receipt for future in working for receipt in future.result()]
        told, was_cut = dying.result()
        wait_for(lambda: server.status()["connections"] == 0)
        rows, status = ledger.read(server.state_dict()), server.status()
    assert all(receipt.applied and receipt.weight == 1 for receipt in receipts)
    assert len(receipts) == 2 * NUM_PUSHES
    for number in (0, 1, 3):  # all but the one that was killed
        assert ledger.fate(rows, ledger.lane(number), NUM_PUSHES) == "absent"
    fate = ledger.fate(rows, ledger.lane(2), told)
    tickets = status["tickets"]
    assert tickets["open"] == 0
    assert (tickets["applied"], tickets["partial"]) == (ledger.whole(rows), ledger.partial(rows))
    assert tickets["issued"] == sum(tickets[ending] for ending in ("applied", "partial", "dropped"))
    assert tickets["partial"] == (fate == "partial")
    assert was_cut == (fate != "whole")
    assert status["cut_short"] >= was_cut
    assert transaction == "fragment" or fate != "partial"
    assert status["rejected"] == {}
    told_again = sum(receipt.duplicate for receipt in receipts)
    return Run(status=status, fate=fate, was_cut=was_cut, num_told_again=told_again)


@pytest.mark.parametrize("transaction", ["fragment", "model"])
def test_each_push_counts_once_whatever_breaks_and_whoever_is_killed_in_it(transaction, some_of):
    runs = [play(transaction, seed) for seeds in some_of(SEEDS, 1) for seed in seeds]
    lost, cut = (sum(getattr(run, name) for run in runs) for name in ("num_lost_replies", "num_cut_short"))
    with_lost = sum(run.num_lost_replies > 0 for run in runs)
    with_cut = sum(run.num_cut_short > 0 for run in runs)
    fates = {fate: sum(run.fate == fate for run in runs) for fate in sorted(RESULTS)}
    hit = f"replies lost in {with_lost} ({lost}), pushes cut short in {with_cut} ({cut})"
    print(f"{transaction}: {len(runs)} runs; {hit}; pushes of killed processes: {fates}")  # noqa: T201  a figure
    for run in runs:
        assert run.num_lost_replies <= run.num_told_again
    assert 4 * with_lost >= len(runs)
    assert 4 * with_cut >= len(runs)
