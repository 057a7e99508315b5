"""`offbeat launch`: what its workers find in their environment, how their output is shown, how they end."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import offbeat
from offbeat.cli.copying import READER_S
from support.command import SIGNALLED_IN_THE_SAVE, command, stalled, unread


@pytest.fixture
def script(tmp_path):
    def write(body):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(body))
        return str(path)

    return write


def test_each_worker_has_its_rank_and_a_server(script, tmp_path):
    train = script(
        """
        import os, sys, numpy as np, offbeat
        env = os.environ
        print(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["OMP_NUM_THREADS"], *sys.argv[1:])
        with offbeat.Client() as client:  # by OFFBEAT_SERVER and OFFBEAT_TOKEN
            client.init({"w": np.zeros(2, np.float32)}, optimizer=offbeat.optim.SGD(lr=1.0))
            client.pull()
            assert client.push({"w": np.ones(2, np.float32)}, samples=8).applied
        """
    )
    saved = tmp_path / "model.safetensors"
    with command(
        "launch", "--workers", "2", "--save", str(saved), train, "--lr", "3", "--workers", "7"
    ) as launch:
        assert launch.ends() == 0, launch.said
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    lines = sorted(line for line in launch.out if line.startswith("["))
    assert lines == [f"[{r}] {r} {r} 2 {threads} --lr 3 --workers 7\n" for r in (0, 1)]
    assert load_file(saved)["w"].tolist() == [-2, -2]
    assert "[server] " in "".join(launch.err)


def test_who_has_the_token_is_told_how_to_ask_how_workers_do(script):
    train = script(
        """
        import threading, offbeat
        offbeat.Client().__enter__()
        print("joined", flush=True)
        while not threading.Event().wait(0.2): pass
        """
    )
    theirs = {"OFFBEAT_TOKEN": "one-that-the-user-chose"}
    with command("launch", "--workers", "1", train, **theirs) as launch:
        place = re.search(r"`offbeat (status .*)`", launch.line("offbeat status"))[1]
        launch.line("joined")
        with command(*place.split(), "--json", **theirs) as status:
            assert status.ends() == 0, status.said
        assert '"workers"' in "".join(status.out)
        launch.signal(signal.SIGINT)
        launch.ends()


def test_of_a_token_that_nobody_knows_nothing_is_told(script):
    with command("launch", "--workers", "1", script("print('done')")) as launch:
        assert launch.ends() == 0, launch.said
    assert "offbeat status" not in "".join([*launch.out, *launch.err])


@pytest.mark.parametrize("given", [{}, {"MASTER_ADDR": "", "MASTER_PORT": ""}], ids=["unset", "empty"])
def test_workers_that_are_all_here_are_told_where_they_meet(script, given):
    train = script("import os; print('at', os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))")
    with command("launch", "--workers", "1", train, **given) as launch:
        assert " at 127.0.0.1 " in launch.line("at ")
        assert launch.ends() == 0, launch.said


@pytest.mark.parametrize(
    ("given", "local"),
    [({}, True), ({"OFFBEAT_TOKEN": "one-that-the-user-chose"}, False), ({"OFFBEAT_HOST": "0.0.0.0"}, False)],  # noqa: S104
    ids=["none", "token", "host"],
)
def test_a_server_of_the_script_s_own_opens_to_others_only_where_the_user_has_said_so(script, given, local):
    train = script(
        """
        import offbeat
        with offbeat.ParameterServer() as server:
            print("listens on", server._server.address)
        """
    )
    with command("launch", "--workers", "1", train, **given) as launch:
        where = launch.line("listens on").split()[-1]
        assert launch.ends() == 0, launch.said
    assert where.startswith("127.0.0.1:") == local, where


def test_a_save_that_found_no_model_is_code_13(script, tmp_path):
    saved = tmp_path / "model.safetensors"
    with command("launch", "--workers", "1", "--save", str(saved), script("print('no worker')")) as launch:
        assert launch.ends() == 13, launch.said
        assert "nothing is saved" in launch.said
    assert not saved.exists()


def test_what_all_workers_say_is_told_once_and_of_how_many(script):
    train = script(
        """
        import os, offbeat
        offbeat.Client(os.environ["OFFBEAT_SERVER"], token="another-token-than-the-server-s")
        """
    )
    with command("launch", "--workers", "4", train) as launch:
        assert launch.ends() == 1
    told = [line for line in launch.err if line.startswith("offbeat: ")]
    assert len(told) == 5
    assert sum("do not share a token" in line for line in told) == 1
    first = told[0].split()[2]
    assert told[0].startswith(f"offbeat: worker {first} failed with exit code 1: offbeat.errors.Auth")
    assert {line.rpartition(" failed ")[2] for line in told[1:4]} == {
        f"with exit code 1, as worker {first} did\n"
    }
    begin, end = "offbeat: 4 of 4 workers failed; the first: worker ", "; 3 more, in the same words\n"
    # That is who ended first; another's words may have been read before.
    assert told[4] in {f"{begin}{rank} failed with exit code 1{end}" for rank in range(4)}


def test_a_long_error_is_whole_in_the_worker_s_own_words_and_cut_in_launch_s(script):
    train = script("""raise ValueError("long " * 100 + "end")""")
    with command("launch", "--workers", "1", train) as launch:
        assert launch.ends() == 1
    whole = "long " * 100 + "end"
    assert [line for line in launch.err if whole in line] == [f"[0] ValueError: {whole}\n"]
    worker, last = [line for line in launch.err if line.startswith("offbeat: ")]
    assert worker.startswith("offbeat: worker 0 failed with exit code 1: ValueError: long long ")
    assert worker.endswith("…\n")
    assert last == "offbeat: 1 of 1 workers failed; the first: worker 0 failed with exit code 1\n"


def test_the_first_failure_is_told_again_where_others_have_gone_on_after_it(script, tmp_path):
    train = script(
        """
        import os, sys, threading
        from pathlib import Path
        if os.environ["RANK"] == "0":
            raise ValueError("the loss went up")
        while not Path(sys.argv[1]).exists():
            threading.Event().wait(0.05)
        """
    )
    with command("launch", "--workers", "2", train, str(tmp_path / "on")) as launch:
        launch.line("offbeat: worker 0 failed with exit code 1: ValueError: the loss went up")
        (tmp_path / "on").touch()
        assert launch.ends() == 1
    first = "worker 0 failed with exit code 1: ValueError: the loss went up"
    assert launch.err[-1] == f"offbeat: 1 of 2 workers failed; the first: {first}\n"


def test_the_first_failure_is_the_exit_code_and_its_last_line_is_told(script):
    train = script(
        """
        import os, sys
        if os.environ["RANK"] == "1":
            sys.exit(7)
        raise ValueError("the loss went up")
        """
    )
    with command("launch", "--workers", "1", train) as launch:
        assert launch.ends() == 1
    assert "worker 0 failed with exit code 1: ValueError: the loss went up\n" in launch.said
    with command("launch", "--workers", "1", "--first-rank", "1", train) as launch:
        assert launch.ends() == 7


def test_a_worker_that_fails_does_not_end_the_others(script, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    train = script(
        f"""
        import os, sys
        if os.environ["RANK"] == "0":
            print("round 3", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        open({str(fifo)!r}).read()  # until the test says so
        print("all done")
        """
    )
    with command("launch", "--workers", "2", train) as launch:
        launch.line("worker 0 was ended by signal 9; its last line: round 3")
        fifo.write_text("go on")
        launch.line("[1] all done")
        assert launch.ends() == 137


def test_a_signal_that_the_system_gives_to_another_thread_ends_the_workers(script):
    train = script(
        """
        import time
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    with command("launch", "--workers", "1", train) as launch:
        launch.line("ready")
        launch.signal_another_thread(signal.SIGTERM)
        assert launch.ends() == 128 + signal.SIGINT, launch.said
        assert "stopped by SIGTERM" in launch.said


def test_ctrl_c_reaches_every_worker_once_and_they_end_in_their_own_way(script):
    train = script(
        """
        import threading
        try:
            print("ready")
            while not threading.Event().wait(0.2): pass
        except KeyboardInterrupt:
            print("interrupted, cleaning up")
        """
    )
    with command("launch", "--workers", "2", train) as launch:
        for _ in range(2):
            launch.line("ready")
        launch.signal(signal.SIGINT)
        assert launch.ends() == 130
    assert sum("interrupted, cleaning up" in line for line in launch.out) == 2, launch.said
    assert "Traceback" not in launch.said


INTERRUPTED = """
    import threading, offbeat
    with offbeat.Client(worker_id="w") as client:
        print("ready")
        while not threading.Event().wait(0.2): pass
    """
"""A worker that does nothing about Ctrl-C, and says goodbye by its `with`."""


@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["plain", "debug"])
def test_ctrl_c_shows_no_traceback_of_a_worker_unless_it_is_asked_for(script, debug):
    with command("launch", *debug, "--workers", "1", script(INTERRUPTED)) as launch:
        launch.line("ready")
        launch.signal(signal.SIGINT)
        assert launch.ends() == 130
    assert ("Traceback" in launch.said) == bool(debug), launch.said
    assert ("[0] KeyboardInterrupt" in launch.said) == bool(debug), launch.said
    assert "worker=w incarnation=1 cause=could not begin: KeyboardInterrupt" in launch.said  # its goodbye
    assert "stopped by SIGINT" in launch.said


