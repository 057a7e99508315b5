"""Output of several processes on one terminal: whole lines, by rank, with one bar below them."""

import fcntl
import io
import logging
import os
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
from pathlib import Path

import pytest

from offbeat.cli import copying
from offbeat.cli.background import MOST_WAITING, Background, LogHandler
from offbeat.cli.copying import LONGEST_LINE_BYTES, READER_S, Copy, Output
from offbeat.cli.interrupts import Sieve
from offbeat.cli.launch import environment, exit_code, usable_cores
from offbeat.cli.processes import UNKNOWN, Processes
from offbeat.cli.say import write_all
from offbeat.cli.signals import Signals, handlers, install
from support.waiting import wait_for


def copied(*chunks: bytes, rank: bytes = b"[0] ") -> tuple[bytes, str]:
    """Send chunks through a pipe, and give what was written and what was said last."""
    stream = io.BytesIO()
    ours, theirs = os.pipe()
    copy = Copy(ours, Output(stream.write), rank)
    for chunk in chunks:
        os.write(theirs, chunk)
    os.close(theirs)
    copy.join(20)
    return stream.getvalue(), copy.last_line


TRACE = [b"Traceback (most recent call last):\n", b'  File "a.py", line 1\n', b"    f()\n", b"    ~^^\n"]
INTERRUPT = [*TRACE, b"KeyboardInterrupt\n"]
FAILURE = [*TRACE, b"ValueError: x\n"]
HANDLING = [b"\n", b"During handling of the above exception, another exception occurred:\n", b"\n"]


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([b"before\n", *INTERRUPT, b"after\n"], [b"before\n", b"after\n"]),
        ([*INTERRUPT, *HANDLING, *INTERRUPT], []),
        ([*INTERRUPT, *INTERRUPT], []),
        ([*INTERRUPT, b"\n", b"after\n"], [b"\n", b"after\n"]),
        ([*INTERRUPT, *HANDLING], HANDLING),
        ([*INTERRUPT, *HANDLING, *FAILURE], None),
        ([*FAILURE, *HANDLING, *INTERRUPT], None),
        (FAILURE, None),
        (TRACE, None),
        ([*TRACE, b"another process\n", b"KeyboardInterrupt\n"], None),
        ([b"KeyboardInterrupt\n"], None),
        ([b"\x1b[1m" + line for line in INTERRUPT], []),
    ],
)
def test_tracebacks_of_an_interrupt_are_left_out_and_nothing_else(lines, left):
    sieve = Sieve(lambda: True)
    passed = [one for line in lines for one in sieve.pass_on(line)] + sieve.rest()
    assert passed == (lines if left is None else left)


def test_a_traceback_is_held_back_only_where_it_may_be_left_out():
    sieve = Sieve(lambda: False)
    assert [sieve.pass_on(line) for line in INTERRUPT] == [[line] for line in INTERRUPT]


def test_two_outputs_on_one_terminal_have_one_bar():
    terminal = bytearray()
    errors = Output(terminal.extend)
    out = Output(terminal.extend, errors.bottom)
    elsewhere = Output(terminal.extend)
    errors.write(b"[0] ", b"\r 10%")
    out.write(b"[1] ", b"a line\n")
    out.write(b"[1] ", b"\n")
    elsewhere.write(b"", b"not its affair\n")
    errors.write(b"[1] ", b"\n")
    out.write(b"[1] ", b"\r 20%")
    out.drop_bar()
    errors.write(b"[0] ", b"the last\n")
    clear, bar = b"\r\x1b[K", b"\r[0]  10%"
    above = bar + clear + b"[1] a line\n" + bar + clear + b"[1] \n" + bar
    blank = clear + b"[1] \n" + bar
    assert terminal == above + b"not its affair\n" + blank + clear + b"\r[1]  20%\n[0] the last\n"


