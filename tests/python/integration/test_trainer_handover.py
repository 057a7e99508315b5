"""Changes between a server and a process group that break off: nothing is lost in silence, nobody hangs."""

import functools
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
from torch import distributed

import offbeat
from offbeat import optim
from offbeat.errors import ConfigError, ConnectError, ConnectionLostError, OffbeatError, StateError
from offbeat.trainer import first, served
from support.averaging import warned
from support.group import together
from support.ports import free_port
from support.trainer_group import BATCHES, LOSS, Begins, data_of, member_of, model, values_of
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def fit(trainer, live, rank=0, **settings):
    return trainer.train(
        dataloader=data_of(rank), optimizer=live, loss_fn=LOSS, progress=False, **settings
    ).stopped


def tried(trainer, live, rank, *kinds):
    """Train, and say how that ended."""
    try:
        return fit(trainer, live, rank)
    except kinds as error:
        return f"{type(error).__name__}: {error}"


def sgd(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.05)


def lost(told):
    return [text for text in told if "is lost" in text]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def someone_else_pushes(address):
    with offbeat.AsyncWorker(address, model()) as worker:
        worker.train(dataloader=data_of(7), optimizer=sgd(worker.model), loss_fn=LOSS, progress=False)


def fails(*arguments, **settings):
    del arguments, settings
    raise ConnectionLostError("the server is lost")


@pytest.mark.parametrize("then", ["again", "average on", "close and average"])
@pytest.mark.parametrize("strategies", [["parameter_server", "average"], ["average"]])
def test_what_a_change_that_broke_off_has_seen_at_the_server_is_in_nobodys_model(
    serve, monkeypatch, strategies, then
):
    server = serve(model(seed=9))
    ours = model(seed=1)
    live = sgd(ours)
    with (
        warned() as told,
        member_of(
            ours, server.address, {0: strategies[0], 9: "parameter_server"}, process_group=False
        ) as trainer,
    ):
        for strategy in strategies:
            trainer.strategy = strategy
            fit(trainer, live)
        someone_else_pushes(server.address)
        there = [value.numpy() for value in server.state_dict().values()]
        trainer.strategy = "parameter_server"
        with monkeypatch.context() as patched:
            patched.setattr(offbeat.AsyncWorker, "replace", fails)
            assert "the server is lost" in tried(trainer, live, 0, ConnectionLostError)
        if then.startswith("close"):
            trainer.close()
        live.param_groups[0]["lr"] = 0.0
        for strategy in ("average", "parameter_server"):
            if then != "again":
                trainer.strategy = strategy
            fit(trainer, live)
    assert equal(there, [value.numpy() for value in server.state_dict().values()])
    (text,) = lost(told)
    assert '"parameter_server" goes on from the model that the server has' in text


def never_joined(rank, address, refused):
    """Push, where the first member never comes to that; then average."""
    ours = model(seed=3)
    live = sgd(ours)
    with warned() as told, member_of(ours, address, {0: "parameter_server", 9: "average"}) as trainer:
        if rank:
            fit(trainer, live, rank)
        elif refused == "train":
            with pytest.raises(ConfigError):
                fit(trainer, live, log_frequency=0)
        else:
            real, served.AsyncWorker = served.AsyncWorker, functools.partial(_raises, ConnectError)
            with pytest.raises(ConnectError):
                fit(trainer, live)
            served.AsyncWorker = real
        if refused == "join and close":
            trainer.close()
        own = values_of(ours)
        trainer.strategy = "average"
        live.param_groups[0]["lr"] = 0.0
        ended = fit(trainer, live, rank)
    return ended, equal(own, values_of(ours)), lost(told)


def _raises(kind, *arguments, **settings):
    del arguments, settings
    raise kind("it cannot be reached")


@pytest.mark.parametrize("refused", ["train", "join and close"])
def test_what_others_have_pushed_without_the_first_is_lost_with_a_warning_as_all_average(serve, refused):
    found = together(never_joined, 2, serve(model(seed=9)).address, refused)
    assert [(ended, has_kept) for ended, has_kept, _ in found] == [("epochs", True), ("epochs", False)]
    assert [len(told) for *_, told in found] == [0, 1]
    assert "Average() goes on from the model that the first member has" in found[1][2][0]


