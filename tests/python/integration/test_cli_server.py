"""`offbeat server` and `offbeat status`, as processes: joining by what is printed, stopping, saving."""

import http.server
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import offbeat
from offbeat.errors import AuthenticationError
from support.command import (
    OFFBEAT,
    SIGNALLED_AT_THE_END,
    SIGNALLED_IN_THE_SAVE,
    TIMEOUT_S,
    command,
    stalled,
    unread,
)
from support.waiting import wait_for

WORD = "open-sesame"  # the token of these tests
ZEROS = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
ONES = {name: np.ones_like(value) for name, value in ZEROS.items()}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(ZEROS, path)
    return path


def serving(*arguments, **keywords):
    return command("server", "--port", "0", *arguments, **keywords)


def joining(server):
    """Read the environment and the Python line with which the server says that a worker joins."""
    server.line("from a shell with")
    shell = server.line("OFFBEAT_SERVER=").strip()
    server.line("in Python with")
    python = server.line("offbeat.AsyncWorker(").strip()
    words = shlex.split(shell)
    assert words[-2:] == ["python", "your_script.py"]
    return dict(word.split("=", 1) for word in words[:-2]), python


def test_a_worker_joins_by_the_printed_line_and_the_server_saves_and_ends_at_sigterm(tmp_path, model):
    saved = tmp_path / "trained.safetensors"
    arguments = ["--model", str(model), "--save", str(saved), "--optimizer", "SGD(lr=0.5)"]
    with serving(*arguments) as server:
        variables, python = joining(server)
        assert variables.keys() == {"OFFBEAT_SERVER"}
        assert python == f'offbeat.AsyncWorker("{variables["OFFBEAT_SERVER"]}", model=model)'
        with offbeat.Client(variables["OFFBEAT_SERVER"]) as client:
            assert client.pull()["w"].tolist() == ZEROS["w"].tolist()
            assert client.push(ONES, samples=4).applied
            server.signal(signal.SIGTERM)
            assert server.ends() == 0, server.said
    trained = load_file(saved)
    assert trained.keys() == ZEROS.keys()
    assert (trained["w"] == -0.5).all()
    assert str(saved) in server.said


def test_every_push_that_was_acknowledged_before_the_end_is_in_the_file(tmp_path, model):
    saved = tmp_path / "trained.safetensors"
    arguments = ["--model", str(model), "--save", str(saved), "--optimizer", "SGD(lr=1.0)"]
    acknowledged = 0
    with serving(*arguments) as server:
        variables, _ = joining(server)
        with offbeat.Client(variables["OFFBEAT_SERVER"]) as client:
            client.pull()
            while (receipt := _push_or_none(client)) is not None:
                assert receipt.applied
                acknowledged += 1
                if acknowledged == 1:
                    server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    in_file = -load_file(saved)["w"].max()
    assert acknowledged > 0
    assert acknowledged <= in_file <= acknowledged + 1  # the answer to one may have been cut off


def _push_or_none(client):
    """Push; None if there is no server any more."""
    try:
        return client.push_pull(ONES, samples=1)
    except ConnectionError:
        return None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_server_that_waits_stops_at_a_signal_with_code_0(number):
    with serving("--keep-running") as server:
        joining(server)
        server.signal(number)
        assert server.ends() == 0, server.said
        assert "Traceback" not in server.said


@pytest.mark.parametrize("keeps_running", [True, False])
def test_a_signal_that_the_system_gives_to_another_thread_stops_a_server(keeps_running):
    with serving(*["--keep-running"] * keeps_running) as server:
        environment, _ = joining(server)
        with command("status", environment["OFFBEAT_SERVER"]) as told:
            assert told.ends() == 0, told.said  # by then it waits
        server.signal_another_thread(signal.SIGTERM)
        assert server.ends() == 0, server.said


def test_a_save_that_found_no_model_is_code_13(tmp_path):
    with serving("--save", str(tmp_path / "model.safetensors")) as server:
        joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 13, server.said
        assert "nothing is saved: the server has no model yet" in server.said


