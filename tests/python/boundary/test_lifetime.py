"""Forks, copies, signals and the end of the process, each with real processes."""

import copy
import multiprocessing
import os
import pickle  # noqa: TID251  that it does not pickle is the claim
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import offbeat
from offbeat import optim
from offbeat.errors import ConnectionLostError, StateError
from support.fault_plan import Bytes, HalfClose, Hold, after, inside, plan
from support.fault_proxy import FaultProxy
from support.targets import push_once
from support.waiting import AT_ONCE_S

MODEL = {"w": np.zeros(3, np.float32)}


@pytest.fixture
def server():
    with offbeat.ParameterServer(MODEL, optimizer=optim.SGD(lr=1.0), linger_s=0.1) as made:
        yield made


def worker_state(server, worker):
    return next((w["state"], w["cause"]) for w in server.status()["workers"] if w["id"] == worker)


def wait_for_state(server, worker, state, timeout_s=20):
    end = time.monotonic() + timeout_s
    while worker_state(server, worker)[0] != state:
        assert time.monotonic() < end, worker_state(server, worker)
        server.wait_until_joined(1000, timeout_s=0.01)
    return worker_state(server, worker)[1]


def started(code, *arguments):
    """Start a program and wait until it has printed "ready"."""
    program = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "ready\n", program.communicate()
    return program


ONCE_IT_WAITS = """
import os, sys, threading, offbeat
sys.setswitchinterval(1000)  # another thread runs only when this one lets go of the GIL, as in a wait
def look(number, main=threading.main_thread().ident, package=os.path.dirname(offbeat.__file__)):
    while not sys._current_frames()[main].f_code.co_filename.startswith(package):
        threading.Event().wait(0.001)
    os.kill(os.getpid(), number)
def signal_once_it_waits(number):
    threading.Thread(target=look, args=[number]).start()
"""
"""Sends one signal, when the main thread is inside a call of ours that has let go of the GIL."""


# -- copies


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copy_deepcopy_and_pickle_raise_with_the_remedy(server, how):
    with offbeat.Client(server.address) as client:
        for live in (server, client):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled: .*address"):
                how(live)


# -- fork


