"""`offbeat.ParameterServer` with real clients: its model, its run, and how waiting ends."""

import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import offbeat
from offbeat import optim, schedule
from offbeat.errors import (
    AddressInUseError,
    ClosedError,
    ConfigError,
    ConnectionLostError,
    ModelMismatchError,
    NonFiniteError,
    OffbeatError,
    ServerClosedError,
    StateError,
)


def arrays(value=0.0):
    return {"w": np.full((2, 2), value, np.float32), "n": np.array(3, np.int64)}


def gradient():
    return {"w": np.ones((2, 2), np.float32)}


def module():
    inside = torch.nn.Linear(3, 3, bias=False)
    made = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.BatchNorm1d(3), inside)
    inside.weight = made[0].weight  # tied
    return made.to(torch.float32)


# -- the model


def test_servers_model_is_a_copy_and_the_users_never_changes():
    mine = arrays()
    server = offbeat.ParameterServer(mine, optimizer=optim.SGD(lr=1.0))
    mine["w"][:] = 9
    with server, offbeat.Client(server.address) as client:
        assert client.pull()["w"].tolist() == [[0, 0], [0, 0]]
        client.push(gradient())
        assert mine["w"].tolist() == [[9, 9], [9, 9]]


def test_users_module_never_changes():
    mine = module()
    before = {name: t.clone() for name, t in mine.state_dict().items()}
    with offbeat.ParameterServer(mine, optimizer=optim.SGD(lr=1.0)) as server:
        with offbeat.Client(server.address) as client:
            client.pull()
            assert client.push({"0.weight": np.ones((3, 3), np.float32)}).applied
        moved = server.state_dict()
    assert all(torch.equal(t, before[name]) for name, t in mine.state_dict().items())
    assert not torch.equal(moved["0.weight"], before["0.weight"])


def test_state_dict_is_cpu_tensors_that_a_plain_module_takes_strictly():
    mine = module().half()
    with offbeat.ParameterServer(mine) as server:
        state = server.state_dict()
    other = module().half()
    other.load_state_dict(state, strict=True)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in mine.state_dict().items())
    assert {t.device.type for t in state.values()} == {"cpu"}
    assert state.keys() == mine.state_dict().keys()


def test_state_dict_is_arrays_without_torch(run_python):
    told = run_python(
        "import sys\n"
        "sys.modules['torch'] = None  # makes `import torch` an ImportError\n"
        "import numpy as np, offbeat\n"
        "from offbeat.optim import SGD\n"
        "with offbeat.ParameterServer({'w': np.ones(2, np.float32)}, optimizer=SGD(lr=1.0)) as server:\n"
        "    with offbeat.Client(server.address) as client:\n"
        "        client.pull()\n"
        "        client.push({'w': np.ones(2, np.float32)})\n"
        "    w = server.state_dict()['w']\n"
        "print(type(w).__name__, w.dtype, w.tolist(), w.flags.writeable)"
    )
    assert told.split("\n")[0] == "ndarray float32 [0.0, 0.0] True"


def test_server_without_a_model_has_no_state_yet():
    with offbeat.ParameterServer() as server:
        for use in (server.state_dict, lambda: server.load_state_dict(arrays())):
            with pytest.raises(StateError, match="no model yet"):
                use()


