"""What the server has to say, in `logging` where that is set up, and never lost at the end."""

import logging
import socket
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

import offbeat
from offbeat import log as offbeat_log
from offbeat import optim
from support.waiting import wait_for

MODEL = {"w": np.zeros(3, np.float32)}


def test_events_of_the_rust_server_are_records_of_logging(caplog):
    with (
        caplog.at_level(logging.INFO, logger="offbeat"),
        offbeat.ParameterServer(MODEL) as server,
        offbeat.Client(server.address, worker_id="mine"),
    ):
        pass
    joined = [r for r in caplog.records if "joined" in r.getMessage()]
    assert joined
    assert joined[0].name.startswith("offbeat.net.server")
    assert joined[0].levelno == logging.INFO
    assert "worker=mine" in joined[0].getMessage()


class Unlocked(logging.Handler):
    """One in which a thread may be while another is."""

    def handle(self, record):
        self.emit(record)


class Slow(Unlocked):
    """Has a record of the log's thread until the main thread is closing something, and half a second more."""

    def __init__(self):
        super().__init__()
        self.has_one, self.messages = threading.Event(), []

    def emit(self, record):
        if threading.current_thread().name == "offbeat-log":
            self.has_one.set()
            wait_for(lambda: "release" in calls_of(threading.main_thread()))
            threading.Event().wait(0.5)
        self.messages.append(record.getMessage())


def calls_of(thread):
    frame, names = sys._current_frames()[thread.ident], []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_what_the_logs_thread_has_taken_is_logged_when_a_call_returns_that_closes_something(caplog):
    slow, log = Slow(), logging.getLogger("offbeat")
    log.addHandler(slow)
    try:
        with (
            caplog.at_level(logging.INFO, logger="offbeat"),
            offbeat.ParameterServer(MODEL, host="127.0.0.1"),
        ):
            assert slow.has_one.wait(20)
        assert len(slow.messages) > 1, slow.messages
        assert "listens" in "".join(slow.messages)
    finally:
        log.removeHandler(slow)