def test_what_others_have_pushed_is_in_what_all_go_on_from_where_the_first_joins_late(serve):
    found = together(never_joined, 2, serve(model(seed=9)).address, "join")
    assert found == [("epochs", False, []), ("epochs", True, [])]


def not_brought(rank, address):
    """Average, fail to bring it to a server, and average on after a `close()`."""
    ours = model(seed=rank)
    live = sgd(ours)
    with member_of(ours, address, {0: "average", 1: "parameter_server"}) as trainer:
        fit(trainer, live, rank)
        real, offbeat.AsyncWorker.replace = offbeat.AsyncWorker.replace, fails
        said = tried(trainer, live, rank, ConnectionLostError, StateError)
        offbeat.AsyncWorker.replace = real
        own = values_of(ours)
        trainer.close()
        trainer.strategy = "average"
        live.param_groups[0]["lr"] = 0.0
        with warned() as told:
            fit(trainer, live, rank)
    return said, equal(own, values_of(ours)), told


def test_who_has_joined_and_brought_nothing_is_told_of_nothing_that_was_pulled(serve):
    found = together(not_brought, 2, serve(model(seed=9)).address)
    for said, has_kept, told in found:
        assert said.startswith(("ConnectionLostError", "StateError"))
        assert has_kept
        assert not [text for text in told if "goes on from" in text]


class Interrupted:
    """Sends this process SIGINT as it waits for the first member, which waits until that is so."""

    def __init__(self, rank, marks):
        self.is_first, self.marks, self.real = rank == 0, marks, first.take_first
        self.mark = marks / "interrupted"

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.is_first:
            first.take_first = self.interrupting
        return self

    def __exit__(self, *exc):
        signal.signal(signal.SIGINT, self.before)
        first.take_first = self.real

    def interrupting(self, group, tensor):
        first.take_first = self.real
        threading.Thread(target=self.interrupt, args=[threading.main_thread().ident]).start()
        self.real(group, tensor)

    def interrupt(self, main):
        signal.pthread_kill(main, signal.SIGINT)
        self.mark.touch()

    def waiting(self, act):
        def acts(*arguments):
            wait_for(self.mark.exists, timeout_s=60)
            return act(*arguments)

        return acts


def interrupted(rank, address, marks, strategies, which):
    """Change the strategy in two trains, with a Ctrl-C in the second member as it waits for the first."""
    ours = model(seed=rank)
    live = sgd(ours)
    real = getattr(served.Served, which)
    with warned() as told, member_of(ours, address, dict(enumerate(strategies))) as trainer:
        fit(trainer, live, rank)
        with Interrupted(rank, marks) as interrupt:
            if rank == 0:
                setattr(served.Served, which, interrupt.waiting(real))
            try:
                said = [tried(trainer, live, rank, KeyboardInterrupt, OffbeatError) for _ in range(2)]
            finally:
                setattr(served.Served, which, real)
        distributed.barrier()
    return said, lost(told)


@pytest.mark.parametrize(
    ("strategies", "which"),
    [(["average", "parameter_server"], "hand_over"), (["parameter_server", "average"], "pull")],
    ids=["to a server", "from a server"],
)
def test_after_a_ctrl_c_in_one_that_waits_for_the_first_all_go_on_by_the_next_train(
    serve, tmp_path, strategies, which
):
    server = serve(model(seed=9))
    found = together(interrupted, 2, server.address, tmp_path, strategies, which)
    assert found[0][0][0].startswith("ConnectionLostError")
    assert found[1][0][0].startswith("KeyboardInterrupt")
    for said, told in found:
        assert said[1] == "epochs"
        assert told == []