def test_a_save_to_what_is_no_file_is_code_2_before_the_server_listens(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with serving("--save", str(tmp_path / "fifo")) as server:
        assert server.ends() == 2, server.said
    assert "cannot be written: it is a FIFO" in server.said
    assert "listens" not in server.said


@pytest.mark.parametrize("num_signals", [1, 2])
def test_one_signal_in_the_save_costs_nothing_and_a_second_is_told_with_code_13(tmp_path, model, num_signals):
    saved = tmp_path / "trained.safetensors"
    arguments = ["server", "--port", "0", "--model", str(model), "--save", str(saved)]
    with command(str(num_signals), *arguments, program=SIGNALLED_IN_THE_SAVE) as server:
        joining(server)
        server.signal(signal.SIGTERM)
        code = server.ends()
    if num_signals == 1:
        assert (code, load_file(saved).keys()) == (0, ZEROS.keys()), server.said
        assert "SIGTERM, and this ends already" in server.said
    else:
        assert code == 13, server.said
        assert f"nothing is saved: a signal came before the model was in {saved}" in server.said
        assert list(tmp_path.iterdir()) == [model]


SIGNALLED_BEFORE_THE_STOP = (
    sys.executable,
    "-c",
    """
import signal, sys
from offbeat import ParameterServer
from offbeat.cli import main, server

def stop(*arguments, **keywords):
    signal.raise_signal(signal.SIGINT)
    return stops(*arguments, **keywords)

stops, server.stop = server.stop, stop
if sys.argv[1] == "the work":
    ParameterServer.wait_for_workers = lambda *arguments: True
sys.exit(main.main(sys.argv[2:]))
""",
)


@pytest.mark.parametrize("ended_by", ["the work", "a signal"])
def test_a_signal_that_comes_as_the_server_begins_to_end_costs_nothing(tmp_path, model, ended_by):
    saved = tmp_path / "trained.safetensors"
    arguments = ["server", "--port", "0", "--model", str(model), "--save", str(saved)]
    with command(ended_by, *arguments, program=SIGNALLED_BEFORE_THE_STOP) as server:
        if ended_by == "a signal":
            joining(server)
            server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert load_file(saved).keys() == ZEROS.keys()


SIGNALLED_AS_IT_FAILS = (
    sys.executable,
    "-c",
    """
import signal, sys
from offbeat import ParameterServer
from offbeat.cli import main, model_file, serving
from offbeat.errors import ConnectionLostError

def fail(*arguments):
    raise ConnectionLostError("all workers were lost")

def signalled(*arguments, **keywords):
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)

if sys.argv[1] == "of losses":
    ParameterServer.wait_for_workers = fail
    model_file.save = signalled
else:
    ParameterServer.wait_for_workers = lambda *arguments: True
    serving.not_saved, told = lambda *arguments: (told(*arguments), signalled())[0], serving.not_saved
sys.exit(main.main(sys.argv[2:]))
""",
)
"""`offbeat server`, to which two SIGTERMs come as it saves what is left, or says that there is nothing."""


@pytest.mark.parametrize(
    ("why", "code", "said"),
    [("of losses", 8, "a signal came before"), ("of nothing", 13, "has no model yet")],
)
def test_signals_hide_neither_a_failure_nor_that_nothing_is_saved(tmp_path, model, why, code, said):
    arguments = ["server", "--port", "0", "--save", str(tmp_path / "saved")]
    if why == "of losses":
        arguments += ["--model", str(model)]
    with command(why, *arguments, program=SIGNALLED_AS_IT_FAILS) as server:
        assert server.ends() == code, server.said
    assert "nothing is saved: " in server.said
    assert said in server.said


def test_a_signal_that_comes_when_the_command_has_ended_does_not_change_its_code(model):
    arguments = ["server", "--port", "0", "--model", str(model)]
    with command(*arguments, program=SIGNALLED_AT_THE_END) as server:
        joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    with command("sever", program=SIGNALLED_AT_THE_END) as mistyped:
        assert mistyped.ends() == 2, mistyped.said


def test_a_signal_is_passed_over_where_nobody_reads_what_is_said_of_it(run_python):
    told = run_python(
        "import os, signal\n"
        "from offbeat.cli.signals import Signals\n"
        "reading, writing = os.pipe()\n"
        "os.close(reading)\n"
        "os.dup2(writing, 2)  # as of a reader that the same Ctrl-C has ended\n"
        "with Signals().raised(but_for=1):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('saved')"
    )
    assert told == "saved\n"


def test_a_save_that_found_no_model_is_code_13_where_nobody_reads_it(tmp_path):
    with unread() as stderr, serving("--save", str(tmp_path / "model"), stderr=stderr) as server:
        joining(server)
        server.signal(signal.SIGINT)
        assert server.ends() == 13, server.said


TELLING_ITS_ADDRESS = (
    sys.executable,
    "-c",
    """
import sys
from offbeat.cli import main, server

def join_lines(address, **keywords):
    print("address", address, file=sys.stderr, flush=True)
    return words(address, **keywords)

words, server.join_lines = server.join_lines, join_lines
sys.exit(main.main(sys.argv[1:]))
""",
)
"""`offbeat server`, which tells its address on stderr before its welcome."""


TELLING_ITS_END = (
    *TELLING_ITS_ADDRESS[:2],
    "from offbeat.cli import server\n"
    "begin, server.stop = server.stop, lambda *a, **k: print('x' * 100) or begin(*a, **k)\n"
    + TELLING_ITS_ADDRESS[2],
)
"""The same, which has something to say as it ends, too."""


def test_a_server_serves_where_nobody_reads_its_welcome(model):
    arguments = ["server", "--port", "0", "--model", str(model)]
    with unread() as stdout, command(*arguments, program=TELLING_ITS_ADDRESS, stdout=stdout) as server:
        address = server.line("address").split()[-1]
        with offbeat.Client(address) as client:
            assert client.pull().keys() == ZEROS.keys()
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said


def test_an_error_that_nobody_reads_has_its_code_all_the_same():
    with unread() as stderr, command("sever", stderr=stderr) as mistyped:
        assert mistyped.ends() == 2


ENDING = (
    sys.executable,
    "-c",
    """
import sys
from offbeat.cli import env, main
def run(arguments):
    print("the report")
    print("reported", file=sys.stderr)
    print("its end", flush=len(sys.argv) > 2)
    return int(sys.argv[1])
env.run = run
sys.exit(main.main(["env"]))
""",
)
"""`offbeat env`, but that it ends with the code that the argument says."""


@pytest.mark.parametrize(("ended", "code"), [(0, 11), (13, 13), (137, 137)])
def test_output_that_is_lost_is_told_and_hides_no_failure(ended, code):
    with Path("/dev/full").open("w") as full, command(str(ended), program=ENDING, stdout=full) as lost:
        assert lost.ends() == code
        assert lost.said == "reported\noffbeat: [Errno 28] No space left on device: 'stdout'\n"


STANDING_IN = (
    sys.executable,
    "-c",
    """
import sys
from types import SimpleNamespace
from offbeat.cli import main
from offbeat.demo import report, run
run.run_demo = lambda *arguments: SimpleNamespace(is_benchmark=False)
report.table = lambda result: "the table"
report.write_png = lambda result, path: path.write_bytes(b"a picture")
report.write_json = lambda result, path: path.write_bytes(b"the data")
sys.exit(main.main(["demo", *sys.argv[1:]]))
""",
)
"""`offbeat demo`, but that it has nothing to show, and not on the benchmark."""


def test_a_report_of_the_demo_that_is_lost_is_an_error_on_the_stand_in_too(tmp_path):
    asked = ["--png", str(tmp_path / "loss.png")]
    with command(*asked, program=STANDING_IN) as demo:
        assert demo.ends() == 3, demo.said
    with Path("/dev/full").open("w") as full, command(*asked, program=STANDING_IN, stdout=full) as demo:
        assert demo.ends() == 11, demo.said


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_demo_writes_its_files_and_has_its_code_where_nobody_reads_its_report(tmp_path, unbuffered):
    asked = ["--png", str(tmp_path / "loss.png"), "--json", str(tmp_path / "demo.json")]
    with (
        unread() as nobody,
        command(*asked, program=STANDING_IN, stdout=nobody, PYTHONUNBUFFERED=unbuffered) as demo,
    ):
        assert demo.ends() == 3, demo.said
    assert (tmp_path / "loss.png").exists()
    assert (tmp_path / "demo.json").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("words", "code"), [((), 2), (("env",), 0), (("--version",), 0)])