def test_what_else_goes_wrong_as_a_worker_is_interrupted_is_shown_whole(script):
    train = script(
        """
        import threading
        try:
            print("ready")
            while not threading.Event().wait(0.2): pass
        finally:
            raise ValueError("while cleaning up")
        """
    )
    with command("launch", "--workers", "1", train) as launch:
        launch.line("ready")
        launch.signal(signal.SIGINT)
        assert launch.ends() == 130
    said = "".join(launch.err)
    assert said.count("[0] Traceback") == 2, said
    assert said.index("[0] KeyboardInterrupt") < said.index("[0] ValueError: while cleaning up")


def test_the_traceback_of_an_interrupt_that_is_not_launchs_is_shown(script):
    train = script("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    with command("launch", "--workers", "1", train) as launch:
        assert launch.ends() == 130
    assert "[0] Traceback" in launch.said
    assert "[0] KeyboardInterrupt" in launch.said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_workers_end_with_a_launch_that_is_killed(script, tmp_path):
    ended = tmp_path / "ended"
    os.mkfifo(ended)
    train = script(
        """
        import os, signal, sys, threading
        told = os.open(sys.argv[1], os.O_WRONLY)
        signal.signal(signal.SIGTERM, lambda *_: (os.write(told, b"SIGTERM\\n"), sys.exit()))
        print("ready", sys.argv[0])
        while not threading.Event().wait(0.2): pass
        """
    )
    with command("launch", "--workers", "1", train, str(ended)) as launch, ended.open() as told:
        assert launch.line("ready").split()[-1] == str(train)
        launch.signal(signal.SIGKILL)
        assert launch.ends() == -signal.SIGKILL
        assert set(told.read().split()) == {"SIGTERM"}  # one or more: for each of launch's threads


CLEANING_UP = """
    import sys, threading
    try:
        print("ready")
        while not threading.Event().wait(0.2): pass
    except KeyboardInterrupt:
        open(sys.argv[1], "w").close()
    """
"""A worker that makes the file that its argument names when Ctrl-C ends it."""


def test_workers_end_in_their_own_way_where_nobody_reads_that_they_are_to(script, tmp_path):
    cleaned = tmp_path / "cleaned"
    train = script(CLEANING_UP)
    with (
        unread() as stderr,
        command("launch", "--workers", "1", train, str(cleaned), stderr=stderr) as launch,
    ):
        launch.line("ready")
        launch.signal(signal.SIGINT)
        assert launch.ends() == 130
    assert cleaned.exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_no_worker_outlives_a_launch_that_nobody_lets_speak(script, tmp_path, stream):
    told = tmp_path / "pid"
    os.mkfifo(told)
    train = script(
        f"""
        import os, sys, threading
        with open({str(told)!r}, "w") as file:
            file.write(str(os.getpid()))
        for _ in range(5000):  # more than a pipe holds
            print("x" * 60, file=sys.{stream})
        while not threading.Event().wait(0.2): pass
        """
    )
    with stalled() as full, command("launch", "--workers", "1", train, **{stream: full}) as launch:
        pid = int(told.read_text())
        code = launch.ends_by(signal.SIGINT, at_most=8)  # one for each thing that waits for the reader
        assert code in (130, -signal.SIGINT), launch.said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["done", "stopped"])