def in_child(work):
    """Run `work` in a forked child and return what it printed of itself."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ours, str(work()).encode())
        except BaseException as error:  # noqa: BLE001  told to the parent
            os.write(ours, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(ours)
    with open(theirs, "rb") as said:  # noqa: PTH123  a descriptor
        told = said.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return told


def test_fork_is_allowed_and_using_what_was_inherited_raises(server):
    with offbeat.Client(server.address) as client:
        client.pull()
        for use in (client.pull, client.status, server.status, server.state_dict, lambda: client.worker_id):
            told = in_child(use)
            assert told.startswith("ForkedError: "), told
            assert "after the fork, or use spawn" in told
        assert client.push(MODEL).applied
        assert server.status()["version"] == 1


def test_repr_of_what_was_inherited_is_that_of_the_parent(server):
    with offbeat.Client(server.address, worker_id="parent") as client:
        assert repr(client) == f"<offbeat.Client parent at {server.address}>"
        for thing in (client, server):
            assert in_child(lambda thing=thing: repr(thing)) == repr(thing)


def test_closing_what_was_inherited_says_nothing_to_the_other_side(server):
    with offbeat.Client(server.address, worker_id="parent") as client:

        def leave():
            client.close()
            server.stop()
            return "quiet"

        assert in_child(leave) == "quiet"
        client.pull()
        assert client.push(MODEL).applied
        assert worker_state(server, "parent")[0] == "joined"


def test_dropping_what_was_inherited_says_nothing_to_the_other_side(server):
    client = offbeat.Client(server.address, worker_id="parent")

    def drop():
        nonlocal client
        del client
        return "dropped"

    assert in_child(drop) == "dropped"
    client.pull()
    assert client.push(MODEL).applied
    client.close()


def test_dropping_an_inherited_server_ends_nothing():
    server = offbeat.ParameterServer(MODEL, optimizer=optim.SGD(lr=1.0))
    server.start()

    def drop():
        nonlocal server
        del server
        return "dropped"

    assert in_child(drop) == "dropped"
    with server, offbeat.Client(server.address) as client:
        client.pull()
        assert client.push(MODEL).applied


def test_child_may_make_its_own(server):
    with offbeat.Client(server.address, worker_id="parent") as client:

        def work():
            with offbeat.Client(server.address, worker_id="child") as own:
                own.pull()
                return own.push(MODEL).version

        assert in_child(work) == "1"
        wait_for_state(server, "child", "finished")
        assert client.pull()["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_process_is_a_worker_that_says_goodbye(server, method):
    process = multiprocessing.get_context(method).Process(target=push_once, args=(server.address, method))
    process.start()
    process.join(40)
    assert process.exitcode == 0
    wait_for_state(server, method, "finished")


def test_worker_killed_with_forked_children_is_noticed_at_once(server):
    program = started(
        "import multiprocessing, os, signal, sys, offbeat\n"
        "client = offbeat.Client(sys.argv[1], worker_id='doomed')\n"
        "client.pull()\n"
        "children = [multiprocessing.get_context('fork').Process(target=signal.pause) for _ in range(2)]\n"
        "for child in children: child.start()\n"
        "print('ready', flush=True)\n"
        "print(*(child.pid for child in children), flush=True)\n"
        "signal.pause()",
        server.address,
    )
    children = [int(pid) for pid in program.stdout.readline().split()]
    try:
        program.kill()
        begun = time.monotonic()
        cause = wait_for_state(server, "doomed", "lost")
        assert time.monotonic() - begun < AT_ONCE_S
        assert cause
        assert all(os.path.exists(f"/proc/{pid}") for pid in children)  # noqa: PTH110
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        program.communicate(timeout=20)


SOCKETS_OF_CHILDREN = """
import os, sys, warnings, numpy as np, offbeat
warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
def sockets():
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink("/proc/self/fd/" + number)
        except FileNotFoundError:  # the folder's own
            continue
        if what.startswith("socket:"):
            found.append(what[8:-1])
    tables = "".join(open("/proc/self/net/" + name).read() for name in ("tcp", "tcp6"))
    return [line for line in tables.splitlines() if line.split()[9] in found]
