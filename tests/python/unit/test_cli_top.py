"""`offbeat top`: a frame follows from two statuses, and so do the rates in it."""

import copy
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import offbeat
from offbeat.cli.fit import GAP, Column, fit
from offbeat.cli.frame import frame
from offbeat.cli.main import main
from offbeat.cli.rates import percentile, rates

COUNTS = st.integers(0, 10**9)


@pytest.fixture(scope="module")
def empty():
    """A real status, of a server that nobody has joined and that has no model."""
    with offbeat.ParameterServer(run_id="r1") as server:
        return server.status()


def worker(name, incarnation, histogram=(), **changes):
    counts = [*histogram, *[0] * (65 - len(histogram))]
    applied = sum(counts)
    return {
        "id": name,
        "incarnation": incarnation,
        "state": "joined",
        "cause": None,
        "host": "north",
        "samples": 0,
        "samples_per_s": 0.0,
        "pushes": applied,
        "applied": applied,
        "damped": 0,
        "rejected": {},
        "mean_staleness": sum(i * n for i, n in enumerate(counts)) / max(1, applied),
        "max_staleness": max((i for i, n in enumerate(counts) if n), default=0),
        "staleness_histogram": counts,
        "last_push_age_s": 0.5,
        "bytes_received": 3 << 20,
        "bytes_sent": 5 << 20,
    } | changes


def drawn(after, before=None, width=220, **keywords):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(frame(after, before, asked="server.example:5000", **keywords))
    return console.file.getvalue()


# ------------------------------------------------------------------------------- rates


@given(
    st.fixed_dictionaries({"version": COUNTS, "samples": COUNTS, "uptime_s": st.floats(0, 1e6)}),
    st.fixed_dictionaries({"version": COUNTS, "samples": COUNTS, "uptime_s": st.floats(0.01, 1e6)}),
)
def test_rates_times_seconds_are_what_has_come(empty, begin, growth):
    before = empty | begin
    after = empty | {key: begin[key] + growth[key] for key in begin}
    found = rates(before, after)
    assert found.updates_per_s * found.seconds == pytest.approx(growth["version"])
    assert found.samples_per_s * found.seconds == pytest.approx(growth["samples"])
    assert found.seconds == pytest.approx(growth["uptime_s"], rel=1e-3)
    assert rates(after, before) is None, "the other way round there is no rate"


HISTOGRAM = st.lists(st.integers(0, 50), min_size=65, max_size=65)


@given(HISTOGRAM, HISTOGRAM, st.floats(0.1, 100))
def test_staleness_and_pushes_are_those_in_between(empty, old, new, seconds):
    together = [a + b for a, b in zip(old, new, strict=True)]
    before = empty | {"uptime_s": 5.0, "workers": [worker("amy", 1, old)]}
    after = empty | {
        "uptime_s": 5.0 + seconds,
        "workers": [worker("amy", 1, together), worker("bob", 2, old)],
    }
    found = rates(before, after)
    mean = sum(i * n for i, n in enumerate(new)) / sum(new) if sum(new) else None
    assert found.staleness == (None if mean is None else pytest.approx(mean))
    assert found.workers.keys() == {1}, "of who has just come nothing is known yet"
    assert found.workers[1].staleness == found.staleness
    assert found.workers[1].pushes_per_s * found.seconds == pytest.approx(sum(new))


def test_there_are_no_rates_over_a_restart_or_between_runs(empty):
    before = empty | {"uptime_s": 100.0, "version": 5}
    assert rates(None, before) is None
    assert rates(before, before) is None, "of the same moment"
    assert rates(before, before | {"uptime_s": 3.0, "version": 9}) is None, "started again"
    assert rates(before, before | {"uptime_s": 101.0, "run_id": "other"}) is None
    assert rates(before, before | {"uptime_s": 101.0, "version": 4}) is None


