"""Members that train otherwise, and come back to a server: it is there still, and has their model."""

import copy
import functools
import gc
import shutil
import threading
from contextlib import ExitStack, suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import distributed

import offbeat
from offbeat.errors import ClosedError, ConnectError, ConnectionLostError, OffbeatError, StateError
from offbeat.trainer import away, served
from support.averaging import warned
from support.fault_proxy import FaultProxy
from support.group import together
from support.ports import free_port
from support.trainer_group import LOSS, data_of, member_of, model, values_of
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

AWAY = {0: "parameter_server", 1: "average", 3: "parameter_server"}
LINGER_S = 0.5
SOON_S = 1.5
"""In which a server would end that all have left."""


def fit(trainer, live, rank=0, **settings):
    return trainer.train(
        dataloader=data_of(rank), optimizer=live, loss_fn=LOSS, progress=False, **settings
    ).stopped


def sgd(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.05)


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def states_of(server):
    return {worker["id"]: worker["state"] for worker in server.status()["workers"]}


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "offbeat-away"]


class After:
    """Does something as an epoch ends."""

    def __init__(self, epoch, do):
        self.epoch, self.do = epoch, do

    def on_epoch_end(self, trainer, epoch):
        if epoch == self.epoch:
            self.do(trainer)


class Waiting:
    """Waits for a server's end, on a thread."""

    def __init__(self, server, num=1):
        self.thread = threading.Thread(target=self._wait, args=[server, num], daemon=True)
        self.thread.start()

    def _wait(self, server, num):
        with suppress(ClosedError):  # a test's end
            server.wait_for_workers(num)

    def is_over(self, timeout_s):
        self.thread.join(timeout_s)
        return not self.thread.is_alive()


@pytest.mark.parametrize("worker_id", [None, "home", "x" * 128])
def test_a_server_does_not_end_while_a_member_averages_that_is_to_come_back(worker_id, serve):
    server = serve(model(seed=9), linger_s=LINGER_S)
    waiting, found = Waiting(server), []

    def look(trainer):
        found.extend([waiting.is_over(SOON_S), states_of(server)])

    ours, name = model(), worker_id or "worker-0"
    with member_of(
        ours, server.address, AWAY, process_group=False, worker_id=worker_id, callbacks=After(1, look)
    ) as trainer:
        assert fit(trainer, sgd(ours), epochs=4) == "epochs"
        assert threads() == []
        assert not waiting.is_over(0)
    assert waiting.is_over(60)
    assert found == [False, {name: "joined"}]
    assert set(states_of(server).values()) == {"finished"}


def test_who_is_away_is_no_other_for_whom_a_server_waits(serve):
    server = serve(model(seed=9), linger_s=LINGER_S)
    waiting, ours = Waiting(server, 2), model()
    strategy = {0: "parameter_server", 1: "local", 2: "parameter_server"}
    with member_of(ours, server.address, strategy, worker_id="a") as trainer:
        fit(trainer, sgd(ours), epochs=3)
    assert not waiting.is_over(SOON_S)
    assert states_of(server) == {"a": "finished"}


def test_a_place_is_there_again_after_its_connection_broke(serve):
    server = serve(model(seed=9), linger_s=LINGER_S, rejoin_grace_s=60)
    ours = model()
    with FaultProxy(server.address) as proxy:

        def cut(trainer):
            wait_for(lambda: states_of(server) == {"a": "joined"})
            before = proxy.counts["connections"]
            proxy.cut()
            proxy.wait_for("connections", before + 1)
            wait_for(lambda: states_of(server) == {"a": "joined"})

        with member_of(
            ours, proxy.address, AWAY, process_group=False, worker_id="a", callbacks=After(1, cut)
        ) as trainer:
            assert fit(trainer, sgd(ours), epochs=4) == "epochs"


def test_what_members_left_at_a_server_is_soon_in_a_checkpoint_of_it(tmp_path):
    """Their places are there in their names at once: nobody has gone for good."""
    ours = model()
    with (
        offbeat.ParameterServer(
            model(seed=9), checkpoint_dir=tmp_path, checkpoint_frequency="1h", linger_s=LINGER_S
        ) as server,
        offbeat.Client(server.address, "stays"),
    ):
        wait_for(lambda: server.status()["checkpoints"]["version"] == 0)

        def look(trainer):
            version = server.status()["version"]
            assert version > 0
            wait_for(lambda: server.status()["checkpoints"]["version"] == version)
            wait_for(lambda: states_of(server)["a"] == "joined")

        with member_of(
            ours, server.address, AWAY, process_group=False, worker_id="a", callbacks=After(1, look)
        ) as trainer:
            assert fit(trainer, sgd(ours), epochs=2) == "epochs"