def test_a_reader_that_has_gone_does_not_change_the_code(words, code, unbuffered):
    with unread() as nobody, command(*words, stdout=nobody, PYTHONUNBUFFERED=unbuffered) as unheard:
        assert (unheard.ends(), unheard.said) == (code, "")


BREAKING = (
    sys.executable,
    "-c",
    """
import os, sys
from offbeat.cli import env, main
reading, writing = os.pipe()
os.close(reading)
env.run = lambda arguments: os.write(writing, b"x")
sys.exit(main.main(["env"]))
""",
)
"""`offbeat env`, but that it writes to a pipe of its own whose other end is closed."""


def test_a_pipe_of_the_command_s_own_that_breaks_is_an_error():
    with command(program=BREAKING) as broken:
        assert broken.ends() == 11, broken.said
    assert "Broken pipe" in broken.said


@pytest.mark.parametrize("where", [(), ("in a print",)], ids=["at the end", "in a print"])
def test_output_that_nobody_takes_is_waited_for_until_a_signal(where):
    with stalled() as stdout, command("0", *where, program=ENDING, stdout=stdout) as told:
        told.line("reported")
        assert told.ends_by(signal.SIGINT, at_most=1) == 130, told.said


def test_a_server_that_nobody_lets_speak_ends_by_a_few_signals(model):
    arguments = ["server", "--port", "0", "--model", str(model)]
    with stalled() as full, command(*arguments, program=TELLING_ITS_END, stdout=full) as server:
        server.line("address")
        assert server.ends_by(signal.SIGTERM, at_most=5) in (0, -signal.SIGTERM), server.said


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_server_whose_log_nobody_reads_saves_its_model_and_ends(tmp_path, model, num_signals):
    saved = tmp_path / "trained.safetensors"
    asked = [str(num_signals - 1), "server", "--port", "0", "--model", str(model), "--save", str(saved)]
    with stalled() as full, command(*asked, program=SIGNALLED_IN_THE_SAVE, stderr=full) as server:
        joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert load_file(saved).keys() == ZEROS.keys()


