"""What was seen of a run, and pictures: their curves are the numbers that were measured."""

import itertools
import json
import math
import re
import socket
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from offbeat.errors import AuthenticationError, ConfigError, ConnectError, OffbeatTimeoutError, StateError
from offbeat.history import History, Record
from offbeat.tracking import JSONL, Run, watch
from offbeat.tracking.run import MAX_MOMENTS
from support.waiting import wait_for

PNG = b"\x89PNG\r\n\x1a\n"
ZEROS = {"w": np.zeros(4, np.float32)}
ONES = {"w": np.ones(4, np.float32)}
SGD = offbeat.optim.SGD(lr=0.1)


def worker(name, incarnation, state="joined", applied=0, mean=0.0):
    return {
        "id": name,
        "incarnation": incarnation,
        "state": state,
        "applied": applied,
        "mean_staleness": mean,
    }


def departure(name, incarnation, state, age_s):
    return {"worker": name, "incarnation": incarnation, "state": state, "age_s": age_s}


def status(workers=(), departures=(), version=0, samples=0):
    return {
        "run_id": "r1",
        "term": 1,
        "version": version,
        "samples": samples,
        "workers": list(workers),
        "departures": list(departures),
    }


def spans(run):
    return [(s.worker, s.begin_s, s.end_s, s.end) for s in run.spans()]


def curves(axes):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if len(line.get_xdata())]


# ------------------------------------------------------------------------------- membership


def test_a_worker_s_time_ends_when_the_server_says_it_went():
    run = Run()
    run.observe(status([worker("amy", 1)]), 100.0)
    run.observe(status([worker("amy", 1), worker("bob", 2)]), 110.0)
    gone = worker("amy", 1, "finished"), worker("bob", 2)
    run.observe(status(gone, [departure("amy", 1, "finished", 3.0)]), 120.0)
    run.observe(status(gone, [departure("amy", 1, "finished", 13.0)]), 130.0)
    assert spans(run) == [("amy", 0.0, 17.0, "finished"), ("bob", 10.0, 30.0, "joined")]


def test_who_came_and_went_between_two_looks_is_seen():
    run = Run()
    run.observe(status(), 0.0)
    run.observe(status([worker("amy", 1, "left")], [departure("amy", 1, "left", 4.0)]), 10.0)
    assert spans(run) == [("amy", 6.0, 6.0, "left")]


def test_a_worker_that_is_lost_and_back_was_away_in_between():
    run = Run()
    lost = departure("amy", 1, "lost", 1.0)
    run.observe(status([worker("amy", 1)]), 0.0)
    run.observe(status([worker("amy", 1, "lost")], [lost]), 10.0)
    run.observe(status([worker("amy", 1)], [lost]), 20.0)
    run.observe(status([worker("amy", 1, "left")], [lost, departure("amy", 1, "left", 2.0)]), 30.0)
    assert spans(run) == [("amy", 0.0, 9.0, "lost"), ("amy", 20.0, 28.0, "left")]


def test_a_new_process_of_a_name_is_another_span_in_the_same_row():
    run = Run()
    run.observe(status([worker("amy", 1)]), 0.0)
    run.observe(status([worker("amy", 2)], [departure("amy", 1, "lost", 5.0)]), 10.0)
    assert spans(run) == [("amy", 0.0, 5.0, "lost"), ("amy", 10.0, 10.0, "joined")]
    axes = run.plot().axes[-1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["amy"]


@given(st.lists(st.tuples(st.floats(0.1, 10), st.sets(st.integers(1, 4))), min_size=1, max_size=12))
def test_spans_of_one_process_never_overlap_and_lie_in_the_time_watched(looks):
    run, now, there, gone = Run(), 0.0, set(), {}
    for step, present in looks:
        now += step
        gone |= dict.fromkeys(there - present, now)
        departures = [departure(str(i), i, "lost", now - at) for i, at in gone.items()]
        run.observe(status([worker(str(i), i) for i in sorted(present)], departures), now)
        there = present
    for name in "1234":
        mine = sorted((s.begin_s, s.end_s) for s in run.spans() if s.worker == name)
        assert all(0 <= begin <= end <= run.moments[-1].seconds + 1e-9 for begin, end in mine)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(mine))