def test_load_state_dict_replaces_the_values_in_a_new_term():
    with (
        offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0)) as server,
        offbeat.Client(server.address) as client,
    ):
        client.pull()
        server.load_state_dict({"w": torch.full((2, 2), 5.0), "n": np.int64(8)})
        receipt = client.push(gradient())
        assert (receipt.verdict, receipt.reason) == ("reject", "server_rolled_back")
        assert client.pull()["w"].tolist() == [[5, 5], [5, 5]]
        assert client.push(gradient()).applied
        assert server.state_dict()["w"].tolist() == [[4, 4], [4, 4]]
        assert server.state_dict()["n"] == 8


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"w": np.zeros((2, 2), np.float32)}, "the state has no buffer 'n'"),
        ({**arrays(), "W": np.zeros(1, np.float32)}, "'W', .*did you mean parameter 'w'"),
        ({**arrays(), "w": np.zeros((2, 3), np.float32)}, r"\(2, 3\) and dtype float32; .*\(2, 2\)"),
    ],
)
def test_load_state_dict_of_another_model_is_refused_naming_both(state, said):
    with offbeat.ParameterServer(arrays(1.0)) as server:
        with pytest.raises(ModelMismatchError, match=said):
            server.load_state_dict(state)
        assert server.state_dict()["w"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_that_is_not_finite_is_refused_by_name(value):
    bad = arrays()
    bad["w"][1, 0] = value
    said = r"parameter 'w' .*not finite \(.*\) at index 2|parameter \"w\" .*not finite \(.*\) at index 2"
    with pytest.raises(NonFiniteError, match=said):
        offbeat.ParameterServer(bad).start()
    with offbeat.ParameterServer(arrays(1.0)) as server:
        with pytest.raises(NonFiniteError, match=said):
            server.load_state_dict(bad)
        assert server.state_dict()["w"].tolist() == [[1, 1], [1, 1]]
    with offbeat.ParameterServer() as server, offbeat.Client(server.address) as client:
        with pytest.raises(NonFiniteError, match=said):
            client.init(bad)
        assert client.init(arrays(1.0)) is True, "and the session goes on"


def test_buffers_may_be_infinite():
    masked = torch.nn.Linear(2, 2)
    masked.register_buffer("mask", torch.tensor(-torch.inf))
    with offbeat.ParameterServer(masked) as server:
        assert server.state_dict()["mask"] == -torch.inf


def tied_module():
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    module[1].weight = module[0].weight
    return module


def test_load_state_dict_takes_a_tied_tensor_under_any_of_its_names():
    one = np.ones((2, 2), np.float32)
    with offbeat.ParameterServer(tied_module()) as server:
        for value, names in enumerate((("0.weight",), ("1.weight",), ("0.weight", "1.weight"))):
            server.load_state_dict(dict.fromkeys(names, one * value))
            assert {float(t[0, 0]) for t in server.state_dict().values()} == {value}
        server.load_state_dict(server.state_dict())
        with pytest.raises(ModelMismatchError, match=r"the state has no parameter '0\.weight'"):
            server.load_state_dict({})


def test_load_state_dict_with_two_values_for_a_tied_tensor_is_refused_naming_both():
    one = np.ones((2, 2), np.float32)
    with offbeat.ParameterServer(tied_module()) as server:
        server.load_state_dict({"0.weight": one})
        with pytest.raises(ModelMismatchError, match=r"'0\.weight' and '1\.weight' are tied"):
            server.load_state_dict({"0.weight": one * 2, "1.weight": one * 3})
        assert float(server.state_dict()["0.weight"][0, 0]) == 1


# -- the run


def test_set_lr_scales_the_schedule():
    halving = schedule.Step(step_size=1, gamma=0.5)
    with (
        offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0), lr_schedule=halving) as server,
        offbeat.Client(server.address) as client,
    ):
        seen = []
        for lr in (None, None, 8.0):
            if lr is not None:
                server.set_lr(lr)
            before = client.pull()["w"][0, 0]
            client.push(gradient())
            seen.append(float(before - client.pull()["w"][0, 0]))
        assert seen == [1.0, 0.5, 2.0]


def test_set_lr_of_one_group_leaves_the_others():
    groups = [{"pattern": "a", "lr": 2.0}]
    model = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}
    with (
        offbeat.ParameterServer(model, optimizer=optim.SGD(lr=1.0, groups=groups)) as server,
        offbeat.Client(server.address) as client,
    ):
        server.set_lr(3.0, group=0)
        client.pull()
        client.push({name: np.ones(1, np.float32) for name in model})
        assert {name: float(v[0]) for name, v in client.pull().items()} == {"a": -3.0, "b": -1.0}
        with pytest.raises(ConfigError, match="group 2 does not exist"):
            server.set_lr(1.0, group=2)


@pytest.mark.parametrize(
    ("lr", "group"), [(None, -1), ("0.05", "0"), (True, 1.0), (10**400, 1.0), (-1.0, None)]
)
def test_set_lr_refuses_by_name_what_is_no_rate_or_group(lr, group):
    with offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0)) as server:
        with pytest.raises(ConfigError) as caught:
            server.set_lr(lr, group)
        said = [f"lr is {lr!r}", f"group is {group!r}"] if group is not None else ["lr is -1"]
        assert all(fault in str(caught.value) for fault in said)
        assert server.status()["optimizer"]["spec"]["groups"][0]["lr"] == 1.0


def test_a_bound_on_staleness_may_be_set_while_the_server_runs():
    server = offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0), max_staleness=7)
    assert server.max_staleness == 7
    with server, offbeat.Client(server.address) as early, offbeat.Client(server.address) as late:
        for most, verdicts in ((0, [False, True]), (1, [True, True]), (None, [True, True])):
            server.max_staleness = most
            assert server.max_staleness == server.status()["staleness"]["max_staleness"] == most
            early.pull()
            late.pull()
            assert early.push(gradient()).applied
            found = [late.push(gradient())]
            late.pull()
            found.append(late.push(gradient()))
            assert [receipt.applied for receipt in found] == verdicts
            assert found[0].staleness == 1
        server.max_staleness = 3
    assert server.max_staleness == 3
    with pytest.raises(ClosedError):
        server.max_staleness = 4