@pytest.mark.parametrize(
    ("chunks", "written", "last"),
    [
        ([b"one\ntwo\n"], b"[0] one\n[0] two\n", "two"),
        ([b"no end"], b"[0] no end\n", "no end"),
        ([b"ValueError: no\n", b"\n  \n"], b"[0] ValueError: no\n[0] \n[0]   \n", "ValueError: no"),
        ([b"\x1b[31mred\x1b[0m\n", b"\x1b[?25h"], b"[0] \x1b[31mred\x1b[0m\n[0] \x1b[?25h\n", "red"),
        ([b"dos\r\n"], b"[0] dos\r\n", "dos"),
        ([], b"", ""),
    ],
)
def test_each_line_has_its_rank_and_the_last_one_is_kept(chunks, written, last):
    assert copied(*chunks) == (written, last)


@pytest.mark.parametrize(
    ("chunks", "written"),
    [
        (
            [b"\r 10%", b"\r 20%\r 30%", b"\r100%", b"\n", b"done\n\r 5%", b"\r 7%"],
            [b"100%", b"done", b" 7%"],
        ),
        ([b"epoch 1\r", b"epoch 2\r", b"epoch 3\r"], [b"epoch 3"]),
        ([b"epoch 1\r", b"epoch 2\r", b"done\n"], [b"done"]),
        ([b"Downloading 0%", b"\r 50%", b"\r100%", b"\n", b"\n", b"next\n"], [b"100%", b"", b"next"]),
        ([b"\r100%", b"\r", b"\n"], [b"100%"]),
        ([b"\r 99%", b"\r    \r"], []),
        ([b"\r 99%", b"\r\x1b[K\r", b"\n"], []),
        ([b"\x1b[2K\x1b[32m50%\x1b[K\r", b"\x1b[0m\n"], [b"\x1b[32m50%\x1b[0m"]),
        ([b"\r\x1b[Kstep 1", b"\r\x1b[Kstep 2\n", b"a \x1b[K line\n"], [b"step 2", b"a \x1b[K line"]),
        ([b"a\r\nb\r\n"], [b"a\r", b"b\r"]),
        ([b"a\r\n\r\nb\r\n"], [b"a\r", b"", b"b\r"]),
        ([b"\x1b[32mepoch 3\r", b"\x1b[0m\n"], [b"\x1b[32mepoch 3\x1b[0m"]),
        ([b"epoch 3\r\x1b[?25h\n"], [b"epoch 3\x1b[?25h"]),
        ([b" \n", b"\n"], [b" ", b""]),
    ],
)
def test_a_bar_that_has_no_place_is_a_line_when_it_ends(chunks, written):
    stream = io.BytesIO()
    ours, theirs = os.pipe()
    copy = Copy(ours, Output(stream.write), b"[1] ", has_bar=False)
    for chunk in chunks:
        os.write(theirs, chunk)
    os.close(theirs)
    copy.join(20)
    assert stream.getvalue() == b"".join(b"[1] " + line + b"\n" for line in written)


@pytest.mark.parametrize(
    ("chunks", "written"),
    [
        ([b"\rEpoch", b" ", b"4", b" loss ", b"0.4", b"\n"], b"\r[0] Epoch 4 loss 0.4\n"),
        ([b"\r", b"50%", b"\r", b"100%", b"\n"], b"\r[0] 50%\r[0] 100%\n"),
        ([b"\r99%|\xe2\x96", b"\x88\n"], b"\r[0] 99%|\xe2\x96\x88\n"),
    ],
)
def test_a_bar_in_pieces_is_one_bar(monkeypatch, chunks, written):
    monkeypatch.setattr(copying, "SETTLE_S", 60)
    assert copied(*chunks)[0] == written