# ------------------------------------------------------------------------------- moments and pictures


def test_the_picture_of_a_run_has_the_rates_and_the_staleness_in_between(tmp_path):
    run = Run()
    run.observe(status([worker("amy", 1, applied=10, mean=1.0)], samples=100, version=10), 5.0)
    run.observe(status([worker("amy", 1, applied=30, mean=2.0)], samples=300, version=30), 7.0)
    run.observe(status([worker("amy", 1, applied=30, mean=2.0)], samples=300, version=30), 8.0)
    run.observe(status([worker("amy", 1, applied=0, mean=0.0)], samples=50, version=5), 9.0)  # started again
    figure = run.plot(tmp_path / "run.png")
    throughput, late, _ = figure.axes
    ((times, rates),) = curves(throughput)
    assert times == [2.0, 3.0, 4.0]
    assert rates[:2] == [100.0, 0.0]
    assert math.isnan(rates[2])
    ((_, means),) = curves(late)
    assert means[0] == 2.5
    assert all(math.isnan(mean) for mean in means[1:])
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)
    assert "r1" in figure.get_suptitle()


def history(name="loss"):
    values = [(4, 10, 2.0, None), (8, 20, 1.5, 0.5), (10, 30, 1.0, 2.0)]
    return History(
        [Record(step, version, 0, 0.0, {name: loss}, late) for step, version, loss, late in values],
        optimizer="SGD(lr=0.1)",
    )


def test_with_histories_it_has_their_losses_over_the_model_s_version():
    run = Run()
    run.observe(status([worker("amy", 1), worker("bob", 2)]), 0.0)
    figure = run.plot(histories={"amy": history(), "bob": history("accuracy")})
    assert len(figure.axes) == 4
    assert curves(figure.axes[0]) == [([10, 20, 30], [2.0, 1.5, 1.0])]
    assert figure.axes[0].get_ylabel() == "loss"


def test_histories_that_would_draw_nothing_are_refused_all_at_once(tmp_path):
    run, path = Run(), tmp_path / "run.png"
    run.observe(status([worker("amy", 1), worker("bob", 2)]), 0.0)
    for keywords, said in [
        ({"histories": {"amy": history("accuracy")}, "metric": "acuracy"}, "did you mean 'accuracy'"),
        (
            {"histories": {"amyy": history()}},
            "worker in histories 'amyy'; did you mean 'amy'.*Known: amy",
        ),
        ({"histories": history()}, "histories is a History: give {worker.id: history}"),
        ({"histories": {"amy": 3}}, r"histories\['amy'\] is an int: give what"),
        ({"histories": {"nosuch": history()}, "metric": "nosuch"}, "worker.*'nosuch'.*metric 'nosuch'"),
    ]:
        with pytest.raises(ConfigError, match=said):
            run.plot(path, **keywords)
    assert not path.exists()
    run.plot(path, histories={"amy": History()})  # of a train that failed before its first log line
    assert path.exists()


def test_whatever_workers_are_called_a_picture_has_their_names(tmp_path):
    names = ["$\\frac{$", "a$b$", "_hidden", "100%"]
    run = Run()
    for second in range(3):
        run.observe(status([worker(name, i) for i, name in enumerate(names)], samples=second), float(second))
    figure = run.plot(tmp_path / "run.png", histories={name: history() for name in names})
    losses, *_, members = figure.axes
    assert len(losses.get_legend().get_texts()) == len(names)
    for drawn in (losses.get_legend().get_texts(), members.get_yticklabels()):
        assert [text.get_text().strip().replace(r"\$", "$") for text in drawn] == names


def test_a_format_that_there_is_not_is_an_error_that_names_the_file(tmp_path):
    for thing in (Run(), history()):
        with pytest.raises(ConfigError, match=r"run\.what' cannot be drawn to"):
            thing.plot(tmp_path / "run.what")


