"""Workers that are silent for longer than the lease (10 s): what they had read before moves nothing any more.

Processes are stopped (SIGSTOP), given up by the server, and woken (SIGCONT): some in which many workers have
read and are about to push; and one in mid-frame while it sends, one with the answer to its push unread, and
one that is replaced meanwhile. Two workers are awake, so that versions move. The model is a ledger
(`support.ledger`). A worker that holds the GIL for as long is not silent.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import pytest

import offbeat
from support import ledger
from support.command import command
from support.fault_plan import Hold, before, inside, plan
from support.fault_proxy import FaultProxy
from support.freezing import freeze, wake
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ZOMBIES = 50
"""Workers of the one process."""
NUM_ROUNDS = 2
NUM_AWAKE = 2
CELLS_OF_ONE = 20
CELLS_OF_AWAKE = 1500
PACE_S = 0.05
LOST_S = 40

# What a process is to do: each `push` says what has become of it.
PREAMBLE = """
import sys
import offbeat
from offbeat.errors import FencedError
from support import ledger

def push(client, cell, **keywords):
    receipt = (client.push_pull if keywords else client.push)(ledger.push_of(cell), **keywords)
    print("push", cell, receipt.applied, receipt.reason, flush=True)

address, name, first, number, rounds = *sys.argv[1:3], *map(int, sys.argv[3:])
clients = [offbeat.Client(address, worker_id=f"{name}-{n}") for n in range(number)]
out = clients[0].pull()
"""
IDLE = """
for round in range(rounds):
    for client in clients:
        client.pull(out)
    print("has read", flush=True)
    sys.stdin.readline()
    for n, client in enumerate(clients):
        push(client, first + 20 * n + 2 * round)
    for n, client in enumerate(clients):
        client.pull(out)
        push(client, first + 20 * n + 2 * round + 1)
"""
SENDING = """
push(clients[0], first, out=out)
push(clients[0], first + 1, out=out)
push(clients[0], first + 2, out=out)
"""
HOLDING_THE_GIL = """
import ctypes
print("has read", flush=True)
ctypes.PyDLL(None).sleep(hold_s)  # a PyDLL's functions keep the GIL
push(clients[0], first)
"""
REPLACED = """
print("has read", flush=True)
sys.stdin.readline()
try:
    push(clients[0], first)
except FencedError as error:
    print("fenced:", error, flush=True)