def test_what_a_carriage_return_follows_is_a_bar():
    stream = io.BytesIO()
    output = Output(stream.write)
    ours, theirs = os.pipe()
    copy = Copy(ours, output, b"[0] ")
    os.write(theirs, b"epoch 1\r")
    os.write(theirs, b"epoch 2\r")
    wait_for(lambda: stream.getvalue() == b"\r[0] epoch 1\r[0] epoch 2")
    output.write(b"[1] ", b"hi\n")
    os.write(theirs, b"\repoch 3")
    wait_for(lambda: stream.getvalue().endswith(b"\r\x1b[K[1] hi\n\r[0] epoch 2\r[0] epoch 3"))
    os.close(theirs)
    copy.join(20)
    output.drop_bar()
    assert stream.getvalue().endswith(b"\r[0] epoch 3\n")


def test_a_line_in_two_pieces_is_one_line():
    stream = io.BytesIO()
    ours, theirs = os.pipe()
    copy = Copy(ours, Output(stream.write), b"[1] ")
    os.write(theirs, b"one ")
    os.write(theirs, b"line\n")
    os.close(theirs)
    copy.join(20)
    assert stream.getvalue() == b"[1] one line\n"


def test_a_child_that_holds_the_pipe_is_not_waited_for_and_what_it_says_is_not_the_process_s():
    stream = io.BytesIO()
    ours, theirs = os.pipe()
    copy = Copy(ours, Output(stream.write), b"[1] ")
    os.write(theirs, b"one\nno end")
    copy.process_has_ended()
    os.write(theirs, b"the child's\n")
    assert copy.is_done.wait(20)
    assert copy.last_line == "no end"
    os.write(theirs, b"its last\n")
    os.close(theirs)
    copy.join(20)
    assert copy.last_line == "no end"
    assert stream.getvalue() == b"[1] one\n[1] no end\n[1] the child's\n[1] its last\n"


def test_a_process_s_last_line_is_told_from_its_child_s_where_its_reader_is_slow():
    begun, goes_on = threading.Event(), threading.Event()

    def write(text):
        begun.set()
        goes_on.wait()

    ours, theirs = os.pipe()
    copy = Copy(ours, Output(write), b"")
    os.write(theirs, b"one\n")
    assert begun.wait(20)
    os.write(theirs, b"the last\n")
    copy.process_has_ended()
    os.write(theirs, b"the child's\n")
    goes_on.set()
    assert copy.is_done.wait(20)
    assert copy.last_line == "the last"
    os.close(theirs)
    copy.join(20)


def test_a_child_that_holds_the_terminal_is_not_waited_for_for_ever():
    ours, theirs = os.openpty()
    copy = Copy(ours, Output(io.BytesIO().write), b"")
    os.write(theirs, b"no end")
    copy.process_has_ended()
    assert copy.is_done.wait(20)
    assert copy.last_line == "no end"
    os.close(theirs)
    copy.join(20)


def test_a_process_that_had_closed_its_output_ends_as_any():
    ours, theirs = os.pipe()
    copy = Copy(ours, Output(io.BytesIO().write), b"")
    os.close(theirs)
    copy.join(20)
    copy.process_has_ended()
    assert copy.is_done.is_set()


@pytest.mark.timeout(20)
def test_a_line_of_any_length_is_passed_on_in_pieces():
    written = []
    ours, theirs = os.pipe()
    copy = Copy(ours, Output(written.append), b"")
    for _ in range(64):
        os.write(theirs, bytes(2**20))
    copy.process_has_ended()
    os.close(theirs)
    copy.join()
    assert sum(text.count(b"\0") for text in written) == 64 * 2**20
    assert max(map(len, written)) < 2 * LONGEST_LINE_BYTES


def test_what_a_process_wrote_is_copied_however_slowly_it_is_read():
    begun, goes_on = threading.Event(), threading.Event()
    written = []

    def write(text):
        begun.set()
        goes_on.wait()
        written.append(text)

    ours, theirs = os.pipe()
    copy = Copy(ours, Output(write), b"[1] ")
    os.write(theirs, b"one\n")
    assert begun.wait(20)
    os.write(theirs, b"two\n")
    copy.process_has_ended()
    assert not copy.is_done.wait(READER_S)
    goes_on.set()
    assert copy.is_done.wait(20)
    assert written == [b"[1] one\n", b"[1] two\n"]
    os.close(theirs)
    copy.join(20)


