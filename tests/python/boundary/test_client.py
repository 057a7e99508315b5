"""`offbeat.Client` and a real server in another process: what goes in, comes out, and is refused."""

import array
import gc
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import offbeat
from offbeat import optim
from offbeat.errors import (
    AuthenticationError,
    ClosedError,
    ConfigError,
    ConnectError,
    ModelMismatchError,
    NonFiniteError,
    StateError,
    UnsupportedTensorError,
)
from support.command import command

TOKEN = "a secret of the test"  # noqa: S105


def model(**more):
    return {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.float32), **more}


def gradient(value=1.0):
    return {name: np.full_like(a, value) for name, a in model().items()}


@pytest.fixture
def server(host):
    with host.serving(model(), optimizer=optim.SGD(lr=0.5)) as remote:
        yield remote


@pytest.fixture
def client(server):
    with offbeat.Client(server.address) as made:
        yield made


# -- pull


def test_pull_returns_the_models_values_as_writable_copies(client):
    first, second = client.pull(), client.pull()
    assert list(first) == ["w", "b"]
    assert first["w"].tolist() == model()["w"].tolist()
    first["w"][:] = 7
    assert second["w"].tolist() == client.pull()["w"].tolist() == model()["w"].tolist()


def test_out_is_written_in_place_and_returned(client):
    out = {name: np.full_like(a, -1) for name, a in model().items()}
    addresses = {name: a.ctypes.data for name, a in out.items()}
    assert client.pull(out=out) is out
    assert out["w"].tolist() == model()["w"].tolist()
    client.push_pull(gradient(2.0), out=out)
    assert out["b"].tolist() == [-1.0, -1.0, -1.0]
    assert {name: a.ctypes.data for name, a in out.items()} == addresses


def test_out_may_be_anything_writable_such_as_tensors(client):
    out = {"w": torch.zeros(2, 3), "b": array.array("f", [0, 0, 0])}
    client.pull(out=out)
    assert out["w"].tolist() == model()["w"].tolist()


def test_push_pull_without_out_writes_the_clients_own_arrays(client):
    client.pull()
    with pytest.raises(StateError, match="without out="):
        _ = client.parameters
    client.push_pull(gradient(1.0))
    mine = client.parameters
    client.push_pull(gradient(1.0))
    assert client.parameters is mine
    assert mine["b"].tolist() == [-1.0, -1.0, -1.0]


@pytest.fixture
def tied():
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(2)))
    module[1].weight = module[0].weight
    with (
        offbeat.ParameterServer(module, optimizer=optim.SGD(lr=0.5)) as server,
        offbeat.Client(server.address) as client,
    ):
        yield client


def test_tensor_given_under_two_of_its_names_is_one_array_or_refused_naming_both(tied):
    out = tied.pull()
    one, other = (np.full((3, 3), value, np.float32) for value in (1, 2))
    both = "'0.weight' and '1.weight', which are two names of one tensor"
    with pytest.raises(ModelMismatchError, match=f"the push has {both}"):
        tied.push({"0.weight": one, "1.weight": other})
    with pytest.raises(ModelMismatchError, match=f"the push has {both}"):
        tied.push({"0.weight": one.T, "1.weight": other.T})  # of both there are copies
    transposed = one.T
    assert tied.push({"0.weight": transposed, "1.weight": transposed}).applied
    assert tied.push({"0.weight": None, "1.weight": one.T}).applied
    with pytest.raises(ModelMismatchError, match=f"out has {both}"):
        tied.pull(out={**out, "1.weight": other})
    before = out["0.weight"].copy()
    tied.pull(out={**out, "1.weight": out["0.weight"][:]})  # the same memory
    np.testing.assert_allclose(out["0.weight"], before - 1, atol=1e-6)


def options_of_connections_to(address):
    """TCP_USER_TIMEOUT of this process's connections, in ms."""
    host, _, port = address.rpartition(":")
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as found:
            if found.getpeername() == (host, int(port)):
                yield found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_server_whose_host_vanished_is_given_up_after_20_seconds_and_one_that_stands_still_is_not(
    server, client
):
    # A link cannot be cut without privileges: the option is what the system acts by. On the connection of the
    # pushes it would also count the time in which a server that stands still has no room.
    assert client.pull()
    assert sorted(options_of_connections_to(server.address)) == [0, 20_000]


