"""A history is plain data that outlives its process."""

import json
import pickle  # noqa: TID251  that it pickles is the claim

from offbeat.history import History, Record


def example() -> History:
    record = Record(step=100, version=250, samples=3200, seconds=1.5, metrics={"loss": 0.5})
    return History([record], 1, 100, 3200, 1.5, {"applied": 99, "too_stale": 1}, "epochs", "SGD")


def test_to_json_holds_everything():
    assert json.loads(example().to_json()) == {
        "records": [{"step": 100, "version": 250, "samples": 3200, "seconds": 1.5, "metrics": {"loss": 0.5}}],
        "epochs": 1,
        "steps": 100,
        "samples": 3200,
        "seconds": 1.5,
        "receipts": {"applied": 99, "too_stale": 1},
        "stopped": "epochs",
        "optimizer": "SGD",
    }


def test_a_history_pickles():
    assert pickle.loads(pickle.dumps(example())) == example()  # noqa: S301  our own bytes
