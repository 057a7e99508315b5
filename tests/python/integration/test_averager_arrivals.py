"""Members that arrive at a server one by one: asynchronous DiLoCo."""

import copy
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat import optim
from offbeat.averaging import DiLoCo
from offbeat.client import Client
from offbeat.errors import ConfigError
from support.averaging import LOSS, Counter, arrays, close, held_number, model, warned
from support.fault_plan import CALM, Bytes, Cut, LostReply, plan
from support.fault_proxy import FaultProxy
from support.freezing import freeze, wake
from support.group import together
from support.ports import free_port
from support.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.usefixtures("members_in_one_process"),
]

EVERY = 4
TESTS = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
"""Where a program of its own finds what several tests share."""


@pytest.fixture
def server():
    with offbeat.ParameterServer(transaction="model") as running:
        yield running


def at(address, trained, *, asynchronous=True, **settings):
    settings = {"averaging_frequency": EVERY, "method": "diloco", "overlap": False} | settings
    return offbeat.AsyncModelAverager(
        trained,
        1,
        0,
        communication_backend="tcp",
        server_address=address,
        asynchronous=asynchronous,
        **settings,
    )


def batch(rank, number):
    """A member's are all as large, and larger than those of the one before."""
    random = torch.Generator().manual_seed(1000 * rank + number)
    size = 2 + 2 * rank
    return torch.randn(size, 6, generator=random), torch.randint(5, (size,), generator=random)


class Trainee:
    """A model with its optimizer, and how far it is."""

    def __init__(self, rank=0, trained=None):
        self.rank, self.number = rank, 0
        self.model = model(seed=rank) if trained is None else trained
        self.live = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)

    def step(self):
        inputs, targets = batch(self.rank, self.number)
        self.live.zero_grad()
        LOSS(self.model(inputs), targets).backward()
        self.live.step()
        self.number += 1
        return len(inputs)

    def train(self, averager, iterations):
        for _ in range(iterations):
            averager.step(self.step())


@pytest.mark.parametrize(("overlap", "merge_alpha"), [(False, None), (1, None), (2, 0.5)])
def test_one_member_does_what_it_does_synchronously(overlap, merge_alpha):
    found = []
    for asynchronous in (False, True):
        method = DiLoCo(merge_alpha=merge_alpha)
        one = Trainee()
        with (
            offbeat.ParameterServer(transaction="model") as server,
            at(server.address, one.model, asynchronous=asynchronous, overlap=overlap, method=method) as ours,
        ):
            one.train(ours, 5 * EVERY + 2)
            before = [value.copy() for value in arrays(one.model)]
            ours.flush()
            found.append((before, arrays(one.model), ours.averaging_round))
    (synchronous, ended, rounds), (arriving, also_ended, also_rounds) = found
    assert close(arriving, synchronous)
    assert close(also_ended, ended)
    assert rounds == also_rounds == 6


class Alone:
    """One process that does what members and server do, by the papers' forms, in double precision."""

    def __init__(self, method, start, num):
        self.method, self.num_arrived = method, 0
        self.theta = [value.astype(np.float64) for value in start]
        self.velocity = [np.zeros_like(t) for t in self.theta]
        self.buffer = [np.zeros_like(t) for t in self.theta]
        self.trainees = [Trainee(rank) for rank in range(num)]
        self.begun = [[t.copy() for t in self.theta] for _ in range(num)]
        self.read = [0] * num
        for trainee in self.trainees:
            self._give(trainee)
        self.counts = np.zeros((num, 2))  # of each member: samples, iterations
        self.known = [np.zeros(2)] * num  # of all, when it has last read

    def _give(self, trainee):
        with torch.no_grad():
            for parameter, value in zip(trainee.model.parameters(), self.theta, strict=True):
                parameter.copy_(torch.from_numpy(value))

    def arrive(self, rank):
        """Train a member to its next arrival; give how late it came."""
        trainee = self.trainees[rank]
        now = np.array([sum(trainee.step() for _ in range(EVERY)), EVERY])
        self.counts[rank] += now
        (own, iterations), (of_all, all_iterations) = self.counts[rank], self.known[rank] + now
        worth = (own / iterations) / (of_all / all_iterations)
        num, mu, lr = self.method.delay, self.method.momentum, self.method.lr
        c = self.method.activation
        self.num_arrived += 1
        for place, own in enumerate(arrays(trainee.model)):
            way = worth * (self.begun[rank][place] - own)
            self.buffer[place] += way
            share = c
            if self.num_arrived % num == 0:
                self.velocity[place] = mu * self.velocity[place] + self.buffer[place] / num
                self.buffer[place][:] = 0
                share = 1 - c * num + c
            self.theta[place] -= lr * (share * mu * self.velocity[place] + way / num)
        late = self.num_arrived - 1 - self.read[rank]
        self.read[rank], self.known[rank] = self.num_arrived, self.counts.sum(0)
        self.begun[rank] = [t.copy() for t in self.theta]
        self._give(trainee)
        return late