WAITING_AT_THE_END = (
    sys.executable,
    "-c",
    """
import sys, threading
from offbeat.cli import main
code = main.main()
threading.Thread(target=threading.Event().wait).start()
print("ended", flush=True)
sys.exit(code)
""",
)
"""`offbeat`, in whose process something is at work when the command has ended, and does not end."""


def test_a_process_that_does_not_end_when_its_command_has_ends_by_a_few_signals():
    with command("env", program=WAITING_AT_THE_END) as waiting:
        waiting.line("ended")
        assert waiting.ends_by(signal.SIGTERM, at_most=3) == -signal.SIGTERM, waiting.said


SIGNALLED_IN_THE_MODEL = (
    sys.executable,
    "-c",
    """
import signal, sys
from offbeat.cli import main, model_file

def load(path):
    for _ in range(int(sys.argv[1])):
        signal.raise_signal(signal.SIGTERM)
    return loads(path)

loads, model_file.load = model_file.load, load
sys.exit(main.main(sys.argv[2:]))
""",
)
"""`offbeat server`, to which as many SIGTERMs as the first argument says come as it loads its model."""


@pytest.mark.parametrize(("save", "code"), [(False, 0), (True, 13)])
def test_a_signal_as_the_model_is_loaded_stops_the_server_in_good_order(tmp_path, model, save, code):
    saved = ["--save", str(tmp_path / "saved")] if save else []
    arguments = ["1", "server", "--port", "0", "--model", str(model), *saved]
    with command(*arguments, program=SIGNALLED_IN_THE_MODEL) as server:
        assert server.ends() == code, server.said
    assert "stopped by SIGTERM" in server.said
    assert ("nothing is saved: a signal came" in server.said) == save


SIGNALLED_AFTER_THE_SAVE = (
    sys.executable,
    "-c",
    """
import shutil, signal, sys
from offbeat.cli import main

def rmtree(*arguments, **keywords):
    removes(*arguments, **keywords)
    if saving:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)

from offbeat import ParameterServer
saving = []
state_dict = ParameterServer.state_dict
ParameterServer.state_dict = lambda self: saving.append(self) or state_dict(self)
removes, shutil.rmtree = shutil.rmtree, rmtree
sys.exit(main.main(sys.argv[1:]))
""",
)
"""`offbeat server`, to which two SIGTERMs come when the model is in its file."""


