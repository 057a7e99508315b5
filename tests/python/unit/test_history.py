"""A history is plain data that outlives its process."""

import json
import pickle  # noqa: TID251  that it pickles is the claim

import pytest

from offbeat.history import History, Record


def example() -> History:
    record = Record(step=100, version=250, samples=3200, seconds=1.5, metrics={"loss": 0.5}, staleness=1.5)
    return History([record], 1, 100, 3200, 1.5, {"applied": 99, "too_stale": 1}, "epochs", "SGD")


def test_to_json_holds_everything():
    assert json.loads(example().to_json()) == {
        "records": [
            {
                "step": 100,
                "version": 250,
                "samples": 3200,
                "seconds": 1.5,
                "metrics": {"loss": 0.5},
                "staleness": 1.5,
            }
        ],
        "epochs": 1,
        "steps": 100,
        "samples": 3200,
        "seconds": 1.5,
        "receipts": {"applied": 99, "too_stale": 1},
        "stopped": "epochs",
        "optimizer": "SGD",
        "skipped": 0,
        "first_non_finite": None,
        "stop_reason": None,
        "validation": [],
    }


def test_what_is_not_finite_is_null():
    metrics = {"loss": float("nan"), "norm": float("-inf"), "accuracy": 0.5}
    record = Record(step=1, version=1, samples=1, seconds=1.0, metrics=metrics)
    text = History([record]).to_json(indent=1)
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["records"][0]["metrics"] == {"loss": None, "norm": None, "accuracy": 0.5}


def test_a_history_pickles():
    assert pickle.loads(pickle.dumps(example())) == example()  # noqa: S301  our own bytes
