"""A member is told of what it has not brought to the others, and of nothing else."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import offbeat
from offbeat import forgotten
from offbeat._offbeat import fetch_status
from support.averaging import model, step, warned
from support.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.usefixtures("members_in_one_process"),
]


@pytest.fixture(autouse=True)
def nothing_of_other_tests():
    """Forget what members of tests before have left."""
    forgotten.with_something_left.clear()


@pytest.fixture
def two():
    """Give two members, in one process, that average every 2 iterations."""
    with two_members(averaging_frequency=2) as members:
        yield members


@contextmanager
def two_members(**settings):
    with offbeat.ParameterServer(transaction="model") as server, ThreadPoolExecutor(2) as threads:

        def make(rank):
            return offbeat.AsyncModelAverager(model(), 2, rank, server_address=server.address, **settings)

        members = list(threads.map(make, range(2)))
        yield members
        list(threads.map(lambda ours: ours.close(), members))


def train(ours, iterations):
    live = ours.optimizer or torch.optim.SGD(ours.model.parameters(), lr=0.1)
    for number in range(iterations):
        ours.step(step(ours.model, live, ours.rank, number), optimizer=live)


def at_the_end(failure=None):
    with warned() as told:
        forgotten.warn_of_forgotten(failure)
    return told


def together(members, call):
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(call, members))


def test_what_was_not_brought_together_is_told_at_the_end_with_the_number_of_iterations(two):
    assert at_the_end() == []
    train(two[0], 1)
    assert [text.partition(" are in the model of member 0 alone")[0] for text in at_the_end()] == [
        "1 iteration(s) since the last average"
    ]
    assert "call flush() in every member" in at_the_end()[0]
    assert at_the_end(ValueError()) == [], "whoever ends by an exception is told that"
    together(two, lambda ours: train(ours, 3))
    assert len(at_the_end()) == 2
    together(two, lambda ours: ours.flush())
    assert at_the_end() == []


@pytest.mark.parametrize("does", ["close", "state_dict", "give_up"])
def test_what_is_closed_saved_or_given_up_is_not_forgotten(two, does):
    train(two[0], 1)
    assert len(at_the_end()) == 1
    getattr(two[0], does)()
    assert at_the_end() == []


@pytest.mark.parametrize("code", [None, 0])
def test_a_with_block_that_sys_exit_ends_well_tells_so_too(two, code):
    train(two[0], 1)
    with warned() as told, pytest.raises(SystemExit), two[0]:
        sys.exit(code)
    assert [text for text in told if "1 iteration(s) since the last average are in the model" in text]


@pytest.mark.parametrize("does", [None, "close", "state_dict"])
def test_a_with_block_that_ends_well_tells_what_was_not_flushed(two, does):
    with warned() as told, two[0] as ours:
        train(ours, 1)
        if does is not None:
            getattr(ours, does)()
    said = (
        "1 iteration(s) since the last average are in the model of member 0 alone, and the with block ends: "
    )
    assert [text[: len(said)] for text in told] == ([said] if does is None else [])
    assert at_the_end() == [], "it is told once"


def test_a_with_block_that_ends_by_an_exception_tells_that_alone(two):
    train(two[0], 1)
    with warned() as told, pytest.raises(KeyError), two[0]:
        raise KeyError
    assert told == []


def test_a_state_that_was_loaded_is_nothing_new(two):
    train(two[0], 1)
    state, live = two[0].state_dict(), torch.optim.SGD(two[1].model.parameters(), lr=0.1)
    two[1].model.load_state_dict(two[0].model.state_dict())
    two[1].load_state_dict(state, optimizer=live)
    assert at_the_end() == []
    train(two[1], 1)
    assert at_the_end()[0].startswith("1 iteration(s) since the last average are in the model of member 1 ")


def test_one_alone_has_nobody_to_bring_it_to():
    with offbeat.ParameterServer(transaction="model") as server:
        ours = offbeat.AsyncModelAverager(model(), 1, 0, server_address=server.address)
        train(ours, 3)
        assert at_the_end() == []
        ours.close()


def test_a_round_that_takes_ten_times_the_frequency_is_told_once(two):
    with warned() as told:
        train(two[0], 2 + 10 * 2 - 1)
        assert told == [], "a round waits for the other, and training goes on"
        train(two[0], 30)
    assert [text.partition(": ")[0] for text in told] == ["averaging is far behind"]
    assert "member 0 has done 20 iterations since its round began, 10 times averaging_frequency" in told[0]
    assert "other members, or the server, are slower than this one's training; average less" in told[0]


def test_a_round_that_takes_long_since_the_server_is_away_is_told_with_that_alone(monkeypatch):
    """While the client of the round still waits for it, and no round has failed."""

    def gone(tries_s):
        return fetch_status("127.0.0.1:1", None, tries_s)

    with two_members(averaging_frequency=2) as members, warned() as told:
        train(members[0], 2 + 2)
        assert members[0].is_under_way, "it waits for the other"
        monkeypatch.setattr(members[0]._turns.members, "_ask", gone)
        train(members[0], 10 * 2)
    (behind,) = [text for text in told if text.startswith("averaging is far behind")]
    assert "the members' server is away" in behind
    assert "slower" not in behind


def test_where_each_member_adapts_by_itself_a_round_that_takes_long_is_told_with_the_bounds_to_set():
    adaptive = two_members(
        averaging_frequency=2, averaging_policy="adaptive", adaptation_metric="gradient_norm"
    )
    with adaptive as (ours, _), warned() as told:
        train(ours, 2 + 10 * 2)
    assert [text.partition(": ")[0] for text in told] == ["averaging is far behind"]
    assert "by their own adaptation_metric they average less often" in told[0]
    assert "bring min_averaging_frequency and max_averaging_frequency nearer to one another" in told[0]


def test_a_round_that_takes_ten_times_a_frequency_of_time_is_told_too(monkeypatch):
    """Though the clock by which the next one begins does not count while it is under way."""
    now = [time.monotonic()]
    monkeypatch.setattr("offbeat.averaging.course.time", SimpleNamespace(monotonic=lambda: now[0]))
    by_time = two_members(averaging_frequency="5s", averaging_policy="time")
    with by_time as (ours, _), warned() as told:
        for passes in (5.0, 49.0):
            now[0] += passes
            train(ours, 1)
        assert ours.is_under_way, "it waits for the other"
        assert told == []
        now[0] += 1.0
        train(ours, 2)
    assert [text.partition(": ")[0] for text in told] == ["averaging is far behind"]
    assert "member 0 has trained for 50 s since its round began, 10 times averaging_frequency" in told[0]
    assert "averaging_policy='time'" not in told[0], "it is so already"


def test_a_member_that_trains_and_seldom_averages_is_not_taken_for_stalled():
    with offbeat.ParameterServer(transaction="model") as server:
        ours = offbeat.AsyncModelAverager(
            model(), 1, 0, averaging_frequency=1_000_000, server_address=server.address
        )
        (of_ours,) = [worker["id"] for worker in server.status()["workers"]]
        idle = offbeat.AsyncModelAverager(model(), 1, 0, server_address=server.address)

        def states():
            ours.step(1)
            found = {worker["id"]: worker["state"] for worker in server.status()["workers"]}
            return found.pop(of_ours), *found.values()

        wait_for(lambda: states()[1] == "stalled", timeout_s=30)
        assert states() == ("joined", "stalled"), "after 10 s: the one that does nothing, alone"
        idle.close()
        ours.close()


ENDS = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
import offbeat

def main(server):
    address = server.address
    make = lambda rank: offbeat.AsyncModelAverager(torch.nn.Linear(2, 2), 2, rank, server_address=address)
    with ThreadPoolExecutor(2) as threads:
        members = list(threads.map(make, range(2)))
    for _ in range(3):
        members[1].step(1)
    if "raise" in sys.argv:
        raise ValueError("of the user's")

with offbeat.ParameterServer(transaction="model") as server:
    main(server)
"""


@pytest.mark.parametrize("how", ["well", "raise"])
def test_a_process_that_ends_well_tells_what_was_forgotten_also_of_what_a_function_has_held(how):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, how], capture_output=True, text=True, timeout=60, check=False
    )
    text = (
        "offbeat: 3 iteration(s) since the last average are in the model of member 1 alone, and the process"
    )
    assert (ended.returncode, text in ended.stderr) == {"well": (0, True), "raise": (1, False)}[how]