@pytest.mark.parametrize("activation", [0.0, 0.3])
def test_members_that_arrive_out_of_turn_do_what_the_paper_says(server, activation):
    method = DiLoCo(delay=3, activation=activation)
    ours = [Trainee(rank) for rank in range(3)]
    averagers = [
        at(server.address, one.model, method=method if one.rank == 0 else DiLoCo(activation=activation))
        for one in ours
    ]
    alone = Alone(method, [value.copy() for value in arrays(ours[0].model)], 3)
    for rank in (0, 0, 1, 0, 2, 1, 1, 0, 2, 0, 0, 1):
        ours[rank].train(averagers[rank], EVERY)
        assert averagers[rank].receipt.staleness == alone.arrive(rank)
        assert close(arrays(ours[rank].model), arrays(alone.trainees[rank].model), within=1e-5)
    status = server.status()
    assert status["version"] == 12
    assert sorted(w["applied"] for w in status["workers"]) == [2, 4, 6]
    assert f"asynchronous, every {EVERY} iterations, round 4, 4 updates late" in repr(averagers[1])
    for averager in averagers:
        averager.close()


def uneven(rank, address, here):
    """The first goes its way while the second cannot move."""
    one = Trainee(rank)
    with offbeat.AsyncModelAverager(
        one.model, 2, rank, communication_backend="tcp", server_address=address, averaging_frequency=EVERY,
        method="diloco", asynchronous=True,
    ) as ours:  # fmt: skip
        if rank == 1:
            wait_for((here / "far").exists, timeout_s=60)
        while ours.averaging_round < (20 if rank == 0 else 3):
            ours.step(one.step())
        (here / "far").touch()
        rounds = ours.averaging_round
        ours.flush()
        return arrays(one.model), rounds, ours.world_size


def test_nobody_waits_for_anybody_and_all_end_alike(server, tmp_path):
    (first, many, size), (second, few, _) = together(uneven, 2, server.address, tmp_path)
    assert all(map(np.array_equal, first, second))
    assert (many, few, size) == (20, 3, 2)
    found = {w["id"]: (w["applied"], w["max_staleness"]) for w in server.status()["workers"]}
    assert max(applied for applied, _ in found.values()) >= 20
    assert max(late for _, late in found.values()) >= 20, "the second's first: twenty of the other's late"


def dying(rank, address, here):
    one = Trainee(rank)
    with offbeat.AsyncModelAverager(
        one.model, 3, rank, communication_backend="tcp", server_address=address, averaging_frequency=EVERY,
        method="diloco", asynchronous=True,
    ) as ours:  # fmt: skip
        last = None
        while last is None or ours.averaging_round < last + 5:
            ours.step(one.step())
            if rank == 2 and ours.averaging_round == 3:
                (here / "gone").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if last is None and (here / "gone").exists():
                last = ours.averaging_round
        ours.flush()
        np.savez(here / f"{rank}.npz", *arrays(one.model))