@pytest.mark.parametrize("most", [-1, 2.0, "8", True, 10**30])
def test_a_bound_that_is_none_is_refused_with_its_value(most):
    with offbeat.ParameterServer(arrays(), max_staleness=5) as server:
        with pytest.raises(ConfigError, match=f"max_staleness is {most!r}"):
            server.max_staleness = most
        assert server.max_staleness == server.status()["staleness"]["max_staleness"] == 5


def test_set_optimizer_changes_it_for_all():
    with (
        offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0)) as server,
        offbeat.Client(server.address) as client,
    ):
        server.set_optimizer(torch.optim.Adam)
        assert server.status()["optimizer"]["spec"]["groups"][0]["rule"]["name"] == "Adam"
        client.pull()
        assert client.push(gradient()).applied
        client.set_optimizer(optim.Adam())


def test_max_samples_ends_the_run_for_all():
    with (
        offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0), max_samples=10) as server,
        offbeat.Client(server.address) as client,
    ):
        client.pull()
        assert client.push(gradient(), samples=6).applied
        assert client.push(gradient(), samples=6).applied
        receipt = client.push(gradient(), samples=6)
        assert (receipt.verdict, receipt.reason) == ("reject", "budget")
        assert server.status()["state"] == "finished"


def test_status_tells_which_optimizer_runs_where():
    with offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=0.5)) as server:
        told = server.status()["optimizer"]
        assert told["runs_on"] == "server"
        assert "SGD" in told["summary"]
        assert server.status()["address"] == server.address


def test_max_norm_makes_the_transaction_model():
    policy = offbeat.staleness.GradientFiltering(max_norm=3.0)
    with (
        offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0), staleness_policy=policy) as server,
        offbeat.Client(server.address) as client,
    ):
        assert server.status()["transaction"] == "model"
        client.pull()
        receipt = client.push({"w": np.full((2, 2), 2.0, np.float32)})
        assert (receipt.verdict, receipt.reason) == ("reject", "norm")
        assert client.push(gradient()).applied


# -- life


def test_start_returns_at_once_and_twice_is_refused():
    server = offbeat.ParameterServer(arrays())
    assert server.start() is None
    with pytest.raises(StateError, match="has been started"):
        server.start()
    host, port = server.address.split(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    with server:
        assert server.status()["version"] == 0
    server.stop()
    for use in (
        lambda: server.set_lr(1.0),
        lambda: server.load_state_dict(arrays()),
        server.wait_for_workers,
        server.start,
        server.__enter__,
        lambda: server.address,
    ):
        with pytest.raises(ClosedError):
            use()
    assert "stopped" in repr(server)


def test_model_and_status_stay_readable_after_stop():
    with (
        offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0)) as server,
        offbeat.Client(server.address) as client,
    ):
        client.pull()
        assert client.push(gradient(), samples=4).applied
        before = server.state_dict()["w"].tolist()
        server.stop()
        assert server.state_dict()["w"].tolist() == before
    assert server.state_dict()["w"].tolist() == before
    assert server.status()["samples"] == 4
    never_started = offbeat.ParameterServer(arrays())
    never_started.stop()
    with pytest.raises(ClosedError, match="before it was started"):
        never_started.state_dict()


def test_start_that_failed_may_be_tried_again_with_the_same_model():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = offbeat.ParameterServer(arrays(2.0), port=port)
        with pytest.raises(AddressInUseError):
            server.start()
    with server:
        assert server.address == f"127.0.0.1:{port}"
        assert server.state_dict()["w"].tolist() == [[2, 2], [2, 2]]


def test_port_in_use_is_told_with_what_to_do():
    with offbeat.ParameterServer(arrays()) as server:
        port = int(server.address.split(":")[1])
        with pytest.raises(
            AddressInUseError, match=rf"127\.0\.0\.1:{port} is in use.*0 for any free"
        ) as refused:
            offbeat.ParameterServer(arrays(), port=port).start()
        assert isinstance(refused.value, OSError)


def test_host_that_is_not_this_machines_is_told_with_what_to_do():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:.*address of this machine"):
        offbeat.ParameterServer(arrays(), host="192.0.2.1", insecure=True).start()


def test_without_a_token_it_listens_on_this_machine_only_and_with_one_everywhere():
    with offbeat.ParameterServer(arrays()) as server:
        assert server._server.address.startswith("127.0.0.1:")
    with offbeat.ParameterServer(arrays(), token="secret") as server:  # noqa: S106
        assert server._server.address.rpartition(":")[0] in ("0.0.0.0", "[::]")  # noqa: S104
        with offbeat.Client(server.address, token="secret") as client:  # noqa: S106
            assert client.pull()["n"] == 3


