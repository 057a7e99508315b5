"""A status in Prometheus's text format, which prometheus-client writes: it knows escapes and types."""

import math
from collections.abc import Iterable

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from offbeat.tracking import registry
from offbeat.tracking.registry import Status

__all__ = ["CONTENT_TYPE", "text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The oldest version of the format that is in use, which every reader takes: our names are plain ASCII."""


def text(status: Status) -> bytes:
    """Write a server's status as metrics."""
    return generate_latest(_Families(status))


class _Families:
    """A collector of one status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        for metric in registry.METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(f"offbeat_{metric.name}", metric.help, labels=metric.labels)
            for labels, value in metric.read(self._status):
                family.add_metric(labels, value)
            if family.samples:
                yield family
        name, what = registry.HISTOGRAM
        found = registry.staleness(self._status)
        buckets = [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in found.buckets]
        yield HistogramMetricFamily(f"offbeat_{name}", what, buckets=buckets, sum_value=found.total)
