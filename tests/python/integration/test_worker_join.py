"""Joining: how a worker comes by its model, and what it hears when it may not."""

import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import (
    AuthenticationError,
    ConfigError,
    ConnectError,
    ModelMismatchError,
    UnsupportedTensorError,
)
from support.command import command

SPEC = offbeat.optim.SGD(lr=0.1)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


def same(module, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_the_model_is_there_when_the_constructor_returns_and_was_filled_in_place(serve, join):
    server, model = serve(net()), net(1)
    held = list(model.parameters())
    worker = join(server, model)
    assert worker.model is model
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    assert same(model, net().state_dict())


def test_without_a_model_it_is_built_from_the_server_s_description(serve, join):
    original = nn.Sequential(net(), nn.ReLU(), nn.Dropout(0.1))
    original[0][0].requires_grad_(False)
    rng = torch.get_rng_state()
    worker = join(serve(original))
    assert torch.equal(torch.get_rng_state(), rng)
    assert repr(worker.model) == repr(original)
    assert same(worker.model, original.state_dict())
    assert [p.requires_grad for p in worker.model.parameters()] == [
        p.requires_grad for p in original.parameters()
    ]
    assert worker.model.training


def test_a_model_that_cannot_be_described_is_named_and_model_is_the_remedy(serve, join):
    server = serve(nn.Sequential(nn.Linear(4, 4), Own()))
    with pytest.raises(ConfigError, match=r"module '1' is a .*Own.*model="):
        join(server)
    worker = join(server, nn.Sequential(nn.Linear(4, 4), Own()), optimizer=SPEC)
    worker.model(torch.ones(2, 4)).sum().backward()
    assert worker.step().applied


def test_arrays_have_no_description_and_model_is_the_remedy(serve, join):
    server = serve({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"given as arrays.*model="):
        join(server)
    assert same(join(server, nn.Linear(4, 2)).model, {"weight": torch.ones(2, 4), "bias": torch.zeros(2)})


def test_the_first_worker_brings_the_model_and_the_second_builds_it(serve, join):
    server, model = serve(), net(5)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    join(server, model, optimizer=SPEC)
    second = join(server)
    assert same(second.model, wanted)
    assert repr(second.model) == repr(model)


@pytest.mark.slow
def test_a_worker_without_a_model_waits_for_the_one_that_brings_it(serve, join, run_python):
    server = serve()
    code = (
        "import sys, offbeat; w = offbeat.AsyncWorker(sys.argv[1]); print(w.model[0].in_features); w.close()"
    )
    printed = []
    waiting = threading.Thread(target=lambda: printed.append(run_python(code, server.address)))
    waiting.start()
    assert server.wait_until_joined(1, timeout_s=40)
    join(server, net())
    waiting.join()
    assert printed == ["4\n"]


def test_a_worker_that_waits_for_a_model_says_so(serve, join):
    server = serve()
    code = "import sys, offbeat; offbeat.AsyncWorker(sys.argv[1], worker_id='me').close()"
    with command("-c", code, server.address, program=(sys.executable,)) as waiting:
        line = waiting.line("waiting for another to bring one")
        assert "has no model yet" in line
        assert "worker me" in line
        join(server, net())
        assert waiting.ends() == 0, waiting.said


def test_order_is_the_server_s_and_names_decide(serve, join):
    state = net().state_dict()
    del state["1.num_batches_tracked"]
    arrays = {name: state[name].numpy() for name in sorted(state, reverse=True) if "running" not in name}
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), nn.Linear(8, 2)
    )
    worker = join(serve(arrays), model)
    assert same(worker.model, state)


def test_the_wrong_model_is_refused_with_the_first_tensor_that_differs(serve, join):
    server = serve(net())
    wrong = net()
    wrong[3] = nn.Linear(8, 3)
    with pytest.raises(ModelMismatchError) as caught:
        join(server, wrong)
    assert "'3.weight' of shape [2, 8] and dtype float32" in str(caught.value)
    assert "'3.weight' of shape [3, 8] and dtype float32" in str(caught.value)
    status = server.status()
    assert status["workers"] == [], "nobody waits for it"
    assert status["departures"][0]["cause"].startswith("could not begin: ModelMismatchError: ")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_model_that_cannot_be_held_is_refused_before_anything_is_sent(join, dtype):
    with pytest.raises(UnsupportedTensorError, match=r"'weight' is (float64|complex64)"):
        join("127.0.0.1:1", nn.Linear(2, 2, dtype=dtype))


