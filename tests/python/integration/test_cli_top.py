"""`offbeat top` as a process: of a real server with real workers, on a real terminal, through its death."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import offbeat
from support.command import OFFBEAT, command
from support.ports import free_port

ONES = {"w": np.ones(4, np.float32)}
SGD = offbeat.optim.SGD(lr=0.1)
WORD = "of-the-server-alone"  # the token of these tests

WORKER = """
import sys, numpy as np, offbeat
with offbeat.Client(sys.argv[1], worker_id=sys.argv[2]) as client:
    client.pull()
    print("ready", flush=True)
    while not sys.stdin.closed and client.push_pull({"w": np.ones(4, np.float32)}, samples=2).applied:
        pass
"""


@contextmanager
def working(address, name):
    """A worker in a process of its own, which pushes until the run ends or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, address, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_once_prints_one_frame_where_there_is_no_terminal(serve):
    server = serve(ONES, optimizer=SGD, run_id="r1")
    with working(server.address, "amy"), working(server.address, "bob") as bob:
        bob.kill()
        bob.wait()
        with command("top", server.address, "--once", "--interval", "0.5") as top:
            assert top.ends() == 0, top.said
    assert top.err == []
    text = "".join(top.out)
    assert "\x1b" not in text, "no colours, no cursor"
    assert "r1 on 127.0.0.1" in text
    (speed,) = re.findall(r"^speed +([\d,.]+) updates/s, ([\d,]+) samples/s$", text, re.MULTILINE)
    updates, samples = (float(number.replace(",", "")) for number in speed)
    assert updates > 0
    assert samples == pytest.approx(2 * updates, rel=0.01, abs=2)
    assert re.search(r"^amy +joined ", text, re.MULTILINE)
    assert re.search(r"^bob +(lost|joined) ", text, re.MULTILINE)


def test_no_server_and_a_wrong_token_are_told_by_exit_codes(serve):
    with command("top", f"127.0.0.1:{free_port()}", "--once", "--timeout", "0.2") as top:
        assert top.ends() == 4, top.said
    server = serve(ONES, token=WORD)
    address = server.address
    with command("top", address, "--once", OFFBEAT_TOKEN=WORD[::-1]) as top:
        assert top.ends() == 5, top.said
    with command("top", "--once", OFFBEAT_SERVER=address, OFFBEAT_TOKEN=WORD) as top:
        assert top.ends() == 0, top.said


class Screen:
    """`offbeat top` on a terminal of its own."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*OFFBEAT, "top", *arguments, "--interval", "0.1"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  a terminal to hear Ctrl-C from
        )
        os.close(slave)
        self.text, self._changed, self._seen = "", threading.Condition(), 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while True:
            try:
                piece = os.read(self.master, 1 << 16)
            except OSError:  # EIO: the other end is closed
                piece = b""
            with self._changed:
                self.text += piece.decode(errors="replace")
                self._changed.notify_all()
            if not piece:
                return

    def shows(self, words, timeout_s=30):
        """Wait until some words are drawn, after what was waited for before."""

        def found():
            return words in self.text[self._seen :]

        with self._changed:
            assert self._changed.wait_for(found, timeout_s), (words, self.text[-3000:])
            self._seen = len(self.text)

    def ends(self):
        code = self.process.wait(30)
        self._reader.join(30)
        return code

    def close(self):
        self.process.kill()
        self.ends()
        os.close(self.master)


@pytest.fixture
def watched(stack):
    def start(*arguments):
        screen = Screen(*arguments)
        stack.callback(screen.close)
        return screen

    return start


def test_it_draws_anew_as_the_run_goes_on_and_ctrl_c_ends_it_with_code_0(serve, watched):
    server = serve(ONES, optimizer=SGD, run_id="r1")
    screen = watched(server.address)
    screen.shows("no worker has joined yet")
    with offbeat.Client(server.address, worker_id="amy") as client:
        client.pull()
        screen.shows("amy")
        for _ in range(5):
            client.push_pull(ONES, samples=2)
        screen.shows("version 5, 10 samples")
    screen.shows("finished")
    os.write(screen.master, b"\x03")
    assert screen.ends() == 0
    assert "\x1b[?1049h" in screen.text, "it has a screen of its own,"
    assert screen.text.rindex("\x1b[?1049l") > screen.text.rindex("r1"), "which it gives back,"
    assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l"), "with the cursor"
    assert "Traceback" not in screen.text


def test_a_terminal_that_is_closed_and_sigterm_end_it(serve, watched):
    server = serve(ONES, run_id="r1")
    for number in (signal.SIGTERM, signal.SIGHUP):
        screen = watched(server.address)
        screen.shows("r1 on")
        screen.process.send_signal(number)
        assert screen.ends() == 0
        assert "\x1b[?1049l" in screen.text


def test_a_server_that_goes_away_is_shown_as_gone_and_seen_when_it_is_back(watched, tmp_path):
    port = free_port()
    arguments = ["server", "--port", str(port), "--checkpoint-dir", str(tmp_path), "--run-id", "r1"]
    with command(*arguments) as server:
        server.line("in Python with")
        with offbeat.Client(f"127.0.0.1:{port}", worker_id="amy") as client:
            client.init(ONES, SGD)
            screen = watched(f"127.0.0.1:{port}")
            screen.shows("version 0")
            client.pull()
            client.push(ONES)
            screen.shows("version 1")
            server.signal(signal.SIGKILL)
            server.ends()
            screen.shows("no answer since")
            screen.shows("version 1")  # what was last heard stays
            with command(*arguments) as again:
                again.line("in Python with")
                screen.shows("term 2")
                assert "no answer" not in screen.text[screen._seen :]
                os.write(screen.master, b"\x03")
                assert screen.ends() == 0
            client._session.close("left")