def test_parameters_are_not_there_before_something_was_written_to_them(server):
    with offbeat.Client(server.address) as one:
        one.pull()
        with pytest.raises(NonFiniteError):
            one.push_pull(gradient(float("nan")))
        with pytest.raises(StateError, match="without out="):
            _ = one.parameters
    with offbeat.Client(server.address, in_flight=2) as two:
        two.pull()
        assert two.push_pull(gradient()) is None
        with pytest.raises(StateError, match="without out="):
            _ = two.parameters
        assert two.push_pull(gradient()).applied
        assert two.parameters["b"].tolist() == [-0.5, -0.5, -0.5]
        assert len(two.flush()) == 1
        assert two.parameters["b"].tolist() == [-1.0, -1.0, -1.0]
    with offbeat.Client(server.address, in_flight=2) as other:
        other.pull()
        assert other.push_pull(gradient()) is None
        with pytest.raises(NonFiniteError):
            other.push_pull(gradient(float("nan")))
        assert len(other.flush()) == 1
        assert other.parameters["b"].tolist() == [-1.5, -1.5, -1.5]


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ({"w": np.zeros((2, 3), np.float32)}, "out has no parameter 'b' of shape .3,. and dtype float32"),
        ({**model(), "B": np.zeros(3, np.float32)}, "out has 'B', .* did you mean parameter 'b'"),
        (
            {**model(), "b": np.zeros(4, np.float32)},
            r"'b' has shape \(4,\) and dtype float32.*\(3,\).*float32",
        ),
        ({**model(), "b": np.zeros(3)}, r"'b' has shape \(3,\) and dtype float64.*\(3,\).*float32"),
    ],
)
def test_out_of_other_names_shapes_or_dtypes_is_refused_naming_both(client, out, said):
    with pytest.raises(ModelMismatchError, match=said):
        client.pull(out=out)


def test_out_that_overlaps_itself_is_refused(client):
    memory = np.zeros(9, np.float32)
    with pytest.raises(ConfigError, match="same memory"):
        client.pull(out={"w": memory[:6].reshape(2, 3), "b": memory[5:8]})


def test_out_of_foreign_byte_order_is_refused_instead_of_not_written(client):
    with pytest.raises(ConfigError, match=r"out\['b'\] is of foreign byte order"):
        client.pull(out={**model(), "b": np.full(3, -1, ">f4")})


# -- push


@pytest.mark.parametrize(
    "one",
    [
        np.ones((2, 3), np.float32),
        np.ones((3, 2), np.float32).T,
        np.ones((4, 6), np.float32)[::2, ::2],
        np.ones((2, 3), ">f4"),
        memoryview(np.ones((2, 3), np.float32)),
        torch.ones(2, 3),
        torch.ones(3, 2).T,
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.ones(2, 3, requires_grad=True) * 1.0,
    ],
    ids=["C", "F", "strided", "big endian", "memoryview", "tensor", "transposed", "Parameter", "in a graph"],
)
def test_gradient_may_be_whatever_has_a_buffer_or_dlpack_of_any_strides(client, one):
    before = client.pull()["w"]
    receipt = client.push({"w": one})
    assert receipt.applied
    assert client.pull()["w"].tolist() == (before - 0.5).tolist()


def test_what_is_missing_or_none_is_left_out(client):
    before = client.pull()
    client.push({"w": None, "b": np.ones(3, np.float32)})
    after = client.pull()
    assert after["w"].tolist() == before["w"].tolist()
    assert after["b"].tolist() == (before["b"] - 0.5).tolist()


def test_receipt_tells_what_became_of_the_push(client):
    client.pull()
    receipt = client.push(gradient(), samples=32)
    assert (receipt.version, receipt.staleness, receipt.weight, receipt.verdict) == (1, 0, 1.0, "admit")
    assert (receipt.applied, receipt.duplicate, receipt.reason) == (True, False, None)
    assert receipt.term >= 1
    assert client.status()["samples"] == 32


