"""The contract's metrics as objects of prometheus-client, and the text that is scraped. Nothing else makes metrics."""

import threading
from bisect import bisect_left
from collections import Counter as Places
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest

from cormorant_contract.metrics.labels import Metric

# Prometheus does without them, and they double the series of counters.
disable_created_metrics()  # type: ignore[no-untyped-call]  # it says nothing of its result


def observe_all(histogram: Histogram, values: Sequence[float]) -> None:
    """Observe many values in one call: a batch of cheap environments ends a hundred episodes."""
    # prometheus-client has no public way, and a loop of `observe` takes twelve times as long.
    bounds = histogram._upper_bounds
    # NaN is below every bound by `bisect_left`, and belongs above all of them.
    for place, count in Places(bisect_left(bounds, value) if value == value else -1 for value in values).items():
        histogram._buckets[place].inc(count)
    histogram._sum.inc(sum(values))


class Exposition:
    """The metrics of one process. Children are made once and kept by their users."""

    def __init__(self, metrics: Iterable[Metric], *, collectorjob: str = "") -> None:
        """Make every metric that the process may export; one without children exports nothing. `collectorjob`: that
        label.
        """
        self._job = collectorjob
        self._registry = CollectorRegistry(auto_describe=False)
        self._lock = threading.Lock()
        """Guards counters that follow a number, between reading and raising them."""
        self._families = {metric.name: self._make(metric) for metric in metrics}

    def series(self, metric: Metric, **labels: str) -> Any:
        """A metric's Counter, Gauge or Histogram with these labels; made at the first call, at zero."""
        values = {"collectorjob": self._job, **labels}
        ordered = [values[name] for name in metric.label_names]
        family = self._families[metric.name]
        return family.labels(*ordered) if ordered else family

    def show(self, metric: Metric, number: float, **labels: str) -> None:
        """Set a gauge, or raise a counter to a number that others keep, below which it never falls."""
        child = self.series(metric, **labels)
        if isinstance(child, Gauge):
            child.set(number)
            return
        with self._lock:
            child.inc(max(0.0, number - child._value.get()))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format, of the contract's `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        described = metric.name, metric.help, metric.label_names
        if metric.kind == "histogram":
            return Histogram(*described, buckets=metric.buckets, registry=self._registry)
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(*described, registry=self._registry)