@pytest.mark.parametrize("num", [4, 3, 2], ids=["by itself", "from its last state", "from a state"])
def test_a_server_that_members_come_back_to_is_waited_for_as_a_lost_one(num, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="offbeat")
    port, ours = free_port(), model()
    live = sgd(ours)
    with ExitStack() as stack:

        def start():
            server = offbeat.ParameterServer(model(seed=9), port=port, checkpoint_dir=tmp_path)
            server.start()
            stack.callback(server.stop)
            return server

        servers = [start()]
        proxy = stack.enter_context(FaultProxy(servers[0].address))

        def start_again():
            with suppress(AssertionError):  # the test's own is that the member comes to it
                wait_for(lambda: "epoch 3 goes on with strategy 'parameter_server'" in caplog.text)
                wait_for(lambda: threads() == [])  # its place would try as well
                proxy.wait_for("unreachable", proxy.counts["unreachable"] + 5)
            servers.append(start())

        again = threading.Thread(target=start_again)

        def stop(trainer):
            wait_for(lambda: states_of(servers[0]) == {"a": "joined"})
            servers[0].stop(restarting=True)
            monkeypatch.setattr(served, "CONNECT_S", 0.1)
            again.start()

        settings = {"process_group": False, "worker_id": "a"}
        with member_of(ours, proxy.address, AWAY, callbacks=After(1, stop), **settings) as trainer:
            assert fit(trainer, live, epochs=num) == "epochs"
            if (left := 4 - num) > 0:
                state = trainer.state_dict()
                trainer.close()
                with member_of(ours, proxy.address, AWAY, **settings) as next_one:
                    next_one.load_state_dict(state, optimizer=live)
                    assert fit(next_one, live, epochs=left) == "epochs"
        again.join()
        assert states_of(servers[1]) == {"a": "finished"}


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_server_that_is_started_again_meanwhile_has_the_place_and_takes_what_was_made(is_killed, tmp_path):
    """Also where it goes on from a checkpoint of before members left: they have what was in it."""
    port, ours = free_port(), model()
    live = sgd(ours)
    with ExitStack() as stack:

        def start(folder):
            server = offbeat.ParameterServer(
                model(seed=9), port=port, checkpoint_dir=folder, checkpoint_frequency="1h", linger_s=LINGER_S
            )
            server.start()
            stack.callback(server.stop)
            return server

        servers = [start(tmp_path / "kept")]
        wait_for(lambda: servers[0].status()["checkpoints"]["version"] == 0)
        shutil.copytree(tmp_path / "kept", tmp_path / "killed")  # what one has that is killed before another

        def start_again(trainer):
            wait_for(lambda: states_of(servers[0]) == {"a": "joined"})
            first, version = servers[0], servers[0].status()["version"]
            first.stop(restarting=True)
            servers.append(start(tmp_path / ("killed" if is_killed else "kept")))
            assert (servers[1].status()["version"] < version) == is_killed
            wait_for(lambda: states_of(servers[1]).get("a") == "joined")

        def train_no_more(trainer):
            live.param_groups[0]["lr"] = 0.0

        with (
            warned() as told,
            member_of(
                ours,
                servers[0].address,
                AWAY,
                process_group=False,
                worker_id="a",
                callbacks=[After(1, start_again), After(2, train_no_more)],
            ) as trainer,
        ):
            assert fit(trainer, live, epochs=3) == "epochs"
            made = values_of(ours)
            assert fit(trainer, live, epochs=1) == "epochs"
        assert equal(made, [value.numpy() for value in servers[1].state_dict().values()])
        assert [text for text in told if "is lost" in text] == []


def test_an_empty_token_of_the_environment_is_none(serve, monkeypatch):
    monkeypatch.setenv("OFFBEAT_TOKEN", "")
    server, ours = serve(model(seed=9)), model()
    with member_of(ours, server.address, AWAY, process_group=False, worker_id="a") as trainer:
        fit(trainer, sgd(ours), epochs=2)
        wait_for(lambda: states_of(server) == {"a": "joined"})


def test_a_place_is_there_again_after_whatever_its_server_refuses_for_a_while(serve, monkeypatch, caplog):
    caplog.set_level("INFO", logger="offbeat")
    monkeypatch.setattr(away, "ASK_S", 0.1)
    server, ours = serve(model(seed=9)), model()
    real, tries = away.Client, []

    def refuses(*arguments, **settings):
        tries.append(1)
        if len(tries) == 1:
            raise StateError("the server has no room for now")
        client = real(*arguments, **settings)
        if len(tries) == 2:  # its answer is lost
            client.close(finished=False)
            raise ConnectionLostError("the connection is lost")
        if len(tries) == 3:
            client.status = refused
        return client

    def refused():
        raise StateError("the server has no room for it to come back")

    monkeypatch.setattr(away, "Client", refuses)
    with member_of(ours, server.address, AWAY, process_group=False, worker_id="a") as trainer:
        fit(trainer, sgd(ours), epochs=2)
        wait_for(lambda: len(tries) == 4 and states_of(server) == {"a": "joined"})
    told = [record.message for record in caplog.records if "that this member comes back to" in record.message]
    first, last = told
    assert "is tried again every 0.1 s" in first
    assert last.endswith("is held again")