class Restarts:
    """A server that is lost as all have pushed, and another in its place."""

    def __init__(self, rank, port):
        self.is_host, self.port, self.server = rank == 0, port, None
        self.pushed = None

    def start(self, begun):
        if self.is_host:
            self.server = offbeat.ParameterServer(begun, port=self.port)
            self.server.start()
        distributed.barrier()

    def on_epoch_end(self, trainer, epoch):
        if epoch == 0:
            self.pushed = values_of(trainer.model)
            distributed.barrier()
            if self.is_host:
                self.server.stop()
            distributed.barrier()


def with_another_server(rank, port, begun):
    """Push, lose the server, and average once another is there, with a model of its own or without one."""
    served.AsyncWorker = functools.partial(offbeat.AsyncWorker, reconnect_timeout_s=0.5)
    restarts, ours, said = Restarts(rank, port), model(seed=rank), []
    restarts.start(model(seed=9))

    strategy, live, begins = {0: "parameter_server", 1: "average"}, sgd(ours), Begins(ours)
    with (
        warned() as told,
        member_of(ours, f"127.0.0.1:{port}", strategy, callbacks=restarts) as trainer,
    ):
        for epochs in (2, 1):
            try:
                history = trainer.train(
                    dataloader=data_of(rank), epochs=epochs, optimizer=live, loss_fn=begins, progress=False
                )
                said.append(history.stopped)
            except (ConnectionLostError, StateError) as error:
                said.append(type(error).__name__)
                restarts.start(begun)
    served.AsyncWorker = offbeat.AsyncWorker
    distributed.barrier()
    if restarts.is_host:
        restarts.server.stop()
    return said[-1], begins.values[BATCHES], restarts.pushed, told


@pytest.mark.parametrize("begun", [None, model(seed=9)], ids=["no model", "a first model"])
def test_where_another_server_is_in_the_place_of_the_lost_one_all_are_told_what_they_go_on_from(begun):
    found = together(with_another_server, 2, free_port(), begun)
    for ended, began, _, told in found:
        assert ended == "epochs"
        assert equal(began, values_of(begun) if begun else found[0][2])
        texts = [text for text in told if "than the one that members had pushed to" in text]
        assert [text.startswith("epoch 1: Average() goes on from") for text in texts] == [True]


def test_who_joins_another_server_than_it_has_left_is_told_what_that_does_not_have():
    port, ours = free_port(), model(seed=1)
    live = sgd(ours)
    with warned() as told, member_of(ours, f"127.0.0.1:{port}", "parameter_server") as trainer:
        for begun in (None, None, model(seed=9)):
            server = offbeat.ParameterServer(begun, port=port)
            server.start()
            begins = Begins(ours)
            own = values_of(ours)
            trainer.train(dataloader=data_of(0), optimizer=live, loss_fn=begins, progress=False)
            assert equal(begins.values[0], values_of(model(seed=9)) if begun else own)
            assert len(lost(told)) == (begun is not None)
            trainer.close()
            server.stop()
    assert '"parameter_server" goes on from the model of another server than the one' in lost(told)[0]


def cannot_join(rank, address, strategies):
    """Come to a server at which the second cannot join; go on by averaging."""
    ours = model(seed=rank)
    live = sgd(ours)
    with warned() as told, member_of(ours, address, dict(enumerate(strategies))) as trainer:
        for _ in strategies[1:]:
            fit(trainer, live, rank)
        real = served.AsyncWorker
        if rank:
            served.AsyncWorker = functools.partial(_raises, ConnectError)
        said = [tried(trainer, live, rank, ConnectError)]
        trainer.strategy = "average"
        said.append(tried(trainer, live, rank, ConnectError))
        served.AsyncWorker = real
    return said, [text for text in told if "than the one" in text]


@pytest.mark.parametrize("strategies", [["parameter_server"], ["average", "parameter_server"]])
def test_who_could_not_join_a_server_goes_on_with_the_others_where_that_is_not_wanted_any_more(
    serve, strategies
):
    found = together(cannot_join, 2, serve(model(seed=9)).address, strategies)
    assert found[0] == (["epochs", "epochs"], [])
    assert found[1] == (["ConnectError: it cannot be reached", "epochs"], [])