def test_a_reader_that_is_slow_gets_all_that_the_workers_wrote(script, is_stopped):
    train = script(
        """
        import sys, threading
        for n in range(1700):  # more than one pipe holds, and less than the two, so that it ends
            print(n, "x" * 60)
        sys.stdout.flush()
        print("written", file=sys.stderr)
        while sys.argv[1] == "True" and not threading.Event().wait(0.2): pass
        """
    )
    reading, writing = os.pipe()
    with command("launch", "--workers", "1", train, str(is_stopped), stdout=writing) as launch:
        os.close(writing)
        launch.line("written")
        if is_stopped:
            launch.signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            launch.process.wait(2 * READER_S)  # it is a reader that it waits for
        with os.fdopen(reading) as output:
            lines = output.read().splitlines()
        assert launch.ends() == (130 if is_stopped else 0), launch.said
    assert [line.split()[1] for line in lines] == [str(n) for n in range(1700)]


@pytest.mark.parametrize("others", [1, 2])
def test_two_signals_at_once_leave_the_workers_time_to_clean_up(script, tmp_path, others):
    cleaned = tmp_path / "cleaned"
    train = script(CLEANING_UP)
    arguments = ["launch", "--workers", "1", train, str(cleaned)]
    with command(str(others), *arguments, program=SIGNALLED_AT_ONCE) as launch:
        launch.line("ready")
        launch.signal(signal.SIGINT)
        assert launch.ends() == 130, launch.said
    assert cleaned.exists()