"""


def process(address, name, code, first, *, number=1, rounds=1):
    arguments = (address, name, str(first), str(number), str(rounds))
    program = (sys.executable, "-c", PREAMBLE + code)
    return command(*arguments, program=program, stdin=subprocess.PIPE, **ledger.ENVIRONMENT)


def tell(process):
    process.process.stdin.write("\n")
    process.process.stdin.flush()


def pushes_of(process):
    """Give the cell of each push, and what has become of it."""
    said = [line.split()[1:] for line in process.out if line.startswith("push ")]
    return {int(cell): (applied == "True", reason) for cell, applied, reason in said}


def stay_awake(address, number, over):
    """Push on and on; return how often."""
    first = ledger.lane(4 + number, CELLS_OF_AWAKE)
    with offbeat.Client(address, worker_id=f"awake-{number}") as client:
        out = client.pull()
        for cell in range(first, first + CELLS_OF_AWAKE):
            assert client.push_pull(ledger.push_of(cell), out=out).applied
            if over.wait(PACE_S):
                return cell + 1 - first
    raise AssertionError("there is no cell left")


@pytest.fixture(params=["fragment", "model"])
def server(request):
    sgd = offbeat.optim.SGD(lr=1)
    with offbeat.ParameterServer(ledger.MODEL, optimizer=sgd, transaction=request.param) as server:
        yield server


@pytest.fixture
def awake(server):
    """Two workers that push all the time; to be called for an end, and how often each has pushed."""
    over = Event()
    with ThreadPoolExecutor(NUM_AWAKE) as pool, ExitStack() as stack:
        stack.callback(over.set)
        working = [pool.submit(stay_awake, server.address, number, over) for number in range(NUM_AWAKE)]

        def end():
            over.set()
            return [future.result() for future in working]

        yield end


def state_of(server, name):
    return {worker["id"]: worker["state"] for worker in server.status()["workers"]}[name]


def until_lost(server, *names):
    """Wait until workers were given up."""
    wait_for(lambda: {state_of(server, name) for name in names} == {"lost"}, LOST_S)


def test_of_two_hundred_pushes_on_what_was_read_before_a_long_silence_none_is_applied(server, awake, some_of):
    num_rounds = len(some_of(list(range(NUM_ROUNDS)), 1))
    names = [f"zombie-{n}" for n in range(NUM_ZOMBIES)]
    with process(server.address, "zombie", IDLE, 0, number=NUM_ZOMBIES, rounds=num_rounds) as zombies:
        for _ in range(num_rounds):
            zombies.line("has read")
            freeze(zombies)
            until_lost(server, *names)
            wake(zombies)
            tell(zombies)
        assert zombies.ends() == 0, zombies.said
    num_awake = awake()
    told, rows = pushes_of(zombies), ledger.read(server.state_dict())
    assert len(told) == 2 * num_rounds * NUM_ZOMBIES
    on_old, anew = ({cell: told[cell] for cell in told if cell % 2 == odd} for odd in (0, 1))
    assert set(on_old.values()) == {(False, "slept")}
    assert set(anew.values()) == {(True, "None")}, "having read anew, they go on"
    assert not rows[:, sorted(on_old)].any()
    assert rows[:, sorted(anew)].all()
    assert ledger.whole(rows) == len(anew) + sum(num_awake)
    assert ledger.partial(rows) == 0
    assert server.status()["rejected"] == {"slept": len(on_old)}
    print(f"{len(on_old)} pushes of {NUM_ZOMBIES} zombies, {sum(num_awake)} of others")  # noqa: T201


def test_a_worker_that_is_stopped_in_mid_frame_or_with_its_answer_unread_or_replaced_writes_nothing_late(
    server, awake
):
    firsts = [ledger.lane(number, CELLS_OF_ONE) for number in range(4)]
    # Each is held where it is to be stopped: in its second push, and with the answer to that.
    places = inside("Fragment", 2, push=2, payload_byte=1000), before("Receipt", push=2)
    with ExitStack() as stack:
        held, unheard = (stack.enter_context(FaultProxy(server.address, plan(Hold(at)))) for at in places)
        sending = stack.enter_context(process(held.address, "sending", SENDING, firsts[0]))
        unread = stack.enter_context(process(unheard.address, "unread", SENDING, firsts[1]))
        replaced = stack.enter_context(process(server.address, "replaced", REPLACED, firsts[2]))
        for proxy in (held, unheard):
            proxy.wait_for("holds")
        replaced.line("has read")
        freeze(sending, unread, replaced)
        until_lost(server, "sending-0", "unread-0", "replaced-0")
        with offbeat.Client(server.address, worker_id="replaced-0") as newer:
            newer.pull()
            assert newer.push(ledger.push_of(firsts[3])).applied
            for proxy in (held, unheard):
                proxy.heal()
            wake(sending, unread, replaced)
            tell(replaced)
            for each in (sending, unread, replaced):
                assert each.ends() == 0, each.said
    num_awake = awake()
    assert re.search('^fenced: .*"replaced-0".* newer process', replaced.said, re.MULTILINE), replaced.said
    assert pushes_of(replaced) == {}
    applied, slept = (True, "None"), (False, "slept")
    # What was let in before the silence ends under its ticket, once; else it is on what was read before.
    in_time = applied if server.status()["transaction"] == "fragment" else slept
    assert list(pushes_of(sending).values()) == [applied, in_time, applied if in_time == slept else slept]
    assert list(pushes_of(unread).values()) == [applied, applied, slept]
    rows = ledger.read(server.state_dict())
    for each in (sending, unread):
        for cell, (is_applied, _) in pushes_of(each).items():
            assert (rows[:, cell] == is_applied).all(), each.said
    assert not rows[:, firsts[2]].any()
    assert rows[:, firsts[3]].all()
    whole = 1 + sum(is_applied for each in (sending, unread) for is_applied, _ in pushes_of(each).values())
    assert (ledger.whole(rows), ledger.partial(rows)) == (whole + sum(num_awake), 0)


def test_a_worker_that_holds_the_gil_for_longer_than_the_lease_is_not_lost(server, awake, request):
    """The thread that says that it is alive is Rust's."""
    hold_s = 60 if request.config.getoption("--every-fault") else 15
    first = ledger.lane(0, CELLS_OF_ONE)
    with process(server.address, "busy", f"hold_s = {hold_s}\n{HOLDING_THE_GIL}", first) as busy:
        busy.line("has read")
        wait_for(lambda: state_of(server, "busy-0") != "joined", LOST_S)
        assert state_of(server, "busy-0") == "stalled", "it is alive, and makes no progress"
        busy.line("push ", timeout_s=hold_s + LOST_S)
        assert busy.ends() == 0, busy.said
    num_awake = awake()
    assert pushes_of(busy) == {first: (True, "None")}
    assert "lost" not in {departure["state"] for departure in server.status()["departures"]}
    rows = ledger.read(server.state_dict())
    assert ledger.whole(rows) == 1 + sum(num_awake)