def test_a_wrong_token_is_an_authentication_error(serve, join, monkeypatch):
    server = serve(net(), token="right", host="127.0.0.1")  # noqa: S106  a test's
    with pytest.raises(AuthenticationError):
        join(server, net(), token="wrong")  # noqa: S106
    with pytest.raises(AuthenticationError):
        join(server, net())
    join(server, net(), token="right")  # noqa: S106
    monkeypatch.setenv("OFFBEAT_TOKEN", "right")
    join(server, net())


def test_the_server_s_address_may_come_from_the_environment(serve, monkeypatch):
    monkeypatch.setenv("OFFBEAT_SERVER", serve(net()).address)
    with offbeat.AsyncWorker() as worker:
        assert worker.model[0].in_features == 4


def test_no_address_at_all_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="set OFFBEAT_SERVER"):
        offbeat.AsyncWorker()


def test_a_server_that_is_not_there_is_told_with_address_time_and_remedy():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ConnectError) as caught:
            offbeat.AsyncWorker(address, net(), connect_timeout_s=0.5)
        assert time.monotonic() - began < 10
    assert address in str(caught.value)
    assert "refused" in str(caught.value).lower()


@pytest.mark.parametrize("of", ["Client", "AsyncWorker"])
def test_who_is_there_before_the_server_says_what_it_waits_for(serve, of):
    code = f"import sys, offbeat; offbeat.{of}(sys.argv[1]).close()"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        address = f"127.0.0.1:{port}"
        with command("-c", code, address, program=(sys.executable,)) as early:
            line = early.line("no server at")
            assert f"no server at {address} yet" in line
            assert "refused" in line
            assert "trying for up to 60 s" in line
            nobody.close()
            serve(net(), port=port)
            assert early.ends() == 0, early.said
    assert early.said.count("no server at") == 1


@pytest.mark.parametrize("of", [offbeat.AsyncWorker, offbeat.Client])
def test_two_in_flight_are_refused_where_the_server_takes_no_late_push(serve, of):
    server = serve(net(), max_staleness=0)
    with pytest.raises(ConfigError, match=r"in_flight is 2 and the server's max_staleness is 0.*in_flight=1"):
        of(server.address, worker_id="me", in_flight=2)
    assert server.status()["workers"] == []
    of(server.address, worker_id="me", in_flight=1).close()
    of(serve(net(), max_staleness=1).address, in_flight=2).close()


@pytest.mark.parametrize("address", ["http://localhost:5000", "localhost:5000/run", "local host:5000"])
def test_an_address_that_is_a_url_is_refused_at_once(address):
    for of in (offbeat.AsyncWorker, offbeat.Client):
        with pytest.raises(ConfigError, match=r"is not an address; give HOST:PORT") as caught:
            of(address, connect_timeout_s=1e6)
        assert repr(address)[1:-1] in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"local_batch_size": 0}, "local_batch_size is 0"),
        ({"update_frequency": -1}, "update_frequency is -1"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"loss_reduction": "avg"}, "unknown loss_reduction 'avg'"),
        ({"in_flight": 3}, "in_flight is 3: give 1 or 2"),
        ({"in_flight": 1.0}, "in_flight is 1.0: give 1 or 2"),
        ({"server_address": 5000}, 'server_address is 5000: give "HOST:PORT", a string'),
        ({"worker_id": 3}, "worker_id is 3: give a string, or None"),
        ({"token": 31337}, "token is of type int: give a string, or None"),
        ({"model": nn.Linear}, "model is the class Linear: give an object, as Linear(…) makes one"),
        ({"model": 5}, "model is of type int: give an nn.Module, or None"),
        ({"buffers": "locale"}, "unknown buffers 'locale'; did you mean 'local'"),
        ({"connect_timeout_s": -1}, "connect_timeout_s is -1"),
        ({"connect_timeout_s": "5"}, "connect_timeout_s is '5'"),
        ({"seed": 1.5}, "seed is 1.5: give a whole number, 0 or more, or None"),
        ({"seed": -1}, "seed is -1: give a whole number, 0 or more, or None"),
        ({"seed": True}, "seed is True: give a whole number"),
        ({"seed": "7"}, "seed is '7': give a whole number"),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else None,
)
def test_a_setting_that_cannot_be_used_is_named(setting, said):
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncWorker(**({"server_address": "127.0.0.1:1"} | setting))
    assert said in str(caught.value)
    assert "31337" not in str(caught.value), "a token is not shown"