@pytest.mark.parametrize(
    ("push", "said"),
    [
        (
            {"W": np.zeros((2, 3), np.float32)},
            "'W', and the model has no such tensor; did you mean parameter 'w'",
        ),
        (
            {"w": np.zeros((3, 2), np.float32)},
            r"'w' has shape \(3, 2\) and dtype float32; .*\(2, 3\).*float32",
        ),
        ({"w": np.zeros((2, 3))}, r"'w' has shape \(2, 3\) and dtype float64; .*\(2, 3\).*float32"),
        ({"w": np.zeros((2, 3), np.float16)}, "dtype float16; .* dtype float32"),
    ],
)
def test_gradient_of_another_name_shape_or_dtype_is_refused_naming_both(client, push, said):
    client.pull()
    with pytest.raises(ModelMismatchError, match=said):
        client.push(push)
    assert client.status()["version"] == 0


@pytest.mark.parametrize("call", ["push", "push_pull", "init"])
def test_arrays_without_names_are_refused_with_what_is_wanted(client, call):
    client.pull()
    with pytest.raises(ConfigError, match=r"is a list: give a dict of arrays by the model's names"):
        getattr(client, call)([np.zeros((2, 3), np.float32)])
    assert client.status()["version"] == 0


def test_gradient_of_another_dtype_is_refused_with_the_cast(client):
    client.pull()
    with pytest.raises(
        ModelMismatchError, match=r"float64; .* dtype float32: cast it with \.astype\(np\.float32\)"
    ):
        client.push_pull({"w": np.zeros((2, 3))})


@pytest.mark.parametrize("push", [{}, {"w": None}])
def test_push_of_nothing_is_refused_in_words_for_those_without_torch_too(client, push):
    client.pull()
    with pytest.raises(ConfigError, match=r"without any gradient: give that of one parameter at least"):
        client.push(push)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gradient_that_is_not_finite_changes_nothing(client, bad):
    before = client.pull()
    push = gradient()
    push["b"][1] = bad
    with pytest.raises(NonFiniteError, match=r"'b'|\"b\""):
        client.push(push)
    after = client.pull()
    assert client.status()["version"] == 0
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert client.push(gradient()).applied


@pytest.mark.parametrize(
    "kind",
    [lambda: torch.ones(2, 3).to_sparse(), lambda: torch.ones(2, 3, device="meta"), lambda: [1.0, 2.0]],
)
def test_gradient_of_a_kind_that_no_tensor_can_be_is_refused_by_name(client, kind):
    client.pull()
    with pytest.raises(UnsupportedTensorError, match="'w'"):
        client.push({"w": kind()})


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, 2**32 + 1, 2**70])
def test_samples_are_a_count(client, samples):
    client.pull()
    with pytest.raises(ConfigError, match="samples is"):
        client.push(gradient(), samples=samples)


def test_rejection_is_a_receipt_and_moves_nothing(host):
    with (
        host.serving(model(), optimizer=optim.SGD(lr=0.5), max_staleness=1) as server,
        offbeat.Client(server.address) as fast,
        offbeat.Client(server.address) as slow,
    ):
        slow.pull()
        for _ in range(2):
            fast.pull()
            fast.push(gradient())
        before = fast.pull()
        receipt = slow.push(gradient())
        assert (receipt.verdict, receipt.reason, receipt.applied, receipt.staleness) == (
            "reject",
            "stale",
            False,
            2,
        )
        assert receipt.detail
        after = fast.pull()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert server.status()["version"] == 2
        slow.pull()
        assert slow.push(gradient()).applied


@pytest.mark.parametrize("in_flight", [1, 2])
def test_gradients_that_lie_in_each_other_s_parameters_are_pushed_as_they_were(host, in_flight):
    """The gradient of the product u·v: each is the other."""
    length = 2_000_000  # of one tensor roots come back long before the other has been sent
    model = {"u": np.full(length, 3, np.float32), "v": np.full(length, 5, np.float32)}
    with (
        host.serving(model, optimizer=optim.SGD(lr=1.0)) as server,
        offbeat.Client(server.address, in_flight=in_flight) as client,
    ):
        held = client.pull()
        client.push_pull({"u": held["v"], "v": held["u"]}, out=held)
        client.flush()
        found = client.pull()
        assert np.all(found["u"] == 3 - 5)
        assert np.all(found["v"] == 5 - 3)