@given(st.lists(st.integers(0, 64), min_size=1, max_size=60), st.sampled_from([0.05, 0.5, 0.95, 1.0]))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, share):
    found = percentile([values.count(i) for i in range(65)], share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_of_nothing_there_is_no_percentile():
    assert percentile([], 0.5) is None
    assert percentile([0, 0], 0.5) is None


# ------------------------------------------------------------------------------- the frame


@pytest.fixture
def run(empty):
    amy = worker("amy", 1, [8, 0, 2], samples_per_s=1520.4, damped=2, rejected={"stale": 3})
    bob = worker("bob", 2, state="lost", cause="no heartbeat for 10 s", last_push_age_s=75.0)
    gone = {
        "worker": "bob",
        "incarnation": 2,
        "state": "lost",
        "cause": "no heartbeat for 10 s",
        "age_s": 75.0,
    }
    before = empty | {"version": 90, "samples": 900, "uptime_s": 60.0, "workers": [worker("amy", 1, [8])]}
    after = before | {
        "version": 100,
        "samples": 1000,
        "uptime_s": 62.0,
        "state": "running",
        "workers": [amy, bob],
        "departures": [gone],
        "checkpoints": {"directory": "/kept", "version": 95, "age_s": 3.0, "failed": None},
    }
    return before, after


@pytest.mark.parametrize(
    "said",
    [
        "r1 on 127.0.0.1:",
        "running, up 1 min 2 s",
        "version 100, 1,000 samples, term ",
        "5.0 updates/s, 50 samples/s",
        "mean 2.0 now; in all half are at most 0, 95 % at most 2, the largest 2",
        "6.0 MiB received, 10.0 MiB sent",
        "in /kept, the newest of version 95, 3.0 s ago",
        "1 of 2 workers are there",
        "1,520",
        "3 (3 stale)",
        "no heartbeat for 10 s",
        "1 min 15 s ago",
    ],
)
def test_the_frame_says(run, said):
    before, after = run
    assert said in drawn(after, before)


def test_a_frame_of_one_status_alone_has_no_rates(run):
    _, after = run
    lines = drawn(after).splitlines()
    assert next(line for line in lines if line.startswith("speed")).split() == ["speed", "-"]


def test_a_frame_changes_neither_status(run):
    kept = copy.deepcopy(run)
    drawn(run[1], run[0], notice="gone", max_workers=1)
    assert run == kept


def test_what_may_want_a_hand_comes_first_and_what_has_no_room_is_counted(empty):
    states = ["finished"] * 20 + ["joined"] * 20 + ["lost", "stalled"]
    workers = [worker(f"worker-{i}", i, state=state) for i, state in enumerate(states)]
    text = drawn(empty | {"workers": workers}, max_workers=3)
    shown = [line.split()[:2] for line in text.splitlines() if line.startswith("worker-")]
    assert shown == [["worker-41", "stalled"], ["worker-40", "lost"], ["worker-20", "joined"]]
    assert "and 39 more" in text
    assert "21 of 42 workers are there" in text


def test_a_server_that_has_gone_is_told_above_what_was_last_heard(run):
    before, after = run
    lines = drawn(after, before, notice="no answer since 3.0 s").splitlines()
    assert lines[0].startswith("no answer since 3.0 s")
    assert any("version 100" in line for line in lines)


def test_a_server_without_model_or_workers_has_a_frame(empty):
    text = drawn(empty)
    assert "waiting for model" in text
    assert "no worker has joined yet" in text


@given(st.text(min_size=1, max_size=20))
def test_names_of_others_are_neither_markup_nor_move_a_cursor(empty, name):
    evil = f"[red]{name}[/red]\x1b[2J\r\n"
    text = drawn(empty | {"workers": [worker(evil, 1)]}, width=400)
    assert "[red]" in text
    assert "\x1b" not in text
    assert "\r" not in text
    rows = [line for line in text.splitlines() if "[red]" in line]
    assert len(rows) == 1


def test_a_narrow_terminal_cuts_lines_and_never_breaks_them(run):
    before, after = run
    wide, narrow = drawn(after, before).splitlines(), drawn(after, before, width=40).splitlines()
    assert len(narrow) == len(wide)
    assert max(map(len, narrow)) <= 40


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_column_is_there_to_be_read_or_not_at_all(empty, width):
    workers = [worker(f"worker-{i}", i, [5000, 100, 3], host="node-17.cluster") for i in range(8)]
    workers[7] |= {"state": "lost", "cause": "no heartbeat for 10 s"}
    lines = drawn(empty | {"workers": workers}, width=width).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("worker "))
    assert "…" not in lines[head]
    assert "\n".join(lines[head + 1 :]).count("…") <= 9  # of hosts, and a cause
    assert [line.split()[:2] for line in lines[head + 1 : head + 3]] == [
        ["worker-7", "lost"],
        ["worker-0", "joined"],
    ]
    assert "samples/s" in lines[head]
    assert max(map(len, lines)) <= width


COLUMNS = st.lists(
    st.builds(
        lambda width, least, rank: (width, least, rank),
        st.integers(1, 30),
        st.none() | st.integers(1, 30),
        st.integers(0, 9),
    ),
    max_size=12,
).map(lambda all_: [Column(name=str(i), width=w, least=m, rank=r) for i, (w, m, r) in enumerate(all_)])


@given(COLUMNS, st.integers(0, 300))
def test_columns_fit_and_those_that_matter_most_are_there(columns, room):
    widths = fit(columns, room)
    by_name = {column.name: column for column in columns}
    assert list(widths) == [column.name for column in columns if column.name in widths]
    for name, width in widths.items():
        assert by_name[name].needed <= width <= by_name[name].width
    out = [column for column in columns if column.name not in widths]
    kept = [by_name[name] for name in widths]
    assert all(column.rank for column in out)
    assert max((c.rank for c in kept), default=0) <= min((c.rank for c in out), default=9)
    taken = sum(widths.values()) + GAP * max(0, len(widths) - 1)
    assert taken <= room or not any(column.rank for column in kept)
    if not out and taken < room:
        assert all(width == by_name[name].width for name, width in widths.items())


# ------------------------------------------------------------------------------- the command


def test_without_a_terminal_it_says_what_else_there_is(capsys):
    with offbeat.ParameterServer() as server:
        assert main(["top", server.address]) == 2
    assert "give --once for one frame, or take offbeat status" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "0.01"])
def test_an_interval_that_is_none_is_refused(interval, capsys):
    assert main(["top", "127.0.0.1:1", f"--interval={interval}"]) == 2
    assert "--interval is" in capsys.readouterr().err


def test_without_rich_it_says_what_to_install(run_python):
    said = run_python(
        "import sys\n"
        "sys.modules['rich'] = None\n"
        "sys.stderr = sys.stdout\n"
        "from offbeat.cli.main import main\n"
        "print(main(['top', '127.0.0.1:1']))"
    )
    assert "offbeat top needs rich, which is not installed here: pip install rich" in said
    assert "offbeat[top]" in said
    assert said.splitlines()[-1] == "12"