def test_an_address_that_is_none_is_told_with_the_rest_and_by_who_gave_it(monkeypatch):
    monkeypatch.setenv("OFFBEAT_SERVER", "127.0.0.1:x")
    for address, said in [
        ("127.0.0.1:99999", "_address: '127.0.0.1:99999'"),
        (None, "OFFBEAT_SERVER: '127."),
    ]:
        with pytest.raises(ConfigError, match=f"{said}.* give HOST:PORT, .*; in_flight is 3"):
            offbeat.AsyncWorker(address, in_flight=3)
    with pytest.raises(ConfigError, match=r"^address: '127\.0\.0\.1' is not an address; .*; in_flight is 3"):
        offbeat.Client("127.0.0.1", in_flight=3)


def test_every_bad_setting_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        offbeat.AsyncWorker(
            local_batch_size=0,
            update_frequency=True,
            device="gpu",
            loss_reduction="no",
            in_flight=7,
            buffers="x",
            connect_timeout_s=None,
            worker_id="a\nb",
            seed=-1,
        )
    for said in (
        "set OFFBEAT_SERVER",
        "local_batch_size is 0",
        "update_frequency is True",
        "device is 'gpu'",
        "loss_reduction 'no'",
        "in_flight is 7",
        "buffers 'x'",
        "connect_timeout_s is None",
        "worker_id is 'a\\nb'",
        "seed is -1",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize("of", [offbeat.AsyncWorker, offbeat.Client])
@pytest.mark.parametrize(
    ("worker_id", "said"),
    [
        ("", "worker_id is ''"),
        ("a\nb", r"worker_id is 'a\nb'"),
        ("\x1b[2J", r"worker_id is '\x1b[2J'"),
        ("\x85", r"worker_id is '\x85'"),
        ("\udc80", r"worker_id is '\udc80'"),
        ("a" * 129, "worker_id is 129 bytes long"),
        ("é" * 65, "worker_id is 130 bytes long"),
    ],
)
def test_a_name_that_no_server_takes_is_refused_before_one_is_waited_for(of, worker_id, said):
    with pytest.raises(ConfigError) as caught:
        of("127.0.0.1:1", worker_id=worker_id, connect_timeout_s=1e6)
    assert str(caught.value) == f"{said}: give 1 to 128 bytes of UTF-8 without control characters, or None"


def test_the_longest_name_is_the_server_s(serve):
    server = serve(net())
    for name in ("é" * 64, "amy of room 7"):
        with offbeat.Client(server.address, worker_id=name) as client:
            assert client.worker_id == name
    config = (Path(__file__).parents[3] / "rust/net/src/server/config.rs").read_text("utf-8")
    assert "const MAX_ID_BYTES: usize = 128;" in config


@pytest.mark.parametrize("seed", [0, 2**80, np.int64(3)])
def test_any_whole_number_from_0_on_is_a_seed(serve, join, seed):
    worker = join(serve(net()), net(), optimizer=SPEC, seed=seed)
    data = TensorDataset(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))
    assert worker.train(dataset=data, loss_fn=nn.CrossEntropyLoss(), progress=False).steps == 1


@pytest.mark.parametrize(("name", "old", "new"), [("update_frequency", 1, 4), ("device", "cpu", "meta")])
def test_what_is_chosen_when_a_worker_is_made_cannot_be_changed_afterwards(serve, join, name, old, new):
    worker = join(serve(net()), net())
    with pytest.raises(AttributeError, match=rf"{name} is given .*make a new one, with AsyncWorker\({name}="):
        setattr(worker, name, new)
    assert str(getattr(worker, name)) == str(old)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA works")
def test_cuda_that_is_not_there_is_told_before_connecting():
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        offbeat.AsyncWorker("127.0.0.1:1", device="cuda")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="here mps works")
def test_a_device_that_torch_cannot_use_here_is_one_sentence():
    with pytest.raises(ConfigError, match="device is mps, and torch cannot use that here") as caught:
        offbeat.AsyncWorker("127.0.0.1:1", device="mps")
    assert len(str(caught.value)) < 300


def test_a_worker_id_is_kept_and_an_older_worker_of_that_name_is_fenced(serve, join):
    server = serve(net())
    older = join(server, net(), worker_id="me", optimizer=SPEC)
    newer = join(server, net(), worker_id="me", optimizer=SPEC)
    assert older.id == newer.id == "me"
    assert older.run_id == newer.run_id

    def push_until_it_raises():  # what the server has read before it closed the connection is answered
        while True:
            older.model(torch.ones(2, 4)).sum().backward()
            assert older.step().reason == "fenced"

    with pytest.raises(offbeat.errors.FencedError):
        push_until_it_raises()
    newer.model(torch.ones(2, 4)).sum().backward()
    assert newer.step().applied