def test_two_in_flight_answer_each_push_with_the_receipt_of_the_one_before(server):
    with offbeat.Client(server.address, in_flight=2) as client:
        out = client.pull()
        receipts = [client.push_pull(gradient(), out=out) for _ in range(4)]
        assert receipts[0] is None
        assert [r.version for r in receipts[1:]] == [1, 2, 3]
        (last,) = client.flush()
        assert last.version == 4
        assert client.pull()["b"].tolist() == [-2.0, -2.0, -2.0]


# -- dtypes


def test_bfloat16_is_pulled_into_ml_dtypes_and_named_in_dtypes(host):
    with (
        host.serving({"h": np.ones(3, ml_dtypes.bfloat16)}, optimizer=optim.SGD(lr=0.5)) as server,
        offbeat.Client(server.address) as client,
    ):
        pulled = client.pull()
        assert pulled["h"].dtype == ml_dtypes.bfloat16
        assert client.dtypes == {"h": "bfloat16"}
        assert client.shapes == {"h": (3,)}
        client.push({"h": np.ones(3, ml_dtypes.bfloat16)})
        client.push({"h": torch.ones(3, dtype=torch.bfloat16)})
        assert client.pull(out=pulled)["h"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_held_in_float32(host, dtype):
    small = float(ml_dtypes.finfo(dtype).eps) / 8  # of 1; added to 1 in this dtype it would be lost each time
    with (
        host.serving({"h": np.ones(2, dtype)}, optimizer=optim.SGD(lr=1.0)) as server,
        offbeat.Client(server.address) as client,
    ):
        client.pull()
        for _ in range(32):
            client.push({"h": np.full(2, -small, dtype)})
        assert client.pull()["h"].tolist() == [1 + 32 * small] * 2


def test_bfloat16_without_ml_dtypes_is_pulled_as_uint16(host, run_python):
    with host.serving({"h": np.ones(2, ml_dtypes.bfloat16)}, optimizer=optim.SGD(lr=0.5)) as server:
        told = run_python(
            "import sys\n"
            "sys.modules['ml_dtypes'] = None\n"
            "import numpy as np, offbeat\n"
            "with offbeat.Client(sys.argv[1]) as client:\n"
            "    h = client.pull()['h']\n"
            "    print(h.dtype, h.tolist(), client.dtypes['h'])\n"
            "    client.push({'h': h})\n"
            "    print(client.pull()['h'].tolist())\n",
            server.address,
        )
    assert told.split("\n")[:2] == [f"uint16 [{0x3F80}, {0x3F80}] bfloat16", f"[{0x3F00}, {0x3F00}]"]


def test_buffers_are_pushed_as_values_and_added_as_changes(host):
    given = model(n=np.int64(10), mean=np.zeros(2, np.float32))
    with (
        host.serving(given, optimizer=optim.SGD(lr=0.5)) as server,
        offbeat.Client(server.address) as one,
        offbeat.Client(server.address) as two,
    ):
        one.pull(), two.pull()
        one.push({**gradient(), "n": np.int64(13)})
        two.push({**gradient(), "n": np.int64(15)})
        assert one.pull()["n"] == 18


# -- who brings the model


def test_client_brings_the_model_where_the_server_has_none(host):
    with host.serving() as server, offbeat.Client(server.address) as client:
        with pytest.raises(StateError, match=r"no model yet.*client\.init"):
            client.push(gradient())
        assert client.init(model(), optimizer=optim.SGD(lr=0.5)) is True
        assert client.pull()["w"].tolist() == model()["w"].tolist()
        assert client.push(gradient()).applied
        with offbeat.Client(server.address) as second:
            assert second.init({name: a + 1 for name, a in model().items()}) is False
            assert second.pull()["b"].tolist() == [-0.5, -0.5, -0.5]


def test_client_waits_for_the_model_that_another_brings(host):
    with host.serving() as server, offbeat.Client(server.address) as waiting:
        pulled = []
        thread = threading.Thread(target=lambda: pulled.append(waiting.pull()))
        thread.start()
        with offbeat.Client(server.address) as bringing:
            bringing.init(model())
        thread.join(20)
        assert pulled[0]["w"].tolist() == model()["w"].tolist()


def test_client_that_waits_for_a_model_says_so(host):
    code = "import sys, offbeat; print(*offbeat.Client(sys.argv[1]).pull())"
    with (
        host.serving() as server,
        offbeat.Client(server.address) as other,
        command("-c", code, server.address, program=(sys.executable,)) as waiting,
    ):
        assert "has no model yet" in waiting.line("waits for another to bring one")
        other.init(model())
        assert waiting.ends() == 0, waiting.said
        assert waiting.out == ["w b\n"]


def test_another_model_is_refused_naming_the_first_tensor_that_differs(client):
    with pytest.raises(ModelMismatchError, match=r"(?s)'?b'?.*float32 \[3\].*float32 \[4\]"):
        client.init({"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)})


# -- optimizer


def test_push_before_any_optimizer_is_set_is_refused(host):
    with host.serving(model()) as server, offbeat.Client(server.address) as client:
        client.pull()
        receipt = client.push(gradient())
        assert (receipt.verdict, receipt.reason) == ("reject", "no_optimizer")
        assert client.status()["version"] == 0


def test_first_workers_spec_sets_the_servers(host):
    with (
        host.serving(model()) as server,
        offbeat.Client(server.address) as one,
        offbeat.Client(server.address) as two,
    ):
        one.set_optimizer(optim.SGD(lr=0.25))
        two.set_optimizer(optim.SGD(lr=0.25, momentum=0.0, dampening=0))
        two.pull()
        two.push(gradient())
        assert one.pull()["b"].tolist() == [-0.25, -0.25, -0.25]


def test_another_learning_rate_is_refused_with_what_to_use(client):
    with pytest.raises(ConfigError, match=r"0\.5.*0\.1.*server\.set_lr or lr_schedule"):
        client.set_optimizer(optim.SGD(lr=0.1))
    client.set_optimizer(optim.SGD(lr=0.5))


def test_another_optimizer_is_refused_with_both_named(client):
    with pytest.raises(ConfigError, match=r"SGD.*Adam.*server\.set_optimizer"):
        client.set_optimizer(optim.Adam(lr=0.5))


# -- the session


def test_address_and_token_come_from_the_environment(host, monkeypatch):
    with host.serving(model(), token=TOKEN, host="127.0.0.1") as server:
        monkeypatch.setenv("OFFBEAT_SERVER", server.address)
        monkeypatch.setenv("OFFBEAT_TOKEN", TOKEN)
        with offbeat.Client() as client:
            assert client.pull()["b"].tolist() == [0, 0, 0]


def test_no_address_at_all_says_where_to_give_one():
    with pytest.raises(ConfigError, match="OFFBEAT_SERVER"):
        offbeat.Client()


@pytest.mark.parametrize("token", [None, "wrong"])
def test_wrong_token_is_refused_at_once(host, token):
    with (
        host.serving(model(), token=TOKEN, host="127.0.0.1") as server,
        pytest.raises(AuthenticationError, match="token") as refused,
    ):
        offbeat.Client(server.address, token=token)
    assert isinstance(refused.value, PermissionError)


def test_token_of_a_server_that_has_none_is_refused(server):
    with pytest.raises(AuthenticationError, match="token"):
        offbeat.Client(server.address, token=TOKEN)


def test_server_that_cannot_be_reached_is_told_with_what_was_tried():
    with pytest.raises(
        ConnectError, match=r"(?s)127\.0\.0\.1:1\b.*attempt.* s\b.*refused.*Is the server started"
    ) as failed:
        offbeat.Client("127.0.0.1:1", connect_timeout_s=0.5)
    assert isinstance(failed.value, ConnectionError)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "127.0.0.1:x", ":5000"])
def test_address_without_host_or_port_is_refused(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        offbeat.Client(address, connect_timeout_s=0.2)


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"unknown keyword of Client 'in_fligth'; did you mean 'in_flight'\?"
    ):
        offbeat.Client("127.0.0.1:1", in_fligth=2)


@pytest.mark.parametrize("in_flight", [0, 3, "1"])
def test_in_flight_is_one_or_two(in_flight):
    with pytest.raises(ConfigError, match="in_flight is"):
        offbeat.Client("127.0.0.1:1", in_flight=in_flight)


@pytest.mark.parametrize("timeout_s", [-1, "x", "5", None, float("nan"), True, 10**400])
def test_time_to_connect_is_a_number_of_seconds(timeout_s):
    with pytest.raises(ConfigError) as caught:
        offbeat.Client(connect_timeout_s=timeout_s, in_flight=3)
    for said in ("OFFBEAT_SERVER", "in_flight is 3", f"connect_timeout_s is {timeout_s!r}"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"address": 5000}, 'address is 5000: give "HOST:PORT", a string'),
        ({"worker_id": 3}, "worker_id is 3: give a string, or None"),
        ({"token": 31337}, "token is of type int: give a string, or None"),
        ({"in_flight": 2.0}, "in_flight is 2.0: give 1 or 2"),
    ],
)
def test_setting_of_another_type_is_refused_by_name_and_no_token_is_shown(setting, said):
    with pytest.raises(ConfigError) as caught:
        offbeat.Client(**({"address": "127.0.0.1:1"} | setting))
    assert str(caught.value) == said


