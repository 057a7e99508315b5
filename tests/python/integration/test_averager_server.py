"""Members that meet at a server average as the methods say, and outlive one another and the server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import offbeat
from offbeat import averaging
from offbeat._offbeat import fetch_status
from offbeat.errors import (
    ConfigError,
    ConnectError,
    ConnectionLostError,
    ModelMismatchError,
    NonFiniteError,
    StateError,
    UnsupportedTensorError,
)
from support.averaging import (
    METHODS,
    SPEC,
    Alone,
    Counter,
    arrays,
    batch,
    close,
    held_number,
    model,
    sick_beside_one_that_has_ended,
    step,
    warned,
)
from support.command import command
from support.freezing import freeze, wake
from support.group import together
from support.ports import free_port
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

LEASE_S = 10.0
TESTS = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
"""Where a program of its own finds what several tests share."""


@pytest.fixture
def server():
    with offbeat.ParameterServer(transaction="model") as running:
        yield running


def at(address, trained, rank, num, **settings):
    return offbeat.AsyncModelAverager(
        trained, num, rank, communication_backend="tcp", server_address=address, **settings
    )


def asked(port):
    """Give what a server in another process says of itself."""
    return json.loads(fetch_status(f"127.0.0.1:{port}", None, 5.0))


def member(rank, address, method):
    trained = model(seed=rank)  # all start from what the first brings
    started = [p.detach().clone() for p in trained.parameters()]
    with at(address, trained, rank, 3, averaging_frequency=4, method=method, overlap=False) as ours:
        is_first = all(map(torch.equal, started, trained.parameters()))
        beginning = [value.copy() for value in arrays(trained)]
        for number in range(10):
            inputs, targets = batch(rank, number)
            ours.train_step(inputs=inputs, targets=targets, optimizer=SPEC, loss_fn=nn.CrossEntropyLoss())
        before = [value.copy() for value in arrays(trained)]
        ours.flush()
        return is_first, beginning, before, arrays(trained), ours.averaging_round


@pytest.mark.parametrize("method", METHODS)
def test_members_at_a_server_do_what_the_methods_say(server, method):
    found = together(member, 3, server.address, method)
    assert sum(is_first for is_first, *_ in found) == 1
    us = Alone(3, method)
    for trained in us.models:
        with torch.no_grad():
            for parameter, value in zip(trained.parameters(), found[0][1], strict=True):
                parameter.copy_(torch.from_numpy(value))
    us.reference = [p.detach().double().clone() for p in us.models[0].parameters()]
    assert us.train(10, 4, 0) is None
    for rank in range(3):
        assert all(map(np.array_equal, found[rank][1], found[0][1])), "all begin alike"
        assert close(found[rank][2], arrays(us.models[rank]), within=1e-6)
        assert all(map(np.array_equal, found[rank][3], found[0][3])), "and end alike"


def dying(rank, address, here):
    trained = model()
    with at(address, trained, rank, 3, averaging_frequency=5) as ours:
        live = torch.optim.SGD(trained.parameters(), lr=0.01)
        gap, last = 0.0, None
        while last is None or ours.averaging_round < last + 5:
            began_s = time.monotonic()
            ours.step(step(trained, live, rank, ours.iterations % 20))
            gap = max(gap, time.monotonic() - began_s)
            if rank == 2 and ours.averaging_round == 3:
                (here / "gone").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if last is None and (here / "gone").exists():
                last = ours.averaging_round
        ours.flush()
        np.savez(here / f"{rank}.npz", *arrays(trained), gap=gap, size=ours.world_size)


def test_one_that_is_killed_holds_up_the_others_for_no_longer_than_a_lease(server, tmp_path):
    with pytest.raises(EOFError):  # of the one that is killed
        together(dying, 3, server.address, tmp_path)
    with np.load(tmp_path / "0.npz") as first, np.load(tmp_path / "1.npz") as second:
        for found in (first, second):
            assert found["gap"] < LEASE_S
            assert found["size"] == 2
        assert all(np.array_equal(first[f"arr_{i}"], second[f"arr_{i}"]) for i in range(4))


def ill_at_a_server(rank, ill_at, address, method):
    place = {"rank": rank, "world_size": 2, "communication_backend": "tcp", "server_address": address}
    return sick_beside_one_that_has_ended(rank, ill_at, method=method, **place)


@pytest.mark.parametrize("ill_at", [9, 25])
@pytest.mark.parametrize("method", METHODS)
def test_a_member_that_is_not_finite_goes_on_from_what_the_server_has(server, method, ill_at):
    (well, first, _), (ill, second, _) = together(ill_at_a_server, 2, ill_at, server.address, method)
    assert (well, ill) == (0, 1)
    assert all(np.isfinite(value).all() for value in first)
    assert all(map(np.array_equal, first, second))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_rank_0_whose_block_ends_by_an_exception_raises_that_and_stops_its_server(monkeypatch, error):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for _ in range(2):  # the second finds the place free
        with (
            pytest.raises(type(error)) as raised,
            offbeat.AsyncModelAverager(model(), 1, 0, communication_backend="tcp"),
        ):
            raise error
        assert raised.value is error


def joining(rank, address, here):
    """Give what this member begins with, and what it has after each round."""
    if rank == 1:
        wait_for((here / "trained").exists, timeout_s=60)
    trained, means = model(seed=rank), []
    with at(address, trained, 0, 1, averaging_frequency=5, overlap=False) as ours:
        began = [value.copy() for value in arrays(trained)]
        live = torch.optim.SGD(trained.parameters(), lr=0.1)
        while not (here / "joined").exists():
            ours.step(step(trained, live, rank, ours.iterations % 20))
            if ours.averaging_round > len(means):
                means.append([value.copy() for value in arrays(trained)])
            if len(means) == 4:
                (here / ("trained", "joined")[rank]).touch()
        ours.flush()
        return began, means


def test_one_that_comes_late_begins_with_the_current_mean(server, tmp_path):
    (_, means), (began, later) = together(joining, 2, server.address, tmp_path)

    def number_of(values):
        (found,) = (n for n, mean in enumerate(means) if all(map(np.array_equal, mean, values)))
        return found

    assert number_of(began) >= 3, "what the first had learnt by then, whose fourth round it has waited for"
    assert number_of(later[0]) > number_of(began), "and is in its rounds from then on"


def test_where_the_server_is_lost_training_goes_on_and_averaging_when_it_is_there_again(monkeypatch):
    port = free_port()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    trained = model()
    with warned() as told:
        with offbeat.ParameterServer(port=port, transaction="model"):
            ours = at(f"127.0.0.1:{port}", trained, 0, 1, averaging_frequency=2, overlap=False)
            live = torch.optim.SGD(trained.parameters(), lr=0.1)
            for number in range(4):
                ours.step(step(trained, live, 0, number))
        before = ours.averaging_round
        assert before == 2
        for number in range(4):
            ours.step(step(trained, live, 0, number))
        assert ours.averaging_round == before
        assert ours.iterations == 8
        assert len([text for text in told if text.startswith("averaging pauses, and training goes on")]) == 1
        with offbeat.ParameterServer(port=port, transaction="model"):
            for number in range(4):
                ours.step(step(trained, live, 0, number))
            assert told[-1] == "the server is there again: averaging goes on"
            assert ours.averaging_round > before
            ours.flush()
            ours.close()


@pytest.fixture
def two_of_before(monkeypatch):
    """Give two members of a server that was lost, and the port at which they try to flush again."""
    port, ones = free_port(), [Counter(by=1.0), Counter(by=3.0)]
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)

    with ThreadPoolExecutor(2) as threads:

        def joined(rank):
            place = f"127.0.0.1:{port}"
            return at(place, ones[rank].model, rank, 2, averaging_frequency=100, overlap=False)

        with offbeat.ParameterServer(port=port, transaction="model"):
            members = list(threads.map(joined, range(2)))
        for one, averager in zip(ones, members, strict=True):
            one.train(averager, 2)
            with pytest.raises(ConnectionLostError, match="the members' server is away"):
                averager.flush()
        yield port, ones, members, threads
    for averager in members:
        averager.close()


def test_a_member_at_a_server_is_shown_with_how_many_its_newest_round_had(server):
    with at(server.address, Counter().model, 0, 1, averaging_frequency=1, overlap=False) as first:
        first.step(1)
        shown = (
            "<offbeat.AsyncModelAverager member 0, worker-0 at the server, 1 in its newest round, Average()"
        )
        assert repr(first).startswith(shown)
        late_model = Counter().model
        with at(server.address, late_model, 2, 3, averaging_frequency=1, overlap=False) as late:
            shown = "<offbeat.AsyncModelAverager member 2, worker-1 at the server, in no round yet, Average()"
            assert repr(late).startswith(shown)


def test_a_server_where_members_average_takes_no_bound_on_staleness(server):
    server.max_staleness = 3  # nobody averages yet
    server.max_staleness = None
    with at(server.address, Counter().model, 0, 1, averaging_frequency=1, overlap=False) as ours:
        ours.step(1)
        with pytest.raises(ConfigError, match="max_staleness is 3: members average at this server"):
            server.max_staleness = 3
        assert server.max_staleness is None
    server.max_staleness = 3  # they have gone
    with offbeat.ParameterServer(transaction="model", max_staleness=20) as other:
        with at(other.address, Counter().model, 0, 1, method="diloco", asynchronous=True) as ours:
            ours.step(1)
            other.max_staleness = 30  # there is no mean
        assert other.max_staleness == 30


def test_a_member_in_no_round_yet_when_a_bound_was_set_is_told_as_it_comes_to_one(server):
    settings = {"averaging_frequency": 1, "overlap": False}
    with at(server.address, Counter().model, 0, 1, **settings) as ours:
        ours.step(1)
    with at(server.address, Counter().model, 0, 1, **settings) as late:
        server.max_staleness = 0  # nobody averages
        with pytest.raises(StateError, match=r"the server's max_staleness is 0, and .*; set server\.max_sta"):
            late.step(1)
    server.max_staleness = None
    with at(server.address, Counter().model, 0, 1, **settings) as again:
        again.step(1)
        assert again.averaging_round > 0
        with pytest.raises(ConfigError, match="max_staleness is 3: members average at this server"):
            server.max_staleness = 3


def test_a_member_says_what_it_is_called_at_a_server_where_that_is_not_its_rank(server, caplog):
    with caplog.at_level("INFO", logger="offbeat"), at(server.address, Counter().model, 0, 1):
        assert "at the server" not in "".join(m for m in caplog.messages if not m.startswith("<"))
        with at(server.address, Counter().model, 2, 3):
            assert "this averager, of rank 2, is worker-1 at the server" in caplog.messages


def test_members_end_together_at_a_server_that_knows_nobody_of_before(two_of_before):
    port, ones, members, threads = two_of_before
    with warned() as told, offbeat.ParameterServer(port=port, transaction="model") as server:
        first = threads.submit(members[0].flush)
        wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
        assert not first.done(), "it waits for the other, of whom the server knows nothing"
        members[1].flush()
        first.result(LEASE_S)
        assert [one.value for one in ones] == [4.0, 4.0], "2 and 6"
        assert [averager.world_size for averager in members] == [2, 2]
        assert {*told} == {"the server is there again: averaging goes on"}


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_one_flush_is_enough_where_the_server_was_started_again_without_its_run(has_begun, is_asynchronous):
    port, ones = str(free_port()), [Counter(by=1.0), Counter(by=3.0)]
    method = averaging.DiLoCo(lr=1.0, momentum=0.0, delay=1) if is_asynchronous else "average"

    def serving():
        return command("server", "--port", port, "--transaction", "model")

    def joined(rank):
        return at(
            f"127.0.0.1:{port}", ones[rank].model, rank, 2, averaging_frequency=100, overlap=False,
            method=method, asynchronous=is_asynchronous,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as threads, warned() as told:
        with serving() as server:
            server.line("OFFBEAT_SERVER=")
            members = list(threads.map(joined, range(2)))
            for one, averager in zip(ones, members, strict=True):
                one.train(averager, 2)
            if has_begun:
                first = threads.submit(members[0].flush)
                wait_for(lambda: asked(port)["rounds"]["open_entrants"] == 1)
            server.signal(signal.SIGKILL)
        with serving() as server:
            server.line("OFFBEAT_SERVER=")
            if not has_begun:
                first = threads.submit(members[0].flush)
            wait_for(lambda: asked(port)["rounds"]["open_entrants"] == 1)
            assert not first.done(), "it waits for the other, of whom the server knows nothing"
            members[1].flush()
            first.result(LEASE_S)
            assert ones[0].value == ones[1].value
            assert is_asynchronous or ones[0].value == 4.0, "of 2 and 6"
            assert [averager.world_size for averager in members] == [2, 2]
            assert not [text for text in told if "this ends with" in text]
            for averager in members:
                averager.close()


def test_who_ends_without_those_of_before_has_waited_for_them_and_says_so(two_of_before, monkeypatch):
    monkeypatch.setattr("offbeat.averaging.waiting.BEGIN_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.waiting.TELL_AFTER_S", 0.1)
    port, ones, members, _ = two_of_before
    with warned() as told, offbeat.ParameterServer(port=port, transaction="model"):
        members[0].flush()
        assert "1 of 2 are there; after 0.5 s at most" in told[1]
        assert told[2].startswith("this ends with 1 of 2 members: the others have not come within 0.5 s")
        members[0].flush()
        assert len(told) == 3, "it is waited for once"
    assert ones[0].value == 2.0


def test_a_long_wait_for_those_of_before_says_no_other_thing_than_a_short_one(two_of_before, monkeypatch):
    monkeypatch.setattr("offbeat.averaging.waiting.BEGIN_S", 1.5)
    monkeypatch.setattr("offbeat.averaging.waiting.TELL_AFTER_S", 0.1)
    monkeypatch.setattr("offbeat.telling.LONG_S", 0.5)
    port, _, members, _ = two_of_before
    with warned() as told, offbeat.ParameterServer(port=port, transaction="model"):
        members[0].flush()
    short, long = [text for text in told if "wait" in text]
    assert "1 of 2 are there; after 1.5 s at most those who are there end without the others" in short
    assert long == short


def test_what_is_learnt_before_the_server_is_started_again_is_brought_after_it(tmp_path):
    port, one = free_port(), Counter()

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    with serving() as server:
        ours = at(f"127.0.0.1:{port}", one.model, 0, 1, averaging_frequency=4, overlap=False)
        one.train(ours, 4)
        assert held_number(server) == one.value == 4.0
        one.train(ours, 3)
        server.stop(restarting=True)
    with serving() as server:
        one.train(ours)
        assert (held_number(server), one.value) == (4.0, 8.0), "measured from a mean of before"
        one.train(ours, 4)
        assert held_number(server) == one.value == 12.0
        one.train(ours, 2)
        server.stop(restarting=True)
    with serving() as server:
        ours.flush()
        assert held_number(server) == one.value == 14.0
        ours.close()


def test_a_server_that_goes_on_from_an_older_mean_takes_nothing_from_its_members(tmp_path):
    port, here, older, one = free_port(), tmp_path / "here", tmp_path / "older", Counter()

    def serving(folder):
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=folder)

    with serving(here) as server:
        ours = at(f"127.0.0.1:{port}", one.model, 0, 1, averaging_frequency=1, overlap=False)
        one.train(ours)
        server.stop(restarting=True)
    shutil.copytree(here, older)
    with serving(here) as server:
        one.train(ours, 4)
        assert held_number(server) == one.value == 5.0
        server.stop(restarting=True)
    shutil.copy(here / "life.json", older)  # as it is after a crash: what came since the save is lost
    with serving(older) as server:
        assert held_number(server) == 1.0
        one.train(ours)
        assert one.value == 6.0
        one.train(ours)
        assert held_number(server) == one.value == 7.0
        ours.close()


def test_what_is_learnt_while_the_server_is_away_is_in_the_mean_at_the_end(monkeypatch, tmp_path):
    port, one = free_port(), Counter()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    with serving():
        ours = at(f"127.0.0.1:{port}", one.model, 0, 1, averaging_frequency=4, overlap=False)
        one.train(ours, 4)
    one.train(ours, 4)
    assert ours.averaging_round == 1
    with serving() as server:
        assert held_number(server) == 4.0
        ours.flush()  # with nothing new since the round that was none
        assert held_number(server) == one.value == 8.0
        ours.close()


def test_nobody_waits_for_those_who_were_away_for_so_long_that_they_come_back_under_other_names(
    monkeypatch, tmp_path
):
    port, here, older, both = free_port(), tmp_path / "here", tmp_path / "older", [Counter(), Counter()]

    def serving(folder=here):
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=folder, linger_s=0.5)

    def begin(rank):
        return at(f"127.0.0.1:{port}", both[rank].model, rank, 2, averaging_frequency=4)

    def flush():
        since = time.monotonic()
        list(threads.map(offbeat.AsyncModelAverager.flush, averagers))
        assert time.monotonic() - since < 3 * LEASE_S, (
            "who is missed is waited for no longer than by the others"
        )

    def states():
        return {worker["id"]: worker["state"] for worker in server.status()["workers"]}

    with ThreadPoolExecutor(2) as threads, warned() as told:
        with serving() as server, monkeypatch.context() as briefly:
            briefly.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
            averagers = list(threads.map(begin, range(2)))
            before = set(states())
            server.stop(restarting=True)
        shutil.copytree(here, older)
        with monkeypatch.context() as briefly:
            briefly.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
            for one, averager in zip(both, averagers, strict=True):
                one.train(averager, 4)
            wait_for(lambda: all(averager._turns.members.is_there() for averager in averagers))
        both[0].train(averagers[0], 2)
        with serving() as server:
            flush()
            assert both[0].value == both[1].value == pytest.approx(5.2), "6 and 4, weighed by as many samples"
            assert [states()[name] for name in before] == ["left", "left"], "for whom nobody waits"
            assert len(states()) == 4
            server.stop(restarting=True)
        shutil.copy(
            here / "life.json", older
        )  # as after a crash before the next save: they are missed once more
        with serving(older) as server:
            flush()
            assert both[0].value == both[1].value
            assert [states()[name] for name in before] == ["left", "left"]
            for averager in averagers:
                averager.close()
            assert server.wait_for_workers(2, timeout_s=20), (
                "by the names that they have now they have finished"
            )
    said = [text for text in told if any(f"{name} (lost)" in text for name in before)]
    assert not said


def test_a_round_of_nothing_after_the_server_was_away_leaves_the_model_where_the_outer_step_led(
    monkeypatch, tmp_path
):
    """The server holds the mean that the outer step was taken from, to which nobody is to go back."""
    port, one = free_port(), Counter()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    with serving():
        ours = at(
            f"127.0.0.1:{port}", one.model, 0, 1, averaging_frequency=4, overlap=False,
            method=averaging.DiLoCo(lr=1.0, momentum=0.5),
        )  # fmt: skip
        one.train(ours, 4)
        assert one.value == 4.0 + 0.5 * 4.0
    with pytest.raises(ConnectionLostError, match=r"server is away, .* all that member 0 has trained"):
        ours.flush()
    with serving() as server:
        ours.flush()
        assert held_number(server) == one.value == 6.0
        assert ours.averaging_round == 1
        ours.close()


@pytest.mark.parametrize("method", ["average", "easgd", "asynchronous"])
def test_flush_says_that_the_server_is_away_and_leaves_the_model_as_it_is(monkeypatch, tmp_path, method):
    port, one = free_port(), Counter()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    settings = {"method": method}
    if method == "asynchronous":
        settings = {"asynchronous": True, "method": averaging.DiLoCo(lr=1.0, momentum=0.0)}

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    with serving():
        ours = at(f"127.0.0.1:{port}", one.model, 0, 1, averaging_frequency=4, overlap=False, **settings)
        one.train(ours, 4)
        assert not ours.has_lost_server
    one.train(ours, 4)  # and pauses
    alone = one.value
    with pytest.raises(
        ConnectionLostError, match=r"server is away, .*127\.0\.0\.1.* the last 4 iteration\(s\) of member 0"
    ):
        ours.flush()
    ours._turns.rounds.end_alike()  # as where it is lost in the last moment of a flush
    assert ours.has_lost_server
    assert one.value == alone
    with serving() as server:
        ours.flush()
        assert not ours.has_lost_server
        assert held_number(server) == one.value
    with pytest.raises(ConnectionLostError, match="all that member 0 has trained is averaged, and its model"):
        ours.flush()
    ours.close()


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_one_that_is_not_finite_while_the_server_is_away_trains_on_and_is_mended_when_it_is_there(
    monkeypatch, tmp_path, is_asynchronous
):
    port, ones = free_port(), [Counter(), Counter()]
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    method = averaging.DiLoCo(lr=1.0, momentum=0.0, delay=1) if is_asynchronous else "average"

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    def made(rank):
        return at(
            f"127.0.0.1:{port}", ones[rank].model, rank, 2, averaging_frequency=4, overlap=False,
            method=method, asynchronous=is_asynchronous,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as threads:

        def train(averagers):
            list(threads.map(Counter.train, ones, averagers, (4, 4)))

        with serving() as server:
            averagers = list(threads.map(made, range(2)))
            train(averagers)
            server.stop(restarting=True)
        with torch.no_grad():
            ones[0].model.weight.fill_(float("nan"))
        with warned() as told:
            train(averagers)
            with pytest.raises(ConnectionLostError, match="server is away"):
                averagers[0].flush()
            assert not [text for text in told if "finite" in text], "there is a mean to come to"
            with serving() as server:
                train(averagers)
                assert held_number(server) == ones[1].value
                assert np.isfinite(ones[0].value)
                assert len([text for text in told if "were not finite" in text]) == 1
                for averager in averagers:
                    averager.close()


def test_after_a_centre_all_models_count_in_the_next_round_also_where_the_server_is_away_first(monkeypatch):
    port, one = free_port(), Counter()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    with offbeat.ParameterServer(port=port, transaction="model"):
        ours = at(f"127.0.0.1:{port}", one.model, 0, 1, averaging_frequency=1, overlap=False, method="easgd")
        ours.method = "average"
        one.train(ours)
        assert ours.method == averaging.Average()
    with pytest.raises(ConnectionLostError, match="server is away"):
        ours.flush()
    assert ours._turns.rounds.are_apart, "nobody else has what it learnt around the centre"
    with offbeat.ParameterServer(port=port, transaction="model"):
        ours.flush()
        assert not ours._turns.rounds.are_apart
        ours.close()


def test_one_that_waits_for_the_others_to_end_is_told_when_the_server_is_lost(monkeypatch):
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    ones = [Counter(), Counter()]
    with offbeat.ParameterServer(transaction="model") as server, ThreadPoolExecutor(2) as threads:

        def make(rank):
            return at(server.address, ones[rank].model, rank, 2, averaging_frequency=4)

        waits, trains = threads.map(make, range(2))
        ones[0].train(waits)
        ones[1].train(trains)
        ending = threads.submit(waits.flush)
        wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
        server.stop()
        with pytest.raises(
            ConnectionLostError, match=r"the last 1 iteration\(s\) of member 0 are in its own"
        ):
            ending.result()
        assert ones[0].value == 1.0
        waits.close()
        trains.close()


def test_one_that_is_alone_keeps_its_velocity_while_the_server_is_away(monkeypatch, tmp_path):
    port, one = free_port(), Counter()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    with serving():
        ours = at(
            f"127.0.0.1:{port}", one.model, 0, 1, averaging_frequency=4, overlap=False,
            method=averaging.DiLoCo(lr=1.0, momentum=0.5),
        )  # fmt: skip
        one.train(ours, 4)
        assert one.value == 4.0 + 0.5 * 4.0
    one.train(ours, 4)
    assert one.value == 10.0
    with serving():
        one.train(ours, 4)
        way, velocity = 14.0 - 6.0, 0.5 * 4.0 + (14.0 - 6.0)
        assert one.value == 6.0 + way + 0.5 * velocity
        ours.close()


IN_ROUNDS = """
import sys
import offbeat
from offbeat.averaging import DiLoCo
from support.averaging import Counter

