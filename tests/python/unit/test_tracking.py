"""Trackers: what is logged is read back by somebody else's reader, whatever it is called."""

import csv
import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ClosedError, ConfigError
from offbeat.tracking import CSV, JSONL, TensorBoard, Tracker
from offbeat.tracking.base import checked, trackers_of
from offbeat.tracking.fanout import Fanout
from support.tracker import Told

NAMES = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=20)
CALLS = st.lists(
    st.tuples(st.integers(0, 2**53), st.dictionaries(NAMES, st.floats(), min_size=1, max_size=4)), max_size=6
)
FILES = [JSONL, CSV]


def from_jsonl(path):
    lines = path.read_text("utf-8").split("\n")
    assert lines.pop() == ""
    read = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    return [(line["step"], line["time_unix_s"], line["values"]) for line in read]


def from_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [
            (int(row["step"]), float(row["time_unix_s"]), row["name"], float(row["value"]))
            for row in csv.DictReader(file, strict=True)
        ]


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


@given(CALLS)
def test_a_jsonl_file_is_read_back_as_it_was_logged_and_what_is_not_finite_is_null(tmp_path_factory, calls):
    path = tmp_path_factory.mktemp("jsonl") / "run.jsonl"
    begin = time.time()
    with JSONL(path) as log:
        for step, values in calls:
            log.log(values, step)
    read = from_jsonl(path)
    times = [at for _, at, _ in read]
    assert times == sorted(times)
    assert all(begin <= at <= time.time() for at in times)
    wanted = [
        (step, {k: v if math.isfinite(v) else None for k, v in values.items()}) for step, values in calls
    ]
    assert [(step, values) for step, _, values in read] == wanted


@given(CALLS)
def test_a_csv_file_is_read_back_to_the_bit_whatever_names_come_later(tmp_path_factory, calls):
    path, begin = tmp_path_factory.mktemp("csv") / "run.csv", time.time()
    with CSV(path) as log:
        for step, values in calls:
            log.log(values, step)
    wanted = [(step, name, value) for step, values in calls for name, value in values.items()]
    read = from_csv(path)
    assert [(step, name) for step, _, name, _ in read] == [row[:2] for row in wanted]
    assert all(same(one[3], other[2]) for one, other in zip(read, wanted, strict=True))
    times = [at for _, at, _, _ in read]
    assert times == sorted(times)
    assert all(begin <= at <= time.time() for at in times)


@pytest.mark.parametrize("cls", FILES)
def test_a_file_s_folder_is_made(tmp_path, cls):
    path = tmp_path / "no" / "such" / "a.log"
    with cls(path) as log:
        log.log({"a": 1.0}, 3)
    assert b"a" in path.read_bytes()


@pytest.mark.parametrize("cls", FILES)
def test_a_file_that_is_there_is_gone_on_with(tmp_path, cls):
    path = tmp_path / "run"
    for step in (1, 2):
        with cls(path) as log:
            log.log({"loss": 0.5}, step)
    read = from_jsonl(path) if cls is JSONL else from_csv(path)
    assert [row[0] for row in read] == [1, 2]


@pytest.mark.parametrize("cls", FILES)
def test_a_line_that_was_left_half_written_anywhere_is_taken_off(tmp_path, cls):
    whole = tmp_path / "whole"
    with cls(whole) as log:
        log.log({"a, b": 0.5}, 1)
        log.log({'"c': 1.5}, 2)
    text = whole.read_bytes()
    for length in range(len(text)):
        path = tmp_path / f"cut-{length}"
        path.write_bytes(text[:length])
        with cls(path) as log:
            log.log({"d": 2.5}, 3)
        read = from_jsonl(path) if cls is JSONL else from_csv(path)
        kept = text[:length].count(b"\n") - (cls is CSV and length >= len(CSV._head))
        # A line of JSON of which the end alone is missing lacks nothing.
        kept += cls is JSONL and length in {i for i, byte in enumerate(text) if byte == ord("\n")}
        assert [row[0] for row in read] == [*[1, 2][:kept], 3]


