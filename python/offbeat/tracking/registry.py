"""What a server measures: every metric with its type, its labels and how it follows from a status.

The one list of them, with what the server's process knows besides. The Prometheus endpoint shows all;
trackers of a run get those that are not of a single worker. Names and units are as Prometheus has them (base
units, counters end in `_total`), without the prefix `offbeat_`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from offbeat.tracking import alerts

__all__ = [
    "HISTOGRAM",
    "MAX_WORKERS",
    "METRICS",
    "PRESENT",
    "Histogram",
    "Metric",
    "Status",
    "scalars",
    "staleness",
]

Status = Mapping[str, Any]

#: A sample's label values, in the order of its metric's labels, and its value.
Sample = tuple[tuple[str, ...], float]

MAX_WORKERS = 100
"""So many workers have metrics of their own: each is a dozen time series wherever they are kept."""

STATES = ("joined", "stalled", "lost", "left", "finished")
"""Of a worker; in the first two it is there."""

PRESENT = STATES[:2]
RUN_STATES = ("waiting_for_model", "running", "finished", "stopped")
MEMORY = ("roots", "ledgers", "pinned", "idle", "staging")
BOUNDS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
"""Of staleness's buckets, in updates; the status counts each staleness below 64 by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A counter or a gauge.

    Attributes:
        name: Without prefix.
        kind: Whether it only grows while the server lives.
        help: What it is, in a sentence.
        read: Its samples in a status; none where there is nothing to tell.
        labels: The names of its labels.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Status], Iterable[Sample]]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often what was measured was at most so much.

    Attributes:
        buckets: Upper bounds, rising, and how many were at most that; the last is everything.
        total: The sum of all.
    """

    buckets: Sequence[tuple[float, int]]
    total: float

    @property
    def count(self) -> int:
        """How many were measured."""
        return self.buckets[-1][1]


HISTOGRAM = ("staleness", "Staleness of applied pushes, in updates.")
"""The one histogram: name and help."""


def staleness(status: Status) -> Histogram:
    """Count the applied pushes of all workers by staleness."""
    by_staleness = [sum(counts) for counts in _together(w["staleness_histogram"] for w in status["workers"])]
    below = [(float(bound), sum(by_staleness[: bound + 1])) for bound in BOUNDS]
    total = sum(round(w["mean_staleness"] * w["applied"]) for w in status["workers"])
    return Histogram([*below, (float("inf"), sum(by_staleness))], total)


def _together(histograms: Iterable[Sequence[int]]) -> Iterable[tuple[int, ...]]:
    return zip(*histograms, strict=True)


# -- how to read a status


def _plain(key: str) -> Callable[[Status], Iterable[Sample]]:
    """Read a number that may be None."""
    return lambda status: [] if status[key] is None else [((), status[key])]


def _of(part: str, key: str) -> Callable[[Status], Iterable[Sample]]:
    """Read a number of a part, either of which may be None."""
    return lambda status: _plain(key)(status[part]) if status[part] is not None else []


def _sum(key: str) -> Callable[[Status], Iterable[Sample]]:
    """Add up a number of all workers."""
    return lambda status: [((), sum(worker[key] for worker in status["workers"]))]


def _worker(key: str) -> Callable[[Status], Iterable[Sample]]:
    """Read a number of each worker that has metrics of its own; it may be None."""
    return lambda status: [((w["id"],), w[key]) for w in _labelled(status) if w[key] is not None]


def _labelled(status: Status) -> Sequence[Status]:
    """Choose the workers that have metrics of their own: those that are there before those that are not."""
    workers: Sequence[Status] = status["workers"]
    return sorted(workers, key=lambda worker: worker["state"] not in PRESENT)[:MAX_WORKERS]


def _updates(status: Status) -> Iterable[Sample]:
    yield from (((fate, ""), status["tickets"][fate]) for fate in ("applied", "partial"))
    yield from ((("rejected", reason), number) for reason, number in status["rejected"].items())


def _states(status: Status) -> Iterable[Sample]:
    states = [worker["state"] for worker in status["workers"]]
    return [((state,), states.count(state)) for state in STATES]


def _learning_rates(status: Status) -> Iterable[Sample]:
    optimizer = status["optimizer"]
    if optimizer is None or optimizer["runs_on"] != "server":
        return []
    return [((str(group),), rate) for group, rate in enumerate(status["schedule"]["lr"])]


def _failed(status: Status) -> Iterable[Sample]:
    kept = status["checkpoints"]
    return [] if kept is None else [((), kept["failed"] is not None)]


def _counter(name: str, text: str, read: Callable[[Status], Iterable[Sample]], *labels: str) -> Metric:
    return Metric(name=name, kind="counter", help=text, read=read, labels=labels)


def _gauge(name: str, text: str, read: Callable[[Status], Iterable[Sample]], *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", help=text, read=read, labels=labels)


METRICS: tuple[Metric, ...] = (
    _gauge(
        "run_state",
        "1 for the state that the run is in.",
        lambda status: [((state,), status["state"] == state) for state in RUN_STATES],
        "state",
    ),
    _gauge("uptime_seconds", "Since the server was started.", _plain("uptime_s")),
    _gauge("model_term", "Lives of the model's values: restarts, rollbacks, replacements.", _plain("term")),
    _gauge("model_version", "Updates of the model.", _plain("version")),
    _counter("samples_total", "Samples in the pushes that were admitted.", _plain("samples")),
    _gauge("max_samples", "Samples after which the run ends, where it does.", _plain("max_samples")),
    _counter(
        "updates_total", "Pushes that were answered, by what became of them.", _updates, "outcome", "reason"
    ),
    _counter(
        "damped_updates_total", "Applied pushes that were worth less because they were late.", _sum("damped")
    ),
    _counter(
        "dropped_updates_total", "Pushes admitted, and then applied to nothing.", _of("tickets", "dropped")
    ),
    _counter(
        "lost_updates_total",
        "Updates told of, and not in the checkpoint gone on from.",
        _plain("lost_updates"),
    ),
    _counter("duplicate_pushes_total", "Pushes that came once more, and count once.", _plain("duplicates")),
    _counter(
        "cut_short_pushes_total", "Pushes that broke off before they had come whole.", _plain("cut_short")
    ),
    _gauge("open_updates", "Pushes admitted and still under way.", _of("tickets", "open")),
    _gauge("learning_rate", "Of each group, where the optimizer is the server's.", _learning_rates, "group"),
    _gauge("workers", "Workers by state.", _states, "state"),
    _gauge(
        "unlabelled_workers",
        f"Workers without metrics of their own: {MAX_WORKERS} have some.",
        lambda status: [((), max(0, len(status["workers"]) - MAX_WORKERS))],
    ),
    _counter(
        "push_bytes_total",
        "Received from workers: pushes, and what little else they say.",
        _sum("bytes_received"),
    ),
    _counter(
        "pull_bytes_total", "Sent to workers: parameters, and what little else they hear.", _sum("bytes_sent")
    ),
    _gauge("connections", "Open connections.", _plain("connections")),
    _gauge(
        "longest_poll_seconds",
        "The longest that one task kept a data thread busy.",
        lambda status: [((), status["longest_poll_ms"] / 1e3)],
    ),
    _gauge(
        "memory_bytes",
        "What the model and its traffic take, by part.",
        lambda status: [((part,), status["memory"][f"{part}_bytes"]) for part in MEMORY],
        "part",
    ),
    _gauge(
        "live_versions",
        "Versions of the model that are held, with the newest.",
        _of("memory", "live_versions"),
    ),
    _counter(
        alerts.NAME,
        "Alerts of the monitors in this process, by metric and by the remedy taken or in effect.",
        lambda _: alerts.counted().items(),
        "metric",
        "action",
    ),
    _gauge("checkpoint_version", "Of the newest checkpoint of this server.", _of("checkpoints", "version")),
    _gauge("checkpoint_age_seconds", "Since the newest checkpoint was written.", _of("checkpoints", "age_s")),
    _gauge("checkpoint_write_seconds", "How long the newest checkpoint took.", _of("checkpoints", "write_s")),
    _gauge("checkpoint_failed", "1 where the last checkpoint that was tried was not written.", _failed),
    _gauge(
        "worker_up",
        "1 where the worker is there.",
        lambda status: [((w["id"],), w["state"] in PRESENT) for w in _labelled(status)],
        "worker",
    ),
    _counter("worker_samples_total", "Samples of applied pushes.", _worker("samples"), "worker"),
    _gauge("worker_samples_per_second", "Over the last ten seconds.", _worker("samples_per_s"), "worker"),
    _counter("worker_pushes_total", "Pushes answered.", _worker("pushes"), "worker"),
    _counter("worker_damped_pushes_total", "Worth less because they were late.", _worker("damped"), "worker"),
    _counter(
        "worker_rejected_pushes_total",
        "Pushes of which nothing was applied.",
        lambda status: [((w["id"],), sum(w["rejected"].values())) for w in _labelled(status)],
        "worker",
    ),
    _gauge("worker_mean_staleness", "Of applied pushes, in updates.", _worker("mean_staleness"), "worker"),
    _gauge("worker_max_staleness", "Of applied pushes, in updates.", _worker("max_staleness"), "worker"),
    _gauge("worker_last_push_age_seconds", "Since its last push.", _worker("last_push_age_s"), "worker"),
    _counter("worker_push_bytes_total", "Received from it.", _worker("bytes_received"), "worker"),
    _counter("worker_pull_bytes_total", "Sent to it.", _worker("bytes_sent"), "worker"),
)


def scalars(status: Status) -> dict[str, float]:
    """Give a status's numbers for a tracker: `offbeat/NAME`, or `offbeat/NAME/LABEL…` where it has labels.

    What is of a single worker is left out; of the histogram the mean is taken, where there is one.
    """
    found = {
        "/".join(["offbeat", metric.name, *filter(None, labels)]): float(value)
        for metric in METRICS
        if "worker" not in metric.labels
        for labels, value in metric.read(status)
    }
    late = staleness(status)
    if late.count:
        found["offbeat/staleness_mean"] = late.total / late.count
    return found