one = Counter()
with offbeat.AsyncModelAverager(
    one.model, 1, 0, communication_backend="tcp", server_address=sys.argv[1], averaging_frequency=1,
    overlap=False, method=DiLoCo(lr=1.0, momentum=0.5),
) as ours:
    print("ready", flush=True)
    for _ in sys.stdin:
        one.train(ours)
        print(one.value, flush=True)
"""


def test_one_that_stands_still_while_others_make_rounds_does_not_go_their_way_once_more(server):
    one = Counter()
    ours = at(
        server.address, one.model, 0, 1, averaging_frequency=1, overlap=False,
        method=averaging.DiLoCo(lr=1.0, momentum=0.5),
    )  # fmt: skip
    one.train(ours)
    with subprocess.Popen(
        [sys.executable, "-c", IN_ROUNDS, server.address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": TESTS},
    ) as process:  # fmt: skip

        def both():
            process.stdin.write("\n")
            process.stdin.flush()
            wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)
            one.train(ours)
            return float(process.stdout.readline())

        try:
            assert process.stdout.readline() == "ready\n"
            both()
            both()
            freeze(process)
            with offbeat.Client(server.address, contribution="delta") as other:
                held = other.pull()  # else what the other has read would be the newest still
                assert other.push({"weight": np.zeros_like(held["weight"])}).applied
            wait_for(
                lambda: "lost" in [worker["state"] for worker in server.status()["workers"]], timeout_s=40
            )
            one.train(ours, 10)
            wake(process)
            both()  # in which what it brings is not taken
            assert server.status()["rejected"] == {"slept": 1}
            assert both() == held_number(server), "the mean, and no step from where it was before"
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
    ours.close()


STANDING_STILL = """
import sys
import offbeat
from offbeat.averaging import DiLoCo
from support.averaging import Counter

