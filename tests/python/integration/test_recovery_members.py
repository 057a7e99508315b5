"""A `FaultTolerantTrainer` around a member of several: what it and the others have after it was stopped."""

import json
import multiprocessing
import os
import signal

import pytest
from safetensors.torch import load_file

import offbeat
from offbeat.cli import training_checkpoint
from offbeat.errors import StateError
from offbeat.recovery import directory
from support import fault_tolerant, members
from support.averaging import METHODS, held_number
from support.fault_tolerant import in_process, started
from support.members import BATCH, EVERY
from support.ports import free_port
from support.waiting import wait_for

pytestmark = pytest.mark.timeout(200)

CONTEXT = multiprocessing.get_context("forkserver")
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
    barrier = CONTEXT.Barrier(2, timeout=60)
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


def test_a_member_that_comes_back_to_others_in_another_epoch_is_told_so_and_how_it_can(tmp_path):
    schedule = {0: "average", 1: "slowmo"}
    barrier = CONTEXT.Barrier(2, timeout=60)
    with offbeat.ParameterServer(transaction="model") as server:
        run = {"kind": "trainer", "max_steps": 20}
        last = in_process(
            members.count, tmp_path / "a", server.address, BY, killed_in=8, method=schedule, **run
        )
        assert last == -signal.SIGKILL
        other = started(
            members.count,
            tmp_path / "b",
            server.address,
            BY,
            method=schedule,
            waits_in=(17,),
            barrier=barrier,
            **run,
        )
        barrier.wait()  # in its second epoch
        with (
            members.trainer_of(members.one_number(), schedule, server_address=server.address) as member,
            pytest.raises(
                StateError, match=r"method is Average\(\) here and SlowMo.* there.*in epoch 0 of its own"
            ),
        ):
            members.trained(member, tmp_path / "a", lambda outputs, _: outputs.mean(), epochs=2)
        again = started(members.count, tmp_path / "c", server.address, BY, method="slowmo", **run)
        wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
        barrier.wait()
        assert [ended(other), ended(again)] == [0, 0]


# --------------------------------------------------------------------------- a group that is told to end


def both(tmp_path, in_batches, in_rounds=(None, None), *, batches, **run):
    """Start a group of two."""
    port = free_port()
    return [
        started(
            members.in_group,
            rank,
            port,
            tmp_path / f"{rank}",
            tmp_path / f"{rank}.json",
            batches=batches[rank],
            in_batch=in_batches[rank],
            in_round=in_rounds[rank],
            **run,
        )
        for rank in range(2)
    ]


def come_of(tmp_path):
    return [json.loads((tmp_path / f"{rank}.json").read_text("utf-8")) for rank in range(2)]


def newest(folder):
    return int(directory.names(folder)[0].rpartition("-")[2])


@pytest.mark.parametrize(
    ("run", "batches", "waits_in"),
    [
        ({"kind": "averager", "method": "diloco"}, (10, 10), 2),
        ({"kind": "trainer", "method": "slowmo"}, (10, 10), 2),
        ({"kind": "averager", "method": "diloco"}, (5, 10), 3),
        ({"kind": "trainer", "method": "slowmo"}, (5, 10), 3),
        ({"kind": "trainer", "method": {0: "average", 1: "slowmo"}}, (10, 20), 3),
    ],
    ids=["averager", "trainer", "averager at its end", "trainer at its end", "between strategies"],
)
def test_sigterm_to_a_group_saves_who_waits_for_one_that_ends(run, batches, waits_in, tmp_path):
    """The first waits in a round, to which the other does not come any more; both go on from that before."""
    waits, holds, told = CONTEXT.Event(), CONTEXT.Event(), CONTEXT.Event()
    held_in = EVERY * waits_in - 2
    group = both(
        tmp_path,
        (members.nothing, members.Holds({held_in: told}, there=holds)),
        (members.Sets(waits_in, waits), None),
        batches=batches,
        **run,
    )
    assert (waits.wait(60), holds.wait(60)) == (True, True)
    for process in group:
        os.kill(process.pid, signal.SIGTERM)
    told.set()
    assert [ended(process) for process in group] == [143, 143]
    assert [newest(tmp_path / f"{rank}") for rank in range(2)] == [2 * EVERY, held_in]
    group = both(tmp_path, (members.nothing, members.nothing), batches=batches, **run)
    assert [ended(process) for process in group] == [0, 0]
    first, second = come_of(tmp_path)
    assert (first["steps"], second["steps"]) == (2 * batches[0], 2 * batches[1])
    assert first["value"] == second["value"]
    assert first["warned"] == second["warned"] == []
    assert second["round"] == [waits_in - 1]  # what the method has kept goes on from there