def test_that_one_arrives_at_a_time_is_no_sign_that_others_have_ended(server):
    members = [Trainee(0), Trainee(1)]
    ours = [at(server.address, one.model) for one in members]
    with warned() as told:
        for _ in range(4):
            for one, averager in zip(members, ours, strict=True):
                one.train(averager, EVERY)
    assert [averager.averaging_round for averager in ours] == [4, 4]
    assert [text for text in told if "have ended" in text] == []
    for averager in ours:
        averager.close()


def test_one_that_is_killed_holds_up_nobody(server, tmp_path):
    with pytest.raises(EOFError):  # of the one that is killed
        together(dying, 3, server.address, tmp_path)
    with np.load(tmp_path / "0.npz") as first, np.load(tmp_path / "1.npz") as second:
        assert all(np.array_equal(first[f"arr_{i}"], second[f"arr_{i}"]) for i in range(4))


def test_one_that_comes_late_begins_with_the_parameters_of_then(server):
    first, second = Trainee(0), Trainee(1)
    with at(server.address, first.model, method=DiLoCo(delay=2)) as ours:
        first.train(ours, 3 * EVERY)
        with at(server.address, second.model) as theirs:
            assert all(map(np.array_equal, arrays(second.model), arrays(first.model)))
            second.train(theirs, 2 * EVERY)
            assert theirs.receipt.staleness == 0
        first.train(ours, EVERY)
        assert ours.receipt.staleness == 2
        assert server.status()["optimizer"]["spec"]["groups"][0]["rule"]["delay"] == 2


def test_what_is_learnt_while_the_server_is_away_is_brought_when_it_is_there_again(monkeypatch, tmp_path):
    port = free_port()
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    one = Trainee()
    # With these numbers the outer parameters are the member's own, as long as nothing is lost.
    method = DiLoCo(lr=1.0, momentum=0.0)

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=tmp_path)

    with warned() as told:
        with serving():
            ours = at(f"127.0.0.1:{port}", one.model, method=method)
            one.train(ours, 2 * EVERY)
        assert ours.averaging_round == 2
        one.train(ours, 2 * EVERY)
        assert (ours.averaging_round, ours.iterations) == (2, 4 * EVERY)
        assert len([text for text in told if text.startswith("averaging pauses, and training goes on")]) == 1
        with serving() as again:
            one.train(ours, EVERY)
            assert told[-1] == "the server is there again: averaging goes on"
            held = again.state_dict()
            assert close([np.asarray(held[n]) for n, _ in one.model.named_parameters()], arrays(one.model))
            straight = Trainee()
            for _ in range(5 * EVERY):
                straight.step()
            assert close(arrays(one.model), arrays(straight.model), within=1e-5)
            ours.close()


def test_what_was_measured_from_another_life_of_the_server_is_brought_all_the_same(server):
    one, straight = Trainee(), Trainee()
    with at(server.address, one.model, method=DiLoCo(lr=1.0, momentum=0.0)) as ours:
        one.train(ours, 2 * EVERY)
        server.load_state_dict(server.state_dict())  # a term of its own, in which nobody has read
        one.train(ours, EVERY)
        assert server.status()["rejected"] == {"server_rolled_back": 1}
        assert ours.receipt.applied
        assert ours.averaging_round == 3
    for _ in range(3 * EVERY):
        straight.step()
    assert close(arrays(one.model), arrays(straight.model), within=1e-5)


def unreachable_after_its_second_push(number):
    return [plan(LostReply(push=2)), CALM][number] if number < 2 else plan(Cut(Bytes(0)))


def test_a_push_whose_answer_is_lost_with_the_connection_counts_once(server, monkeypatch):
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    one, straight = Trainee(), Trainee()
    method = DiLoCo(lr=1.0, momentum=0.0)
    with (
        FaultProxy(server.address, unreachable_after_its_second_push) as proxy,
        at(proxy.address, one.model, method=method) as ours,
    ):
        one.train(ours, 3 * EVERY)
        assert (ours.averaging_round, server.status()["version"], proxy.counts["lost_replies"]) == (1, 2, 1)
        proxy.heal()
        one.train(ours, EVERY)
        assert (ours.averaging_round, server.status()["version"]) == (2, 3)
        counted = np.asarray(server.state_dict()["samples and iterations"])
        assert counted.tolist() == [4 * EVERY * 2, 4 * EVERY], "those of the rounds that were none, too"
        for _ in range(4 * EVERY):
            straight.step()
        assert close(arrays(one.model), arrays(straight.model), within=1e-5), (
            "nothing is lost, nor twice there"
        )


