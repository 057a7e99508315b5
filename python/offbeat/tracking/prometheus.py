"""A status in Prometheus's text format, which prometheus-client writes: it knows escapes and types."""

import math
from collections.abc import Hashable, Iterable

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from offbeat.tracking import registry
from offbeat.tracking.registry import Status

__all__ = ["CONTENT_TYPE", "Steady", "text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The oldest version of the format that is in use, which every reader takes: our names are plain ASCII."""


class Steady:
    """Counters that do not fall as long as this lives.

    Some are sums over the workers of a status, which knows of the last thousand that have gone: with one that
    it forgets the sum falls. To Prometheus a counter that falls has begun anew, and all of it would count
    once more. So what was forgotten stays in.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, float] = {}
        self._forgotten: dict[Hashable, float] = {}

    def value(self, key: Hashable, now: float) -> float:
        """Give a counter's value, which is now so much in the status."""
        fallen = self._last.get(key, now) - now
        if fallen > 0:
            self._forgotten[key] = self._forgotten.get(key, 0) + fallen
        self._last[key] = now
        return now + self._forgotten.get(key, 0)


def text(status: Status, steady: Steady | None = None) -> bytes:
    """Write a server's status as metrics.

    Args:
        status: As the server tells it.
        steady: What was told before of this server; None: nothing.
    """
    return generate_latest(_Families(status, Steady() if steady is None else steady))


class _Families:
    """A collector of one status."""

    def __init__(self, status: Status, steady: Steady) -> None:
        self._status = status
        self._steady = steady

    def collect(self) -> Iterable[Metric]:
        for metric in registry.METRICS:
            is_counter = metric.kind == "counter"
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(f"offbeat_{metric.name}", metric.help, labels=metric.labels)
            # One worker's begin anew with whoever has its name.
            is_steady = is_counter and "worker" not in metric.labels
            for labels, value in metric.read(self._status):
                key = (metric.name, *labels)
                family.add_metric(labels, self._steady.value(key, value) if is_steady else value)
            if family.samples:
                yield family
        name, what = registry.HISTOGRAM
        found = registry.staleness(self._status)
        buckets, below, told = [], 0, 0.0
        for bound, count in found.buckets:
            label = "+Inf" if math.isinf(bound) else str(bound)
            told += self._steady.value((name, label), count - below)  # each by itself, so that they rise
            below = count
            buckets.append((label, told))
        total = self._steady.value((name, "sum"), found.total)
        yield HistogramMetricFamily(f"offbeat_{name}", what, buckets=buckets, sum_value=total)
