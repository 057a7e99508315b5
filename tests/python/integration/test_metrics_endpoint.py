"""`GET /metrics` of a real server: what it tells, whom it refuses, and what a bad client costs."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import offbeat
from offbeat.errors import AddressInUseError, ConfigError
from offbeat.tracking.endpoint import DEADLINE_S, MAX_CONNECTIONS, MetricsEndpoint
from support.command import command
from support.ports import free_port
from support.waiting import wait_for

ZEROS = {"w": np.zeros(4, np.float32)}
ONES = {"w": np.ones(4, np.float32)}
SGD = offbeat.optim.SGD(lr=0.5)


@pytest.fixture
def server(serve):
    return serve(ZEROS, optimizer=SGD, metrics_port=0)


def ask(address, path="/metrics", method="GET", **headers):
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read().decode()
    finally:
        connection.close()


def scrape(address):
    status, content_type, text = ask(address)
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def connect(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def is_free(port):
    """Tell whether nobody listens there, nor has a connection from there for a moment."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_scrape_tells_how_the_run_goes(server):
    assert scrape(server.metrics_address)["offbeat_model_version",] == 0
    with offbeat.Client(server.address, worker_id="amy") as client:
        client.pull()
        client.push(ONES, samples=8)
        wait_for(lambda: scrape(server.metrics_address)["offbeat_model_version",] == 1)
        assert scrape(server.metrics_address)["offbeat_worker_samples_total", "amy"] == 8


def test_only_get_of_metrics_is_answered_and_nothing_is_told_elsewhere(server):
    address = server.metrics_address
    assert ask(address, "/metrics?x=1")[0] == 200
    for path in ("/", "/metric", "/metrics/", "/../metrics"):
        status, _, text = ask(address, path)
        assert (status, text) == (404, "there is only /metrics\n")
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
        assert ask(address, method=method)[0] == 501


def test_a_page_whose_name_was_bent_to_this_machine_is_refused(server):
    address = server.metrics_address
    assert ask(address, Host="evil.example:80")[0] == 403
    for host in ("localhost", "localhost:9", "127.0.0.1", "127.8.8.8:80", "[::1]:80"):
        assert ask(address, Host=host)[0] == 200
    for host in ("127.0.0.1.evil.example", "[::1", "", "10.0.0.1"):
        assert ask(address, Host=host)[0] == 403


