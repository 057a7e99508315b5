"""A server that goes away and comes again: its workers wait for it and go on, as who they were."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import ConfigError, ConnectionLostError
from support.command import command
from support.freezing import freeze, wake
from support.small_net import backward, net
from support.waiting import wait_for

SPEC = offbeat.optim.SGD(lr=0.01)


def step(worker):
    backward(worker.model)
    return worker.step()


def address_of(server):
    return server.line("OFFBEAT_SERVER=").split("OFFBEAT_SERVER=")[1].split()[0]


def test_stopped_and_gone_on_with_twenty_times_in_two_hundred_steps_a_run_ends_with_the_same_bits(tmp_path):
    torch.manual_seed(3)
    inputs, targets = torch.randn(200, 16, 4), torch.randint(0, 3, (200, 16))

    def run(restarts, directory):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        adam = offbeat.optim.Adam(lr=0.01)

        def serve():
            return offbeat.ParameterServer(model, optimizer=adam, checkpoint_dir=directory, run_id="bits")

        server = serve()
        server.start()
        redone = 0
        with offbeat.AsyncWorker(server.address, model) as worker:
            for n in range(200):
                if n in restarts:
                    server.stop(restarting=True)
                    server = serve()
                    server.start()
                # What was made on the values of before is made anew on the same ones.
                while True:
                    nn.functional.cross_entropy(worker.model(inputs[n]), targets[n]).backward()
                    receipt = worker.step()
                    if receipt.applied:
                        break
                    assert receipt.reason == "server_rolled_back"
                    redone += 1
        state = server.state_dict()
        assert server.status()["term"] == 1 + len(restarts)
        server.stop()
        return state, redone

    undisturbed, _ = run((), tmp_path / "undisturbed")
    points = set(torch.randperm(199, generator=torch.Generator().manual_seed(7))[:20].add(1).tolist())
    assert len(points) == 20
    disturbed, redone = run(points, tmp_path / "disturbed")
    assert redone == 20
    for name, value in undisturbed.items():
        assert torch.equal(value, disturbed[name]), name


def test_a_worker_trains_on_over_three_deaths_of_its_server(tmp_path, stack):
    kept = tmp_path / "kept"
    arguments = ["--optimizer", "SGD(lr=0.01)", "--checkpoint-dir", str(kept), "--checkpoint-frequency", "50"]
    inputs, targets = torch.randn(4, 4), torch.randint(0, 2, (4,))
    given = []
    server = stack.enter_context(command("server", *arguments, "--port", "0"))

    def disturb():
        nonlocal server
        for _ in range(3):
            seen = newest(kept)
            wait_for(lambda seen=seen: newest(kept) > seen + 1)
            server.signal(signal.SIGKILL)
            server.ends()
            server = stack.enter_context(command("server", *arguments, "--port", "0"))

    def batches():
        """Give batches for as long as it is disturbed, and some more for the last server."""
        num_more = 100
        while num_more > 0:
            num_more -= disturbing.done()
            given.append(num_more)
            yield inputs, targets

    worker = offbeat.AsyncWorker(address_of(server), net(), 4, worker_id="it")
    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        history = worker.train(dataloader=batches(), loss_fn=nn.CrossEntropyLoss())
        disturbing.result()
    assert history.stopped == "epochs"
    status = worker_status(worker)
    worker.close()
    assert status["term"] == 4
    assert [w["id"] for w in status["workers"]] == ["it"]
    told = history.receipts
    assert set(told) == {"applied", "server_rolled_back"}
    assert told["server_rolled_back"] <= 3
    # Of the pushes each is there, was rejected, or is counted as lost.
    assert sum(told.values()) == len(given)
    assert status["version"] + status["lost_updates"] == told["applied"]


def newest(kept):
    """Give the number of the newest checkpoint in a directory."""
    return max((int(path.name[-6:]) for path in kept.glob("checkpoint-*")), default=0)


def worker_status(worker):
    """What the server of a worker tells."""
    with offbeat.Client(worker._link.session.address) as client:
        status = client.status()
    status["workers"] = [w for w in status["workers"] if w["state"] == "joined" and w["id"] == "it"]
    return status


@pytest.mark.parametrize(
    ("number", "goes_on"), [(signal.SIGTERM, True), (signal.SIGHUP, True), (signal.SIGINT, False)]
)
def test_a_command_that_a_machine_ends_tells_workers_to_wait_and_ctrl_c_ends_the_run(
    tmp_path, number, goes_on, stack
):
    arguments = ["--optimizer", "SGD(lr=0.01)", "--checkpoint-dir", str(tmp_path), "--port", "0"]
    server = stack.enter_context(command("server", *arguments))
    worker = stack.enter_context(offbeat.AsyncWorker(address_of(server), net()))
    assert step(worker).applied
    server.signal(number)
    assert server.ends() == 0, server.said
    again = stack.enter_context(command("server", *arguments))
    address_of(again)
    if goes_on:
        assert step(worker).reason == "server_rolled_back"
        assert step(worker).applied
        assert worker.version == 2
        worker.close()  # before its server
    else:
        with pytest.raises(offbeat.errors.ServerClosedError, match="the server was stopped"):
            step(worker)


def test_a_server_that_keeps_nothing_cannot_come_again(serve, join):
    server = serve(net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match=r"keeps no checkpoints: .*checkpoint_dir="):
        server.stop(restarting=True)
    assert step(join(server, net())).applied, "nothing has stopped"


def test_how_long_a_lost_server_is_waited_for_is_said_and_told(caplog, tmp_path):
    caplog.set_level("INFO", "offbeat")
    with command("server", "--optimizer", "SGD(lr=0.01)", "--port", "0") as server:
        address = address_of(server)
        worker = offbeat.AsyncWorker(address, net(), reconnect_timeout_s=0.3)
        impatient = offbeat.AsyncWorker(address, net(), reconnect_timeout_s=0)
        assert step(worker).applied
        server.signal(signal.SIGKILL)
        server.ends()
    with pytest.raises(
        ConnectionLostError, match=r"it did not come back within 0\.\d s: no server at"
    ) as caught:
        step(worker)
    assert "make a new AsyncWorker" in str(caught.value)
    (told,) = [r.getMessage() for r in caplog.records if "coming back" in r.getMessage()]
    assert re.search(r"the connection to 127\.0\.0\.1:\d+ is lost: .*; coming back, for up to 0.3 s", told), (
        told
    )
    with pytest.raises(ConnectionLostError) as caught:
        step(impatient)
    assert "come back" not in str(caught.value)
    for each in (worker, impatient):
        each.close()


def test_a_server_that_hangs_is_told_of_and_that_it_answers_again(caplog):
    def said(words):
        return [r.getMessage() for r in caplog.records if words in r.getMessage()]

    with (
        command("server", "--optimizer", "SGD(lr=0.01)", "--port", "0") as server,
        ThreadPoolExecutor() as pool,
        offbeat.AsyncWorker(address_of(server), net()) as worker,
    ):
        assert step(worker).applied
        freeze(server)
        try:
            waiting = pool.submit(step, worker)
            wait_for(lambda: said("no answer from 127.0.0.1"), timeout_s=30)
            assert not waiting.done()
        finally:
            wake(server)
        receipt = waiting.result(30)
        assert receipt.applied or receipt.reason in ("slept", "server_rolled_back")
        (told,) = said("no answer from")
        assert re.search(r"for 1\d s, though it is connected: .* \(Ctrl-C ends the wait\)", told), told
        wait_for(lambda: len(said("answers again, after 1")) == 1)  # the log comes by a thread of its own


@pytest.mark.parametrize("value", [-1, "5", float("nan")])
def test_a_time_to_wait_for_a_lost_server_that_is_none_is_refused(value):
    for make in (offbeat.Client, offbeat.AsyncWorker):
        with pytest.raises(ConfigError, match=f"reconnect_timeout_s is {value!r}"):
            make("127.0.0.1:1", reconnect_timeout_s=value)