@pytest.mark.parametrize(
    ("stream", "worker", "code"), [("stdout", 0, 11), ("stdout", 3, 3), ("stdout", 7, 7), ("stderr", 0, 0)]
)
def test_workers_go_on_where_what_they_write_cannot_be_kept(script, tmp_path, stream, worker, code):
    done = tmp_path / "done"
    train = script(
        f"""
        import sys
        for _ in range(5000):  # more than a pipe holds
            print("x" * 60, file=sys.{stream})
        open({str(done)!r}, "w").close()
        sys.exit({worker})
        """
    )
    with (
        Path("/dev/full").open("w") as full,  # each write to it finds no space left
        command("launch", "--workers", "1", train, **{stream: full}) as launch,
    ):
        assert launch.ends() == code  # that the output itself is lost is an error, as of any program
    assert done.exists()


def test_output_that_is_lost_is_told_once(script, tmp_path):
    arguments = ["--workers", "1", "--save", str(tmp_path / "m"), script(INITIALIZING + "    print('x')\n")]
    with Path("/dev/full").open("w") as full, command("launch", *arguments, stdout=full) as launch:
        assert launch.ends() == 11, launch.said
    assert launch.said.count("No space left on device") == 1, launch.said


INITIALIZING = """
    import os, sys, numpy as np, offbeat
    with offbeat.Client() as client:
        client.init({"w": np.zeros(2, np.float32)}, optimizer=offbeat.optim.SGD(lr=1.0))
"""
"""A worker that gives the server a model."""

READY = """
    import threading
    print("ready")
    while not threading.Event().wait(0.2): pass
    """
"""What it does then: nothing, until it is ended."""


