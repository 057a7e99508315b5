"""Trackers of `train`: each log line's numbers, at steps that go on, whatever becomes of a tracker."""

import json

import pytest
import torch
from torch import nn

import offbeat
from offbeat.tracking import CSV, JSONL, alerts

SPEC = offbeat.optim.SGD(lr=0.1)
BATCHES = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))] * 10


@pytest.fixture
def worker(serve, join):
    return join(serve(nn.Linear(3, 2)), nn.Linear(3, 2), worker_id="me", optimizer=SPEC)


def train(worker, **keywords):
    return worker.train(
        dataloader=BATCHES, loss_fn=nn.CrossEntropyLoss(), log_frequency=4, progress=False, **keywords
    )


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_alerts_of_monitors_come_with_each_log_line_by_metric_and_action(worker, tmp_path):
    counted = alerts.counted().get(("loss", "reject"), 0)
    path = tmp_path / "run.jsonl"
    with (
        JSONL(path) as log,
        offbeat.AsyncTrainingMonitor(worker.model, remediation_strategy="reject") as ours,
    ):
        train(worker, trackers=log)
        ours.observe(100, loss=float("nan"))
        ours.observe(101, loss=float("nan"))
        train(worker, trackers=log)
    name = "offbeat/monitor_alerts_total/loss/reject"
    assert [line["values"].get(name, 0.0) for line in lines(path)] == [counted] * 3 + [counted + 2.0] * 3


def test_each_log_line_is_tracked_with_what_the_history_says(worker, tmp_path):
    path = tmp_path / "run.jsonl"
    with JSONL(path) as log:
        history = train(worker, trackers=log, metrics=["loss", "accuracy"])
    assert [line["step"] for line in lines(path)] == [4, 8, 10]
    for line, record in zip(lines(path), history.records, strict=True):
        values = line["values"]
        assert values.pop("offbeat/samples_per_s") > 0
        values = {name: value for name, value in values.items() if alerts.NAME not in name}  # of other tests
        assert values == record.metrics | {
            "offbeat/version": record.version,
            "offbeat/samples": record.samples,
            "offbeat/seconds": record.seconds,
            "offbeat/staleness": 0.0,
        }
        assert record.staleness == 0.0


def test_steps_go_on_over_several_calls_of_train(worker, tmp_path):
    path = tmp_path / "run.jsonl"
    with JSONL(path) as log:
        for _ in range(2):
            train(worker, trackers=[log])
    assert [line["step"] for line in lines(path)] == [4, 8, 10, 14, 18, 20]


def test_staleness_is_that_of_the_receipts_since_the_line_before(serve, join, tmp_path):
    server = serve(nn.Linear(3, 2))
    worker = join(server, nn.Linear(3, 2), optimizer=SPEC)
    other = join(server, nn.Linear(3, 2))
    inputs, targets = BATCHES[0]

    def loader():
        for _ in range(8):
            yield inputs, targets
            # Between the pull of the step before and the next push another worker makes an update.
            nn.functional.cross_entropy(other.model(inputs), targets).backward()
            other.step()

    class Loader:
        def __iter__(self):
            return loader()

    history = worker.train(
        dataloader=Loader(), loss_fn=nn.CrossEntropyLoss(), log_frequency=4, progress=False
    )
    assert [record.staleness for record in history.records] == [0.75, 1.0]  # the first push was fresh


def test_trackers_that_are_none_are_refused_with_all_else_that_is_wrong(worker):
    with pytest.raises(offbeat.errors.ConfigError) as refused:
        train(worker, trackers="run.jsonl", epochs=0)
    assert "epochs is 0" in str(refused.value)
    assert "trackers has 'run.jsonl'" in str(refused.value)


def test_a_tracker_that_fails_stops_no_training(worker, caplog, tmp_path):
    log = CSV(tmp_path / "run.csv")
    log.finish()  # as where somebody ends it too early
    history = train(worker, trackers=log)
    assert history.stopped == "epochs"
    (warned,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "worker me" in warned
    assert "was finished" in warned