def test_worker_id_is_the_users_or_the_servers(server):
    with offbeat.Client(server.address, worker_id="mine") as named, offbeat.Client(server.address) as unnamed:
        assert named.worker_id == "mine"
        assert unnamed.worker_id not in ("", "mine")
        assert named.run_id == unnamed.run_id


def test_closed_client_raises_and_closing_twice_is_fine(server):
    client = offbeat.Client(server.address)
    client.close()
    client.close()
    for use in (client.pull, client.flush, client.status, lambda: client.push({}), lambda: client.worker_id):
        with pytest.raises(ClosedError):
            use()
    assert "closed" in repr(client)


def test_a_client_that_goes_out_of_scope_finishes(server):
    def work():
        client = offbeat.Client(server.address, worker_id="gone")
        client.pull()
        assert client.push(gradient()).applied

    work()
    assert [(w["id"], w["state"]) for w in server.status()["workers"]] == [("gone", "finished")]


def test_a_client_that_could_not_be_made_goes_without_a_word():
    with pytest.raises(ConfigError):
        offbeat.Client("127.0.0.1:1", adress=1)
    gc.collect()


def test_with_statement_says_finished_or_left(server):
    def state(worker):
        return next(w["state"] for w in server.status()["workers"] if w["id"] == worker)

    with offbeat.Client(server.address, worker_id="good"):
        assert state("good") == "joined"
    with pytest.raises(ZeroDivisionError), offbeat.Client(server.address, worker_id="bad"):
        _ = 1 / 0
    assert (state("good"), state("bad")) == ("finished", "left")


