"""Every class that Rust raises exists, and each is met by a test, here or where the table says."""

import re
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import offbeat
from offbeat import _offbeat, errors, optim
from offbeat.errors import FencedError, OffbeatTimeoutError, ProtocolError

MAP = Path(__file__).parents[3] / "rust/py/src/error.rs"
MODEL = {"w": np.zeros(3, np.float32)}

# Class -> the test that meets it.
MET = {
    "AddressInUseError": "test_server.test_port_in_use_is_told_with_what_to_do",
    "AuthenticationError": "test_client.test_wrong_token_is_refused_at_once",
    "CheckpointError": "test_checkpoints.test_a_directory_that_cannot_be_used_is_told",
    "ClosedError": "test_client.test_closed_client_raises_and_closing_twice_is_fine",
    "ConfigError": "test_client.test_another_optimizer_is_refused_with_both_named",
    "ConnectError": "test_client.test_server_that_cannot_be_reached_is_told_with_what_was_tried",
    "ConnectionLostError": "test_server.test_all_lost_and_none_finished_raises_with_the_causes",
    "FencedError": "test_error_map.test_worker_that_was_replaced_is_fenced",
    "ForkedError": "test_lifetime.test_fork_is_allowed_and_using_what_was_inherited_raises",
    "ModelMismatchError": "test_client.test_another_model_is_refused_naming_the_first_tensor_that_differs",
    "NonFiniteError": "test_client.test_gradient_that_is_not_finite_changes_nothing",
    "OffbeatTimeoutError": "test_error_map.test_server_that_does_not_answer_is_a_timeout",
    "ProtocolError": "test_error_map.test_something_else_that_listens_there_is_a_protocol_error",
    "ServerClosedError": "test_server.test_stop_tells_the_workers",
    "StateError": "test_client.test_two_threads_in_one_client_are_told_so",
}


def test_every_class_that_rust_raises_exists_and_is_met_by_a_test():
    raised = set(re.findall(r'=> "(\w+Error)"', MAP.read_text()))
    assert len(raised) > 10
    assert all(issubclass(getattr(errors, name), errors.OffbeatError) for name in raised)
    assert raised == MET.keys()
    for where in MET.values():
        file, _, test = where.partition(".")
        assert f"def {test}(" in (Path(__file__).parent / f"{file}.py").read_text(), where


def test_worker_that_was_replaced_is_fenced():
    with (
        offbeat.ParameterServer(MODEL, optimizer=optim.SGD(lr=1.0)) as server,
        offbeat.Client(server.address, worker_id="twice") as first,
    ):
        first.pull()
        with offbeat.Client(server.address, worker_id="twice") as second:
            second.pull()
            with pytest.raises(FencedError, match=r"replaced|taken|another"):
                first.push(MODEL)
            assert second.push(MODEL).applied


@contextmanager
def listening(answer):
    """Listen, and answer whoever connects with these bytes; with None, with nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = []

        def serve():
            try:
                while True:
                    taken.append(listener.accept()[0])
                    if answer is not None:
                        taken[-1].sendall(answer)
            except OSError:
                pass  # closed: the test is over

        thread = threading.Thread(target=serve)
        thread.start()
        yield "{}:{}".format(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        for connection in taken:
            connection.close()


def test_server_that_does_not_answer_is_a_timeout():
    with (
        listening(None) as address,
        pytest.raises(
            OffbeatTimeoutError, match=r"has not answered in [0-9.]+ s .*look at its process"
        ) as late,
    ):
        offbeat.Client(address, connect_timeout_s=0.5)
    assert isinstance(late.value, TimeoutError)


def test_something_else_that_listens_there_is_a_protocol_error():
    with (
        listening(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)) as address,
        pytest.raises(ProtocolError, match=address) as wrong,
    ):
        offbeat.Client(address, connect_timeout_s=5)
    assert isinstance(wrong.value, ConnectionError)


def test_status_can_be_asked_for_without_joining():
    with offbeat.ParameterServer(MODEL) as server:
        status = _offbeat.fetch_status(server.address, None, 5.0)
        assert '"run_id"' in status
        assert server.status()["workers"] == []


def test_build_info_says_what_a_bug_report_needs():
    info = _offbeat.build_info()
    assert info.keys() >= {"version", "profile", "os", "arch", "protocol"}