def test_signals_that_come_when_the_model_is_in_its_file_do_not_say_that_it_is_not(tmp_path, model):
    saved = tmp_path / "saved"
    arguments = ["server", "--port", "0", "--model", str(model), "--save", str(saved)]
    with command(*arguments, program=SIGNALLED_AFTER_THE_SAVE) as server:
        joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert f"the model is in {saved}" in server.said
    assert "nothing is saved" not in server.said
    assert load_file(saved).keys() == ZEROS.keys()


def test_a_closed_terminal_stops_a_server_as_sigterm_does(tmp_path, model):
    saved = tmp_path / "saved"
    with serving("--model", str(model), "--save", str(saved)) as server:
        joining(server)
        server.signal(signal.SIGHUP)
        assert server.ends() == 0, server.said
    assert saved.exists()


def test_a_closed_terminal_does_not_stop_a_server_under_nohup(model):
    shell = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh", *OFFBEAT)
    arguments = ["server", "--port", "0", "--model", str(model)]
    with command(*arguments, program=shell) as server:
        variables, _ = joining(server)
        server.signal(signal.SIGHUP)
        with offbeat.Client(variables["OFFBEAT_SERVER"]) as client:
            assert client.pull().keys() == ZEROS.keys()
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said


def test_the_model_is_saved_where_its_folder_was_removed_meanwhile(tmp_path, model):
    away = tmp_path / "away" / "down"
    away.mkdir(parents=True)
    with serving("--model", str(model), "--save", "../saved/m", cwd=away) as server:
        server.ends()
    assert "there is no folder" in server.said
    (tmp_path / "away" / "saved").mkdir()
    with serving("--model", str(model), "--save", "../saved/m", cwd=away) as server:
        joining(server)
        shutil.rmtree(tmp_path / "away")
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert load_file(tmp_path / "away" / "saved" / "m").keys() == ZEROS.keys()


def test_a_model_that_is_lost_is_said_to_be_with_its_file(tmp_path, model):
    folder = tmp_path / "folder"
    folder.mkdir()
    with serving("--model", str(model), "--save", str(folder / "m")) as server:
        joining(server)
        folder.rmdir()
        folder.touch()
        server.signal(signal.SIGTERM)
        assert server.ends() == 11, server.said
    assert f"the model is lost: {folder / 'm'} cannot be written: " in server.said


@pytest.mark.parametrize(
    ("is_whole", "replace"),
    [
        (True, Path.touch),
        (False, Path.touch),
        (True, lambda folder: folder.symlink_to("x" * 300)),
    ],
    ids=["whole", "of an earlier version", "where nothing can be looked up"],
)
def test_a_model_that_is_not_saved_is_in_the_checkpoint_and_the_command_that_is_told_takes_it_out(
    tmp_path, model, is_whole, replace
):
    folder, kept = tmp_path / "a folder", tmp_path / "it's kept"
    folder.mkdir()
    arguments = ["--model", str(model), "--save", str(folder / "m"), "--optimizer", "SGD(lr=1.0)"]
    with serving(*arguments, "--checkpoint-dir", str(kept)) as server:
        variables, _ = joining(server)
        wait_for((kept / "checkpoint-000001").exists)
        with offbeat.Client(variables["OFFBEAT_SERVER"]) as client:
            client.pull()
            assert client.push(ONES).applied
        if not is_whole:
            (kept / ".new").write_text("in the way")
        folder.rmdir()
        replace(folder)
        server.signal(signal.SIGTERM)
        assert server.ends() == 11, server.said
    assert "the model is not saved: " in server.said
    as_of = "" if is_whole else ", as of version 0 of 1"
    assert f"the newest checkpoint in {kept} has it{as_of}: `" in server.said
    told = shlex.split(server.said.partition(": `")[2].partition("`")[0])
    assert told[0] == "offbeat"
    folder.unlink()
    folder.mkdir()
    with command(*told[1:]) as export:
        assert export.ends() == 0, export.said
    assert (load_file(folder / "m")["w"] == (-1 if is_whole else 0)).all()


