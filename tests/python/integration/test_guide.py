"""The guide is true: its code runs as it stands, from top to bottom, and its tables leave nothing out."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import offbeat
from offbeat import errors, history, staleness
from offbeat.receipt import Receipt
from support.group import together

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guide.md").read_text("utf-8")
TIMEOUT_S = 100


def program(page):
    """Give a page's Python as one program, each line where the page has it, and the number of its blocks."""
    lines, num_blocks, is_code = [], 0, False
    for line in page.splitlines():
        if line.startswith("```"):
            is_code = line == "```python"
            num_blocks += is_code
            lines.append("")
        else:
            lines.append(line if is_code else "")
    return "\n".join(lines), num_blocks


def rows(heading):
    """Give the rows of the table whose first cell is `heading`, each as a list of cells."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\| ---.*\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]


def names(cell):
    return re.findall(r"`\"?([\w]+)\"?`", cell)


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_the_code_of_the_guide_runs_as_one_program(tmp_path):
    code, num_blocks = program(GUIDE)
    assert num_blocks >= 8
    path = tmp_path / "guide.md"
    path.write_text(code, "utf-8")
    ran = subprocess.run(
        [sys.executable, "-W", "error", path.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    warned = re.findall("^offbeat: (.*)", ran.stderr, re.MULTILINE)  # as warnings of ours begin
    busy = ("stood still", "saves are put off until the disk is done")  # as a busy machine is
    ours = [line.split(" from=")[0] for line in warned if not any(word in line for word in busy)]
    assert ours[0] == "the model is back where it was"
    assert re.fullmatch(r"step 26: loss is nan, .*rollback: went back to step 20", ours[1])
    # In which step depends on the model, which is drawn from what threads have drawn from before.
    assert re.match(r"step (3\d|4[0-7]): loss is .*, in its range again", ours[2])
    halved = "increase_sync_frequency: averaging_frequency is to be 4 instead of 8"
    assert re.fullmatch(rf"step 48: loss is 1e\+06, .*; {halved}", ours[3])
    assert len(ours) == 4
    assert (tmp_path / "monitor.png").exists()
    assert (tmp_path / "model.pt").exists()
    printed = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(printed) >= 2
    for said in printed:
        assert said in ran.stdout


def save_and_go_on(rank, folder):
    """Run what the guide has of an averager's life and its next one, but for the flush in between."""
    os.chdir(folder)
    begins, averaging = GUIDE.index("import offbeat\n"), GUIDE.index("averager = offbeat.AsyncModelAverager(")
    made = GUIDE[begins : GUIDE.index("\nserver = ", begins)]
    rounds = GUIDE[GUIDE.rindex("```python\n", 0, averaging) : averaging]
    life, next_life = re.findall(r"```python\n(.*?)```", GUIDE[averaging - len(rounds) :], re.DOTALL)[:2]
    life, num_flushes = re.subn(r"averager\.flush\(\).*\nprint\(.*\n", "", life)
    assert num_flushes == 1
    found = {}
    saving, going_on = next_life.split("\n\n", 1)
    exec(made + life + saving, found)  # noqa: S102  the guide's own
    before = [p.detach().numpy().copy() for p in found["model"].parameters()]
    first = found["averager"]
    exec(going_on, found)  # noqa: S102
    assert found["averager"] is not first
    after = [p.detach().numpy().copy() for p in found["model"].parameters()]
    return before, after, (first.iterations, found["averager"].iterations)


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_each_of_two_members_saves_and_goes_on_as_the_guide_has_it(tmp_path):
    of_first, of_second = together(save_and_go_on, 2, str(tmp_path))
    assert not np.array_equal(of_first[0][0], of_second[0][0]), "between rounds members differ"
    for before, after, (saved, now) in (of_first, of_second):
        assert all(map(np.array_equal, before, after))
        assert saved == now > 0


def test_every_field_of_a_receipt_is_explained():
    assert [name for row in rows("field") for name in names(row[0])] == list(Receipt._fields)


def test_every_reason_is_explained():
    source = (ROOT / "rust/core/src/pipeline/verdict.rs").read_text("utf-8")
    reasons = re.findall(r'^    \w+ = "(\w+)",$', source, re.MULTILINE)
    assert "stale" in reasons
    explained = {name for row in rows("reason") for name in names(row[0])}
    assert explained | {"base_evicted"} == set(reasons)  # which nothing gives yet


def test_every_weight_is_what_the_table_says():
    table = rows("policy")
    weighing = {name for name, policy in staleness._POLICIES.items() if policy().weight() is not None}
    assert {name for row in table for name in names(row[0])} == weighing
    for name, _, *said, _ in [(names(row[0])[0], *row[1:]) for row in table]:
        with (
            offbeat.ParameterServer(
                {"w": np.zeros(1, np.float32)}, optimizer=offbeat.optim.SGD(lr=0.1), staleness_policy=name
            ) as server,
            offbeat.Client(server.address) as client,
        ):
            client.pull()  # once, so that each push is later than the one before
            found = [client.push({"w": np.ones(1, np.float32)}) for _ in range(16)]
        assert [found[3].staleness, found[15].staleness] == [3, 15]
        assert [found[3].weight, found[15].weight] == pytest.approx(list(map(float, said)), abs=0.005)


def test_every_key_of_the_status_is_explained():
    with offbeat.ParameterServer() as server:
        status = server.status()
    keys = [name for row in rows("key") for name in names(row[0])]
    assert sorted(keys) == sorted(status)


def test_every_error_is_explained_with_what_it_also_is():
    table = {names(row[0])[0]: names(row[1])[0] for row in rows("error")}
    found = {
        name: next(b.__name__ for b in getattr(errors, name).__bases__ if b is not errors.OffbeatError)
        for name in errors.__all__
        if name != "OffbeatError"
    }
    assert table == found


def test_the_guide_names_each_way_in_which_train_stops():
    (listed,) = re.findall(r"`stopped` is\n(.*?)\n\n", GUIDE, re.DOTALL)
    ways = get_args(history.Stopped)
    assert len(ways) == 7
    assert sorted(re.findall(r'`"(\w+)"`', listed)) == sorted(ways)