one, address, is_asynchronous = Counter(), sys.argv[1], sys.argv[2] == "True"
settings = {"asynchronous": True, "method": DiLoCo(lr=1.0, momentum=0.0)} if is_asynchronous else {}
with offbeat.AsyncModelAverager(
    one.model, 1, 0, communication_backend="tcp", server_address=address, averaging_frequency=4,
    overlap=False, **settings,
) as ours:
    one.train(ours, 6)
    print("ready", flush=True)
    sys.stdin.readline()
    one.train(ours, 2)
    print(one.value, flush=True)
    one.train(ours, 1)
    ours.flush()
    print(one.value, flush=True)
"""


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_one_that_stands_still_for_longer_than_the_lease_loses_nothing(server, is_asynchronous):
    def states():
        return {worker["id"]: worker["state"] for worker in server.status()["workers"]}

    with subprocess.Popen(
        [sys.executable, "-c", STANDING_STILL, server.address, str(is_asynchronous)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": TESTS},
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "ready\n"
            (standing,) = states()
            freeze(process)
            # Else what it has read would be the newest still when it is given up.
            with offbeat.Client(
                server.address, "other", contribution="gradient" if is_asynchronous else "delta"
            ) as other:
                held = other.pull()
                assert other.push({"weight": np.zeros_like(held["weight"])}).applied
            wait_for(lambda: states()[standing] == "lost", timeout_s=40)
            wake(process)
            told, _ = process.communicate("\n", timeout=100)
        finally:
            process.kill()
    assert server.status()["rejected"] == {"slept": 1}
    assert told == "8.0\n9.0\n"
    assert held_number(server) == 9.0


STANDING_STILL_AS_IT_FREEZES = """
import sys
import torch
from torch import nn
import offbeat

