"""`offbeat status` for people: everything that matters is there, and says what it is."""

import pytest

from offbeat.cli import main
from offbeat.cli.status import MAX_DEPARTURES, MAX_WORKERS, report
from offbeat.cli.wording import columns

ASKED = "server.example:5000"


def status(**changes):
    whole = {
        "run_id": "r1",
        "address": "10.0.0.1:5000",
        "state": "running",
        "uptime_s": 3723.0,
        "term": 1,
        "version": 1234,
        "samples": 39_488,
        "max_samples": 100_000,
        "transaction": "fragment",
        "optimizer": {"summary": "SGD(lr=0.1)", "runs_on": "server"},
        "momentum_correction": True,
        "staleness": {
            "weights": [{"name": "constant"}, {"name": "hinge", "a": 10.0, "b": 4}],
            "max_staleness": 8,
            "max_norm": None,
        },
        "schedule": {"factor": 0.5, "lr": [0.05]},
        "workers": [
            {
                "id": "amy",
                "incarnation": 1,
                "state": "joined",
                "host": "north",
                "samples": 39_488,
                "samples_per_s": 1520.4,
                "pushes": 1236,
                "damped": 12,
                "rejected": {"stale": 2, "nonfinite": 0},
                "mean_staleness": 1.24,
                "max_staleness": 9,
                "last_push_age_s": 0.04,
            },
            {
                "id": "bob",
                "incarnation": 2,
                "state": "lost",
                "host": "south",
                "samples": 0,
                "samples_per_s": 0.0,
                "pushes": 0,
                "damped": 0,
                "rejected": {},
                "mean_staleness": 0.0,
                "max_staleness": 0,
                "last_push_age_s": None,
            },
        ],
        "departures": [departure("bob", "lost", 2) | {"age_s": 75.0, "cause": "no heartbeat for 10 s"}],
        "tickets": {"applied": 1234, "partial": 1, "dropped": 0},
        "rejected": {"stale": 2},
        "memory": {
            "formula": "roots + ledgers + pinned + idle + staging",
            "total_bytes": 3 << 20,
            "roots_bytes": 2 << 20,
            "ledgers_bytes": 0,
            "pinned_bytes": 0,
            "idle_bytes": 1 << 20,
            "staging_bytes": 0,
        },
        "longest_poll_ms": 0.61,
        "lost_updates": 0,
        "checkpoints": None,
    }
    return whole | changes


@pytest.mark.parametrize(
    "said",
    [
        "r1 on 10.0.0.1:5000, running, up 1 h 2 min",
        "version 1,234, 39,488 of 100,000 samples, term 1",
        "SGD(lr=0.1), on the server, momentum in the workers",
        "0.05 (schedule's factor 0.5)",
        "constant, hinge(a=10, b=4), max_staleness 8",
        "1,234 applied, 1 partial, 0 dropped, 2 (2 stale) rejected",
        "no heartbeat for 10 s",
        "1 min 15 s ago",
        "memory 3.0 MiB = roots + ledgers + pinned + idle + staging = 2.0 + 0.0 + 0.0 + 1.0 + 0.0",
        "0.6 ms",
    ],
)
def test_the_report_says(said):
    assert said in report(status(), asked=ASKED)


def test_a_server_on_every_interface_is_told_with_an_address_to_join_with():
    everywhere = status(address="[::]:5000")
    assert "r1 on server.example:5000 (every interface)," in report(everywhere, asked=ASKED)
    here = report(everywhere, asked="127.0.0.1:5000")
    assert "[::]" not in here
    assert ":5000 (every interface)," in here


def test_live_optimizers_are_said_to_be_on_the_workers():
    text = report(status(optimizer={"summary": "Add(lr=1)", "runs_on": "worker"}), asked=ASKED)
    assert "live ones, on the workers" in text
    assert "Add" not in text
    assert "learning rate  -, the workers' optimizers decide" in text


def kept(**changes):
    return {"directory": "/kept", "path": None, "version": None, "age_s": None, "failed": None} | changes


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        (kept(), "none written yet"),
        (kept(version=1200, age_s=75.4), "the newest of version 1,200, 1 min 15 s ago"),
        (
            kept(version=7, age_s=0.2, failed="disk full"),
            "the newest of version 7, 0.2 s ago; the last one failed: disk full",
        ),
        (kept(failed="disk full"), "none written yet; the last one failed: disk full"),
    ],
)
def test_what_is_kept_is_told_in_one_line(checkpoints, said):
    lines = report(status(checkpoints=checkpoints), asked=ASKED).splitlines()
    assert f"checkpoints    in /kept, {said}" in lines


def test_lost_updates_are_told_where_there_are_some():
    assert "lost updates   1,400" in report(status(lost_updates=1400), asked=ASKED).splitlines()


def test_without_checkpoints_and_losses_neither_has_a_line():
    text = report(status(), asked=ASKED)
    assert "checkpoints" not in text
    assert "lost updates" not in text


