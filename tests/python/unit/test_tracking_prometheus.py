"""What a server measures, as Prometheus's own parser reads it."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import offbeat
from offbeat.tracking import alerts
from offbeat.tracking.prometheus import Steady, text
from offbeat.tracking.registry import HISTOGRAM, MAX_WORKERS, METRICS, scalars

COUNTS = st.integers(0, 2**53)
HISTOGRAMS = st.dictionaries(st.integers(0, 64), st.integers(1, 1000), max_size=8)
IDS = st.text(
    st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=30
)  # as the server has them


@pytest.fixture(scope="module")
def empty():
    """A real status, of a server that nobody has joined and that has no model."""
    with offbeat.ParameterServer() as server:
        return server.status()


def worker(name, **changes):
    histogram = changes.pop("histogram", {})
    return {
        "id": name,
        "state": "joined",
        "samples": 0,
        "samples_per_s": 0.0,
        "pushes": 0,
        "applied": sum(histogram.values()),
        "damped": 0,
        "rejected": {},
        "mean_staleness": sum(k * n for k, n in histogram.items()) / max(1, sum(histogram.values())),
        "max_staleness": max(histogram, default=0),
        "staleness_histogram": [histogram.get(i, 0) for i in range(65)],
        "last_push_age_s": None,
        "bytes_received": 0,
        "bytes_sent": 0,
    } | changes


def samples(status, steady=None):
    """Give all samples by name and labels, and the type of each family."""
    found, kinds = {}, {}
    for family in text_string_to_metric_families(text(status, steady).decode()):
        kinds[family.name] = family.type
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found, kinds


def value(found, name, **labels):
    return found["offbeat_" + name, frozenset(labels.items())]


def test_every_metric_is_parsed_with_its_type_and_is_named_as_prometheus_wants(empty):
    status = empty | {
        "workers": [worker("amy", last_push_age_s=0.5)],
        "max_samples": 10,
        "optimizer": {"runs_on": "server"},
        "schedule": {"lr": [0.1]},
        "checkpoints": {"version": 1, "age_s": 2.0, "write_s": 0.5, "failed": None},
    }
    alerts.count("loss", "clip")
    _, kinds = samples(status)
    # The parser, as the format of 0.0.4 has it, names a counter's family without _total.
    wanted = {f"offbeat_{m.name.removesuffix('_total')}": m.kind for m in METRICS}
    assert kinds == wanted | {f"offbeat_{HISTOGRAM[0]}": "histogram"}
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_monitor_s_alerts_are_counted_by_metric_and_by_what_was_done(empty):
    def counted(action):
        found, _ = samples(empty)
        labels = frozenset({"metric": "loss", "action": action}.items())
        return found.get(("offbeat_monitor_alerts_total", labels), 0)

    before = {action: counted(action) for action in ("alert", "pause")}
    with offbeat.AsyncTrainingMonitor(
        warm_up=2, patience=2, remediation_strategy=["alert", "pause"], pause_timeout_s=0.001
    ) as monitor:
        for step, loss in enumerate([1.0, 1.0, 1.0, 9.0, 9.0, 9.0, math.nan]):
            monitor.observe(step, loss=loss)
        assert monitor.report().num_alerts == {"loss": 4}
    del monitor
    assert counted("alert") == before["alert"] + 2
    assert counted("pause") == before["pause"] + 2
    name = "offbeat/monitor_alerts_total/loss/pause"
    assert scalars(empty)[name] == counted("pause")


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(0, 99), HISTOGRAMS), max_size=3),
        max_size=6,
    )
)
def test_a_counter_does_not_fall_with_the_workers_that_a_status_forgets(empty, looks):
    steady, before, grown = Steady(), {}, {}
    for workers in looks:
        told = [worker(n, bytes_sent=size, histogram=counts) for n, (size, counts) in workers.items()]
        status = empty | {"workers": told}
        now, _ = samples(status, steady)
        alone, _ = samples(status)
        rising = {
            key: number
            for key, number in now.items()
            if "worker" not in dict(key[1]) and key[0].endswith(("_total", "_bucket", "_sum", "_count"))
        }
        for key, number in rising.items():
            assert number >= before.get(key, 0)
        key = ("offbeat_pull_bytes_total", frozenset())
        grown[key] = grown.get(key, 0) + max(0, alone[key] - grown.get("last", 0))
        grown["last"] = alone[key]
        assert rising[key] == grown[key], "what has come since is in it, and nothing else"
        buckets = [n for (name, _), n in now.items() if name == "offbeat_staleness_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == value(now, "staleness_count")
        before = rising


def test_a_server_without_anything_tells_what_there_is(empty):
    found, _ = samples(empty)
    assert value(found, "run_state", state="waiting_for_model") == 1
    assert value(found, "run_state", state="running") == 0
    assert value(found, "staleness_count") == 0
    assert not [name for name, _ in found if "checkpoint" in name or "max_samples" in name]


@given(st.lists(st.tuples(IDS, COUNTS), unique_by=lambda pair: pair[0], max_size=5))
def test_whatever_a_worker_is_called_its_samples_are_read_back(empty, workers):
    status = empty | {"workers": [worker(name, samples=number) for name, number in workers]}
    found, _ = samples(status)
    read = {
        dict(labels)["worker"]: number
        for (name, labels), number in found.items()
        if name == "offbeat_worker_samples_total"
    }
    assert read == {name: float(number) for name, number in workers}


@given(st.lists(HISTOGRAMS, min_size=1, max_size=4))
def test_the_histogram_counts_each_push_of_each_worker(empty, histograms):
    workers = [worker(f"worker-{i}", histogram=h) for i, h in enumerate(histograms)]
    found, _ = samples(empty | {"workers": workers})
    together = Counter()
    for histogram in histograms:
        together.update(histogram)
    for (name, labels), number in found.items():
        if name == "offbeat_staleness_bucket":
            bound = float(dict(labels)["le"])
            assert number == sum(n for staleness, n in together.items() if staleness <= bound)
    assert value(found, "staleness_count") == together.total()
    assert value(found, "staleness_sum") == sum(k * n for k, n in together.items())


def test_only_so_many_workers_have_metrics_of_their_own_and_those_that_are_there_first(empty):
    gone = [worker(f"gone-{i}", state="left", samples=1) for i in range(MAX_WORKERS)]
    here = [worker(f"here-{i}", samples=1, damped=1) for i in range(3)]
    found, _ = samples(empty | {"workers": gone + here})
    up = {dict(labels)["worker"]: n for (name, labels), n in found.items() if name == "offbeat_worker_up"}
    assert len(up) == MAX_WORKERS
    assert {name for name, number in up.items() if number} == {"here-0", "here-1", "here-2"}
    assert value(found, "unlabelled_workers") == 3
    assert value(found, "damped_updates_total") == 3, "what is of all workers is of all"
    assert value(found, "workers", state="left") == MAX_WORKERS


def test_what_is_told_is_what_the_status_has():
    zeros = {"w": np.zeros(4, np.float32)}
    policy = offbeat.staleness.Polynomial(a=0.5)
    with (
        offbeat.ParameterServer(
            zeros,
            optimizer=offbeat.optim.SGD(lr=0.5),
            staleness_policy=policy,
            max_staleness=1,
            max_samples=99,
        ) as server,
        offbeat.Client(server.address, worker_id="amy") as client,
    ):
        client.pull()  # once, so that each push is later than the one before
        for _ in range(3):
            client.push({"w": np.ones(4, np.float32)}, samples=8)
        status = server.status()
    found, _ = samples(status)
    assert value(found, "model_version") == 2
    assert value(found, "samples_total") == 16
    assert value(found, "max_samples") == 99
    assert value(found, "updates_total", outcome="applied", reason="") == 2
    assert value(found, "updates_total", outcome="rejected", reason="stale") == 1
    assert value(found, "damped_updates_total") == 1
    assert value(found, "learning_rate", group="0") == 0.5
    assert value(found, "workers", state="joined") == 1
    assert value(found, "staleness_bucket", le="0.0") == 1
    assert value(found, "staleness_bucket", le="1.0") == 2
    assert value(found, "staleness_sum") == 1
    assert value(found, "worker_rejected_pushes_total", worker="amy") == 1
    assert value(found, "push_bytes_total") == value(found, "worker_push_bytes_total", worker="amy") > 48
    parts = sum(number for (name, _), number in found.items() if name == "offbeat_memory_bytes")
    assert parts == status["memory"]["total_bytes"]
    text_of_all = text(status).decode()
    assert status["run_id"] not in text_of_all
    assert status["workers"][0]["host"] not in text_of_all.replace("offbeat", "")


def test_the_numbers_for_a_tracker_are_those_that_are_of_no_single_worker(empty):
    status = empty | {"workers": [worker("amy", samples=5, histogram={1: 1, 4: 1})]}
    found = scalars(status)
    exposed, _ = samples(status)
    assert found.pop("offbeat/staleness_mean") == 2.5
    order = {f"offbeat_{metric.name}": metric.labels for metric in METRICS}

    def words(name, labels):
        return [name.removeprefix("offbeat_"), *filter(None, (labels[label] for label in order[name]))]

    plain = {
        "/".join(["offbeat", *words(name, dict(labels))]): n
        for (name, labels), n in exposed.items()
        if "worker" not in dict(labels) and not name.startswith("offbeat_staleness")
    }
    assert found == plain
    assert not any("amy" in name for name in found)
    assert all(math.isfinite(number) for number in found.values())
    json.dumps(found, allow_nan=False)