@pytest.mark.parametrize("cls", FILES)
@pytest.mark.parametrize("text", ["model = 5\n", "{}", "step,loss\n1,0.5\n", '{"loss": 1}\n'])
def test_a_file_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path, cls, text):
    path = tmp_path / "mine"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine holds something else .* give another path"):
        cls(path)
    assert path.read_text() == text


@pytest.mark.parametrize("cls", [JSONL, CSV])
def test_a_folder_is_no_file(tmp_path, cls):
    with pytest.raises(ConfigError, match="which is a folder: give the name of a file in it"):
        cls(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "events").touch()
    with pytest.raises(ConfigError, match="which is a file: give the name of a folder"):
        TensorBoard(tmp_path / "events")


def test_a_json_object_without_the_end_of_its_line_is_not_cut_off(tmp_path):
    path = tmp_path / "one.json"
    path.write_text('{"step": 1, "time_unix_s": 0.0, "values": {"loss": 2.0}}')
    with JSONL(path) as log:
        log.log({"loss": 1.0}, 2)
    assert [step for step, *_ in from_jsonl(path)] == [1, 2]


@pytest.mark.parametrize("cls", FILES)
def test_what_was_logged_is_in_the_file_when_the_process_is_killed(tmp_path, cls):
    path = tmp_path / "run"
    code = (
        "import os, signal, sys; from offbeat import tracking\n"
        "log = getattr(tracking, sys.argv[1])(sys.argv[2])\n"
        "for step in range(100): log.log({'loss': step / 4}, step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", code, cls.__name__, str(path)], check=False)
    assert ran.returncode == -signal.SIGKILL
    read = from_jsonl(path) if cls is JSONL else from_csv(path)
    assert [row[0] for row in read] == list(range(100))


HOLD = """
import sys
from offbeat import tracking
log = getattr(tracking, sys.argv[1])(sys.argv[2])
log.log({"loss": 1.0}, 1)
print("open", flush=True)
sys.stdin.readline()
log.log({"loss": 2.0}, 2)
"""


@pytest.mark.parametrize("cls", FILES)
@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_a_second_tracker_of_one_file_is_refused_and_the_first_loses_nothing(tmp_path, cls, ends):
    path = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, cls.__name__, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "open\n"
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=r"run is being written by another tracker.*a file of its own"):
            cls(path)
        assert path.read_bytes() == before
        if ends == "killed":
            first.kill()
        else:
            first.stdin.write("\n")
            first.stdin.flush()
        first.wait(40)
    with cls(path) as log:
        with pytest.raises(ConfigError, match="another tracker, of this process"):
            cls(path)
        log.log({"loss": 3.0}, 3)
    read = from_jsonl(path) if cls is JSONL else from_csv(path)
    assert [row[0] for row in read] == ([1, 3] if ends == "killed" else [1, 2, 3])