def test_a_server_that_fails_says_so_although_its_model_cannot_be_saved(tmp_path, model):
    folder = tmp_path / "folder"
    folder.mkdir()
    arguments = ["server", "--port", "0", "--model", str(model), "--save", str(folder / "m")]
    with command(str(folder), *arguments, program=FAILING) as server:
        assert server.ends() == 8, server.said
    assert "all workers were lost" in server.said
    assert "the model is lost" in server.said


FAILING = (
    sys.executable,
    "-c",
    """
import os, sys
from offbeat import ParameterServer
from offbeat.cli import main
from offbeat.errors import ConnectionLostError

def fail(*arguments):
    os.rmdir(sys.argv[1])
    open(sys.argv[1], "w").close()
    raise ConnectionLostError("all workers were lost")

ParameterServer.wait_for_workers = fail
sys.exit(main.main(sys.argv[2:]))
""",
)
"""`offbeat server` that fails, and that finds a file where the folder was that its first argument names."""


def _has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="there is no IPv6 here")
def test_a_server_on_this_machine_s_ipv6_address_says_that_only_this_machine_reaches_it(model):
    with serving("--model", str(model), "--host", "::1") as server:
        joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert "Only this machine can reach it" in server.said
    assert "Checkpoints go to" not in server.said
    assert "Whoever" not in server.said


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("--help",), ("server", "--help"), ("env",)])
def test_output_that_cannot_be_written_is_code_11(words, unbuffered):
    lossy = {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full, command(*words, stdout=full, **lossy) as lost:
        assert lost.ends() == 11, lost.said
        assert "No space left on device" in lost.said


@pytest.mark.parametrize("words", [("--help",), ("env",)])
def test_what_stdout_has_no_letters_for_is_written_all_the_same(words):
    lacking = {"PYTHONIOENCODING": "ascii", "OFFBEAT_NAME": "caf\udce9"}
    with command(*words, **lacking) as told:
        assert told.ends() == 0, told.said
    assert "\\u" in told.said


def test_a_server_ends_by_no_letter_that_stdout_lacks(tmp_path, model):
    saved = tmp_path / "größe"
    arguments = ["--model", str(model), "--save", str(saved), "--run-id", "größe"]
    with serving(*arguments, PYTHONIOENCODING="ascii") as server:
        joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert saved.exists()


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (("env",), ">&-", 0),
        (("env",), "2>&-", 0),
        (("sever",), "2>&-", 2),
        (("launch", "--workers", "1", "caf\udce9"), "2>&-", 2),
        (("launch", "--workers", "1", "script"), "2>&-", 0),
    ],
)
def test_a_closed_stream_is_one_that_nobody_reads(tmp_path, words, closed, code):
    (tmp_path / "script").write_text("print('at work')")
    shell = ("sh", "-c", f'exec "$@" {closed}', "sh", *OFFBEAT)
    with command(*words, program=shell, cwd=tmp_path) as closing:
        assert closing.ends() == code, closing.said
    assert "offbeat:" not in "".join(closing.out), "what is for stderr is on stdout"


CHILD_SEES = "import os, sys; sys.exit(any(os.fstat(n).st_rdev != os.stat(os.devnull).st_rdev for n in {}))"


