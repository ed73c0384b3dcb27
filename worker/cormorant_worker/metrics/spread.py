"""A histogram that takes many values at once: a batch of cheap environments ends a hundred episodes."""

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

from cormorant_contract.metrics import Metric


class Spread:
    """One series of buckets. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begin empty, with upper bounds in order, without infinity."""
        self._bounds = np.asarray(bounds, dtype=np.float64)
        self._lock = threading.Lock()
        """Guards the counts and the sum."""
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        found = np.asarray(values, dtype=np.float64)
        places = np.searchsorted(self._bounds, found, side="left")
        counts = np.bincount(places, minlength=len(self._counts))
        with self._lock:
            self._counts += counts
            self._sum += float(found.sum())

    def read(self) -> tuple[list[int], float]:
        """How many values each bucket has, those below it among them; and the sum of all."""
        with self._lock:
            return list(accumulate(self._counts.tolist())), self._sum


class Spreads(Collector):
    """A histogram's series, by the values of its labels."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._spreads: dict[tuple[str, ...], Spread] = {}

    def child(self, labels: tuple[str, ...]) -> Spread:
        """One series; made at the first call."""
        return self._spreads.setdefault(labels, Spread(self._metric.buckets))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The family. Where a bound is negative prometheus-client leaves sum and count out: the sum could fall."""
        family = HistogramMetricFamily(self._metric.name, self._metric.help, labels=self._metric.label_names)
        bounds = [_written(bound) for bound in (*self._metric.buckets, INF)]
        for labels, spread in tuple(self._spreads.items()):
            counts, total = spread.read()
            family.add_metric(list(labels), list(zip(bounds, counts, strict=True)), total)
        yield family


def _written(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]  # it says nothing of its result
    return text