@pytest.mark.parametrize(("code", "state"), [(None, "finished"), (0, "finished"), (3, "left")])
def test_sys_exit_without_failure_in_a_with_statement_is_no_failure(server, code, state):
    with pytest.raises(SystemExit), offbeat.Client(server.address, worker_id="it"):
        sys.exit(code)
    assert [w["state"] for w in server.status()["workers"]] == [state]


def test_two_threads_in_one_client_are_told_so(host):
    with host.serving() as server, offbeat.Client(server.address) as client:

        def wait():
            with suppress(StateError):  # the other thread was first
                client.pull()

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        while all(thread.is_alive() for thread in threads):
            threads[0].join(0.01)  # one of them is refused, the other waits for a model
        with pytest.raises(StateError, match="another thread"):
            client.status()
        assert repr(client).startswith("<offbeat.Client ")
        with offbeat.Client(server.address) as other:
            other.init(model())
        for thread in threads:
            thread.join(20)
        assert client.pull()["w"].tolist() == model()["w"].tolist()


def test_progress_that_is_no_number_is_refused(server):
    with offbeat.Client(server.address) as client:
        client.set_progress(0)
        for wrong in (-1, 1.5, "3", None):
            with pytest.raises(ConfigError, match=r"steps is .*: give a whole number, 0 or more"):
                client.set_progress(wrong)