FORK = """
import os, signal, sys
from offbeat import errors, tracking
log = tracking.JSONL(sys.argv[1])
if os.fork() == 0:
    try:
        log.log({"loss": 1.0}, 1)
    except errors.ClosedError as error:
        print(error, flush=True)
    os.read(int(sys.argv[2]), 1)  # it outlives its parent
    os._exit(0)
log.log({"loss": 2.0}, 2)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_neither_writes_nor_keeps_the_file_of_a_killed_parent(tmp_path):
    path = tmp_path / "run.jsonl"
    until, end = os.pipe()
    command = [sys.executable, "-c", FORK, str(path), str(until)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": [until]}
    with subprocess.Popen(command, text=True, **pipes) as parent:
        assert "make one here, of another file" in parent.stdout.readline()
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.wait(40) == -signal.SIGKILL
        with JSONL(path) as log:
            log.log({"loss": 3.0}, 3)
        os.close(end)
    os.close(until)
    assert [step for step, *_ in from_jsonl(path)] == [2, 3]


class Halting:
    """A file, of whose first write another thread begins when it is half done."""

    def __init__(self, file, meanwhile):
        self._file = file
        self._meanwhile = meanwhile

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, text):
        if self._meanwhile is None:
            return self._file.write(text)
        meanwhile, self._meanwhile = self._meanwhile, None
        done = self._file.write(text[:5])
        meanwhile()
        return done


@pytest.mark.parametrize("cls", FILES)
def test_threads_that_log_at_once_take_turns(tmp_path, cls):
    path = tmp_path / "run"
    with cls(path) as log:
        other = threading.Thread(target=log.log, args=({"loss": 2.0}, 2))

        def meanwhile():
            other.start()
            other.join(0.2)  # it does not end before this one has

        log._file = Halting(log._file, meanwhile)
        log.log({"loss": 1.0}, 1)
        other.join(20)
    read = from_jsonl(path) if cls is JSONL else from_csv(path)
    assert [row[0] for row in read] == [1, 2]


@pytest.mark.parametrize("said", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch, said):
    def flock(file, how):
        raise OSError(said, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "run.jsonl"
    with JSONL(path) as log:
        log.log({"loss": 1.0}, 1)
    assert [step for step, *_ in from_jsonl(path)] == [1]


def test_a_lock_that_fails_otherwise_is_an_error(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.EIO, "the disk has gone")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="the disk has gone"):
        JSONL(tmp_path / "run.jsonl")


def test_what_is_no_number_is_refused_all_at_once_and_nothing_is_written(tmp_path):
    path = tmp_path / "run.jsonl"
    with JSONL(path) as log:
        with pytest.raises(ConfigError) as refused:
            log.log({"loss": 1.0, "name": "amy", "": 2.0, "a\nb": 3.0, "many": [1, 2]}, -1)
        for said in ("step is -1", "name is 'amy'", "called ''", r"called 'a\nb'", "many is [1, 2]"):
            assert said in str(refused.value)
        log.log({"loss": 2.0}, 1)
    assert [values for *_, values in from_jsonl(path)] == [{"loss": 2.0}]


def test_a_tensor_of_one_element_is_a_number():
    torch = pytest.importorskip("torch")
    assert checked({"loss": torch.tensor([0.5])}, 0) == {"loss": 0.5}
    with pytest.raises(ConfigError, match="loss is tensor"):
        checked({"loss": torch.zeros(2)}, 0)


def test_a_path_that_is_none_is_refused():
    for cls in (JSONL, CSV, TensorBoard):
        for path in (None, 3, ""):
            with pytest.raises(ConfigError, match=f"is {path!r}: give the name of a"):
                cls(path)


@pytest.mark.parametrize("cls", [JSONL, CSV, TensorBoard])
def test_a_tracker_that_was_finished_says_so(tmp_path, cls):
    log = cls(tmp_path / "run")
    log.log({"loss": 1.0}, 1)
    log.finish()
    log.finish()
    with pytest.raises(ClosedError, match=f"{cls.__name__}.*was finished"):
        log.log({"loss": 1.0}, 2)


# ------------------------------------------------------------------------------- TensorBoard

READ_EVENTS = """
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
for tag in sorted(events.Tags()["scalars"]):
    for event in events.Scalars(tag): print(tag, event.step, event.value)
"""


def scalars(run_python, directory):
    rows = [line.split() for line in run_python(READ_EVENTS, str(directory)).splitlines()]
    return {(name, int(step)): float(value) for name, step, value in rows}


WRITE_EVENTS = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))  # makes `import` of these an ImportError
from offbeat.tracking import TensorBoard
with TensorBoard(sys.argv[1]) as log:
    for step in range(5): log.log({"loss": step / 4, "offbeat/version": 3 * step, "nan": float("nan")}, step)
    print(type(log._writer).__module__)
"""


@pytest.mark.parametrize(
    ("hidden", "writer"), [([], "torch.utils.tensorboard.writer"), (["tensorboard"], "tensorboardX.writer")]
)
def test_tensorboard_reads_back_what_either_writer_wrote(run_python, tmp_path, hidden, writer):
    pytest.importorskip("tensorboard")
    assert run_python(WRITE_EVENTS, str(tmp_path), *hidden).strip() == writer
    read = scalars(run_python, tmp_path)
    for step in range(5):
        assert read["loss", step] == step / 4
        assert read["offbeat/version", step] == 3 * step
        assert math.isnan(read["nan", step])
    assert len(read) == 15