@pytest.mark.parametrize(
    "strategies", [["parameter_server", "local", "average"], ["parameter_server", None, "average"]]
)
def test_who_is_alone_at_a_server_and_then_averages_is_warned_of_nothing(serve, strategies):
    ours = model()
    live = sgd(ours)
    address, places = serve(model(seed=9)).address, {"process_group": False}
    with (
        warned() as told,
        member_of(ours, address, {0: "parameter_server", 9: "average"}, **places) as trainer,
    ):
        for strategy in strategies:
            if strategy is None:
                trainer.close()
            else:
                trainer.strategy = strategy
                fit(trainer, live)
    assert [text for text in told if "goes on from" in text] == []


def test_a_server_that_a_state_refuses_is_none_that_was_trained_with():
    port, ours = free_port(), model(seed=1)
    address, live = f"127.0.0.1:{port}", sgd(ours)
    server = offbeat.ParameterServer(model(seed=9), port=port)
    server.start()
    with member_of(ours, address, "parameter_server") as trainer:
        fit(trainer, live)
        state = trainer.state_dict()
    server.stop()
    own = values_of(ours)
    server = offbeat.ParameterServer(model(seed=8), port=port)
    server.start()
    with warned() as told, member_of(ours, address, "parameter_server") as trainer:
        live = sgd(ours)
        trainer.load_state_dict(state, optimizer=live)
        assert "the state's was" in tried(trainer, live, 0, StateError)
        assert trainer.state_dict()["handover"] == state["handover"]
        trainer.close()
        fit(trainer, live)
    server.stop()
    assert not equal(own, values_of(ours))
    assert len(lost(told)) == 1


def test_members_that_cannot_bring_it_go_on_as_before_where_they_are_set_to(serve, monkeypatch):
    server = serve(model(seed=9))
    ours = model(seed=1)
    live = sgd(ours)
    places = {"process_group": False}
    with (
        warned() as told,
        member_of(ours, server.address, {0: "average", 1: "parameter_server"}, **places) as trainer,
    ):
        fit(trainer, live)
        with monkeypatch.context() as patched:
            patched.setattr(served, "AsyncWorker", functools.partial(_raises, ConnectError))
            assert tried(trainer, live, 0, ConnectError).startswith("ConnectError")
            trainer.strategy = "average"
            assert fit(trainer, live) == "epochs"
        trainer.strategy = "parameter_server"
        live.param_groups[0]["lr"] = 0.0
        own = values_of(ours)
        fit(trainer, live)
    assert equal(own, [value.numpy() for value in server.state_dict().values()])
    assert lost(told) == []


@pytest.mark.parametrize("how", ["another frequency", "another optimizer"])
def test_a_worker_that_takes_the_place_of_one_joins_no_other_server_in_silence(how):
    port, ours = free_port(), model(seed=1)
    live = sgd(ours)
    warm_up = {"warm_up_epochs": 1} if how == "another frequency" else {}
    with (
        warned() as told,
        member_of(ours, f"127.0.0.1:{port}", "parameter_server", **warm_up) as trainer,
    ):
        for num_told in range(2):
            server = offbeat.ParameterServer(model(seed=9), port=port)
            server.start()
            fit(trainer, live if warm_up else optim.SGD(lr=0.1 / (1 + num_told)))
            assert len(lost(told)) == num_told
            server.stop()


class Closes:
    def on_step(self, trainer, step):
        if step.step == BATCHES:
            trainer.close()


def test_a_trainer_that_is_closed_as_the_last_batch_of_a_pass_ends_ends_it(serve):
    ours = model()
    with member_of(ours, serve(model(seed=9)).address, "parameter_server", callbacks=Closes()) as trainer:
        assert fit(trainer, sgd(ours)) == "epochs"


@pytest.mark.parametrize("first", ["average", "local"])
def test_a_state_of_after_a_close_knows_what_a_server_does_not_have(serve, first):
    ours = model(seed=1)
    server = serve(model(seed=9))
    someone_else_pushes(server.address)
    strategy, places = {0: first, 1: "parameter_server"}, {"process_group": False}
    with member_of(ours, server.address, strategy, **places) as trainer:
        fit(trainer, sgd(ours))
    state = trainer.state_dict()
    assert state["stage"] is None
    with warned() as told, member_of(ours, server.address, strategy, **places) as trainer:
        live = sgd(ours)
        trainer.load_state_dict(state, optimizer=live)
        fit(trainer, live)
    assert len(lost(told)) == 1