def test_a_picture_s_folder_is_made(tmp_path):
    monitor = offbeat.AsyncTrainingMonitor()
    monitor.observe(0, loss=1.0)
    for number, thing in enumerate([Run(), history(), monitor.report()]):
        path = tmp_path / str(number) / "new" / "a.png"
        thing.plot(path)
        assert path.read_bytes().startswith(PNG)


def test_a_run_that_was_not_seen_has_an_empty_picture():
    assert len(Run().plot().axes) == 3


def test_the_picture_of_a_history_has_its_metrics_and_the_staleness_that_was_told(tmp_path):
    for name, magic in (("a.png", PNG), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        figure = history().plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)
    loss, late = figure.axes
    assert curves(loss) == [([4, 8, 10], [2.0, 1.5, 1.0])]
    assert curves(late) == [([8, 10], [0.5, 2.0])]
    assert figure.get_suptitle() == "SGD(lr=0.1)"


def test_a_history_without_staleness_has_the_metrics_alone():
    record = Record(1, 1, 1, 1.0, {"loss": 1.0, "accuracy": 0.5})
    assert [axes.get_ylabel() for axes in History([record]).plot().axes] == ["loss", "accuracy"]


def test_a_history_of_several_lives_draws_what_some_of_them_measured_with_gaps():
    records = [
        Record(1, 1, 1, 1.0, {"loss": 1.0, "top5": 0.5}),
        Record(2, 2, 2, 2.0, {"loss": 0.5}),
        Record(3, 3, 3, 3.0, {"loss": 0.4, "accuracy": 0.75}),
    ]
    panels = History(records).plot().axes
    assert [axes.get_ylabel() for axes in panels] == ["loss", "top5", "accuracy"]
    drawn = [axes.lines[0].get_ydata().tolist() for axes in panels]
    assert drawn[0] == [1.0, 0.5, 0.4]
    assert (drawn[1][0], [*map(math.isnan, drawn[1])]) == (0.5, [False, True, True])
    assert (drawn[2][2], [*map(math.isnan, drawn[2])]) == (0.75, [True, True, False])