@pytest.mark.parametrize("num_others", [0, 1])
def test_one_that_is_not_finite_goes_on_from_the_servers_parameters_whoever_came(server, num_others):
    one, others = Counter(), [Counter() for _ in range(num_others)]
    method = DiLoCo(lr=1.0, momentum=0.0, delay=1)
    with at(server.address, one.model, method=method) as ours:
        one.train(ours, EVERY)
        for other in others:
            with at(server.address, other.model, method=method) as theirs:
                other.train(theirs, EVERY)
        with torch.no_grad():
            one.model.weight.fill_(float("nan"))
        with warned() as told:
            one.train(ours, EVERY)
        assert one.value == held_number(server) == (1 + num_others) * EVERY
        assert len(told) == 1
        assert told[0].startswith(
            "parameters or statistics of member 0 were not finite in iteration 8: it adds"
        )
        one.train(ours, EVERY)
        assert one.value == held_number(server) == (2 + num_others) * EVERY


def test_one_that_comes_back_to_another_server_replaces_nobody(monkeypatch):
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    port, method, first, newcomer = free_port(), DiLoCo(lr=1.0, momentum=0.0), Counter(), Counter()

    def serving():
        return offbeat.ParameterServer(port=port, transaction="model")

    def join(one):
        return at(f"127.0.0.1:{port}", one.model, method=method, averaging_frequency=1)

    with serving():
        ours = join(first)
        first.train(ours)
    with serving() as server:  # which knows of nobody, and gives names out from the first on
        theirs = join(newcomer)
        newcomer.train(theirs)
        for _ in range(3):
            first.train(ours)
            newcomer.train(theirs)
        assert theirs.averaging_round == 4
        assert [worker["state"] for worker in server.status()["workers"]] == ["joined"] * 2
        ours.close()
        theirs.close()


class OnTheWay:
    """Plans of a proxy: calm; or the next client's first answer is lost, and nobody is reached after it."""

    def __init__(self):
        self._next = None

    def __call__(self, number):
        if self._next is None:
            return CALM
        return next(self._next, plan(Cut(Bytes(0))))

    def lose_the_next_answer(self):
        self._next = iter([plan(LostReply(push=1))] * 2)  # a client has two connections, and pushes on one

    def reach_nobody(self):
        self._next = iter(())

    def be_calm(self):
        self._next = None


def test_a_push_counts_once_where_the_server_has_lost_one_before(monkeypatch, tmp_path):
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 3.0)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    port, here, older = free_port(), tmp_path / "here", tmp_path / "older"
    one, plans, method = Counter(), OnTheWay(), DiLoCo(lr=1.0, momentum=0.0)

    def serving(folder):
        return offbeat.ParameterServer(port=port, transaction="model", checkpoint_dir=folder)

    with FaultProxy(f"127.0.0.1:{port}", plans) as proxy:
        with serving(here) as server:
            ours = at(proxy.address, one.model, method=method, averaging_frequency=1)
            one.train(ours)
            server.stop(restarting=True)
        shutil.copytree(here, older)
        with serving(here) as server:
            one.train(ours)
            assert held_number(server) == one.value == 2.0
            server.stop(restarting=True)
        shutil.copy(here / "life.json", older)  # as it is after a crash: what came since the save is lost
        with serving(older) as server:
            one.train(ours)
            assert held_number(server) == one.value == 2.0, "of three, one was lost with the server"
            plans.lose_the_next_answer()
            proxy.cut()
            one.train(ours)
            assert (held_number(server), proxy.counts["lost_replies"], ours.averaging_round) == (3.0, 1, 3)
            plans.be_calm()
            proxy.heal()
            one.train(ours)
            assert held_number(server) == one.value == 4.0
            ours.close()