def test_a_server_that_has_gone_back_to_an_older_checkpoint_is_told_of(tmp_path):
    port, ours, told_of = free_port(), model(seed=1), []
    live, killed = sgd(ours), tmp_path / "killed"

    def start(kept):
        server = offbeat.ParameterServer(
            model(seed=9), port=port, checkpoint_dir=kept, checkpoint_frequency="1h"
        )
        server.start()
        return server

    for folder in (tmp_path / "kept", killed):
        with warned() as told, member_of(ours, f"127.0.0.1:{port}", "parameter_server") as trainer:
            server = start(tmp_path / "kept")
            fit(trainer, live)
            trainer.close()
            server.stop()
            if folder != killed:
                shutil.copytree(folder, killed)
                server = start(folder)
                fit(trainer, live)
                trainer.close()
                server.stop()
            live.param_groups[0]["lr"] = 0.0
            server = start(folder)
            fit(trainer, live)
            server.stop()
        told_of.append(len(lost(told)))
    assert told_of == [0, 1]


def pushed_elsewhere(rank, ports):
    """Push to a server, of which the first goes on at another; then average."""
    ours = model(seed=rank)
    live = sgd(ours)
    servers = [offbeat.ParameterServer(model(seed=9), port=port) for port in ports] if rank == 0 else []
    for server in servers:
        server.start()
    distributed.barrier()
    address, strategy = f"127.0.0.1:{ports[rank]}", {0: "parameter_server", 1: "average"}
    with warned() as told, member_of(ours, address, strategy) as trainer:
        fit(trainer, live, rank)
        fit(trainer, live, rank)
    distributed.barrier()
    for server in servers:
        server.stop()
    return [text for text in told if "than the one that members had pushed to" in text]


def test_who_has_pushed_to_another_server_than_the_first_takes_from_is_told_of_it():
    found = together(pushed_elsewhere, 2, [free_port(), free_port()])
    assert [len(told) for told in found] == [0, 1]


@pytest.mark.parametrize(
    ("strategies", "told"),
    [
        (["parameter_server", "average"], ["epoch 1 leaves the server"]),
        (["parameter_server", "local"], ["epoch 1 leaves the server"]),
        (["parameter_server", "average", "local", "parameter_server"], ["epoch 1 leaves the server"]),
        (["average", "parameter_server"], []),
    ],
)
def test_who_leaves_a_server_is_told_what_it_has(serve, caplog, strategies, told):
    ours, places = model(), {"process_group": False}
    with (
        caplog.at_level("INFO", "offbeat"),
        member_of(ours, serve(model(seed=9)).address, dict(enumerate(strategies)), **places) as trainer,
    ):
        fit(trainer, sgd(ours), epochs=len(strategies))
    texts = [record.getMessage() for record in caplog.records]
    texts = [text for text in texts if "leaves the server" in text or "leave the server" in text]
    assert len(texts) == len(told)
    assert all(text.startswith(begin) for text, begin in zip(texts, told, strict=True))


def test_who_comes_back_to_a_server_that_has_ended_is_told_why_and_what_to_do(serve, monkeypatch):
    server = serve(model(seed=9))
    ours = model()
    live = sgd(ours)
    monkeypatch.setattr(served, "AsyncWorker", functools.partial(offbeat.AsyncWorker, connect_timeout_s=0.5))
    places = {"process_group": False}
    with member_of(ours, server.address, {0: "average", 1: "parameter_server"}, **places) as trainer:
        fit(trainer, live)
        own = values_of(ours)
        server.stop()
        said = tried(trainer, live, 0, ConnectError)
        assert equal(own, values_of(ours))
    assert said.startswith("ConnectError: no server at")
    assert "when a server is there again, call train() in all members, which brings it there" in said
    assert "One that all had left ends after its linger, without --keep-running" in said
