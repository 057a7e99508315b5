"""A `FaultTolerantTrainer` around a member of several: what it and the others have after it was stopped."""

import multiprocessing
import signal

import pytest

import offbeat
from offbeat.recovery import directory
from support import members
from support.averaging import METHODS, held_number
from support.fault_tolerant import in_process, started
from support.members import BATCH, EVERY
from support.waiting import wait_for

pytestmark = pytest.mark.timeout(200)

BY = 0.125
"""What a step adds: a number that binary fractions hold."""


def ended(process):
    process.join(60)
    return process.exitcode


def samples_of(server):
    return sum(worker["samples"] for worker in server.status()["workers"])


# --------------------------------------------------------------------------- a member that comes back


def lived_and_killed(folder, address, **run):
    """Let a member come to its 13th batch, of which the checkpoint has ten."""
    last = in_process(members.count, folder, address, BY, killed_in=13, max_steps=20, **run)
    assert last == -signal.SIGKILL
    assert directory.names(folder)[0].endswith("-step-10")


@pytest.mark.parametrize("kind", members.MADE)
def test_a_member_that_comes_back_weighs_what_it_has_trained_since(kind, tmp_path):
    """One counts up and the other as much down: where they weigh the same, nothing comes of both together."""
    run = {"kind": kind, "method": "average"}
    barrier = multiprocessing.get_context("forkserver").Barrier(2, timeout=60)
    with offbeat.ParameterServer(transaction="model") as server:
        lived_and_killed(tmp_path / "a", server.address, **run)
        before = held_number(server)
        other = started(
            members.count, tmp_path / "b", server.address, -BY, max_steps=15, barrier=barrier, **run
        )
        barrier.wait()  # it was in a round, and is waited for in the next
        killed = started(members.count, tmp_path / "a", server.address, BY, max_steps=20, **run)
        wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
        barrier.wait()
        assert [ended(other), ended(killed)] == [0, 0]
        assert held_number(server) == before - EVERY * BY


@pytest.mark.parametrize("method", METHODS)
def test_the_server_hears_of_no_sample_twice_of_a_member_that_comes_back(method, tmp_path):
    run = {"kind": "averager", "method": method}
    with offbeat.ParameterServer(transaction="model") as server:
        lived_and_killed(tmp_path, server.address, **run)
        before = samples_of(server)
        assert in_process(members.count, tmp_path, server.address, BY, max_steps=20, **run) == 0
        assert samples_of(server) - before == 10 * BATCH + 1  # one for the end, with no batch


def test_a_member_that_comes_back_asynchronously_brings_what_it_has_trained_since(tmp_path):
    run = {"kind": "averager", "method": "diloco", "asynchronous": True}
    with offbeat.ParameterServer(transaction="model") as server:
        lived_and_killed(tmp_path, server.address, **run)
        assert in_process(members.count, tmp_path, server.address, BY, max_steps=20, **run) == 0
        totals = server.state_dict()["samples and iterations"].numpy().tolist()
        assert totals == [20 * BATCH, 20]


def test_a_pace_goes_by_no_loss_of_the_model_that_a_member_has_left(serve):
    settings = {"averaging_policy": "adaptive", "adaptation_metric": "loss_variance"}
    server = serve(members.one_number())

    def met():
        return members.averager_of(members.one_number(), "average", server_address=server.address, **settings)

    with met() as a:
        for loss in range(EVERY + 2):
            a.step(BATCH, loss=float(loss))
        state = a.state_dict()
    with met() as b:
        b.load_state_dict(state, strict=False)
        assert (b.iterations, b.last_averaging_iteration) == (EVERY + 2, 2)
        assert b._turns.course.losses == []