def test_other_lines_go_above_a_bar():
    stream = io.BytesIO()
    output = Output(stream.write)
    output.write(b"[0] ", b"\r 10%")
    output.write(b"[1] ", b"hello\n")
    output.write(b"[0] ", b"\r 20%")
    output.write(b"[0] ", b"\n")
    output.write(b"[1] ", b"bye\n")
    assert stream.getvalue() == (
        b"\r[0]  10%" + b"\r\x1b[K[1] hello\n\r[0]  10%" + b"\r[0]  20%" + b"\n" + b"[1] bye\n"
    )


def test_a_bar_that_its_process_left_behind_is_left_where_it_is():
    stream = io.BytesIO()
    output = Output(stream.write)
    output.write(b"[0] ", b"\r 10%")
    output.drop_bar()
    output.drop_bar()
    output.write(b"[1] ", b"hello\n")
    assert stream.getvalue() == b"\r[0]  10%\n[1] hello\n"


def test_what_is_said_in_the_background_goes_above_a_bar():
    stream = io.BytesIO()
    background = Background(Output(stream.write))
    background.output.write(b"[0] ", b"\r 10%")
    background.say("hello")
    background.flush()
    assert stream.getvalue() == b"\r[0]  10%" + b"\r\x1b[Koffbeat: hello\n\r[0]  10%"


def test_who_says_something_in_the_background_waits_for_no_reader():
    goes_on = threading.Event()
    background = Background(Output(lambda text: goes_on.wait()))
    handler = LogHandler(background, "")
    for n in range(2 * MOST_WAITING):
        handler.handle(logging.makeLogRecord({"msg": str(n)}))
    background.flush()
    assert background._waiting.qsize() <= MOST_WAITING + 1
    said = background._waiting.qsize()
    background.say("nothing is saved")
    assert background._waiting.qsize() == said + 1, "what matters is never dropped"
    goes_on.set()


@pytest.fixture
def signals():
    before = handlers()
    yield Signals()
    install(before)


def test_a_process_that_failed_before_all_were_ended_is_told_of_however_slowly_its_words_are_read(signals):
    goes_on = threading.Event()
    background = Background(Output(lambda text: goes_on.wait()))
    fails = "import sys; print('why', file=sys.stderr); sys.exit(7)"
    processes = Processes([sys.executable, "-c", fails], [os.environ], signals, background)
    with processes:
        wait_for(lambda: not processes._running)
    goes_on.set()
    assert [(ended.code, ended.was_asked) for ended in processes.left_over()] == [(7, False)]


def test_a_process_that_is_ended_was_asked_to(signals):
    background = Background(Output(io.BytesIO().write))
    waits = "import threading\nwhile not threading.Event().wait(0.2): pass"
    with Processes([sys.executable, "-c", waits], [os.environ], signals, background) as processes:
        pass
    assert [ended.was_asked for ended in processes.left_over()] == [True]


def test_a_bar_that_nobody_sees_holds_no_end_up(signals):
    goes_on = threading.Event()
    background = Background(Output(lambda text: None if text.startswith(b"\r") else goes_on.wait()))
    background.output.write(b"[0] ", b"\r 10%")
    with Processes([sys.executable, "-c", ""], [os.environ], signals, background) as processes:
        assert [ended.code for ended in processes.as_they_end()] == [0]
    goes_on.set()  # without the claim, it does not come to this