@pytest.mark.parametrize(
    ("closed", "numbers"), [("<&-", "[0]"), (">&-", "[1]"), ("2>&-", "[2]"), ("<&- >&- 2>&-", "[0, 1, 2]")]
)
def test_a_stream_that_is_closed_is_the_null_device_in_children_too(closed, numbers):
    code = (
        "import subprocess, sys; from offbeat.cli import main; main.main(['--version']); "
        "sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    )
    shell = ("sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code)
    with command(CHILD_SEES.format(numbers), program=shell) as parent:
        assert parent.ends() == 0, parent.said


SLOW_TO_LOG = (
    sys.executable,
    "-c",
    """
import sys, threading
from offbeat import log
from offbeat.cli import main, server

def log_waiting(patience_s):
    told.wait()
    logs(patience_s)

def join_lines(*arguments, **keywords):
    told.set()
    return words(*arguments, **keywords)

told, logs, words = threading.Event(), log._log_waiting, server.join_lines
log._log_waiting, server.join_lines = log_waiting, join_lines
sys.exit(main.main(sys.argv[1:]))
""",
)
"""`offbeat server`, whose log comes when it has begun to tell how workers join."""


def test_the_start_is_told_once_however_late_its_log_comes(model):
    with command("server", "--port", "0", "--model", str(model), program=SLOW_TO_LOG) as server:
        joining(server)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
    assert "the model is in place" in server.said
    assert "run_id=" not in server.said
    assert "listens" not in server.said
    assert "joins with" not in server.said


def test_a_token_made_up_is_printed_in_full_and_opens_the_door(model):
    with serving("--model", str(model), "--new-token", "--host", "127.0.0.1") as server:
        variables, python = joining(server)
        assert len(variables["OFFBEAT_TOKEN"]) >= 32
        assert f'token="{variables["OFFBEAT_TOKEN"]}"' in python
        with pytest.raises(AuthenticationError):
            offbeat.Client(variables["OFFBEAT_SERVER"], token=WORD)
        with offbeat.Client(variables["OFFBEAT_SERVER"], token=variables["OFFBEAT_TOKEN"]) as client:
            assert client.pull().keys() == ZEROS.keys()


def test_a_token_that_was_given_is_not_shown_and_the_address_is_one_that_others_can_reach(model):
    with serving("--model", str(model), OFFBEAT_TOKEN=WORD) as server:
        variables, python = joining(server)
        assert variables["OFFBEAT_TOKEN"].startswith("$")
        assert 'os.environ["OFFBEAT_TOKEN"]' in python
        assert WORD not in server.said
        assert variables["OFFBEAT_SERVER"].partition(":")[0] not in ("0.0.0.0", "[::]", "")  # noqa: S104
        with offbeat.Client(variables["OFFBEAT_SERVER"], token=WORD) as client:
            assert client.pull().keys() == ZEROS.keys()


@pytest.mark.parametrize("environment", [None, "another", WORD])
def test_a_token_of_the_command_line_is_not_shown_nor_is_a_variable_that_does_not_hold_it(model, environment):
    variable = {} if environment is None else {"OFFBEAT_TOKEN": environment}
    with serving("--model", str(model), "--host", "127.0.0.1", "--token", WORD, **variable) as server:
        variables, python = joining(server)
    given = "<the secret given as --token>"
    said = ("$OFFBEAT_TOKEN", 'os.environ["OFFBEAT_TOKEN"]') if environment == WORD else (given, f'"{given}"')
    assert variables["OFFBEAT_TOKEN"] == said[0]
    assert python.endswith(f", token={said[1]})")
    assert WORD not in server.said


def test_without_a_file_the_first_worker_brings_the_model_and_the_run_ends_with_its_samples(tmp_path):
    saved = tmp_path / "trained.safetensors"
    with serving("--save", str(saved), "--max-samples", "8", "--lr-schedule", "linear") as server:
        variables, _ = joining(server)
        with offbeat.Client(variables["OFFBEAT_SERVER"]) as client:
            client.init(ZEROS, optimizer=offbeat.optim.SGD(lr=1.0))
            client.pull()
            receipts = [client.push_pull(ONES, samples=4) for _ in range(3)]
        assert [receipt.reason for receipt in receipts] == [None, None, "budget"]
        assert server.ends() == 0, server.said
    assert np.allclose(load_file(saved)["w"], -1.5)  # 1, then half of it


def test_batchnorms_statistics_in_a_file_are_buffers(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"bn.weight": np.ones(2, np.float32), "bn.running_mean": np.zeros(2, np.float32)}, path)
    with serving("--model", str(path), "--optimizer", "SGD(lr=0.5)") as server:
        variables, _ = joining(server)
        with offbeat.Client(variables["OFFBEAT_SERVER"]) as client:
            client.pull()
            client.push({"bn.weight": np.ones(2, np.float32), "bn.running_mean": np.full(2, 7, np.float32)})
            now = client.pull()
        assert now["bn.weight"].tolist() == [0.5, 0.5]
        assert now["bn.running_mean"].tolist() == [7, 7]


def test_an_address_in_use_is_code_6():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with command("server", "--port", str(port)) as server:
            assert server.ends() == 6
            assert str(port) in server.said
            assert server.said.count("\n") == 1


def test_status_tells_people_and_programs(model):
    with serving("--model", str(model), "--optimizer", "SGD(lr=0.5)", OFFBEAT_TOKEN=WORD) as server:
        variables, _ = joining(server)
        address = variables["OFFBEAT_SERVER"]
        with offbeat.Client(address, token=WORD, worker_id="amy") as client:
            client.pull()
            client.push(ONES, samples=32)
            with command("status", address, OFFBEAT_TOKEN=WORD) as status:
                assert status.ends() == 0, status.said
                text = status.said
            with command("status", "--format", "json", OFFBEAT_SERVER=address, OFFBEAT_TOKEN=WORD) as status:
                assert status.ends() == 0, status.said
                data = json.loads("".join(status.out))
            with command("status", "--json", OFFBEAT_SERVER=address, OFFBEAT_TOKEN=WORD) as status:
                assert status.ends() == 0, status.said
                assert json.loads("".join(status.out)).keys() == data.keys()
        assert "version 1, 32 samples" in text
        assert "SGD(lr=0.5" in text
        assert "memory" in text
        assert " + " in text
        row = next(line.split() for line in text.splitlines() if line.startswith("amy"))
        assert row[1:4] == ["joined", socket.gethostname(), "32"]
        assert data["version"] == 1
        assert [worker["id"] for worker in data["workers"]] == ["amy"]
        with command("status", address, OFFBEAT_TOKEN=WORD + "?") as status:
            assert status.ends() == 5
            assert "and this client do not share a token" in status.said


def test_on_a_terminal_status_is_no_wider_than_that_unless_all_is_asked_for(model, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which would count more than the width
    with serving("--model", str(model)) as server:
        variables, _ = joining(server)
        address = variables["OFFBEAT_SERVER"]
        with offbeat.Client(address, worker_id="a-worker-with-a-name-of-some-length") as client:
            client.pull()
            wide = {}
            for words in (["status", address], ["status", address, "--all"]):
                ours, theirs = os.openpty()
                termios.tcsetwinsize(theirs, (24, 60))
                with command(*words, stdout=theirs) as told:
                    assert told.ends() == 0, told.said
                os.close(theirs)
                table = os.read(ours, 65_536).decode().partition("\nworker ")[2].partition("\r\n\r\n")[0]
                os.close(ours)
                wide[len(words)] = [len(line) for line in f"worker {table}".splitlines()]
    assert len(wide[2]) == len(wide[3]) == 2
    assert max(wide[2]) <= 60 < max(wide[3])


def test_status_of_an_http_server_is_code_10():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with command("status", f"127.0.0.1:{other.server_port}", "--timeout", "1") as status:
                assert status.ends() == 10, status.said  # in other words where the hello's nonce ends a line
                assert str(other.server_port) in status.said
        finally:
            other.shutdown()
            thread.join()


def test_status_of_something_that_says_nothing_is_code_9():
    with socket.create_server(("127.0.0.1", 0)) as quiet:
        address = f"127.0.0.1:{quiet.getsockname()[1]}"
        with command("status", address, "--timeout", "3") as status:
            status.line(f"nobody has answered at {address} yet: it is tried for 3 s (--timeout)")
            assert status.ends() == 9, status.said


def test_insecure_opens_every_interface_without_a_token_and_says_so(model):
    every = "0.0.0.0"  # noqa: S104  that is what it is about
    with serving("--model", str(model), "--host", every, "--insecure") as server:
        variables, _ = joining(server)
        assert "Whoever reaches this port can join: there is no token (--insecure)." in server.said
        port = variables["OFFBEAT_SERVER"].rpartition(":")[2]
        with offbeat.Client(f"127.0.0.1:{port}") as client:
            assert client.pull().keys() == ZEROS.keys()
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said


def test_status_of_a_server_that_is_not_there_is_code_4():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with command("status", address, "--timeout", "1") as status:
        assert status.ends() == 4
        assert address in status.said


def test_a_reader_that_has_gone_is_no_error():
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{shlex.quote(sys.executable)} -m offbeat.cli.main --help | true"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_server_runs_without_torch(tmp_path, model):
    """As on a machine that has none: importing it fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with serving("--model", str(model), PYTHONPATH=path) as server:
        variables, _ = joining(server)
        with offbeat.Client(variables["OFFBEAT_SERVER"]) as client:
            assert client.pull().keys() == ZEROS.keys()
        server.signal(signal.SIGTERM)
        assert server.ends() == 0, server.said