def test_it_listens_on_this_machine_only_unless_told_otherwise(serve):
    assert serve(ZEROS, metrics_port=0).metrics_address.startswith("127.0.0.1:")
    assert serve(ZEROS).metrics_address is None
    everywhere = serve(ZEROS, metrics_port=0, metrics_host="0.0.0.0", insecure=True)  # noqa: S104
    port = everywhere.metrics_address.rpartition(":")[2]
    assert ask(f"127.0.0.1:{port}", Host="any.example")[0] == 200


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"metrics_port": -1}, "metrics_port is -1: it is 0"),
        ({"metrics_port": True}, "metrics_port is True"),
        ({"metrics_port": 70_000}, "metrics_port is 70000"),
        ({"metrics_port": 0, "metrics_host": "0.0.0.0"}, "metrics_host is '0.0.0.0'.*insecure=True"),  # noqa: S104
        ({"metrics_port": 0, "metrics_host": 3}, "metrics_host is 3: give an address"),
        ({"metrics_host": "::1"}, "metrics_host is '::1', and there is no metrics_port"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_all_others(keywords, said):
    with pytest.raises(ConfigError, match=rf"linger_s is -1.*{said}|{said}.*linger_s is -1"):
        offbeat.ParameterServer(ZEROS, linger_s=-1, **keywords)


def test_a_port_that_is_taken_is_refused_before_anything_is_started(serve):
    port = free_port()
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        server = offbeat.ParameterServer(ZEROS, port=port, metrics_port=taken.getsockname()[1])
        with pytest.raises(AddressInUseError, match=r"metrics_port \d+ on"):
            server.start()
        wait_for(lambda: is_free(port))
    with server:  # the other one has let go
        assert scrape(server.metrics_address)["offbeat_model_version",] == 0


def test_a_host_that_is_none_of_this_machine_s_is_refused_by_name():
    server = offbeat.ParameterServer(ZEROS, metrics_port=0, metrics_host="192.0.2.1", insecure=True)
    with pytest.raises(ConfigError, match=r"metrics_port 0 on 192\.0\.2\.1 cannot be listened on"):
        server.start()


def test_a_server_that_does_not_start_leaves_no_port_of_metrics_behind(serve):
    other, port = serve(ZEROS), free_port()
    server = offbeat.ParameterServer(ZEROS, port=int(other.address.rpartition(":")[2]), metrics_port=port)
    with pytest.raises(AddressInUseError):
        server.start()
    wait_for(lambda: is_free(port))


def test_it_ends_with_the_server_at_once_whoever_is_connected(serve):
    server = serve(ZEROS, metrics_port=0)
    address = server.metrics_address
    with connect(address) as silent, connect(address) as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost: lo")
        scrape(address)
        begin = time.monotonic()
        server.stop()
        assert time.monotonic() - begin < DEADLINE_S / 2
        assert silent.recv(10) == b""
        assert half.recv(1000) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(address)


def test_clients_that_say_or_read_nothing_hold_up_nobody_and_end_by_the_deadline():
    read = threading.Event()

    def answer():
        read.set()
        return b"x" * (64 << 20)  # more than any socket's buffers take

    endpoint = MetricsEndpoint(answer, content_type="text/plain", host="127.0.0.1", port=0, deadline_s=1.0)
    endpoint.start()
    with ExitStack() as stack:
        stack.callback(endpoint.close)
        silent = stack.enter_context(connect(endpoint.address))
        deaf = stack.enter_context(connect(endpoint.address))
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        dripping = stack.enter_context(connect(endpoint.address))
        assert read.wait(20)
        assert ask(endpoint.address, "/elsewhere")[0] == 404, "it is heard beside them"
        dripping.sendall(b"GET /met")
        assert silent.recv(10) == b"", "cut off"
        assert dripping.recv(10) == b""
        wait_for(lambda: not endpoint._threads)  # the deaf one's, too


def test_who_holds_all_places_keeps_nobody_out_and_there_are_only_so_many():
    endpoint = MetricsEndpoint(lambda: b"well", content_type="text/plain", host="127.0.0.1", port=0)
    endpoint.start()
    with ExitStack() as stack:
        stack.callback(endpoint.close)
        idle = [stack.enter_context(connect(endpoint.address)) for _ in range(MAX_CONNECTIONS)]
        wait_for(lambda: len(endpoint._threads) == MAX_CONNECTIONS)
        for number in range(3):
            assert ask(endpoint.address)[2] == "well"
            assert len(endpoint._threads) <= MAX_CONNECTIONS
            wait_for(lambda: len(endpoint._threads) < MAX_CONNECTIONS)  # who has asked has left its place
            late = stack.enter_context(connect(endpoint.address))
            wait_for(lambda: len(endpoint._threads) == MAX_CONNECTIONS)
            assert idle[number].recv(10) == b"", "who has had its place for longest gives it up"
        late.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert late.recv(100).startswith(b"HTTP/1.0 200")


def test_where_nobody_can_be_cut_off_a_newcomer_is_closed_and_others_are_answered_later():
    go_on, asked = threading.Event(), threading.Semaphore(0)

    def answer():
        asked.release()
        assert go_on.wait(20)
        return b"well"

    endpoint = MetricsEndpoint(answer, content_type="text/plain", host="127.0.0.1", port=0)
    endpoint.start()
    with ExitStack() as stack:
        stack.callback(endpoint.close)
        stack.callback(go_on.set)
        for _ in range(MAX_CONNECTIONS):  # all wait for one answer, which no cut ends
            stack.enter_context(connect(endpoint.address)).sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.acquire(timeout=20)
        wait_for(lambda: len(endpoint._threads) == MAX_CONNECTIONS)
        assert stack.enter_context(connect(endpoint.address)).recv(10) == b""
        assert len(endpoint._threads) == MAX_CONNECTIONS
        go_on.set()
        wait_for(lambda: not endpoint._threads)
        assert ask(endpoint.address)[2] == "well"


def test_whoever_asks_often_is_answered_from_what_was_read_last():
    num_read = 0

    def answer():
        nonlocal num_read
        num_read += 1
        return b"%d" % num_read

    endpoint = MetricsEndpoint(answer, content_type="text/plain", host="127.0.0.1", port=0)
    endpoint._kept._fresh_s = 1000
    endpoint.start()
    try:
        assert [ask(endpoint.address)[2] for _ in range(5)] == ["1"] * 5
    finally:
        endpoint.close()


def test_what_cannot_be_told_is_said_and_logged_and_the_next_one_is_tried(caplog):
    errors = [ZeroDivisionError("in the status")]

    def answer():
        if errors:
            raise errors.pop()
        return b"well"

    endpoint = MetricsEndpoint(answer, content_type="text/plain", host="127.0.0.1", port=0)
    endpoint.start()
    try:
        assert ask(endpoint.address)[0] == 503
        assert ask(endpoint.address)[2] == "well"
    finally:
        endpoint.close()
    assert "ZeroDivisionError" in caplog.text


def test_it_listens_on_ipv6_too():
    endpoint = MetricsEndpoint(lambda: b"well", content_type="text/plain", host="::1", port=0)
    endpoint.start()
    try:
        assert re.fullmatch(r"\[::1\]:\d+", endpoint.address)
        assert ask(endpoint.address)[2] == "well"
    finally:
        endpoint.close()


FORKS_AND_IS_KILLED = """
import os, signal, sys, offbeat
server = offbeat.ParameterServer(metrics_port=0)
server.start()
print(server.metrics_address, flush=True)
if os.fork() == 0:
    sys.stdin.read()  # until the test has looked
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_keeps_no_port_of_metrics_open():
    with subprocess.Popen(
        [sys.executable, "-c", FORKS_AND_IS_KILLED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        address = parent.stdout.readline().strip()
        assert parent.wait(40) == -signal.SIGKILL

        def is_refused():  # once the child has been made ready
            try:
                connect(address).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_for(is_refused)
        parent.stdin.close()
        assert parent.stdout.read() == "", "the child has ended"


def test_a_process_that_never_stops_its_server_ends_all_the_same(run_python):
    said = run_python(
        "import http.client, offbeat\n"
        "server = offbeat.ParameterServer(metrics_port=0)\n"
        "server.start()\n"
        "held = http.client.HTTPConnection(server.metrics_address)\n"
        "held.request('GET', '/metrics')\n"
        "print(held.getresponse().status)",
        timeout_s=30,
    )
    assert said.strip() == "200"


def test_a_server_that_nobody_holds_takes_its_endpoint_along(run_python):
    said = run_python(
        "import gc, socket, offbeat\n"
        "server = offbeat.ParameterServer(metrics_port=0)\n"
        "server.start()\n"
        "host, port = server.metrics_address.split(':')\n"
        "del server; gc.collect()\n"
        "try: socket.create_connection((host, int(port)))\n"
        "except ConnectionRefusedError: print('refused')"
    )
    assert said.strip() == "refused"


def test_without_prometheus_client_it_is_said_what_to_install(run_python):
    said = run_python(
        "import sys\n"
        "sys.modules['prometheus_client'] = None\n"
        "import offbeat\n"
        "try: offbeat.ParameterServer(metrics_port=0, linger_s=-1)\n"
        "except offbeat.errors.ConfigError as error: print(error)\n"
        "from offbeat.cli.main import main\n"
        "print(main(['server', '--port', '0', '--metrics-port', '0']))"
    )
    assert "linger_s is -1" in said
    assert "pip install prometheus-client" in said
    assert "offbeat[metrics]" in said
    assert said.splitlines()[-1] == "12"


def test_the_command_line_s_server_says_where_its_metrics_are_and_needs_no_torch():
    arguments = ["server", "--port", "0", "--metrics-port", "0"]
    with command(*arguments) as server:
        url = server.line("Metrics are at").strip()
        match = re.fullmatch(r"Metrics are at http://(127\.0\.0\.1:\d+)/metrics\.", url)
        found = scrape(match[1])
        assert found["offbeat_run_state", "waiting_for_model"] == 1
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text("utf-8")
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