def test_a_push_whose_answer_is_lost_counts_once_where_a_state_is_loaded_then(monkeypatch):
    """At a server that has gone on a member goes on from there, and with nothing of before still to bring."""
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 3.0)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    one, plans, method = Counter(), OnTheWay(), DiLoCo(lr=1.0, momentum=0.0)
    with (
        offbeat.ParameterServer(transaction="model") as server,
        FaultProxy(server.address, plans) as proxy,
        at(proxy.address, one.model, method=method, averaging_frequency=1) as ours,
    ):
        one.train(ours)
        kept = copy.deepcopy((one.model.state_dict(), ours.state_dict()))
        plans.lose_the_next_answer()
        proxy.cut()
        one.train(ours)
        assert (held_number(server), proxy.counts["lost_replies"], ours.averaging_round) == (2.0, 1, 1)
        plans.be_calm()
        proxy.heal()
        one.model.load_state_dict(kept[0])
        ours.load_state_dict(kept[1])
        assert one.value == held_number(server) == 2.0
        one.train(ours)
        assert one.value == held_number(server) == 3.0


def test_a_state_that_is_loaded_while_the_server_is_away_is_gone_on_from(monkeypatch):
    """After a push that was answered, and a pull that was lost with the server."""
    monkeypatch.setattr("offbeat.averaging.meeting.RECONNECT_S", 0.5)
    monkeypatch.setattr("offbeat.averaging.presence.AGAIN_S", 0.5)
    one, plans, method, pull = Counter(), OnTheWay(), DiLoCo(lr=1.0, momentum=0.0), Client.pull
    with (
        offbeat.ParameterServer(transaction="model") as server,
        FaultProxy(server.address, plans) as proxy,
        at(proxy.address, one.model, method=method, averaging_frequency=1) as ours,
    ):
        one.train(ours)
        kept = copy.deepcopy((one.model.state_dict(), ours.state_dict()))

        def pull_of_nobody(client, **arguments):
            proxy.cut()
            return pull(client, **arguments)

        plans.reach_nobody()
        with monkeypatch.context() as patched:
            patched.setattr(Client, "pull", pull_of_nobody)
            one.train(ours)
        assert (held_number(server), ours.averaging_round) == (2.0, 1)
        one.model.load_state_dict(kept[0])
        ours.load_state_dict(kept[1])
        one.train(ours)
        assert (one.value, held_number(server)) == (2.0, 2.0)
        plans.be_calm()
        proxy.heal()
        one.train(ours)
        assert one.value == held_number(server) == 4.0, "both steps since then are new"


def test_in_the_background_no_progress_is_lost(server):
    one, straight = Trainee(), Trainee()
    with at(server.address, one.model, method=DiLoCo(lr=1.0, momentum=0.0), overlap=True) as ours:
        one.train(ours, 6 * EVERY)
        ours.flush()
        for _ in range(6 * EVERY):
            straight.step()
        assert close(arrays(one.model), arrays(straight.model), within=1e-5)


def test_statistics_of_batch_norm_are_averaged_by_samples(server):
    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))

    first, second = Trainee(0, normed()), Trainee(1, normed())  # batches of two and of four
    with at(server.address, first.model, method=DiLoCo(delay=2)) as ours:
        first.train(ours, EVERY)
        held = np.asarray(server.state_dict()["BatchNorm 0.running_mean"]).copy()
        assert np.array_equal(held, first.model[0].running_mean.numpy()), "of one alone, its own"
        with at(server.address, second.model) as theirs:
            assert np.array_equal(second.model[0].running_var.numpy(), first.model[0].running_var.numpy())
            second.train(theirs, EVERY)
            first.train(ours, EVERY)  # of the samples since its last arrival it had a third
            held = np.asarray(server.state_dict()["BatchNorm 0.running_mean"]).copy()
            first.train(ours, EVERY - 1)
            one_more = first.step()
            local = first.model[0].running_mean.numpy().copy()
            ours.step(one_more)
            now = np.asarray(server.state_dict()["BatchNorm 0.running_mean"])
            assert np.allclose(now, held + (local - held) / 3, atol=1e-6)
            assert np.array_equal(now, first.model[0].running_mean.numpy())