def test_exit_codes_are_known_where_sigchld_is_ignored(run_python):
    """As daemons leave it to what they start: the system then forgets them."""
    told = run_python(
        textwrap.dedent("""
        import io, signal, sys
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        from offbeat.cli.background import Background
        from offbeat.cli.copying import Output
        from offbeat.cli.processes import UNKNOWN, Processes
        from offbeat.cli.signals import Signals
        background = Background(Output(io.BytesIO().write))
        with Processes([sys.executable, "-c", "exit(7)"], [{}], Signals(), background) as processes:
            print([ended.code for ended in processes.as_they_end()])
        print(signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN)
        """)
    )
    assert told.split() == ["[7]", "True"]


@pytest.mark.parametrize("by_popen", [True, False])
def test_a_process_that_something_else_has_waited_for_is_no_success(signals, monkeypatch, by_popen):
    waitid = os.waitid

    def after_another(kind, number, options):
        if by_popen:
            for process in processes._running:
                process.wait()
        else:
            waitid(kind, number, os.WEXITED)
        return waitid(kind, number, options)

    monkeypatch.setattr(os, "waitid", after_another)
    background = Background(Output(io.BytesIO().write))
    processes = Processes([sys.executable, "-c", "exit(7)"], [os.environ], signals, background)
    with processes:
        assert [ended.code for ended in processes.as_they_end()] == [7 if by_popen else UNKNOWN]


def test_a_terminal_that_was_closed_is_a_reader_that_has_gone():
    ours, theirs = os.openpty()
    os.close(ours)
    with pytest.raises(BrokenPipeError):
        write_all(theirs, b"hello")
    os.close(theirs)


def test_a_signal_does_not_hide_why_no_process_could_be_started(signals):
    signal.raise_signal(signal.SIGTERM)
    processes = Processes(["/no/such/program"], [{}], signals, Background(Output(io.BytesIO().write)))
    with pytest.raises(FileNotFoundError), processes:
        pytest.fail("started")


def open_descriptors() -> set[Path]:
    """Without that of the listing itself, which has another number where something was closed meanwhile."""
    return {descriptor for descriptor in list(Path("/dev/fd").iterdir()) if os.path.lexists(descriptor)}


def test_a_process_that_could_not_be_started_leaves_no_descriptor_behind(signals):
    processes = Processes(["/no/such/program"], [{}], signals, Background(Output(io.BytesIO().write)))
    before = {thread for thread in threading.enumerate() if isinstance(thread, Copy)}
    open_before = open_descriptors()
    with pytest.raises(FileNotFoundError), processes:
        pytest.fail("started")
    for thread in threading.enumerate():
        if isinstance(thread, Copy) and thread not in before:
            thread.join(20)
    assert open_descriptors() <= open_before


@pytest.mark.parametrize(("columns", "left"), [(0, 0), (3, 1), (80, 76)])
def test_a_workers_terminal_is_as_wide_as_ours_less_its_prefix(columns, left):
    code = (
        "import os\n"
        "from offbeat.cli.processes import _terminal\n"
        "print(os.get_terminal_size(_terminal(reserve=4)[1]).columns)\n"
    )
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True, timeout=50
    )
    os.close(ours)
    os.close(theirs)
    assert int(done.stdout) == left


def test_a_workers_environment():
    made = environment({"HOME": "/root", "RANK": "9"}, rank=5, local_rank=1, world_size=8, num_workers=4)
    assert made["HOME"] == "/root"
    assert (made["RANK"], made["LOCAL_RANK"], made["WORLD_SIZE"]) == ("5", "1", "8")
    assert made["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 4))


def test_threads_that_the_user_chose_stay():
    made = environment({"OMP_NUM_THREADS": "3"}, rank=0, local_rank=0, world_size=1, num_workers=64)
    assert made["OMP_NUM_THREADS"] == "3"
    made = environment({}, rank=0, local_rank=0, world_size=1, num_workers=10_000)
    assert made["OMP_NUM_THREADS"] == "1"


def test_a_signal_counts_as_in_a_shell():
    assert exit_code(3) == 3
    assert exit_code(-9) == 137