made = nn.Module()
made.register_parameter("head", nn.Parameter(torch.zeros(1)))
made.register_parameter("body", nn.Parameter(torch.zeros(1)))
with offbeat.AsyncModelAverager(
    made, 1, 0, communication_backend="tcp", server_address=sys.argv[1], averaging_frequency=4, overlap=False,
) as ours:

    def train(num):
        for _ in range(num):
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter += parameter.requires_grad
            ours.step(1)

    train(6)
    made.body.requires_grad_(requires_grad=False)
    print("ready", flush=True)
    sys.stdin.readline()
    train(6)
    print("met", flush=True)
    sys.stdin.readline()
"""


def test_what_is_frozen_as_a_round_does_not_take_it_comes_with_the_next(server):
    with subprocess.Popen(
        [sys.executable, "-c", STANDING_STILL_AS_IT_FREEZES, server.address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": TESTS},
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "ready\n"
            freeze(process)
            with offbeat.Client(server.address, contribution="delta") as other:
                held = other.pull()  # else what it has read would be the newest still
                assert other.push({name: np.zeros_like(array) for name, array in held.items()}).applied
            wait_for(
                lambda: "lost" in [worker["state"] for worker in server.status()["workers"]], timeout_s=40
            )
            wake(process)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "met\n"
            assert server.status()["rejected"] == {"slept": 1}
            assert {name: value.item() for name, value in server.state_dict().items()} == {
                "head": 12.0,
                "body": 6.0,
            }
            process.communicate("\n", timeout=60)
            assert process.returncode == 0
        finally:
            process.kill()


STANDING_STILL_BESIDE_OTHERS = """
import sys
import offbeat
from support.averaging import Counter, warned