STANDING_STILL = """
import sys
import offbeat
from offbeat.averaging import DiLoCo
from support.averaging import Counter, warned

one = Counter()
with warned() as told, offbeat.AsyncModelAverager(
    one.model, 2, 1, communication_backend="tcp", server_address=sys.argv[1], averaging_frequency=1,
    overlap=False, asynchronous=True, method=DiLoCo(lr=1.0, momentum=0.0),
) as ours:
    print("ready", flush=True)
    for _ in range(2):
        sys.stdin.readline()
        one.train(ours, 1)
        print("arrived", flush=True)
    sys.stdin.readline()
    ours.flush()
print(one.value)
print(*told, sep="\\n")
"""


@pytest.mark.parametrize("are_others_done", [False, True])
@pytest.mark.parametrize("others_push", [False, True])
def test_one_that_stood_still_for_longer_than_the_lease_is_waited_for_again_or_all_say_so(
    server, others_push, are_others_done
):
    """Whether the server takes what it brings next (where nobody has pushed meanwhile), or it comes again."""

    def states():
        return [worker["state"] for worker in server.status()["workers"]]

    one = Counter()
    with (
        subprocess.Popen(
            [sys.executable, "-c", STANDING_STILL, server.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": TESTS},
        ) as process,
        ThreadPoolExecutor(1) as thread,
        warned() as told,
    ):  # fmt: skip

        def arrive():
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "arrived\n"

        try:
            settings = {"averaging_frequency": 1, "method": DiLoCo(lr=1.0, momentum=0.0)}
            ours = offbeat.AsyncModelAverager(
                one.model, 2, 0, server_address=server.address, asynchronous=True, overlap=False, **settings
            )
            assert process.stdout.readline() == "ready\n"
            arrive()
            freeze(process)
            if others_push:
                one.train(ours, 1)
            wait_for(lambda: "lost" in states(), timeout_s=40)
            if are_others_done:
                ours.flush()
                ours.close()
            wake(process)
            arrive()
            if not are_others_done:
                flushed = thread.submit(ours.flush)
                wait_for(lambda: server.status()["rounds"]["open_entrants"] == 1)  # where it waits
            said, _ = process.communicate("\n", timeout=100)
            if not are_others_done:
                flushed.result(60)
                ours.close()
        finally:
            process.kill()
    value, *warnings = said.splitlines()
    assert [text for text in warnings if "had given this member up" in text]
    ends = [text for text in told if "this ends with 1 member(s), and there were 2: " in text]
    assert len(ends) == are_others_done
    assert (float(value) == one.value) == (not are_others_done)


def test_one_that_came_later_and_was_given_up_is_told_of_as_well(server):
    one = Counter()
    settings = {"averaging_frequency": 1, "method": DiLoCo(lr=1.0, momentum=0.0, delay=2)}
    with (
        warned() as told,
        offbeat.AsyncModelAverager(
            one.model, 1, 0, server_address=server.address, asynchronous=True, overlap=False, **settings
        ) as ours,
    ):
        one.train(ours, 1)
        with subprocess.Popen(
            [sys.executable, "-c", STANDING_STILL, server.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": TESTS},
        ) as process:  # fmt: skip
            try:
                assert process.stdout.readline() == "ready\n"
                one.train(ours, 1)
                freeze(process)
                wait_for(lambda: "lost" in [w["state"] for w in server.status()["workers"]], timeout_s=40)
                one.train(ours, 1)
                ours.flush()
            finally:
                process.kill()
    assert len([text for text in told if "this ends with 1 member(s), and there were 2: " in text]) == 1


def test_a_state_goes_on_from_the_parameters_of_now(server):
    first, second = Trainee(0), Trainee(1)
    with at(server.address, first.model, method=DiLoCo(delay=2)) as ours:
        first.train(ours, EVERY + 1)
        state = ours.state_dict()
        with at(server.address, second.model) as theirs:
            second.train(theirs, EVERY)
            first.train(ours, 2)
            ours.load_state_dict(state)
            assert all(map(np.array_equal, arrays(first.model), arrays(second.model)))
            assert ours.iterations == EVERY + 1
            before = np.array(server.state_dict()["samples and iterations"].numpy())
            first.train(ours, EVERY - 1)
            assert ours.averaging_round == 2
            assert ours.receipt.staleness == 0
            came = server.state_dict()["samples and iterations"].numpy() - before
            assert came.tolist() == [2 * (EVERY - 1), EVERY - 1]  # and not what the server did not get


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"communication_backend": "gloo"},
            "asynchronous is True and communication_backend 'gloo': give server",
        ),
        ({"method": "average"}, "asynchronous is True and method Average(): take 'diloco'"),
        ({"method": DiLoCo(nesterov=False)}, "nesterov is False and asynchronous True"),
        ({"asynchronous": 1}, "asynchronous is 1: give True or False"),
        (
            {"asynchronous": False, "method": DiLoCo(delay=2)},
            "delay and activation are for asynchronous=True",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings, told):
    keywords = {"method": "diloco", "asynchronous": True, "server_address": "127.0.0.1:1"} | settings
    if "communication_backend" in settings:
        del keywords["server_address"]
    with pytest.raises(ConfigError) as refused:
        offbeat.AsyncModelAverager(model(), **keywords)
    assert told in str(refused.value)


