"""The benches run from end to end, at sizes that take no time; what they find here means nothing.

Of `run.py` its own parts do: what takes long is left out here (memory, limits, the store, training an MLP).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[3] / "benches"
ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


def run_bench(script, *arguments, timeout_s=50):
    return subprocess.run(
        [sys.executable, str(BENCHES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("system", ["offbeat", "pysock"])
def test_a_system_under_load_gives_one_line(system):
    done = run_bench("measure.py", system, "--params", "1000", "--workers", "2", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["system"], line["n_params"], line["workers"]) == (system, 1000, 2)
    assert line["updates_per_s"] > 0
    assert line["samples"] >= 2
    assert line["p50_ms"] <= line["p99_ms"]
    assert line["server_cpu_s_per_gb"] >= 0
    assert 0 < line["server_load_peak_mb"] <= line["server_peak_mb"]
    if system == "offbeat":
        assert line["applied"] == line["samples"] + 2 * 3  # and the warm-ups


@pytest.mark.slow
@pytest.mark.timeout(200)  # five processes import torch
def test_diloco_with_a_slow_worker_is_timed_both_ways():
    done = run_bench("async_diloco.py", "--quick", timeout_s=180)
    assert done.returncode == 0, done.stderr
    runs = [line for line in done.stdout.splitlines() if "iterations/s by worker" in line]
    assert len(runs) == 2
    for line in runs:
        slow, *others = map(float, line.partition("by worker ")[2].partition(";")[0].split(", "))
        assert slow < max(others)
    assert "times sooner" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)  # up to three processes import torch, on a machine that may be busy
@pytest.mark.parametrize(
    ("script", "arguments", "compared"),
    [
        ("recovery.py", (), ["cost of saving every 50 steps"]),
        (
            "overlap.py",
            (),
            [
                "cost of averaging, gloo",
                "cost of averaging, wire",
                "cost of averaging, tcp",
                "cost of accumulating, wire",
                "cost of accumulating, gloo",
            ],
        ),
        ("convergence.py", ("--methods", "average,gossip"), ["average ", "gossip "]),
        ("adaptive.py", (), ["adaptive, loss_variance"]),
    ],
    ids=["recovery", "overlap", "convergence", "adaptive"],
)
def test_what_is_compared_with_a_target_is_judged_in_the_end(script, arguments, compared):
    done = run_bench(script, "--quick", *arguments, timeout_s=280)
    assert done.returncode == 0, done.stderr
    judged = [line for line in done.stdout.splitlines() if re.search(r"target: .*: (met|MISSED)\b", line)]
    assert len(judged) == len(compared)
    for line, name in zip(judged, compared, strict=True):
        assert line.startswith(name)
    assert done.stdout.splitlines()[-1].startswith("load afterwards: ")


def test_two_wheels_are_measured_in_turns_each_by_its_own_code(tmp_path):
    (built,) = sorted((BENCHES.parent / "dist").glob("offbeat-*.whl"))
    old = tmp_path / "old.whl"
    with zipfile.ZipFile(old, "w") as archive:
        archive.writestr("offbeat/__init__.py", "raise SystemExit('the old one was loaded')")
    load = ("--loads", "offbeat:1000:1", "--rounds", "2", "--seconds", "0.1")
    done = run_bench("wheels.py", str(built), str(built), *load)
    assert done.returncode == 0, done.stderr
    *lines, said = [line for line in done.stdout.splitlines() if line]
    assert [json.loads(line)["wheel"] for line in lines] == ["old", "new", "new", "old"]
    assert said.startswith("offbeat, 1000 parameters, 1 workers")
    assert "in 2 rounds" in said
    done = run_bench("wheels.py", str(old), str(built), *load)
    assert done.returncode != 0
    assert "the old one was loaded" in done.stderr


def test_strangers_at_the_door_are_compared_with_none():
    counts = ("--idle", "70", "--slow", "10")
    load = ("--params", "1000", "--workers", "1", "--seconds", "0.1", "--rounds", "2")
    done = run_bench("hostile.py", *counts, *load)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert (line["idle"], line["slow"]) == (70, 10)
    assert len(line["alone_updates_per_s"]) == len(line["beside_updates_per_s"]) == 2
    assert line["ratio"] > 0
    assert line["strangers_cut_off"] > 0  # they were there, more than have a place


def test_a_server_that_writes_checkpoints_is_compared_with_one_that_does_not(tmp_path):
    load = ("--params", "1000", "--workers", "1", "--seconds", "2", "--rounds", "1", "--every", "0.1")
    done = run_bench("checkpoints.py", *load, "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    of_round, line, *summary = [line for line in done.stdout.splitlines() if line]
    assert json.loads(of_round)["ratio"] == json.loads(line)["ratio"] > 0
    assert json.loads(line)["write_s"] > 0
    assert len(summary) == 3
    assert all("target" in said for said in summary)
    assert list(tmp_path.iterdir()) == []  # what it wrote is gone


def test_a_bench_of_checkpoints_under_which_none_is_written_says_so(tmp_path):
    load = ("--params", "1000", "--workers", "1", "--seconds", "0.1", "--rounds", "1", "--every", "1000")
    done = run_bench("checkpoints.py", *load, "--dir", str(tmp_path))
    assert done.returncode != 0
    assert "no checkpoint was written under load" in done.stderr


@pytest.mark.parametrize("part", ["fairness", "many", "control", "joins"])
@pytest.mark.timeout(200)  # hundreds of clients, on a machine that may be busy
def test_each_part_of_the_load_gives_a_line_and_a_summary(part):
    done = run_bench("load.py", "--quick", "--only", part, timeout_s=180)
    assert done.returncode == 0, done.stderr
    line, *summary = [line for line in done.stdout.splitlines() if line]
    assert json.loads(line)["bench"] == part
    assert all("target" in said or part == "control" or "threads" in said for said in summary)
    assert summary


def test_a_run_measures_between_two_references_names_what_fails_and_writes_the_page(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed, so the reference in C cannot be compiled")
    lines, page = tmp_path / "lines.jsonl", tmp_path / "RESULTS.md"
    done = run_bench(
        "run.py",
        *("--rounds", "1", "--seconds-factor", "0.1", "--sizes", "1e4", "--workers", "2"),
        *(
            "--systems",
            "offbeat:nothing,offbeat,offbeat:2,pysock",
            "--mlp",
            "",
            "--no-memory",
            "--no-limits",
            "--no-store",
        ),
        *("--lines", str(lines), "--results", str(page)),
    )
    assert done.returncode == 1, done.stderr
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    order = [(line["kind"], line.get("when") or line.get("system")) for line in found]
    assert order == [
        ("machine", None),
        *[("reference", "before")] * 2,
        *[("push_pull", system) for system in ("offbeat:nothing", "offbeat", "offbeat:2", "pysock")],
        *[("reference", "after")] * 2,
        ("end", None),
    ]
    assert {line["mode"] for line in found if line["kind"] == "reference"} == {"sequential", "pipelined"}
    assert [line["system"] for line in found if "error" in line] == ["offbeat:nothing"]
    text = page.read_text()
    assert "| updates/s, share of the C reference, N = 1e4, W = 2 | ≥ 0.7 |" in text
    assert "## N = 1e4, W = 2" in text
    assert "## What could not be measured" in text


@pytest.fixture
def summary(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    import summary

    return summary


def reference_line(mode, number, rate):
    cell = {"n_params": 10_000, "workers": 1, "round": number}
    return {"kind": "reference", "mode": mode, "updates_per_s": rate, **cell}


def test_a_ratio_is_taken_to_the_better_mode_of_the_same_round(summary):
    lines = [
        *(reference_line("sequential", 0, rate) for rate in (100, 300)),
        *(reference_line("pipelined", 0, rate) for rate in (10, 1000)),
        *(reference_line("sequential", 1, rate) for rate in (50, 50)),
    ]
    own = {"kind": "push_pull", "system": "offbeat", "n_params": 10_000, "workers": 1}
    lines += [{**own, "round": 0, "updates_per_s": 404}, {**own, "round": 1, "updates_per_s": 30}]
    ratio = summary.ratios(lines, "offbeat", (10_000, 1))
    assert ratio.values == (404 / 505, 30 / 50)
    assert str(ratio) == "0.7 [0.6–0.8]"


def test_a_target_is_judged_by_the_median_and_says_so(summary):
    spread = summary.Spread((0.6, 0.9, 0.71))
    target = summary.Target("share", "≥ 0.7", spread, spread.median >= 0.7)
    assert target.verdict == "met"
    assert summary.Target("share", "≥ 0.8", spread, spread.median >= 0.8).verdict == "**missed**"
    assert summary.Target("share", "≥ 0.8", summary.Spread(()), is_met=False).verdict == "not measured"