def test_no_place_is_kept_in_another_run(serve):
    port, ours, found = free_port(), model(), []
    servers = [serve(model(seed=9), port=port)]

    def another(trainer):
        servers[0].stop()
        servers.append(serve(model(seed=8), port=port))
        with offbeat.Client(servers[1].address, "a") as newer:
            wait_for(lambda: not threads())
            newer.status()
        found.append(states_of(servers[1]))

    with member_of(
        ours, servers[0].address, AWAY, process_group=False, worker_id="a", callbacks=After(1, another)
    ) as trainer:
        assert fit(trainer, sgd(ours), epochs=2) == "epochs"
    assert found == [{"a": "finished"}]


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_place_is_taken_from_nobody_who_has_the_name_by_then(is_cut_off, serve, monkeypatch, caplog):
    monkeypatch.setattr(away, "ASK_S", 0.2)
    server, ours, has_heard = serve(model(seed=9)), model(), threading.Event()

    class Heard(offbeat.Client):
        def status(self):
            found = super().status()
            has_heard.set()
            return found

    monkeypatch.setattr(away, "Client", Heard)
    with FaultProxy(server.address) as proxy:

        def another(trainer):
            assert has_heard.wait(20)  # one whose join is cut off does not know who has the name, and asks on
            if is_cut_off:
                proxy.lead_to(f"127.0.0.1:{free_port()}")
                proxy.cut()
                wait_for(lambda: "is tried again" in caplog.text)
            with offbeat.Client(server.address, "a") as newer:
                proxy.lead_to(server.address)
                wait_for(lambda: not threads())
                newer.status()

        with (
            caplog.at_level("INFO", "offbeat"),
            member_of(
                ours, proxy.address, AWAY, process_group=False, worker_id="a", callbacks=After(1, another)
            ) as trainer,
        ):
            assert fit(trainer, sgd(ours), epochs=2) == "epochs"
    assert caplog.text.count("no place is kept at the server") == 1


@pytest.mark.parametrize("how", ["set", "alone"])
def test_a_place_is_kept_until_who_was_set_to_come_back_does(how, serve):
    server = serve(model(seed=9), linger_s=LINGER_S)
    waiting, ours = Waiting(server), model()
    live = sgd(ours)
    with member_of(ours, server.address, AWAY, process_group=False, worker_id="a") as trainer:
        fit(trainer, live, epochs=2)
        trainer.strategy = "parameter_server" if how == "set" else {0: "local", 2: "parameter_server"}
        assert not waiting.is_over(SOON_S)
        assert fit(trainer, live) == "epochs"
    assert waiting.is_over(30)


@pytest.mark.parametrize("how", ["set", "set to a past epoch", "closed", "dropped"])
def test_a_place_is_given_up_by_who_does_not_come_back(how, serve):
    server = serve(model(seed=9), linger_s=LINGER_S)
    waiting, ours = Waiting(server), model()
    live = sgd(ours)
    trainer = member_of(ours, server.address, AWAY, process_group=False, worker_id="a")
    fit(trainer, live, epochs=2)
    assert not waiting.is_over(SOON_S)
    if how.startswith("set"):
        trainer.strategy = "average" if how == "set" else {0: "parameter_server", 2: "average"}
        fit(trainer, live)
    elif how == "closed":
        trainer.close()
    else:
        del trainer
        gc.collect()
    assert waiting.is_over(30)
    assert states_of(server) == {"a": "finished"}
    wait_for(lambda: not threads())


def test_who_ends_by_a_failure_leaves_its_place_by_that(serve):
    server, ours = serve(model(seed=9)), model()

    def fail(trainer):
        wait_for(lambda: states_of(server) == {"a": "joined"})
        raise ValueError("the disk is full")

    with (
        pytest.raises(ValueError, match="the disk is full"),
        member_of(
            ours, server.address, AWAY, process_group=False, worker_id="a", callbacks=After(1, fail)
        ) as trainer,
    ):
        fit(trainer, sgd(ours), epochs=4)
    assert states_of(server) == {"a": "left"}