@pytest.mark.parametrize(
    ("method", "number", "codes"),
    [("diloco", signal.SIGKILL, [1, -signal.SIGKILL]), ("gossip", signal.SIGTERM, [143, 143])],
)
def test_who_loses_a_member_saves_its_model_first_and_all_go_on(method, number, codes, tmp_path):
    waits, holds, told = CONTEXT.Event(), CONTEXT.Event(), CONTEXT.Event()
    run = {"kind": "averager", "method": method, "batches": (10, 10)}
    group = both(
        tmp_path,
        (members.nothing, members.Holds({8: told}, there=holds)),
        (members.Sets(2, waits), None),
        **run,
    )
    assert (waits.wait(60), holds.wait(60)) == (True, True)
    for process in group[number == signal.SIGKILL :]:
        os.kill(process.pid, number)
    if number != signal.SIGKILL:  # an event waits for who was killed while waiting for it
        told.set()
    assert [ended(process) for process in group] == codes
    assert newest(tmp_path / "0") == 2 * EVERY
    group = both(tmp_path, (members.nothing, members.nothing), **run)
    assert [ended(process) for process in group] == [0, 0]
    first, second = come_of(tmp_path)
    assert (first["steps"], second["steps"], first["value"]) == (20, 20, second["value"])


@pytest.mark.parametrize("kind", members.MADE)
def test_a_save_waits_for_no_slower_member(kind, tmp_path):
    """The other comes to a round when the first waits for it, and to the next when that is saved."""
    waits, saved = CONTEXT.Event(), CONTEXT.Event()
    first_waits, first_is_saved = members.Sets(1, waits), members.Sets(2 * EVERY + 1, saved)
    group = both(
        tmp_path,
        (first_is_saved, members.Holds({EVERY: waits, EVERY + 1: saved})),
        (first_waits, None),
        batches=(6, 6),
        kind=kind,
        method="diloco",
        overlap=True,
    )
    assert [ended(process) for process in group] == [0, 0]
    first, second = come_of(tmp_path)
    assert first["value"] == second["value"]
    steps = [int(name.rpartition("-")[2]) for name in directory.names(tmp_path / "0")]
    assert steps == [12, 2 * EVERY]


# --------------------------------------------------------------------------- one that waits at its end


def newest_entry(folder):
    found = directory.entries(folder) if folder.exists() else []
    return found[0] if found and found[0].manifest is not None else None


def is_saved_before_the_end(folder):
    entry = newest_entry(folder)
    return entry is not None and entry.manifest.is_end_due


def ended_beside_another(kind, folder, number):
    """Let one wait for another's end, and be ended by a signal, if one is given, and begun again.

    Returns:
        What the server has in the end.
    """
    run = {"kind": kind, "method": "average"}
    barrier = CONTEXT.Barrier(2, timeout=60)
    with offbeat.ParameterServer(transaction="model") as server:
        waits_in = EVERY + 1, 2 * EVERY + 1
        other = started(
            members.count,
            folder / "b",
            server.address,
            -BY,
            max_steps=2 * EVERY + 3,
            waits_in=waits_in,
            barrier=barrier,
            **run,
        )
        barrier.wait()  # it was in a round, and is waited for in the next

        def begun():
            # Of its own it has no round before its end.
            process = started(members.count, folder / "a", server.address, BY, max_steps=EVERY - 1, **run)
            wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
            return process

        ends = begun()
        assert not is_saved_before_the_end(folder / "a"), "the other has nothing of it yet"
        barrier.wait()
        barrier.wait()  # which has it now, and trains on
        wait_for(lambda: is_saved_before_the_end(folder / "a"))
        wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
        if number is not None:
            os.kill(ends.pid, number)
            assert ended(ends) == (143 if number == signal.SIGTERM else -number)
            assert not newest_entry(folder / "a").manifest.is_finished
            ends = begun()
        barrier.wait()
        assert [ended(other), ended(ends)] == [0, 0]
        held = held_number(server)
    last = newest_entry(folder / "a")
    found = last.manifest.step, last.manifest.is_finished, last.manifest.is_end_due
    assert found == (EVERY - 1, True, False)
    assert load_file(folder / "a" / last.name / "model.safetensors")["weight"].item() == held
    return held