def test_a_way_that_is_too_late_for_the_server_is_told_with_the_samples_that_are_lost():
    with offbeat.ParameterServer(transaction="model", max_staleness=0) as server:
        ones = [Counter(samples=3), Counter(samples=3)]
        first, second = (at(server.address, one.model) for one in ones)
        ones[0].train(first, EVERY)
        with warned() as told:
            ones[1].train(second, EVERY)
        assert second.receipt.reason == "stale"
        assert len(told) == 1
        assert told[0].startswith(f"what this member has learnt of {3 * EVERY} samples is lost")
        first.close()
        second.close()


def test_an_outer_step_that_is_not_the_servers_is_refused(server):
    with pytest.raises(ConfigError, match="activation is 2: give a number from 0 to 1 / delay"):
        DiLoCo(activation=2)
    with at(server.address, model(), method=DiLoCo(delay=2)) as ours:
        for other, told in ({"lr": 0.1}, "learning rate is 0.7"), ({"momentum": 0.5}, "momentum=0.9"):
            with pytest.raises(ConfigError, match=told):
                at(server.address, model(), method=DiLoCo(**other))
        with pytest.raises(ConfigError, match="the outer step is the server's, for all members"):
            ours.method = "average"
        assert ours.method == DiLoCo(delay=2)
    with (
        offbeat.ParameterServer(optimizer=optim.SGD(lr=0.1), transaction="model") as other,
        pytest.raises(ConfigError, match="SGD"),
    ):
        at(other.address, model())


def test_a_server_at_which_a_push_can_count_in_part_is_refused():
    with offbeat.ParameterServer() as server:
        with pytest.raises(ConfigError) as refused:
            at(server.address, model())
        assert not server.status()["workers"]
    assert "asynchronous is True and the server's transaction 'fragment'" in str(refused.value)
    assert "transaction='model' (`--transaction model` of `offbeat server`" in str(refused.value)


def test_the_server_that_the_first_member_starts_takes_a_push_whole(monkeypatch):
    for name in ("OFFBEAT_SERVER", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    one = Trainee()
    with at(None, one.model) as ours, offbeat.Client(f"127.0.0.1:{os.environ['MASTER_PORT']}") as other:
        assert other.run["transaction"] == "model"
        one.train(ours, EVERY)
        assert ours.receipt.applied