def in_child():
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(theirs, "\\n".join(sockets()).encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as told:
        told = told.read()
    assert os.waitpid(child, 0)[1] == 0
    return told
"""


def test_child_forked_right_after_start_has_no_socket_of_the_servers(run_python):
    # Were the listening socket left in it, the port would be taken after the server's end.
    told = run_python(
        SOCKETS_OF_CHILDREN + "model = {'w': np.zeros(3, np.float32)}\n"
        "inherited = []\n"
        "for _ in range(40):\n"
        "    server = offbeat.ParameterServer(model)\n"
        "    server.start()\n"
        "    inherited.append(in_child())\n"
        "    assert sockets()\n"
        "    server.stop()\n"
        "print(sum(map(bool, inherited)), *inherited)",
        timeout_s=50,
    )
    assert told.split() == ["0"], told


# -- the end of the process


@pytest.mark.parametrize(
    ("ending", "state"),
    [("", "finished"), ("sys.exit(0)", "finished"), ("1 / 0", "left"), ("raise KeyboardInterrupt", "left")],
)
def test_end_of_the_process_says_goodbye(server, ending, state):
    code = (
        f"import sys, offbeat\nclient = offbeat.Client(sys.argv[1], worker_id='it')\nclient.pull()\n{ending}"
    )
    subprocess.run([sys.executable, "-c", code, server.address], timeout=50, check=False, capture_output=True)
    wait_for_state(server, "it", state, timeout_s=5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_ctrl_c_in_a_goodbye_keeps_nobody_from_leaving(server, when):
    code = (
        "import signal, sys, offbeat\n"
        "clients = [offbeat.Client(sys.argv[1], worker_id=name) for name in 'abc']\n"
        "leave = offbeat.Client._at_exit\n"
        "def leave_and_interrupt(client, failure):\n"
        "    offbeat.Client._at_exit = leave\n"
        "    if sys.argv[2] == 'before': signal.raise_signal(signal.SIGINT)\n"
        "    leave(client, failure)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "offbeat.Client._at_exit = leave_and_interrupt  # of whichever is the first\n"
        "1 / 0"
    )
    arguments = [sys.executable, "-c", code, server.address, when]
    subprocess.run(arguments, timeout=50, check=False, capture_output=True)
    for name in "abc":
        wait_for_state(server, name, "left", timeout_s=5)


UNREADABLE = (
    "class Unreadable(Exception):\n    def __str__(self):\n        raise ValueError\nraise Unreadable"
)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("import os; raise OSError(os.fsdecode(b'caf\\xe9.jpg'))", "OSError: caf?.jpg"),
        (UNREADABLE, "Unreadable"),
        ("raise ValueError('x' * 40_000_000)", "ValueError: xxx"),
        ("raise ValueError('\\n\\nno sample\\nat all')", "ValueError: no sample"),
    ],
    ids=["a name that is no text", "words that raise", "many words", "words after an empty line"],
)
def test_whatever_an_exception_says_all_of_the_process_leave(server, ending, told):
    code = (
        "import sys, offbeat\n"
        "clients = [offbeat.Client(sys.argv[1], worker_id=name) for name in 'ab']\n"
        f"for client in clients:\n    client.pull()\n{ending}"
    )
    subprocess.run([sys.executable, "-c", code, server.address], timeout=50, check=False, capture_output=True)
    for name in "ab":
        wait_for_state(server, name, "left", timeout_s=5)
    causes = {departure["cause"] for departure in server.status()["departures"]}
    assert all(cause.startswith(f"left before its work was done: {told}") for cause in causes), causes


def test_server_left_running_does_not_keep_the_process_from_ending(run_python):
    told = run_python(
        "import numpy as np, offbeat\n"
        "server = offbeat.ParameterServer({'w': np.zeros(3, np.float32)})\n"
        "server.start()\n"
        "client = offbeat.Client(server.address)\n"
        "print(client.pull()['w'].tolist())",
        timeout_s=20,
    )
    assert told == "[0.0, 0.0, 0.0]\n"


def test_close_while_another_thread_is_in_a_call_raises_and_works_afterwards():
    wide = {"w": np.zeros(400_000, np.float32)}
    with (
        offbeat.ParameterServer(wide, optimizer=optim.SGD(lr=1.0)) as server,
        FaultProxy(server.address, plan(Hold(Bytes(300_000)))) as proxy,
    ):
        client = offbeat.Client(proxy.address, worker_id="it")
        client.pull()
        thread = threading.Thread(target=client.push, args=(wide,))
        thread.start()
        try:
            proxy.wait_for("holds")
            with pytest.raises(StateError, match="another thread is in a call"):
                client.close()
        finally:
            proxy.heal()
            thread.join()
        client.close()
        wait_for_state(server, "it", "finished", timeout_s=5)


# -- signals


WAITS = {
    "wait_for_workers": "server.wait_for_workers()",
    "wait_until_joined": "server.wait_until_joined(1)",
    "connect": "offbeat.Client('192.0.2.1:9', connect_timeout_s=60)",
    "pull": "offbeat.Client(server.address).pull()",
    "status": "status.run(Namespace(address=quiet_address, token=None, timeout_s=60.0))",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_every_wait(wait, run_python):
    told = run_python(
        f"{ONCE_IT_WAITS}\n"
        "import socket\n"
        "from argparse import Namespace\n"
        "from offbeat.cli import status\n"
        "server = offbeat.ParameterServer()\n"
        "server.start()\n"
        "quiet = socket.create_server(('127.0.0.1', 0))\n"
        "quiet_address = f'127.0.0.1:{quiet.getsockname()[1]}'\n"
        "try:\n"
        "    signal_once_it_waits(2)\n"
        f"    {WAITS[wait]}\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n",
        timeout_s=20,
    )
    assert told == "interrupted\n"


def test_ctrl_c_in_a_push_leaves_the_client_usable():
    large = {"w": np.zeros(2_000_000, np.float32)}
    with (
        offbeat.ParameterServer(large, optimizer=optim.SGD(lr=1.0)) as server,
        FaultProxy(server.address, plan(Hold(Bytes(1 << 20)))) as proxy,
    ):
        program = started(
            "import sys, numpy as np, offbeat\n"
            "client = offbeat.Client(sys.argv[1])\n"
            "out = client.pull()\n"
            "try:\n"
            "    print('ready', flush=True)\n"
            "    client.push_pull({'w': np.ones(2_000_000, np.float32)}, out=out)\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', flush=True)\n"
            "sys.stdin.readline()\n"
            "print(len(client.flush()), client.pull(out=out)['w'][:2].tolist(), flush=True)",
            proxy.address,
        )
        proxy.wait_for("holds")  # the push is under way, and waits
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n", program.kill()
        proxy.heal()
        out, err = program.communicate("\n", timeout=30)
        assert out == "1 [-1.0, -1.0]\n", (out, err)


@pytest.mark.parametrize("wait", ["wait_for_workers()", "wait_until_joined(5)"])
def test_sigterm_in_a_wait_stops_the_server_and_exits_with_zero(wait):
    program = started(
        "import signal, threading, numpy as np, offbeat\n"
        "def tell():\n"
        "    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL: pass\n"
        "    print(server.address, flush=True)\n"
        "server = offbeat.ParameterServer({'w': np.zeros(1, np.float32)})\n"
        "server.start()\n"
        "print('ready', flush=True)\n"
        "threading.Thread(target=tell).start()\n"
        f"server.{wait}"
    )
    with offbeat.Client(program.stdout.readline().strip()) as client:
        client.pull()
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=20)
        assert program.returncode == 0
        with pytest.raises(ConnectionError):
            client.pull()


def test_sigterm_with_a_handler_of_the_users_is_the_users():
    program = started(
        f"{ONCE_IT_WAITS}\n"
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "server = offbeat.ParameterServer()\n"
        "server.start()\n"
        "print('ready', flush=True)\n"
        "signal_once_it_waits(signal.SIGTERM)\n"
        "server.wait_for_workers()"
    )
    program.communicate(timeout=20)
    assert program.returncode == 7


def test_a_peer_that_is_gone_does_not_end_a_server_to_whom_sigpipe_is_the_end():
    program = started(
        "import signal, sys, numpy as np, offbeat\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "with offbeat.ParameterServer({'w': np.zeros(5_000_000, np.float32)}) as server:\n"
        "    print(f'ready\\n{server.address}', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    address = program.stdout.readline().strip()

    def pull():
        with suppress(ConnectionLostError), offbeat.Client(proxy.address, reconnect_timeout_s=0) as client:
            client.pull()

    # The worker's way ends first, then the connection, with most of the model unsent: EPIPE is the answer.
    with FaultProxy(address, [plan(HalfClose(after("Pull")), Hold(inside("Root")))]) as proxy:
        pulling = threading.Thread(target=pull)
        pulling.start()
        proxy.wait_for("half_closes")
        proxy.wait_for("holds")
        proxy.cut()
        pulling.join()
    with suppress(ConnectionError), offbeat.Client(address, connect_timeout_s=2) as client:
        client.pull()
    program.communicate("", timeout=20)
    assert program.returncode == 0