@pytest.mark.parametrize("kind", members.MADE)
def test_one_that_waits_for_the_others_end_has_saved_all_and_a_signal_ends_the_wait(kind, tmp_path):
    held = [
        ended_beside_another(kind, tmp_path / str(number), number)
        for number in (None, signal.SIGTERM, signal.SIGKILL)
    ]
    assert held[0] == held[1] == held[2], "nothing of it is lost"


@pytest.mark.parametrize("are_both_ended", [False, True])
def test_one_that_has_the_server_waits_for_the_others_end_whatever_signal_comes(are_both_ended, tmp_path):
    """Where a signal has ended those others as well, it has the server once more when all are begun again."""
    barrier, port, num_steps = CONTEXT.Barrier(2, timeout=60), free_port(), (EVERY - 1, EVERY + 3)

    def begun(rank, meeting=None):
        folder, settings = tmp_path / str(rank), {"max_steps": num_steps[rank], "barrier": meeting}
        return started(members.meet_at_rank_0, rank, port, folder, BY, **settings)

    host, other = begun(0), begun(1, barrier)
    barrier.wait()  # it has been in a round with the host's share
    wait_for(lambda: is_saved_before_the_end(tmp_path / "0"))
    for process in (host, other)[: 1 + are_both_ended]:
        os.kill(process.pid, signal.SIGTERM)
    barrier.wait()
    assert [ended(other), ended(host)] == [143 if are_both_ended else 0, 143]
    assert is_saved_before_the_end(tmp_path / "0")
    if are_both_ended:
        assert [ended(process) for process in (begun(0), begun(1))] == [0, 0]
    weights = []
    for rank in range(2):
        last = newest_entry(tmp_path / str(rank))
        assert last.manifest.step == num_steps[rank]
        assert last.manifest.is_finished == (are_both_ended or rank == 1)
        weights.append(load_file(tmp_path / str(rank) / last.name / "model.safetensors")["weight"])
    assert weights[0] == weights[1] != 0


def test_a_save_at_the_last_step_says_that_the_end_is_due(tmp_path, capsys):
    """One that is killed before it has ended together with the others is not done."""
    barrier = CONTEXT.Barrier(2, timeout=60)
    run = {"kind": "averager", "method": "average"}
    with offbeat.ParameterServer(transaction="model") as server:
        settings = {"max_steps": 2 * EVERY + 3, "waits_in": (EVERY + 1, 2 * EVERY + 1)} | run
        other = started(members.count, tmp_path / "b", server.address, -BY, barrier=barrier, **settings)
        barrier.wait()

        def begun():
            process = started(members.count, tmp_path / "a", server.address, BY, max_steps=EVERY, **run)
            wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
            return process

        killed = begun()  # in the round of its last step
        barrier.wait()
        barrier.wait()
        wait_for(lambda: is_saved_before_the_end(tmp_path / "a"))  # as any save that is due
        wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)  # it brings what is left: nothing
        os.kill(killed.pid, signal.SIGKILL)
        assert ended(killed) == -signal.SIGKILL
        training_checkpoint.inspect(tmp_path / "a" / newest_entry(tmp_path / "a").name, as_json=False)
        assert ", to end together with the others yet" in capsys.readouterr().out
        again = begun()
        barrier.wait()
        assert [ended(other), ended(again)] == [0, 0]
        held = held_number(server)
    last = newest_entry(tmp_path / "a")
    assert (last.manifest.step, last.manifest.is_finished, last.manifest.is_end_due) == (EVERY, True, False)
    assert load_file(tmp_path / "a" / last.name / "model.safetensors")["weight"].item() == held


@pytest.mark.parametrize("data", [fault_tolerant.plain, fault_tolerant.stateful, fault_tolerant.in_our_order])
def test_a_life_that_only_ends_leaves_all_so_that_training_goes_on(data, tmp_path):
    """Begun again with more steps, it sees the batches and the noise that it would have seen."""

    def lives(name, *ends):
        folder = tmp_path / name
        folder.mkdir()
        with offbeat.ParameterServer(transaction="model") as server:
            for max_steps, is_killed in ends:
                code = in_process(
                    members.draw,
                    folder / "run",
                    server.address,
                    folder / "seen",
                    data,
                    max_steps=max_steps,
                    is_killed=is_killed,
                )
                assert code == (-signal.SIGKILL if is_killed else 0)
        return (folder / "seen").read_text("utf-8").splitlines()

    whole = lives("whole", (13, False), (20, False))
    assert len(whole) == 20
    assert lives("killed", (13, True), (13, False), (20, False)) == whole