one = Counter()
with warned() as told, offbeat.AsyncModelAverager(
    one.model, 3, 2, communication_backend="tcp", server_address=sys.argv[1], averaging_frequency=1,
    overlap=False,
) as ours:
    one.train(ours, 1)
    print("ready", flush=True)
    sys.stdin.readline()
    one.train(ours, 3)
    ours.flush()
print(*told, sep="\\n")
"""


def test_one_that_was_given_up_while_it_stood_still_and_the_others_say_that_it_was(server):
    ones = [Counter(), Counter()]
    with (
        subprocess.Popen(
            [sys.executable, "-c", STANDING_STILL_BESIDE_OTHERS, server.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": TESTS},
        ) as process,
        ThreadPoolExecutor(2) as threads,
        warned() as told,
    ):  # fmt: skip
        try:

            def joined(rank):
                return at(server.address, ones[rank].model, rank, 3, averaging_frequency=1, overlap=False)

            others = list(threads.map(joined, range(2)))
            list(threads.map(Counter.train, ones, others))
            assert process.stdout.readline() == "ready\n"
            freeze(process)
            list(threads.map(offbeat.AsyncModelAverager.flush, others))
            (standing,) = [w["id"] for w in server.status()["workers"] if w["state"] == "lost"]
            for averager in others:
                averager.close()
            wake(process)
            said, _ = process.communicate("\n", timeout=100)
        finally:
            process.kill()
    given_up = [text for text in told if f"{standing} was given up (" in text]
    assert len(given_up) == 2, "by each of the others, once"
    assert all("has 2 member(s), and the one before had 3: " in text for text in given_up)
    warnings = [line for line in said.splitlines() if "without this member" in line]
    assert len(warnings) == 1
    assert "Its last round had 3 members, and this one has 1;" in warnings[0]


def test_where_one_leaves_by_an_error_the_other_says_which_and_one_that_has_ended_is_no_news(server):
    ones = [Counter() for _ in range(3)]
    fails = ValueError("own bug")

    def joined(rank):
        return at(server.address, ones[rank].model, rank, 3, averaging_frequency=1, overlap=False)

    with ThreadPoolExecutor(3) as threads, warned() as told:
        others = list(threads.map(joined, range(3)))
        list(threads.map(Counter.train, ones, others))
        (first, second, third), states = others, []
        with pytest.raises(ValueError, match="own bug"), first:
            raise fails
        list(threads.map(offbeat.AsyncModelAverager.flush, [second, third]))
        for averager in (second, third):
            averager.close()
        states = sorted(worker["state"] for worker in server.status()["workers"])
    assert states == ["finished", "finished", "left"]
    news = [text for text in told if "left before its work was done: ValueError: own bug" in text]
    assert len(news) == 2, "by each of the others, once"
    assert all("has 2 member(s), and the one before had 3: worker-" in text for text in news)


def with_its_own_server(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    trained = model(seed=rank)
    with offbeat.AsyncModelAverager(
        trained, 2, rank, communication_backend="tcp", averaging_frequency=5
    ) as ours:
        live = torch.optim.SGD(trained.parameters(), lr=0.1)
        for number in range(20):
            ours.step(step(trained, live, rank, number))
        ours.flush()
        return arrays(trained), ours.averaging_round


def test_the_first_member_starts_a_server_where_there_is_none():
    (first, rounds), (second, _) = together(with_its_own_server, 2, free_port())
    assert rounds >= 2
    assert all(map(np.array_equal, first, second))


UNDER_TORCHRUN = """
import torch
import offbeat
from torch import nn