def test_help_says_how_long_the_server_is_tried(capsys):
    assert main.main(["status", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--timeout SECONDS how long to try; where all is silent, up to 2 s more" in said
    assert "default: 10" in said


def test_help_explains_the_words_of_the_tables(capsys):
    assert main.main(["status", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in (
        "damped",
        "applied",
        "partial",
        "dropped",
        "ost updates",
        "ongest poll",
        "roots",
        "pinned",
        "idle",
        "staging",
    ):
        assert f"{word}," in said


def test_each_worker_has_a_row_below_its_headings():
    lines = report(status(), asked=ASKED).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("worker "))
    amy = " ".join(lines[head + 1].split())
    assert amy == "amy joined north 39,488 1,520 1,236 12 2 (2 stale) 1.2 9 0.0 s ago"
    assert lines[head + 2].split()[-1] == "-"
    assert len({len(line) for line in lines[head : head + 2]}) == 1, "columns are set right"


def departure(worker, state, incarnation):
    told = {"worker": worker, "incarnation": incarnation, "state": state}
    return told | {"age_s": 26.0, "cause": f"the cause of {worker}"}


@pytest.mark.parametrize("state", ["joined", "stalled"])
def test_a_lost_worker_that_is_back_is_no_departure_in_the_table(state):
    amy, bob = status()["workers"]
    amy, bob = amy | {"state": state, "incarnation": 5}, bob | {"incarnation": 2}
    before = departure("amy", "lost", 1)  # by another process of that name, which is told of
    who = (("amy", "lost", 5), ("amy", "left", 4), ("bob", "lost", 2), ("cy", "lost", 3))
    gone = [departure(*each) for each in who]
    text = report(status(workers=[amy, bob], departures=[before, *gone]), asked=ASKED)
    told = text.partition("departure ")[2]
    assert [line.split()[:2] for line in told.splitlines()[1:5]] == [
        ["amy", "lost"],
        ["amy", "left"],
        ["bob", "lost"],
        ["cy", "lost"],
    ]
    assert "departure" not in report(status(workers=[amy], departures=gone[:1]), asked=ASKED)


def test_a_server_without_a_model_or_workers_has_a_report_too():
    terms = ("total", "roots", "ledgers", "pinned", "idle", "staging")
    empty = {"formula": "", **{f"{term}_bytes": 0 for term in terms}}
    text = report(
        status(
            state="waiting_for_model",
            optimizer=None,
            workers=[],
            departures=[],
            memory=empty,
            schedule={"factor": 1.0, "lr": []},
        ),
        asked=ASKED,
    )
    assert "waiting for model" in text
    assert "no worker has joined yet" in text
    assert "none yet" in text


def test_columns():
    assert columns([["a", "1"], ["long", "100"]], left=1) == "a       1\nlong  100"
    assert columns([], left=0) == ""


def crowd():
    """A thousand workers, of whom two may want a hand."""
    amy = status()["workers"][0]
    states = ["finished"] * 500 + ["joined"] * 498 + ["lost", "stalled"]
    workers = [amy | {"id": f"w{i}", "incarnation": i, "state": state} for i, state in enumerate(states)]
    workers[777]["last_push_age_s"] = 7.0
    return workers


def rows(text, heading):
    """Give the first two words of the lines below a heading, up to the table's end."""
    table = text.partition(f"\n{heading} ")[2].partition("\n\n")[0]
    return [line.split()[:2] for line in table.splitlines()[1:]]


def test_of_a_thousand_workers_those_are_told_that_may_want_a_hand_and_how_many_are_left_out():
    text = report(status(workers=crowd(), departures=[]), asked=ASKED)
    *shown, _ = rows(text, "worker")
    assert shown[:3] == [["w999", "stalled"], ["w998", "lost"], ["w777", "joined"]]
    assert len(shown) == MAX_WORKERS
    assert "and 950 more (450 joined, 500 finished); --all lists them" in text
    assert len(text.splitlines()) < 80
    whole = report(status(workers=crowd(), departures=[]), asked=ASKED, is_whole=True)
    assert [name for name, _ in rows(whole, "worker")] == [f"w{i}" for i in range(1000)], (
        "as they are told of"
    )
    assert "--all" not in whole


def test_the_latest_departures_are_told_and_how_many_were_before_them():
    gone = [departure(f"d{i}", "left", 10 + i) for i in range(MAX_DEPARTURES + 3)]
    text = report(status(departures=gone), asked=ASKED)
    *shown, _ = rows(text, "departure")
    assert shown == [[f"d{i}", "left"] for i in range(3, MAX_DEPARTURES + 3)]
    assert "and 3 before them; --all lists them" in text
    assert len(rows(report(status(departures=gone), asked=ASKED, is_whole=True), "departure")) == len(gone)


def test_a_thousand_departures_with_long_causes_are_a_few_lines_that_a_terminal_has_room_for():
    cause = "left before its work was done: RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB."
    gone = [departure(f"node-{i:04}.cluster.example", "left", 10 + i) for i in range(1000)]
    gone = [one | {"cause": f"{one['worker']} {cause}"} for one in gone]
    told = status(workers=crowd(), departures=gone)
    text = report(told, asked=ASKED, room=80)
    tables = [table for table in text.split("\n\n") if table.startswith(("worker ", "departure "))]
    assert len(tables) == 2
    assert max(len(line) for table in tables for line in table.splitlines()) <= 80
    *shown, _ = rows(text, "departure")
    assert shown == [[f"node-{i:04}.cluster.example", "left"] for i in range(990, 1000)]
    assert "…" in tables[1].splitlines()[-2]
    assert tables[1].splitlines()[-1] == "and 990 before them; --all lists them"
    for heading in ("samples/s", "last push", "rejected"):
        assert heading in tables[0].splitlines()[0], "what matters most is there"
    assert "max" not in tables[0].splitlines()[0]
    long = [worker | {"id": f"node-{worker['incarnation']:04}.cluster.example"[:24]} for worker in crowd()]
    assert long[999]["id"] in report(status(workers=long), asked=ASKED, room=80), "a name before its host"
    assert cause in report(told, asked=ASKED), "in a file or a pipe it is whole"


def test_all_is_a_flag(capsys):
    assert main.main(["status", "--help"]) == 0
    assert "--all" in capsys.readouterr().out
