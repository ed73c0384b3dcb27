"""The operator's metrics: its work, counted as it happens, and the state of jobs, read on each scrape."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from cormorant_contract.metrics import operator as declared
from cormorant_contract.metrics.labels import HANDLER, Metric

# Prometheus does not need them, and they double the series of counters.
disable_created_metrics()  # type: ignore[no-untyped-call]  # its return type is not annotated

Handler = Literal["reconcile", "poll", "counters"]
Values = Mapping[tuple[str, ...], float]
"""Values of a metric by its label values, in order."""
Family = CounterMetricFamily | GaugeMetricFamily


class Metrics(Collector):
    def __init__(self) -> None:
        self.read: Callable[[], Mapping[Metric, Values]] = dict
        """Gives more metrics on each scrape, so that deleted jobs disappear from them."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        timed, failed, registry = declared.RECONCILE, declared.RECONCILE_ERRORS, self._registry
        durations = Histogram(timed.name, timed.help, timed.label_names, buckets=timed.buckets, registry=registry)
        errors = Counter(failed.name, failed.help, failed.label_names, registry=registry)
        # Create each handler's series at the start.
        self._durations = {handler: durations.labels(handler) for handler in HANDLER.values}
        self._errors = {handler: errors.labels(handler) for handler in HANDLER.values}

    @contextmanager
    def measure(self, handler: Handler) -> Iterator[None]:
        """Measure the block's duration and count an exception that leaves it."""
        with self._durations[handler].time(), self._errors[handler].count_exceptions():
            yield

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        for metric, values in self.read().items():
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family: Family = make(metric.name, metric.help, labels=metric.label_names)
            for labels, value in values.items():
                family.add_metric(list(labels), value)
            yield family