torch.set_num_threads(1)
for times in range(2):  # the second has a server of its own
    torch.manual_seed(times)
    trained = nn.Linear(4, 2)
    with offbeat.AsyncModelAverager(trained, averaging_frequency=5, communication_backend="tcp") as ours:
        live = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(10):
            live.zero_grad()
            trained(torch.ones(3, 4) + ours.rank).square().mean().backward()
            live.step()
            ours.step(3)
        ours.flush()
        text = f"{ours.rank} of {ours.world_size}, {times}: {trained.weight.detach().sum().item()!r}\\n"
        print(text, end="", flush=True)
"""


def test_under_torchrun_which_listens_at_the_master_port_the_first_member_starts_a_server(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(UNDER_TORCHRUN)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    said = dict(line.split(": ") for line in ended.stdout.splitlines())
    for times in range(2):
        assert said[f"0 of 2, {times}"] == said[f"1 of 2, {times}"]


def test_a_first_member_that_does_not_say_where_its_server_is_is_told_by_the_others(monkeypatch):
    monkeypatch.setattr("offbeat.averaging.server_place.TOLD_WITHIN_S", 0.3)
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConnectError, match=r"process 1 of 2 was not told within 0\.3 s where rank 0's server"
    ):
        offbeat.AsyncModelAverager(model(), 2, 1, communication_backend="tcp")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(
        ConnectError, match=r"the launcher's store, .* cannot be reached at .*; give server_address"
    ):
        offbeat.AsyncModelAverager(model(), 2, 1, communication_backend="tcp")


def test_batch_norms_statistics_are_in_the_mean(server):
    trained = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 5))
    with at(server.address, trained, 0, 1, averaging_frequency=2, overlap=False) as ours:
        for _ in range(2):
            trained(torch.randn(8, 2))
            ours.step(8)
        held = server.state_dict()
        assert np.allclose(np.asarray(held["BatchNorm statistics 0"]), trained[0].running_mean.numpy())
        before = trained[0].running_mean.clone()
        trained.double().float()  # after which the statistics are other tensors
        trained(torch.randn(8, 2) + 5)
        ours.step(8)
        ours.flush()
        held = server.state_dict()
        assert np.allclose(np.asarray(held["BatchNorm statistics 0"]), trained[0].running_mean.numpy())
        assert not torch.allclose(trained[0].running_mean, before, atol=0.1)


def test_where_no_thread_can_be_had_the_round_is_none_and_the_next_one_is_made(server, monkeypatch):
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "offbeat-averaging":
            raise RuntimeError("can't start new thread")
        start(thread)

    trained = model()
    with at(server.address, trained, 0, 1, averaging_frequency=2) as ours:
        ours.step(step(trained, live := torch.optim.SGD(trained.parameters(), lr=0.1), 0, 0))
        with monkeypatch.context() as here:
            here.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                ours.step(step(trained, live, 0, 1))
        before = [value.copy() for value in arrays(trained)]
        ours.flush()
        held = server.state_dict()
    assert close([np.asarray(held[name]) for name, _ in trained.named_parameters()], before, within=1e-6)


def test_a_server_that_weighs_by_staleness_is_refused():
    with (
        offbeat.ParameterServer(staleness_policy="adaptive_lr") as weighing,
        pytest.raises(ConfigError, match="start it with staleness_policy='constant'"),
    ):
        at(weighing.address, model(), 0, 1)


def test_a_server_with_an_optimizer_of_its_own_is_refused():
    with (
        offbeat.ParameterServer(transaction="model", optimizer=SPEC) as stepping,
        pytest.raises(ConfigError, match=r"start it without optimizer= \(`--optimizer` of"),
    ):
        at(stepping.address, model(), 0, 1)


def test_a_server_that_rejects_what_is_late_is_refused():
    """A round's shares come one after the other: of two members one's would be rejected in each round."""
    with (
        offbeat.ParameterServer(transaction="model", max_staleness=0) as rejecting,
        pytest.raises(ConfigError, match=r"the server's max_staleness is 0, .*; start it without"),
    ):
        at(rejecting.address, model(), 0, 1)


@pytest.mark.parametrize("outer", [{}, {"method": "diloco", "asynchronous": True}])
def test_a_server_whose_run_ends_by_itself_is_refused(outer):
    """After that it would take nothing, and members that go on would lose what they learn."""
    with (
        offbeat.ParameterServer(transaction="model", max_samples=100) as ending,
        pytest.raises(ConfigError, match=r"max_samples is 100, .*; start it without max_samples \(`--max-"),
    ):
        at(ending.address, model(), 0, 1, **outer)


def test_another_model_and_what_a_server_cannot_hold_are_refused(server):
    at(server.address, model(), 0, 1).close()
    with pytest.raises(ModelMismatchError):
        at(server.address, nn.Linear(2, 2), 0, 1)
    with pytest.raises(UnsupportedTensorError, match=r"of torch\.float64, and a server holds float32"):
        at(server.address, model().double(), 0, 1)


def with_frozen(values):
    made = model()
    made.register_parameter("held", nn.Parameter(values, requires_grad=False))
    return made


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32, torch.complex64, torch.float64])
def test_what_a_server_would_round_is_refused_by_name(dtype, server):
    with pytest.raises(UnsupportedTensorError, match=rf"'held' is of {dtype}, and a server holds float32"):
        at(server.address, with_frozen(torch.ones(2, dtype=dtype)), 0, 1)


@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*[Qq]uantization.*")
@pytest.mark.parametrize(
    "made",
    [lambda: torch.eye(2).to_sparse(), lambda: torch.quantize_per_tensor(torch.eye(2), 1, 0, torch.qint8)],
)
def test_what_has_no_plain_memory_is_refused_by_name(made, server):
    with pytest.raises(UnsupportedTensorError, match=r"'held' is of torch\.(float32 and not plain|qint8)"):
        at(server.address, with_frozen(made()), 0, 1)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0, 1, 2**16 - 1], dtype=torch.uint16),
        torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16),
        torch.tensor([True, False]),
        torch.tensor([-448.0, 2**-9, 0.8125]).to(torch.float8_e4m3fn),
        torch.tensor([57344.0, 2**-16]).to(torch.float8_e5m2),
        torch.tensor([2.0**-24, 65504.0], dtype=torch.float16),
    ],
    ids=lambda values: str(values.dtype),
)
def test_what_is_frozen_comes_to_another_member_bit_for_bit(values, server):
    with at(server.address, with_frozen(values), 0, 1) as first:
        first.step(4)
        first.flush()
    other = with_frozen(torch.zeros_like(values))
    at(server.address, other, 0, 1).close()
    for held in (first.model.held, other.held):
        assert torch.equal(held.view(torch.uint8), values.view(torch.uint8))


def test_what_is_not_finite_is_found_before_anybody_is_met():
    """Else the first member alone would know, and the others look for its server."""
    with pytest.raises(NonFiniteError, match=r"'held' is not finite .* is to be a buffer"):
        at(f"127.0.0.1:{free_port()}", with_frozen(torch.tensor([0.0, -torch.inf])), 1, 2)


def test_methods_with_memory_go_on_at_a_server_after_one_has_joined(server):
    ours = at(server.address, model(), 0, 1, averaging_frequency=2, method=averaging.DiLoCo(), overlap=1)
    live = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    for number in range(9):
        ours.step(step(ours.model, live, 0, number))
    ours.flush()
    ours.close()
    assert ours.averaging_round >= 4
    assert all(p.isfinite().all() for p in ours.model.parameters())


def test_a_server_in_whose_place_something_silent_is_pauses_averaging_too(monkeypatch):
    port = free_port()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.2)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.2)
    trained = model()
    with offbeat.ParameterServer(port=port, transaction="model"):
        ours = at(f"127.0.0.1:{port}", trained, 0, 1, averaging_frequency=2, overlap=False)
    live = torch.optim.SGD(trained.parameters(), lr=0.1)
    with socket.create_server(("127.0.0.1", port)):  # takes connections, and says nothing
        for number in range(4):
            ours.step(step(trained, live, 0, number))
    assert (ours.iterations, ours.averaging_round) == (4, 0)
    ours.close()


def test_a_server_that_stays_away_is_told_of_ever_more_rarely(monkeypatch):
    """Each round tries it again, for seconds: training for a night would fill the log."""
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.1)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 2.5)
    counter = Counter()
    with warned() as told:
        with offbeat.ParameterServer(transaction="model") as server:
            ours = at(server.address, counter.model, 0, 1, averaging_frequency=1, overlap=False)
            counter.train(ours, 2)
        counter.train(ours, 5)
        ours.close()
    absent = [text for text in told if text.startswith("no server at ")]
    assert len(absent) == 3, "of the tries number 1, 2 and 4"


def unfrozen_late(rank, address, settings):
    """Train a part only after the last round before the end; give where both parts end."""
    trained = nn.Module()
    trained.register_parameter("head", nn.Parameter(torch.zeros(1)))
    trained.register_parameter("body", nn.Parameter(torch.zeros(1), requires_grad=False))
    with at(address, trained, rank, 2, averaging_frequency=10, **settings) as ours:
        for iteration in range(26):
            trained.body.requires_grad_(requires_grad=iteration >= 22)
            with torch.no_grad():
                for parameter in trained.parameters():
                    if parameter.requires_grad:
                        parameter.add_(1 + 2 * rank)
            if iteration == 19:
                ours.state_dict()  # ends the first round: the second would begin later in one member else
            ours.step(4 + 8 * rank)
        ours.flush()
    return trained.body.item(), trained.head.item()


PLAIN_MEAN = averaging.DiLoCo(lr=1.0, momentum=0.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (10.0, 65.0)),
        ({"method": PLAIN_MEAN}, (10.0, 65.0)),
    ],
    ids=["average", "diloco"],
)
def test_what_was_unfrozen_after_the_last_round_is_brought_too(settings, expected, overlap, server):
    for found in together(unfrozen_late, 2, server.address, {**settings, "overlap": overlap}):
        assert found == pytest.approx(expected, rel=1e-6)


def test_parts_of_any_name_are_unfrozen_one_after_another(server):
    names = "abcdefgh"
    trained = nn.ParameterDict({name: torch.zeros(1) for name in names}).requires_grad_(False)
    trained["a"].requires_grad_()
    with at(server.address, trained, 0, 1, averaging_frequency=2) as ours:
        for iteration in range(18):
            for name in names[: 1 + iteration // 2]:
                trained[name].requires_grad_()
                with torch.no_grad():
                    trained[name].add_(1)
            ours.step(1)
        ours.flush()
    assert [trained[name].item() for name in names] == [18 - 2 * number for number in range(8)]


def unfrozen_last(rank, address, settings, more):
    """Train a part only after the last round but one began; one member ends as the last does, or both."""
    trained = nn.Module()
    trained.register_parameter("head", nn.Parameter(torch.zeros(1)))
    trained.register_parameter("body", nn.Parameter(torch.zeros(1), requires_grad=False))
    with at(address, trained, rank, 2, averaging_frequency=10, **settings) as ours:
        for iteration in range(20 + more * rank):
            trained.body.requires_grad_(requires_grad=iteration >= 10)
            with torch.no_grad():
                for parameter in trained.parameters():
                    if parameter.requires_grad:
                        parameter.add_(1 + 2 * rank)
            ours.step(4 + 8 * rank)
            if iteration == 9:
                ours.state_dict()  # ends the first round: the second would begin later in one member else
        ours.state_dict()
        head = trained.head.item()
        ours.flush()
    return trained.body.item(), trained.head.item(), head


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("settings", [{}, {"method": PLAIN_MEAN}], ids=["average", "diloco"])
def test_what_was_unfrozen_counts_in_one_that_has_trained_nothing_since_its_last_round(
    settings, overlap, server
):
    """It has no share in the way of the rest, which the other has gone on alone."""
    for body, head, _ in together(unfrozen_last, 2, server.address, {**settings, "overlap": overlap}, 3):
        assert body == pytest.approx((10 * 40 + 39 * 156) / 196, rel=1e-6)
        assert head == pytest.approx(25 + 25 + 9, rel=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", [averaging.DiLoCo(), averaging.SlowMo()], ids=["diloco", "slowmo"])
def test_what_was_unfrozen_makes_no_outer_step_of_the_rest_where_nobody_goes_on(method, overlap, server):
    settings = {"method": method, "overlap": overlap}
    for body, head, before in together(unfrozen_last, 2, server.address, settings, 0):
        assert body == pytest.approx((10 * 40 + 30 * 120) / 160, rel=1e-6)
        assert head == before


def unfrozen_behind(rank, address, others_have_brought):
    """Train a part from the seventh iteration on; in one member as the other has brought all of its own."""
    trained = nn.Module()
    trained.register_parameter("head", nn.Parameter(torch.zeros(1)))
    trained.register_parameter("body", nn.Parameter(torch.zeros(1), requires_grad=False))
    settings = {"method": PLAIN_MEAN, "asynchronous": True, "overlap": False}
    with at(address, trained, rank, 2, averaging_frequency=4, **settings) as ours:
        for iteration in range(24):
            if iteration == 6:
                trained.body.requires_grad_(True)
                if rank == 1:
                    wait_for(others_have_brought.exists, timeout_s=60)
            with torch.no_grad():
                for parameter in trained.parameters():
                    if parameter.requires_grad:
                        parameter.add_(1.0)
            ours.step(4)
        others_have_brought.touch()
        ours.flush()
    return trained.body.item(), trained.head.item()


def test_what_is_unfrozen_where_others_have_trained_it_pulls_nothing_back(server, tmp_path):
    """Each way is measured from where its member has begun, and not from where others have led since."""
    first, second = together(unfrozen_behind, 2, server.address, tmp_path / "brought")
    assert first == second
    assert first == pytest.approx((18.0, 24.0), rel=1e-6)


def frozen_and_flushed(rank, address, here):
    """Train a part, freeze it before the other has brought all of it, come together, and train it again."""
    trained = nn.Module()
    trained.register_parameter("head", nn.Parameter(torch.zeros(1)))
    trained.register_parameter("body", nn.Parameter(torch.zeros(1)))
    settings = {"method": PLAIN_MEAN, "asynchronous": True, "overlap": False}
    ends = []
    with at(address, trained, rank, 2, averaging_frequency=4, **settings) as ours:
        for last, is_trained in ((8, True), (16, False), (24, True)):
            trained.body.requires_grad_(is_trained)
            if rank == 1 and last == 8:
                wait_for((here / "brought").exists, timeout_s=60)
            for _ in range(8):
                with torch.no_grad():
                    for parameter in trained.parameters():
                        if parameter.requires_grad:
                            parameter.add_(1.0)
                ours.step(4)
            if rank == 0 and last == 8:
                (here / "brought").touch()
            if last == 16:
                ours.flush()
            ends.append((trained.body.item(), trained.head.item()))
        ours.flush()
    return [*ends[1:2], (trained.body.item(), trained.head.item())]


def test_what_was_frozen_through_a_flush_brings_nothing_twice(server, tmp_path):
    first, second = together(frozen_and_flushed, 2, server.address, tmp_path)
    assert first == second
    assert first == [pytest.approx((8.0, 16.0), rel=1e-6), pytest.approx((16.0, 24.0), rel=1e-6)]


def test_what_was_unfrozen_after_the_last_arrival_arrives_too(server):
    settings = {"method": PLAIN_MEAN, "asynchronous": True, "overlap": False}
    (body, head), (also_body, also_head) = together(unfrozen_late, 2, server.address, settings)
    assert (body, head) == (also_body, also_head)
    assert 4 <= body <= 12  # the members' ways, weighted as they have come