def test_without_a_writer_of_event_files_it_says_what_to_install(run_python, tmp_path):
    said = run_python(
        "import sys\n"
        "sys.modules['tensorboard'] = sys.modules['tensorboardX'] = None\n"
        "from offbeat import errors, tracking\n"
        "try: tracking.TensorBoard(sys.argv[1])\n"
        "except errors.ConfigError as error: print(error)",
        str(tmp_path / "new"),
    )
    assert "pip install tensorboard " in said
    assert "pip install 'offbeat[tensorboard]'" in said
    assert "tensorboardX" in said
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------- whoever is given


def test_any_object_with_the_two_methods_is_a_tracker(tmp_path):
    one = Told()
    assert isinstance(one, Tracker)
    with JSONL(tmp_path / "a") as log:
        assert isinstance(log, Tracker)
    assert trackers_of(one) == [one]
    assert trackers_of((one, one)) == [one, one]
    assert trackers_of([]) == []


def test_what_is_no_tracker_is_refused_all_at_once():
    with pytest.raises(ConfigError) as refused:
        trackers_of([Told(), "run.jsonl", JSONL, 3])
    assert "trackers has 'run.jsonl'" in str(refused.value)
    assert "trackers is the class JSONL" in str(refused.value)
    assert "trackers has 3" in str(refused.value)
    with pytest.raises(ConfigError, match=r"'run.jsonl'.*give objects with log"):
        trackers_of("run.jsonl")


def test_a_tracker_that_raises_is_warned_of_once_and_the_others_hear(caplog):
    good, bad = Told(), Told(OSError("the disk is full"))
    fanout = Fanout([bad, good], "worker amy")
    fanout.log({"loss": 1.0}, 1)
    fanout.log({"loss": 0.5}, 2)
    assert good.calls == [({"loss": 1.0}, 1), ({"loss": 0.5}, 2)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "worker amy" in record.getMessage()
    assert "OSError: the disk is full" in record.getMessage()
    bad.error = None  # room was made
    fanout.log({"loss": 0.25}, 3)
    assert bad.calls == [({"loss": 0.25}, 3)]


FILL_THE_DISK = """
import json, os, resource, sys
from offbeat import tracking
folder, cls = sys.argv[2], getattr(tracking, sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
refused, logs = {}, []
for limit in range(400, 520):  # the end of a line among them, and all but its last byte
    refused[limit] = []
    logs.append(log := cls(f"{folder}/{limit}"))
    last = 20 if limit % 2 else 15  # which may be one that was refused
    for step in range(last):
        full = limit if 3 <= step < 15 else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, hard))
        try: log.log({"loss": step / 4, "lr": 0.5}, step)
        except OSError: refused[limit].append(step)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(json.dumps(refused), flush=True)
os._exit(0)  # without finish(), as a process that is killed
"""


@pytest.mark.parametrize("cls", FILES)
def test_of_a_call_that_a_full_disk_refuses_nothing_stays_and_of_others_all(run_python, tmp_path, cls):
    refused = json.loads(run_python(FILL_THE_DISK, cls.__name__, str(tmp_path)))
    assert all(refused.values())
    for limit, steps in refused.items():
        read = from_jsonl(tmp_path / limit) if cls is JSONL else from_csv(tmp_path / limit)
        numbers_a_line = 1 if cls is JSONL else 2
        logged = [step for step in range(20 if int(limit) % 2 else 15) if step not in steps]
        assert [row[0] for row in read] == [step for step in logged for _ in range(numbers_a_line)]


def test_a_tracker_that_takes_something_out_leaves_it_to_the_others():
    class Takes:
        def log(self, values, step):
            values.clear()

        def finish(self):
            """Nothing is left to be done."""

    kept = Told()
    Fanout([Takes(), kept], "worker amy").log({"loss": 1.0}, 1)
    assert kept.calls == [({"loss": 1.0}, 1)]
