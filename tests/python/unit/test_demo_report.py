"""The demo's report: the table says what the data says, the JSON is all of it, and the picture is one."""

import json
import re
from dataclasses import asdict

from matplotlib.figure import Figure

from offbeat.demo import report
from offbeat.demo.result import AsyncRun, DemoResult, Point, Run, TaskResult, WorkerResult
from offbeat.demo.run import _pooled, note
from offbeat.demo.workers import Finished
from offbeat.history import History, Record


def worker(number: int, slowed: float = 1.0, **rejected: int) -> WorkerResult:
    return WorkerResult(
        id=f"worker-{number}",
        slowed=slowed,
        samples=12_345,
        samples_per_s=678.4,
        pushes=99,
        rejected=rejected,
        mean_staleness=2.34,
        max_staleness=17,
        staleness_histogram=[5, 3] + [0] * 15 + [1] + [0] * 46,
    )


def result(**changes: object) -> DemoResult:
    curve = [Point(1.0, 100, 2.0), Point(2.0, 200, 1.0)]
    task = TaskResult(
        name="mlp",
        title="MLP",
        lr=0.05,
        momentum=0.9,
        batch_size=64,
        single=Run(accuracy=0.9, seconds=10.0, samples=1000, curve=curve),
        asynchronous=AsyncRun(
            accuracy=0.895,
            seconds=5.0,
            samples=1000,
            curve=curve,
            workers=[worker(0), worker(1, 5.0, stale=2, budget=1)],
            version=16,
            optimizer="SGD",
            staleness_policy="constant",
        ),
    )
    whole = {"data": "pictures", "is_benchmark": True, "seed": 3, "quick": False, "seconds": 21.0}
    return DemoResult(**(whole | {"tasks": [task], "machine": {"cores": "2"}} | changes))


def test_the_table_has_both_accuracies_and_every_worker():
    text = report.table(result())
    assert "90.00%" in text
    assert "89.50%" in text
    assert "0.50 points below" in text
    assert "2.00 times as fast" in text
    assert "worker-1, 5x slower" in text
    assert "3 (1 budget, 2 stale)" in text
    assert "12,345" in text
    assert "seed 3" in text


def test_the_table_says_what_its_numbers_are_and_what_they_show():
    text = report.table(result())
    assert "staleness policy: constant (a late push counts as much as any other)" in text
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "staleness, updates" in line)
    above, heads = lines[first].split(), lines[first + 1].split()
    assert above == ["staleness,", "updates", "rejected"]
    assert heads == ["worker", "samples", "samples/s", "pushes", "mean", "largest", "pushes"]
    assert "worker-1 did 678 samples/s, and beside it the others 678 each" in text
    assert "The 2 workers and the server shared this machine's 2 cores" in text
    assert 'Rejected for "budget" are the pushes that came when the run\'s samples were used up' in text


def test_the_note_beside_the_progress_names_each_worker():
    workers = [{"id": "worker-0", "samples_per_s": 33_181.4}, {"id": "worker-3", "samples_per_s": 212.0}]
    said = note({"version": 1234, "workers": workers})
    assert said == "version 1,234; samples/s: worker-0 33,181, worker-3 212"
    assert note({"version": 0, "workers": []}).endswith("nobody has joined yet")


def test_the_picture_has_a_row_for_each_worker(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    report.write_png(result(), tmp_path / "demo.png")
    _, *rows = drawn[0].axes
    assert len(rows) == 2
    for row, seen in zip(rows, result().tasks[0].asynchronous.workers, strict=True):
        assert seen.id in row.get_title("right")
        assert max(bar.get_height() for bar in row.patches) >= row.get_ylim()[1] / 2


def test_a_run_that_was_cut_short_says_so():
    assert "--quick" in report.table(result(quick=True))
    assert "--quick" not in report.table(result())


def test_the_json_is_everything(tmp_path):
    path = tmp_path / "demo.json"
    report.write_json(result(), path)
    assert json.loads(path.read_text("utf-8")) == json.loads(json.dumps(asdict(result())))


def test_a_loss_that_is_nan_is_null_in_the_json(tmp_path):
    path = tmp_path / "demo.json"
    whole = result()
    whole.tasks[0].single.curve[1] = Point(2.0, 200, float("nan"))
    report.write_json(whole, path)
    assert not re.search("NaN|Infinity", path.read_text("utf-8"))
    assert json.loads(path.read_text("utf-8"))["tasks"][0]["single"]["curve"][1]["loss"] is None


def test_the_picture_is_a_png(tmp_path):
    path = tmp_path / "demo.png"
    report.write_png(result(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(path.read_bytes()) > 10_000


def test_the_workers_curves_become_one_over_common_time():
    def finished(began, *records):
        made = [
            Record(step=0, version=0, samples=samples, seconds=seconds, metrics={"loss": loss})
            for seconds, samples, loss in records
        ]
        return Finished(worker_id="w", began=began, history=History(records=made))

    curve = _pooled(
        [finished(100.0, (1.0, 10, 4.0), (2.0, 20, 2.0)), finished(100.5, (1.0, 30, 2.0), (3.0, 60, 1.0))],
        100.0,
        40,
    )
    assert curve == [Point(1.5, 40, 2.5), Point(3.5, 80, 1.25)]