def test_stop_tells_the_workers():
    server = offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0))
    server.start()
    with offbeat.Client(server.address) as client:
        client.pull()
        server.stop()
        with pytest.raises(ServerClosedError, match="stopped") as told:
            client.push(gradient())
        assert isinstance(told.value, ConnectionError)


# -- waiting


def test_wait_until_joined_waits_for_as_many():
    with offbeat.ParameterServer(arrays()) as server:
        assert server.wait_until_joined(1, timeout_s=0.05) is False
        with offbeat.Client(server.address):
            assert server.wait_until_joined(1, timeout_s=20) is True
            assert server.wait_until_joined(2, timeout_s=0.05) is False


def test_wait_for_workers_is_over_when_nobody_has_been_there_for_the_linger():
    with offbeat.ParameterServer(arrays(), linger_s=0.2) as server:
        assert server.wait_for_workers(timeout_s=0.05) is False
        with offbeat.Client(server.address):
            assert server.wait_for_workers(timeout_s=0.5) is False
        assert server.wait_for_workers(2, timeout_s=0.5) is False
        assert server.wait_for_workers(timeout_s=20) is True


def test_wait_for_workers_counts_a_lost_one_as_there_for_the_grace():
    with offbeat.ParameterServer(arrays(), linger_s=0.1, rejoin_grace_s=5) as server:
        lose_a_worker(server)
        with offbeat.Client(server.address):
            pass  # this one finishes
        assert server.wait_for_workers(timeout_s=0.7) is False
        assert server.wait_for_workers(timeout_s=20) is True


def test_all_lost_and_none_finished_raises_with_the_causes():
    with offbeat.ParameterServer(arrays(), linger_s=0.1, rejoin_grace_s=0.1) as server:
        lose_a_worker(server)
        with pytest.raises(ConnectionLostError, match="no worker finished: doomed: "):
            server.wait_for_workers(timeout_s=20)


def test_all_left_and_none_finished_raises_too():
    with offbeat.ParameterServer(arrays(), linger_s=0.1) as server:
        with pytest.raises(ZeroDivisionError), offbeat.Client(server.address, worker_id="unlucky"):
            1 / 0  # noqa: B018
        with pytest.raises(ConnectionLostError, match="unlucky: left before its work was done: ZeroDivision"):
            server.wait_for_workers(timeout_s=20)


def test_a_worker_that_could_not_begin_is_not_one_of_the_n(caplog):
    with offbeat.ParameterServer(arrays(), max_staleness=0, linger_s=0.1) as server:
        with pytest.raises(ConfigError, match="in_flight is 2"):
            offbeat.Client(server.address, worker_id="late", in_flight=2)
        assert server.wait_for_workers(timeout_s=0.5) is False
        with offbeat.Client(server.address):
            pass
        assert server.wait_for_workers(timeout_s=20) is True
        status = server.status()
    assert [worker["id"] for worker in status["workers"]] == ["worker-0"]
    cause = status["departures"][0]["cause"]
    assert cause.startswith("could not begin: ConfigError: ")
    assert "in_flight" in cause
    assert "a worker cannot begin" in caplog.text


def lose_a_worker(server):
    code = (
        "import os, sys, offbeat\n"
        "client = offbeat.Client(sys.argv[1], worker_id='doomed')\n"
        "client.pull()\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, server.address], timeout=50, check=False)
    assert done.returncode == -9


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_number_of_workers_is_a_count(n):
    with offbeat.ParameterServer(arrays()) as server:
        for wait in (server.wait_for_workers, server.wait_until_joined):
            with pytest.raises(ConfigError, match="n is"):
                wait(n)


@pytest.mark.parametrize("timeout_s", [-1, "5", float("nan")])
def test_time_to_wait_is_a_number_of_seconds(timeout_s):
    with offbeat.ParameterServer() as server:
        for wait in (server.wait_for_workers, lambda **time: server.wait_until_joined(1, **time)):
            with pytest.raises(ConfigError, match=f"timeout_s is {timeout_s!r}"):
                wait(timeout_s=timeout_s)


def test_many_threads_may_use_one_server():
    with offbeat.ParameterServer(arrays(), optimizer=optim.SGD(lr=1.0)) as server:
        faults = []

        def use():
            try:
                for _ in range(20):
                    server.status()
                    server.state_dict()
                    server.set_lr(0.5)
            except OffbeatError as error:
                faults.append(error)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not faults
