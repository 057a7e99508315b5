"""A member at a server whose process ends with a round under way has finished, or left: it is not lost."""

import subprocess
import sys

import pytest
from torch import nn

import offbeat
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MEMBER = """
import sys, torch, offbeat
from torch import nn

model = nn.Linear(1, 1, bias=False)
averager = offbeat.AsyncModelAverager(
    model, 1, 0, averaging_frequency=1, communication_backend="tcp", server_address=sys.argv[1]
)
with torch.no_grad():
    model.weight.add_(2)
averager.step(1)
sys.stdin.readline()
exec(sys.argv[2])
"""


@pytest.fixture
def server():
    with offbeat.ParameterServer(transaction="model") as running:
        yield running


@pytest.fixture
def stays(server):
    """Give a member that is in each round, and does not come to those of others."""
    trained = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(trained.weight)
    with offbeat.AsyncModelAverager(
        trained, 1, 0, averaging_frequency=1, communication_backend="tcp", server_address=server.address
    ) as member:
        does_a_round(member)
        yield member


def does_a_round(member):
    member.step(1)
    member.state_dict()  # waits for its end


def ends(address, ending):
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, address, ending], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def until_it_waits(server):
    wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1, timeout_s=60)


def ended(server, ending):
    """Have a member end while its round waits for others; give it, and what it has printed on both."""
    with ends(server.address, ending) as member:
        try:
            until_it_waits(server)
            return (member, *member.communicate("\n", timeout=60))
        finally:
            member.kill()


def others(server):
    return {
        worker["id"]: worker["state"] for worker in server.status()["workers"] if worker["id"] != "worker-0"
    }


@pytest.mark.parametrize(
    ("ending", "state", "code"),
    [
        ("", "finished", 0),
        ("averager.close()", "finished", 0),
        ("sys.exit(0)", "finished", 0),
        ("1 / 0", "left", 1),
        ("with averager: 1 / 0", "left", 1),
        ("with averager: sys.exit(3)", "left", 3),
        ("averager.close()\n1 / 0", "finished", 1),
        ("try:\n with averager: 1 / 0\nfinally: averager.close()", "left", 1),
        ("raise KeyboardInterrupt", "left", None),
    ],
)
def test_who_ends_while_a_round_of_its_own_waits_for_others_says_goodbye(server, stays, ending, state, code):
    member, _, told = ended(server, ending)
    assert others(server) == {"worker-1": state}
    assert "Exception ignored" not in told
    assert code is None or member.returncode == code, told
    does_a_round(stays)
    assert stays.world_size == 1, "nobody is waited for who has said goodbye"


BREAKS_OFF = """
import concurrent.futures

def wait(*_):
    print("waits", flush=True)
    raise KeyboardInterrupt

concurrent.futures.wait = wait
"""


def test_ctrl_c_ends_the_wait_for_others(server, stays):
    _, said, told = ended(server, BREAKS_OFF)
    assert said == "waits\n", told
    assert others(server) == {"worker-1": "finished"}


AWAITED = """
from offbeat.averaging import served

served.LEAVING_S = 60.0
print("ends", flush=True)
"""


def test_what_it_has_said_in_that_round_is_in_the_mean_where_others_come_to_it_soon(server, stays):
    with ends(server.address, AWAITED) as member:
        try:
            until_it_waits(server)
            member.stdin.write("\n")
            member.stdin.flush()
            assert member.stdout.readline() == "ends\n"
            does_a_round(stays)
            _, told = member.communicate(timeout=60)
        finally:
            member.kill()
    assert (member.returncode, others(server)) == (0, {"worker-1": "finished"}), told
    assert stays.model.weight.item() == 1.0, "the mean of 0 and 2"
