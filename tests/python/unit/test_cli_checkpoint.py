"""What `offbeat checkpoint` says of what was found, and how it shows that it reads."""

from pathlib import Path

import pytest

from offbeat.cli import reading
from offbeat.cli.checkpoint_report import report
from offbeat.cli.reading import Reading

PLACE = Path("/kept")


def checkpoint(**changes):
    whole = {
        "kind": "checkpoint",
        "name": "checkpoint-000007",
        "written_unix_s": 1_700_000_000.0,
        "format": 1,
        "offbeat": "0.1.0",
        "run_id": "r1",
        "port": 5000,
        "term": 2,
        "version": 1234,
        "gone_back_to": None,
        "samples": 39_488,
        "max_samples": None,
        "transaction": "model",
        "contribution": "gradient",
        "contribution_of": "amy",
        "optimizer": {"summary": "SGD(lr=0.1)", "runs_on": "server"},
        "momentum_correction": True,
        "staleness": {"weights": [], "max_staleness": 8, "max_norm": None},
        "schedule": {"factor": 0.5, "lr": [0.05]},
        "tickets": {"applied": 1234, "partial": 1, "dropped": 0},
        "rejected": {"stale": 2},
        "num_tensors": 12,
        "num_parameters": 1_000_000,
        "num_buffer_elements": 34,
        "bytes": 3 * 2**20,
        "files": [
            {"name": "model.safetensors", "bytes": 3 * 2**20 - 2**9},
            {"name": "optimizer.safetensors", "bytes": 2**9},
        ],
        "workers": [
            {
                "id": "amy",
                "present": True,
                "incarnation": 3,
                "last_push": 1300,
                "pushes": 1236,
                "applied": 1234,
                "samples": 39_488,
                "rejected": {"stale": 2},
                "unfinished": [{"push": 1300, "ticket": 1235, "samples": 8, "num_applied": 2}],
            }
        ],
    }
    return whole | changes


def directory(*checkpoints, **changes):
    return {
        "kind": "directory",
        "checkpoints": list(checkpoints),
        "set_aside": [],
        "next": None,
        "refusal": None,
    } | changes


def entry(name, error=None, told=None, *, is_gone=False):
    return {"name": name, "error": error, "is_gone": is_gone, "checkpoint": told}


@pytest.mark.parametrize(
    "said",
    [
        "by Offbeat 0.1.0",
        "r1, at port 5000",
        "version 1,234, 39,488 samples, term 2",
        "SGD(lr=0.1), on the server, momentum in the workers",
        "0.05 (schedule's factor 0.5)",
        "constant, max_staleness 8",
        "gradients, as fixed by amy",
        "1,234 applied, 1 partial, 0 dropped, 2 (2 stale) rejected",
        "12, with 1,000,000 parameters and 34 numbers in buffers",
        "model.safetensors 3.0 MiB, optimizer.safetensors 0.5 KiB; 3.0 MiB in all",
        "amy     there            3      1,300   1,236    1,234   39,488  2 (2 stale)",
        "unfinished: push 1300 of amy, ticket 1235, 8 samples; 2 of its fragments are applied",
    ],
)
def test_a_checkpoint_s_report_says(said):
    assert said in report(checkpoint(), PLACE)


def test_a_model_without_an_optimizer_has_a_report_too():
    nothing = dict.fromkeys(["optimizer", "staleness", "schedule", "contribution", "written_unix_s"])
    text = report(checkpoint(**nothing, contribution_of="", workers=[]), PLACE)
    assert "none yet" in text
    assert "nothing yet" in text
    assert "no worker had joined" in text
    assert "file time unknown, by Offbeat" in text
    assert "file time unknown, by Offbeat" in report(checkpoint(written_unix_s=1e18), PLACE)


def test_one_that_was_gone_back_to_is_told_by_both_versions():
    again = checkpoint() | {"gone_back_to": 1000}
    assert "values         of version 1,000, to which the run was brought back" in report(again, PLACE)
    assert "values  " not in report(checkpoint(), PLACE)
    text = report(directory(entry("checkpoint-000006", told=again)), PLACE)
    assert "r1   1,234 (1,000 again)" in text.splitlines()[3]


def test_what_is_gone_or_damaged_has_a_row_and_its_reason():
    gone = entry("checkpoint-000007", "/kept/checkpoint-000007 is gone", is_gone=True)
    damaged = entry("checkpoint-000008", "/kept/checkpoint-000008: no")
    good = entry("checkpoint-000006", told=checkpoint())
    text = report(directory(damaged, gone, good, next="checkpoint-000006", set_aside=["a", "b"]), PLACE)
    lines = text.splitlines()
    assert lines[0] == "3 checkpoints in /kept, newest first"
    assert lines[2].split()[:4] == ["checkpoint", "file", "time", "run"], "a copy changes it"
    assert lines[3].split() == ["checkpoint-000008", "cannot", "be", "used", *"-----"]
    assert lines[4].split() == ["checkpoint-000007", "gone", *"-----"]
    assert " ".join(lines[5].split()[3:]) == "r1 1,234 2 39,488 3.0 MiB"
    assert {"/kept/checkpoint-000008: no", "/kept/checkpoint-000007 is gone", "set aside: a, b"} < set(lines)
    assert "a server would go on from checkpoint-000006" in lines[-1]
    assert report(directory(refusal="no"), PLACE).endswith("\na server would not start here: no")
    assert report(directory(), PLACE) == "no checkpoint yet in /kept"


def test_no_name_moves_the_cursor_or_makes_a_line():
    text = report(checkpoint(run_id="a\x1b[2Jb\nc", contribution_of="\r"), PLACE)
    assert "a\\x1b[2Jb\\nc" in text
    assert not {"\x1b", "\r"} & set(text)
    assert "\x1b" not in report(directory(entry("checkpoint-000001", "a\x1b[2J")), PLACE)


@pytest.mark.parametrize("on_terminal", [True, False])
def test_on_a_terminal_reading_shows_a_bar_and_clears_it(on_terminal, monkeypatch, capsys):
    monkeypatch.setattr(reading, "on_terminal", lambda: on_terminal)
    with Reading("checkpoint-000007") as tell:
        assert capsys.readouterr().err == "", "of what is short nothing is seen"
        tell(2**20, 4 * 2**20)
        tell(3 * 2**20, 8 * 2**20)
        assert ("checkpoint-000007" in capsys.readouterr().err) == on_terminal
    assert capsys.readouterr().err.strip() == ""