def test_who_goes_on_from_a_state_has_its_place_again(serve):
    server = serve(model(seed=9), linger_s=LINGER_S)
    waiting, found, ours = Waiting(server), [], model()
    with member_of(ours, server.address, AWAY, process_group=False) as trainer:
        fit(trainer, sgd(ours), epochs=2)
        state, weights = copy.deepcopy((trainer.state_dict(), ours.state_dict()))

        def look(trainer):
            found.extend([waiting.is_over(SOON_S), states_of(server)])

        ours = model()
        ours.load_state_dict(weights)
        live = sgd(ours)
        with member_of(ours, server.address, AWAY, process_group=False, callbacks=After(2, look)) as another:
            another.load_state_dict(state, optimizer=live)
            trainer.close()
            fit(another, live, epochs=2)
    assert waiting.is_over(30)
    assert found == [False, {"worker-0": "joined"}]


def test_a_copy_of_a_member_that_is_away_has_no_place(serve):
    server, ours = serve(model(seed=9)), model()
    strategy = {0: "parameter_server", 1: "local", 2: "parameter_server"}
    with member_of(ours, server.address, strategy, worker_id="a") as trainer:
        fit(trainer, sgd(ours), epochs=2)
        assert len(threads()) == 1
        copied = copy.deepcopy(trainer)
        copied.close()
        assert len(threads()) == 1
        wait_for(lambda: states_of(server) == {"a": "joined"})


def fails(*arguments, **settings):
    del arguments, settings
    raise ConnectError("it cannot be reached")


def joins_late(rank, ports):
    """Bring what was made in a group to a server, which the other member cannot join, but the next, or it."""
    ours = model(seed=rank)
    live = sgd(ours)
    servers = [offbeat.ParameterServer(model(seed=9), port=port) for port in set(ports)] if rank == 0 else []
    for server in servers:
        server.start()
    distributed.barrier()
    address = f"127.0.0.1:{ports[0]}"
    with warned() as told, ExitStack() as stack:
        trainer = stack.enter_context(member_of(ours, address, AWAY | {2: "parameter_server"}))
        assert fit(trainer, live, rank, epochs=2) == "epochs"
        live.param_groups[0]["lr"] = 0.0
        if rank:
            real, served.AsyncWorker = served.AsyncWorker, fails
            with pytest.raises(OffbeatError, match="cannot be reached"):
                fit(trainer, live, rank)
            served.AsyncWorker = real
        else:
            fit(trainer, live, rank)
        distributed.barrier()
        if rank and ports[0] != ports[1]:
            served.AsyncWorker = functools.partial(_at, f"127.0.0.1:{ports[1]}")
        fit(trainer, live, rank)
        served.AsyncWorker = offbeat.AsyncWorker
        distributed.barrier()
    for server in servers:
        server.stop()
    return [text for text in told if "is lost" in text], values_of(ours)


def _at(address, *arguments, **settings):
    return offbeat.AsyncWorker(address, *arguments[1:], **settings)


@pytest.mark.parametrize("is_other", [False, True])
def test_who_joins_later_than_the_first_has_brought_is_told_where_that_is_not_there(is_other):
    one = free_port()
    (told, first), (told_too, second) = together(joins_late, 2, [one, free_port() if is_other else one])
    assert told == []
    assert len(told_too) == is_other
    assert equal(first, second) != is_other


def comes_back_in_vain(rank, port, folder):
    """Come back to a server that does not, with a process group that waits for less long than for that."""
    ours, group = model(), distributed.new_group(timeout=timedelta(seconds=30))
    with ExitStack() as stack:
        if rank == 0:
            server = offbeat.ParameterServer(model(seed=9), port=port, checkpoint_dir=folder)
            server.start()
            stack.callback(server.stop)
        distributed.barrier()
        stop = After(1, lambda trainer: server.stop(restarting=True) if rank == 0 else None)
        trainer = member_of(ours, f"127.0.0.1:{port}", AWAY, process_group=group, callbacks=stop)
        with pytest.raises(OffbeatError) as raised:
            fit(trainer, sgd(ours), rank, epochs=4)
        trainer.close()
    return type(raised.value).__name__


def test_no_member_waits_for_a_server_for_longer_than_others_wait_in_their_group(tmp_path):
    assert together(comes_back_in_vain, 2, free_port(), tmp_path) == ["ConnectError", "StateError"]


def test_who_comes_back_alone_asks_for_no_group_that_others_have_not_come_to(serve, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))  # where nobody is
    server, ours = serve(model(seed=9)), model()
    strategy = {0: "parameter_server", 1: "local", 2: "parameter_server", 9: "average"}
    with member_of(ours, server.address, strategy, communication_backend="gloo", worker_id="a") as trainer:
        assert fit(trainer, sgd(ours), epochs=3) == "epochs"
    assert not distributed.is_initialized()