class Waiting(Unlocked):
    """Has the first record of the log's thread until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.has_one, self.may_go, self.messages = threading.Event(), threading.Event(), []

    def emit(self, record):
        if threading.current_thread().name == "offbeat-log" and not self.has_one.is_set():
            self.has_one.set()
            self.may_go.wait(20)
        self.messages.append(record.getMessage())


@contextmanager
def handled(by):
    log = logging.getLogger("offbeat")
    log.addHandler(by)
    try:
        yield by
    finally:
        if isinstance(by, Waiting):
            by.may_go.set()
        log.removeHandler(by)


def test_a_handler_may_close_something_and_what_that_had_to_log_comes_in_its_order(caplog):
    class Closing(Unlocked):
        def __init__(self):
            super().__init__()
            self.messages = []

        def emit(self, record):
            self.messages.append(record.getMessage())
            if "worker=first" in self.messages[-1] and "joined" in self.messages[-1]:
                second.close()
                self.messages.append("second is closed")
                closed.set()

    closed = threading.Event()
    with caplog.at_level(logging.INFO, logger="offbeat"), offbeat.ParameterServer(MODEL) as server:
        second = offbeat.Client(server.address, worker_id="second")
        with handled(Closing()) as closing:
            offbeat.Client(server.address, worker_id="first").close()
            assert closed.wait(20)
    told = [text for text in closing.messages if "first" in text or "second" in text]
    at = {text: number for number, text in enumerate(told)}
    assert len(at) == len(told), told
    after = {
        what: next(n for text, n in at.items() if what in text)
        for what in ("joined worker=first", "finished worker=second")
    }
    assert after["joined worker=first"] < after["finished worker=second"] < at["second is closed"]


def test_who_closes_does_not_wait_for_ever_for_a_handler_and_what_it_leaves_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(offbeat_log, "PATIENCE_S", 0.5)
    with caplog.at_level(logging.INFO, logger="offbeat"), handled(Waiting()) as waiting:
        with offbeat.ParameterServer(MODEL) as server:
            assert waiting.has_one.wait(20)
            since = time.monotonic()
            for number in range(20):
                offbeat.Client(server.address, worker_id=f"client-{number}").close()
        assert not [text for text in waiting.messages if "client-" in text], (
            "it waits still, and nobody for it"
        )
        assert time.monotonic() - since < 20 * 0.5, "nor has each waited anew"
        waiting.may_go.set()
        wait_for(lambda: any("finished worker=client-19" in text for text in waiting.messages))


@pytest.mark.parametrize(("held", "given"), [("right", "wrong"), (None, "one too many"), ("right", None)])
def test_a_token_that_is_not_the_servers_is_named_in_its_log_with_the_address(caplog, held, given):
    def refused():
        return [r.getMessage() for r in list(caplog.records) if "did not get in" in r.getMessage()]

    with (
        caplog.at_level(logging.WARNING, logger="offbeat"),
        offbeat.ParameterServer(MODEL, token=held, host="127.0.0.1") as server,
    ):
        with pytest.raises(offbeat.errors.AuthenticationError):
            offbeat.Client(server.address, token=given)
        wait_for(refused)
    (said,) = refused()
    assert "peer=127.0.0.1:" in said
    assert "token" in said.split("error=")[1]


def test_a_flood_hides_no_wrong_token_and_is_counted_where_the_server_stops_in_it(caplog):
    flood, told, word, wrong = 27, 20, "right, and long enough", "wrong"

    def refused(of=""):
        said = [r.getMessage() for r in list(caplog.records)]
        return [text for text in said if "a connection did not get in" in text and of in text]

    with (
        caplog.at_level(logging.WARNING, logger="offbeat"),
        offbeat.ParameterServer(MODEL, token=word, host="127.0.0.1") as server,
    ):
        host, _, port = server.address.rpartition(":")
        for _ in range(flood):
            with socket.create_connection((host, int(port)), timeout=20) as scan:
                scan.sendall(b"GET / HTTP/1.1\r\n\r\n")
                scan.settimeout(20)
                assert scan.recv(1) == b""  # it is refused before the next one comes
        wait_for(lambda: len(refused("HTTP")) == told)
        with pytest.raises(offbeat.errors.AuthenticationError):
            offbeat.Client(server.address, token=wrong)
        wait_for(lambda: refused("token"))
        assert not [r for r in caplog.records if "more connections" in r.getMessage()]
    assert not refused("GET"), "what a stranger sends is not repeated"
    assert ["are counted" in text for text in refused("HTTP")] == [False] * (told - 1) + [True]
    (more,) = [r.getMessage() for r in caplog.records if "more connections did not get in" in r.getMessage()]
    assert f"connections={flood - told} " in more
    assert "not what a worker says" in more


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is no Offbeat frame: it looks like SSH"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "is no Offbeat frame: it looks like TLS"),
        (b"ERR worker=forged", "is no Offbeat frame"),
    ],
)
def test_what_a_stranger_sends_is_told_by_its_kind_and_not_repeated(caplog, sent, said):
    with (
        caplog.at_level(logging.WARNING, logger="offbeat"),
        offbeat.ParameterServer(MODEL, host="127.0.0.1") as server,
    ):
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(sent)
            assert stranger.recv(1) == b""
        wait_for(lambda: [r for r in caplog.records if "did not get in" in r.getMessage()])
    (told,) = [r.getMessage() for r in caplog.records if "did not get in" in r.getMessage()]
    assert said in told
    assert not any(word in told for word in ("SSH-", "ERR", "begins with", "\\x16"))


def test_waiting_for_nobody_is_announced(caplog, run_python):
    with (
        caplog.at_level(logging.INFO, logger="offbeat"),
        offbeat.ParameterServer(MODEL, linger_s=0.3, rejoin_grace_s=5) as server,
    ):
        offbeat.Client(server.address).close()
        run_python(
            "import subprocess, sys\n"
            "kill = 'import os, sys, offbeat; c = offbeat.Client(sys.argv[1]); os.kill(os.getpid(), 9)'\n"
            "subprocess.run([sys.executable, '-c', kill, sys.argv[1]])\n",
            server.address,
        )
        assert server.wait_for_workers(2)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    (lost,) = [
        i
        for i, text in enumerate(said)
        if "1 lost: waiting up to 5 s for them, then 0.3 s for anybody" in text
    ]
    (gone,) = [
        i
        for i, text in enumerate(said)
        if text.startswith("all workers have gone: the wait is over in 0.3 s")
    ]
    assert lost < gone


def test_level_of_the_logger_is_obeyed(caplog):
    with (
        caplog.at_level(logging.ERROR, logger="offbeat"),
        offbeat.ParameterServer(MODEL) as server,
        offbeat.Client(server.address),
    ):
        pass
    assert not [r for r in caplog.records if r.levelno < logging.ERROR]


def test_a_filter_that_raises_costs_one_record_and_not_the_log(caplog, capsys):
    def failing(record):
        if "worker=first" in record.getMessage():
            raise ZeroDivisionError
        return True

    def joined(worker):
        return any(f"joined worker={worker}" in r.getMessage() for r in list(caplog.records))

    caplog.handler.addFilter(failing)
    try:
        with caplog.at_level(logging.INFO, logger="offbeat"), offbeat.ParameterServer(MODEL) as server:
            for worker in ("first", "second"):
                offbeat.Client(server.address, worker_id=worker).close()
            wait_for(lambda: joined("second"))
    finally:
        caplog.handler.removeFilter(failing)
    assert not joined("first")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_start_line_goes_to_stderr_where_logging_is_not_set_up(run_python, capfd):
    run_python(
        "import subprocess, sys\n"
        "code = 'import offbeat\\nwith offbeat.ParameterServer(): pass'\n"
        "done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)\n"
        "assert done.stdout == '', done.stdout\n"
        "(line,) = done.stderr.splitlines()\n"
        "assert line.startswith('parameter server on 127.0.0.1:'), line\n"
    )


def test_a_record_is_of_the_module_that_has_something_to_say(caplog, tmp_path):
    with caplog.at_level(logging.DEBUG, logger="offbeat"):
        offbeat_log.debug("%d", 1)
        offbeat_log.info("2")
        offbeat_log.warn("%d", 3)
        offbeat_log.announce("4")
    assert [record.getMessage() for record in caplog.records] == ["1", "2", "3", "4"]
    assert {record.module for record in caplog.records} == {"test_log"}


def test_a_warning_of_python_s_says_from_whom_it_is_where_logging_is_not_set_up(run_python):
    told = run_python(
        "import subprocess, sys\n"
        'code = \'from offbeat import log; log.warn("100% of it"); log.warn("%d%%", 50); log.info("no")\'\n'
        "done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)\n"
        "print(done.stdout + done.stderr)"
    )
    assert told.split("\n")[:2] == ["offbeat: 100% of it", "offbeat: 50%"]
    assert "no" not in told.replace("of it", "")


def test_warnings_are_seen_where_logging_is_not_set_up(run_python):
    told = run_python(
        "import subprocess, sys\n"
        "code = '''\n"
        "import os, subprocess, sys, numpy as np, offbeat\n"
        "with offbeat.ParameterServer({'w': np.zeros(1, np.float32)}) as server:\n"
        "    kill = 'import os, sys, offbeat; c = offbeat.Client(sys.argv[1]); os.kill(os.getpid(), 9)'\n"
        "    subprocess.run([sys.executable, '-c', kill, server.address])\n"
        "    while server.status()['workers'][0]['state'] != 'lost': pass\n"
        "'''\n"
        "done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)\n"
        "print(done.stderr)"
    )
    (lost,) = [line for line in told.splitlines() if "a worker is lost" in line]
    assert lost.startswith("offbeat: ")


@pytest.mark.parametrize(("correction", "warnings"), [(False, 1), (None, 0)])
def test_shared_velocity_warns_when_a_second_worker_pushes(caplog, correction, warnings):
    sgd = offbeat.optim.SGD(lr=0.1, momentum=0.9)
    with (
        caplog.at_level(logging.WARNING, logger="offbeat"),
        offbeat.ParameterServer(MODEL, optimizer=sgd, momentum_correction=correction) as server,
        offbeat.Client(server.address) as first,
    ):
        first.push(first.pull())
        said = [r for r in caplog.records if "one velocity" in r.getMessage()]
        assert not said
        for _ in range(2):
            with offbeat.Client(server.address) as another:
                another.push(another.pull())
    said = [r for r in caplog.records if "one velocity" in r.getMessage()]
    assert len(said) == warnings


@pytest.mark.parametrize(("length", "warnings"), [(15, 1), (16, 0)])
def test_a_short_token_is_warned_of_and_never_shown(caplog, length, warnings):
    word = "x" * length
    with (
        caplog.at_level(logging.INFO, logger="offbeat"),
        offbeat.ParameterServer(MODEL, token=word, host="127.0.0.1") as server,
        offbeat.Client(server.address, token=word),
    ):
        pass
    said = [
        r for r in caplog.records if r.levelno == logging.WARNING and "could be guessed" in r.getMessage()
    ]
    assert len(said) == warnings
    assert all("openssl rand -hex 16" in r.getMessage() for r in said), "of a command line's user, too"
    assert word not in caplog.text
    assert "OFFBEAT_TOKEN=<the server's token>" in caplog.text


def test_words_that_come_from_elsewhere_make_no_line_of_their_own_in_the_log(caplog):
    spec = optim.SGD(lr=0.1, groups=[{"pattern": "a\nb\x1b[31m\x85c", "lr": 0.2}])
    with (
        caplog.at_level(logging.WARNING, logger="offbeat"),
        offbeat.ParameterServer(MODEL, optimizer=spec),
    ):
        wait_for(lambda: any("pattern=" in r.getMessage() for r in list(caplog.records)))
    assert r"pattern=a\nb\u{1b}[31m\u{85}c" in caplog.text


def test_a_group_of_the_optimizer_that_no_tensor_is_in_is_warned_of_once(caplog):
    def warnings():
        return [
            r.getMessage() for r in list(caplog.records) if "no tensor is in this group" in r.getMessage()
        ]

    groups = [{"pattern": "bias", "weight_decay": 0.0}, {"pattern": "*.bias", "weight_decay": 0.0}]
    spec = optim.AdamW(lr=0.1, groups=groups)
    with (
        caplog.at_level(logging.WARNING, logger="offbeat"),
        offbeat.ParameterServer({"0.bias": np.ones(2, np.float32)}, optimizer=spec) as server,
    ):
        server.set_lr(0.2)
        wait_for(warnings)
    (said,) = warnings()
    assert "pattern=bias" in said
    assert '"0.bias"' in said
