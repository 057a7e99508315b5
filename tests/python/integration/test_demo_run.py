"""The demo, cut short, on the digits: real processes, a real server, and all that it promises to report."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.demo import data
from offbeat.demo.run import QUICK_SAMPLES
from offbeat.errors import StateError
from support.command import command

# Most of the time is torch being imported by five processes.
pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(150)]

pytest.importorskip("torch")
pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the command once, where there is no Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("demo")
    code = (
        "import pathlib, sys; from offbeat.demo import data; data.DEBIAN_DIR = pathlib.Path('nowhere');"
        "from offbeat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "demo", "--quick", "--seed", "5", "--json", "demo.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_")},
    )
    assert done.returncode == 3, done.stderr
    return done, json.loads((folder / "demo.json").read_text("utf-8")), folder


def test_the_stand_in_is_not_taken_for_the_benchmark(demo):
    done, result, _ = demo
    assert "not the benchmark" in done.stdout
    assert result["is_benchmark"] is False
    assert result["seed"] == 5


def test_both_ways_train_on_the_same_number_of_samples(demo):
    _, result, _ = demo
    assert [task["name"] for task in result["tasks"]] == ["mlp", "cnn"]
    for task in result["tasks"]:
        assert task["single"]["samples"] == QUICK_SAMPLES
        together = task["asynchronous"]
        # The last pushes are admitted side by side, so the run may end a few batches beyond.
        assert 0 <= together["samples"] - QUICK_SAMPLES < 4 * task["batch_size"]
        assert together["samples"] == sum(worker["samples"] for worker in together["workers"])
        assert together["version"] * task["batch_size"] == together["samples"]


def test_both_ways_learn(demo):
    _, result, _ = demo
    for task in result["tasks"]:
        assert task["single"]["accuracy"] > 0.6
        assert task["asynchronous"]["accuracy"] > 0.6
        for run in (task["single"], task["asynchronous"]):
            assert run["curve"][-1]["loss"] < run["curve"][0]["loss"]
            assert run["curve"][-1]["seconds"] <= run["seconds"] + 1


def test_the_slow_worker_is_slow_and_its_pushes_are_stale(demo):
    _, result, _ = demo
    for task in result["tasks"]:
        *others, slow = task["asynchronous"]["workers"]
        assert [worker["slowed"] for worker in others] == [1, 1, 1]
        assert slow["slowed"] == 5
        assert 0 < slow["samples"] < min(worker["samples"] for worker in others)
        assert slow["mean_staleness"] > max(worker["mean_staleness"] for worker in others)
        for worker in (*others, slow):
            assert sum(worker["staleness_histogram"]) == worker["samples"] / task["batch_size"]
            assert set(worker["rejected"]) <= {"budget"}


def test_the_report_and_the_picture_are_there(demo):
    done, _, folder = demo
    assert "worker-3, 5x slower" in done.stdout
    assert "single process" in done.stdout
    assert (folder / "offbeat-demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"4 workers: {QUICK_SAMPLES:,} samples" in done.stderr, "progress without a terminal is lines"


def test_ctrl_c_ends_the_demo_and_all_its_processes_in_one_sentence(tmp_path):
    with command("demo", "--data-dir", str(tmp_path), cwd=tmp_path) as refused:
        assert refused.ends() == 2, "there is nothing to train on"
    with command("demo", "--quick", cwd=tmp_path) as demo:
        demo.line(f"MLP 784-256-128-10, 4 workers: {QUICK_SAMPLES:,} samples", timeout_s=100)
        workers = workers_of(demo.process.pid)
        assert len(workers) == 4
        for pid in (demo.process.pid, *workers):  # as a terminal does
            os.kill(pid, signal.SIGINT)
        assert demo.ends() == 130, demo.said
    assert demo.said.splitlines()[-1] == "offbeat: interrupted"
    assert "Traceback" not in demo.said
    assert not [pid for pid in workers if is_running(pid)]


def workers_of(pid):
    """List the worker processes of a process, without those that multiprocessing has for itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text("utf-8").rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_failing_worker_ends_the_demo_with_its_error():
    from offbeat.demo import workers
    from offbeat.demo.models import MLP
    from offbeat.demo.samples import Samples

    with workers.crew(1, Samples.of(data.load_digits())) as crew:
        crew.ready()
        settings = {"token": "", "worker_id": "worker-0", "seed": 0, "slowed": 1.0, "num_others": 0}
        with pytest.raises(StateError, match="worker-0 failed"):
            crew.give([workers.Job(task=MLP, address="no address", **settings)])


def test_a_worker_process_that_dies_is_noticed():
    from offbeat.demo import workers
    from offbeat.demo.samples import Samples

    with workers.crew(1, Samples.of(data.load_digits())) as crew:
        crew.ready()
        crew._processes[0].kill()
        with pytest.raises(StateError, match="exit code -9"):
            crew.ready()


def test_a_worker_process_that_died_is_noticed_where_it_is_given_something():
    from offbeat.demo import workers
    from offbeat.demo.samples import Samples

    with workers.crew(1, Samples.of(data.load_digits())) as crew:
        crew.ready()
        crew._processes[0].kill()
        crew._processes[0].join()
        with pytest.raises(StateError, match="exit code -9"):
            list(crew.go(tick_s=1))