@pytest.mark.parametrize("records", [[], [Record(1, 1, 1, 1.0, {})]])
def test_a_history_with_nothing_to_draw_says_so(records, tmp_path):
    with pytest.raises(StateError, match="nothing to draw"):
        History(records).plot(tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_picture_leaves_pyplot_alone_and_needs_no_screen(run_python):
    said = run_python(
        "import os, sys\n"
        "os.environ.pop('DISPLAY', None)\n"
        "from offbeat.history import History, Record\n"
        "History([Record(1, 1, 1, 1.0, {'loss': 1.0})]).plot()\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    assert said.strip() == "False"


def test_without_matplotlib_it_says_what_to_install(run_python):
    said = run_python(
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from offbeat import errors, tracking\n"
        "from offbeat.history import History, Record\n"
        "for plot in (History([Record(1, 1, 1, 1.0, {'loss': 1.0})]).plot, tracking.Run().plot):\n"
        "    try: plot()\n"
        "    except errors.ConfigError as error: print(error)"
    )
    assert "History.plot needs matplotlib, which is not installed here: pip install matplotlib" in said
    assert "Run.plot needs" in said
    assert "offbeat[plot]" in said


def test_however_long_a_run_is_it_keeps_so_many_moments_over_all_of_it():
    run = Run()
    for second in range(3 * MAX_MOMENTS):
        run.observe(status(version=second), float(second))
    seconds = [moment.seconds for moment in run.moments]
    assert MAX_MOMENTS // 2 <= len(seconds) <= MAX_MOMENTS
    assert seconds[0] == 0
    assert seconds[-1] >= 3 * MAX_MOMENTS - 5
    assert len(set(np.diff(seconds))) == 1, "evenly"


# ------------------------------------------------------------------------------- watch


@pytest.fixture
def server():
    with offbeat.ParameterServer(ZEROS, optimizer=SGD, run_id="r1") as server:
        yield server


@pytest.mark.parametrize("by", ["object", "address"])
def test_a_watched_run_is_seen_with_its_workers_and_tracked_by_version(server, tmp_path, by):
    path = tmp_path / "server.jsonl"
    source = server if by == "object" else server.address
    with (
        JSONL(path) as log,
        watch(source, trackers=log, interval_s=0.01) as run,
        offbeat.Client(server.address, worker_id="amy") as client,
    ):
        client.pull()
        wait_for(run.spans)
        for _ in range(3):
            client.push_pull(ONES, samples=4)
        wait_for(lambda: run.moments[-1].version == 3)
    assert run.run_id == "r1"
    assert [(span.worker, span.end) for span in run.spans()] == [("amy", "finished")]
    assert run.moments[-1].samples == 12
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert lines[0]["step"] == 0
    assert lines[-1]["step"] == 3
    assert lines[-1]["values"]["offbeat/samples_total"] == 12
    assert lines[-1]["values"]["offbeat/workers/finished"] == 1
    assert len(lines) == len(run.moments)


def test_what_happened_at_the_end_is_seen_also_where_the_server_was_stopped_in_the_block(server):
    with watch(server, interval_s=1000.0) as run:
        with offbeat.Client(server.address) as client:
            client.pull()
            client.push(ONES)
        server.stop()
    assert [moment.version for moment in run.moments] == [0, 1]


def test_a_server_that_is_gone_is_warned_of_once_and_the_block_goes_on(caplog):
    server = offbeat.ParameterServer(ZEROS)
    server.start()
    address = server.address
    with watch(address, interval_s=0.01) as run:
        server.stop()
        wait_for(lambda: caplog.records)
    warned = [r.getMessage() for r in caplog.records if "cannot be watched" in r.getMessage()]
    assert len(warned) == 1
    assert len(run.moments) >= 1


def test_a_process_that_ends_is_not_held_by_looks_that_are_far_apart(run_python):
    run_python(
        "import offbeat\n"
        "server = offbeat.ParameterServer(port=0)\n"
        "server.start()\n"
        "watched = offbeat.tracking.watch(server, interval_s=3600)\n"
        "watched.__enter__()  # as in a notebook, whose block never ends\n",
        timeout_s=25,
    )


class Elder:
    """A server of a version whose status says less."""

    def status(self):
        return {"run_id": "r1", "version": 1}


def test_a_status_that_cannot_be_read_is_warned_of_and_ends_no_block(caplog):
    with watch(Elder(), interval_s=1000.0) as run:
        pass
    assert run.moments == []
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "the server cannot be watched, which is tried again: KeyError" in caplog.text


@pytest.mark.parametrize(("is_taken", "error"), [(False, ConnectError), (True, OffbeatTimeoutError)])
def test_where_nobody_answers_a_watch_does_not_begin_and_says_so_in_its_time(is_taken, error):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if is_taken:
            silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(error, match=re.escape(address)), watch(address, timeout_s=0.3):
            pytest.fail("the block has begun")
        assert time.monotonic() - begin < 5  # as the answer was waited for before, at the beginning alone


def test_a_watch_by_another_token_does_not_begin():
    ours, theirs = "one", "other"
    with (
        offbeat.ParameterServer(ZEROS, token=theirs) as server,
        pytest.raises(AuthenticationError),
        watch(server.address, token=ours),
    ):
        pytest.fail("the block has begun")


def test_what_cannot_be_watched_is_refused_all_at_once():
    with pytest.raises(ConfigError) as refused, watch(3, interval_s=0, trackers="a", token=5, timeout_s=-1):
        pass
    for said in (
        "server is 3",
        "interval_s is 0",
        "trackers has 'a'",
        "token is of type int",
        "timeout_s is -1",
    ):
        assert said in str(refused.value)
    with pytest.raises(ConfigError, match="server is 'nowhere'"), watch("nowhere"):
        pass