def test_a_save_that_fails_does_not_hide_that_a_worker_has_failed(script, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    train = script(
        INITIALIZING
        + """
    os.rmdir(sys.argv[1])
    open(sys.argv[1], "w").close()
    sys.exit(7)
    """
    )
    saved = folder / "model.safetensors"
    with command("launch", "--workers", "1", "--save", str(saved), train, str(folder)) as launch:
        assert launch.ends() == 7, launch.said
    assert f"the model is lost: {saved} cannot be written" in launch.said
    assert "1 of 1 workers failed" in launch.said


def test_a_worker_that_has_failed_before_a_signal_is_the_exit_code(script):
    train = script(
        """
        import os, sys, threading
        if os.environ["RANK"] == "0":
            sys.exit(7)
        print("ready")
        while not threading.Event().wait(0.2): pass
        """
    )
    with command("launch", "--workers", "2", train) as launch:
        launch.line("ready")
        if "worker 0 failed" not in launch.said:
            launch.line("worker 0 failed")
        launch.signal(signal.SIGTERM)
        assert launch.ends() == 7, launch.said
    assert "1 of 2 workers failed; the first: worker 0" in launch.said


def test_output_that_a_signal_cuts_off_is_said_to_be(script):
    train = script("print('x')")
    with (
        stalled() as full,
        command("launch", "--workers", "1", train, program=FINISHING, stdout=full) as launch,
    ):
        launch.line("finishing")
        assert launch.ends_by(signal.SIGINT, at_most=2) == 130, launch.said
    assert "stopped by SIGINT before all was written" in launch.said


FINISHING = (
    sys.executable,
    "-c",
    """
import sys
from offbeat.cli import main, processes

def finish_output(self):
    print("finishing", file=sys.stderr, flush=True)
    finishes(self)

finishes, processes.Processes.finish_output = processes.Processes.finish_output, finish_output
sys.exit(main.main(sys.argv[1:]))
""",
)
"""`offbeat launch`, which says on stderr when only the workers' output is left to write."""


def test_the_model_is_saved_where_nobody_reads_what_launch_says(script, tmp_path):
    train = script(INITIALIZING + READY)
    saved = tmp_path / "model.safetensors"
    arguments = ["launch", "--workers", "1", "--save", str(saved), train]
    with stalled() as full, command(*arguments, stderr=full) as launch:
        launch.line("ready")
        launch.signal(signal.SIGTERM)
        launch.line(f"the model is in {saved}")
        assert launch.ends_by(signal.SIGTERM, at_most=3) in (130, -signal.SIGTERM)
    assert load_file(saved)["w"].tolist() == [0, 0]


def test_a_closed_terminal_ends_the_workers_and_saves_the_model(script, tmp_path):
    train = script(INITIALIZING + READY)
    saved = tmp_path / "model.safetensors"
    with command("launch", "--workers", "1", "--save", str(saved), train) as launch:
        launch.line("ready")
        launch.signal(signal.SIGHUP)
        assert launch.ends() == 130, launch.said
    assert load_file(saved)["w"].tolist() == [0, 0]


def test_no_child_of_a_worker_outlives_the_end_that_was_asked_for(script, tmp_path):
    held = tmp_path / "fifo"
    os.mkfifo(held)
    child = (
        "import os, signal, sys, threading; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "fifo = open(sys.argv[1], 'w'); print(os.getpid(), file=fifo, flush=True)\n"
        "while not threading.Event().wait(0.2): pass"
    )
    train = script(
        f"""
        import subprocess, sys, threading
        subprocess.Popen([sys.executable, "-c", {child!r}, {str(held)!r}])
        while not threading.Event().wait(0.2): pass
        """
    )
    with command("launch", "--workers", "1", train) as launch, held.open() as fifo:
        pid = int(fifo.readline())
        try:
            launch.signal(signal.SIGINT)
            assert launch.ends() == 130, launch.said
            gone = select.poll()
            gone.register(fifo, select.POLLHUP)
            assert gone.poll(20_000), "the child has it open"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_failure_that_nobody_reads_is_the_exit_code_all_the_same(script, tmp_path):
    saved = tmp_path / "model.safetensors"
    train = script(
        """
        import sys, numpy as np, offbeat
        with offbeat.Client() as client:
            client.init({"w": np.zeros(2, np.float32)}, optimizer=offbeat.optim.SGD(lr=1.0))
        sys.exit(7)
        """
    )
    arguments = ["launch", "--workers", "1", "--save", str(saved), train]
    with unread() as nobody, command(*arguments, stdout=nobody, stderr=nobody) as launch:
        assert launch.ends() == 7
    assert saved.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_the_model_is_saved_when_the_run_is_stopped(script, tmp_path, number):
    train = script(
        """
        import threading, numpy as np, offbeat
        with offbeat.Client() as client:
            client.init({"w": np.zeros(2, np.float32)}, optimizer=offbeat.optim.SGD(lr=1.0))
            client.pull()
            client.push({"w": np.ones(2, np.float32)}, samples=8)
            try:
                print("ready")
                while not threading.Event().wait(0.2): pass
            except KeyboardInterrupt:
                client.push({"w": np.ones(2, np.float32)}, samples=8)  # the last before the end
        """
    )
    saved = tmp_path / "model.safetensors"
    with command("launch", "--workers", "1", "--save", str(saved), train) as launch:
        launch.line("ready")
        launch.signal(number)
        assert launch.ends() == 130
    assert load_file(saved)["w"].tolist() == [-2, -2], launch.said


@pytest.mark.parametrize("num_signals", [1, 2])
def test_one_signal_in_the_save_costs_nothing_and_a_second_is_told(script, tmp_path, num_signals):
    train = script(
        """
        import numpy as np, offbeat
        with offbeat.Client() as client:
            client.init({"w": np.zeros(2, np.float32)}, optimizer=offbeat.optim.SGD(lr=1.0))
        """
    )
    saved = tmp_path / "model.safetensors"
    arguments = ["launch", "--workers", "1", "--save", str(saved), train]
    with command(str(num_signals), *arguments, program=SIGNALLED_IN_THE_SAVE) as launch:
        code = launch.ends()
    assert code == (0 if num_signals == 1 else 13), launch.said
    assert saved.exists() == (num_signals == 1)
    assert ("nothing is saved: a signal came" in launch.said) == (num_signals == 2)


def test_a_worker_that_does_not_listen_is_killed(script):
    train = script(
        """
        import signal, threading
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pid", __import__("os").getpid(), flush=True)
        while True:
            threading.Event().wait(1)
        """
    )
    with command("launch", "--workers", "1", train) as launch:
        pid = int(launch.line("pid").split()[-1])
        launch.signal(signal.SIGINT)
        launch.line("ending 1 worker")
        launch.signal(signal.SIGTERM)
        assert launch.ends() == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SIGNALLED_AT_ONCE = (
    sys.executable,
    "-c",
    """
import signal, sys
from offbeat.cli import main, processes

def end(self):
    for _ in range(int(sys.argv[1])):
        signal.raise_signal(signal.SIGTERM)
    ends(self)

ends, processes.Processes._end = processes.Processes._end, end
sys.exit(main.main(sys.argv[2:]))
""",
)
"""`offbeat launch`, to which as many SIGTERMs as the first argument says come with the one that ends it."""


SIGNALLED_AS_IT = (
    sys.executable,
    "-c",
    """
import signal, subprocess, sys
from offbeat.cli import main, processes

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        print("pid", self.pid, flush=True)
        if sys.argv[1] == "starts":
            signal.raise_signal(signal.SIGTERM)

def end(self):
    if sys.argv[1] == "ends":
        signal.raise_signal(signal.SIGTERM)
    ends(self)

ends, processes.Processes._end = processes.Processes._end, end
subprocess.Popen = Popen
sys.exit(main.main(sys.argv[2:]))
""",
)
"""`offbeat launch`, to which SIGTERM comes as it starts a worker, or begins to end those that there are."""


@pytest.mark.parametrize("when", ["starts", "ends"])
def test_no_worker_outlives_a_signal_whenever_it_comes(script, when):
    train = script("while not __import__('threading').Event().wait(0.2): pass")
    with command(when, "launch", "--workers", "1", train, program=SIGNALLED_AS_IT) as launch:
        pid = int(launch.line("pid").split()[-1])
        if when == "ends":
            launch.signal(signal.SIGINT)
        try:
            assert launch.ends() == 130, launch.said
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_workers_join_a_server_that_is_named(script):
    train = script(
        """
        import numpy as np, offbeat
        with offbeat.Client() as client:
            client.pull()
            client.push({"w": np.ones(2, np.float32)}, samples=8)
        """
    )
    sgd = offbeat.optim.SGD(lr=1.0)
    with offbeat.ParameterServer({"w": np.zeros(2, np.float32)}, optimizer=sgd) as server:
        with command("launch", "--workers", "2", "--server", server.address, train) as launch:
            assert launch.ends() == 0, launch.said
        assert server.state_dict()["w"].tolist() == [-2, -2]
        assert len(server.status()["workers"]) == 2


def test_only_the_first_worker_has_a_terminal_and_its_bar_stays_below_the_lines_of_others(script, tmp_path):
    drawn, written = tmp_path / "drawn", tmp_path / "written"
    os.mkfifo(drawn)
    os.mkfifo(written)
    train = script(
        f"""
        import os, sys
        rank = os.environ["RANK"]
        print(rank, sys.stderr.isatty(), file=sys.stderr, flush=True)
        if rank == "0":
            sys.stderr.write("\\r 50%")
            sys.stderr.flush()
            open({str(written)!r}).close()
            print(file=sys.stderr)
        else:
            open({str(drawn)!r}).close()
            print("hello from one", file=sys.stderr, flush=True)
        """
    )
    # Each goes on when what the other wrote has reached the terminal, not when it was written.
    steps = [(b"50%", drawn), (b"hello from one", written)]
    launch = [sys.executable, "-m", "offbeat.cli.main", "launch", "--workers", "2", train]
    said = _in_a_terminal(*launch, steps=steps)
    assert "[0] 0 True" in said
    assert "[1] 1 False" in said
    assert re.search(r"\r\[0\]  50%.*\r\x1b\[K\[1\] hello from one\r?\n\r\[0\]  50%", said, re.DOTALL)


def test_what_workers_print_goes_above_the_bar_on_the_same_terminal(script, tmp_path):
    drawn, printed = tmp_path / "drawn", tmp_path / "printed"
    os.mkfifo(drawn)
    os.mkfifo(printed)
    train = script(
        f"""
        import sys
        sys.stderr.write("\\r 50%")
        sys.stderr.flush()
        open({str(drawn)!r}).close()
        print("epoch 1 of 2")
        open({str(printed)!r}).close()
        print(file=sys.stderr)
        """
    )
    launch = [sys.executable, "-m", "offbeat.cli.main", "launch", "--workers", "1", train]
    said = _in_a_terminal(*launch, steps=[(b"50%", drawn), (b"epoch 1 of 2", printed)])
    assert re.search(r"\r\[0\]  50%\r\x1b\[K\[0\] epoch 1 of 2\r?\n\r\[0\]  50%", said), said


def test_what_the_server_logs_goes_above_the_bar(script, tmp_path):
    logged = tmp_path / "logged"
    os.mkfifo(logged)
    train = script(
        f"""
        import sys, offbeat
        sys.stderr.write("\\r 50%")
        sys.stderr.flush()
        with offbeat.Client(worker_id="amy"):
            open({str(logged)!r}).close()
        print(file=sys.stderr)
        """
    )
    launch = [sys.executable, "-m", "offbeat.cli.main", "launch", "--workers", "1", train]
    said = _in_a_terminal(*launch, steps=[(b"amy", logged)])
    assert re.search(r"\r\[0\]  50%\r\x1b\[K\[server\] [^\r\n]*amy[^\r\n]*\r?\n\r\[0\]  50%", said), said


BARS = """
import sys
for out in (sys.stdout, sys.stderr):
    for step in ("10%", "50%", "100%"):
        print(step, end="\\r", file=out, flush=True)
    print(file=out)
    print("\\r\\x1b[Kstep 1", "\\r\\x1b[Kstep 2", sep="", file=out, flush=True)
    print("done", file=out, flush=True)
"""
"""A script with two bars on each stream, the second of which erases."""

PLAIN = ["[0] 100%\n", "[0] step 2\n", "[0] done\n"]
"""What is left of them."""


def test_in_a_file_there_is_no_bar_but_its_last_state(script, tmp_path):
    out, err = tmp_path / "out", tmp_path / "err"
    with (
        out.open("w") as to,
        err.open("w") as errors_to,
        command("launch", "--workers", "1", script(BARS), stdout=to, stderr=errors_to) as launch,
    ):
        assert launch.ends() == 0
    for path in (out, err):
        with path.open(newline="") as file:
            assert [line for line in file if not line.startswith("[server] ")] == PLAIN


def test_where_one_stream_is_a_terminal_the_other_s_bar_is_none(script, tmp_path):
    out = tmp_path / "out"
    launch = [sys.executable, "-m", "offbeat.cli.main", "launch", "--workers", "1", script(BARS)]
    said = _in_a_terminal("/bin/sh", "-c", 'exec "$@" >"$0"', str(out), *launch, steps=[])
    with out.open(newline="") as file:
        assert list(file) == PLAIN
    assert "\r[0] 100%" in said


def _in_a_terminal(*arguments, steps):
    """Run a command with a terminal for all its streams, and return everything it wrote there.

    Each of ``steps`` is a text and a fifo: when the text has appeared, whoever reads the fifo may go on.
    """
    steps = list(steps)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(arguments[0], arguments)  # noqa: S606  no shell
    written = b""
    while True:
        try:
            chunk = os.read(terminal, 65_536)
        except OSError:
            break
        if not chunk:
            break
        written += chunk
        while steps and steps[0][0] in written:
            steps.pop(0)[1].open("w").close()
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, written.decode()
    return written.decode()
