"""One metric, as processes, dashboards, rules and docs use it. Plain data."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
Exporter = Literal["head", "worker", "operator"]

_PARTS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label and its possible values."""

    name: str
    help: str
    values: tuple[str, ...] = ()
    """All possible values; empty: the manifest or the cluster determines them."""
    at_most: int = 1
    """Maximum number of values per process, where `values` is empty."""

    @property
    def limit(self) -> int:
        """Maximum number of values per process."""
        return len(self.values) or self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """Name as scraped; counters end with `_total`."""
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""
    when: str = ""
    """Condition under which it is exported; empty: always."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels, except those that scraping adds."""
        return tuple(label.name for label in self.labels)

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of its samples. A histogram of negative values has only buckets, because its sum could decrease."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(self.name + part for part in (_PARTS if self.buckets[0] >= 0 else _PARTS[:1]))

    @property
    def most_series(self) -> int:
        """Maximum number of its series per process."""
        combinations = 1
        for label in self.labels:
            combinations *= label.limit
        # A histogram has one series a bucket, +Inf, the sum and the count.
        return combinations * (len(self.buckets) + 3 if self.kind == "histogram" else 1)


class MetricList(list[Metric]):
    """Declares metrics in order, all with a prefix and with labels of their own before those of each."""

    def __init__(self, prefix: str, *labels: Label) -> None:
        super().__init__()
        self._prefix, self._labels = prefix, labels

    def _declare(self, kind: Kind, name: str, help_: str, labels: tuple[Label, ...], **more: Any) -> Metric:
        metric = Metric(name=self._prefix + name, kind=kind, help=help_, labels=(*self._labels, *labels), **more)
        self.append(metric)
        return metric

    def counter(self, name: str, help_: str, *labels: Label, when: str = "") -> Metric:
        return self._declare("counter", name, help_, labels, when=when)

    def gauge(self, name: str, help_: str, *labels: Label, when: str = "") -> Metric:
        return self._declare("gauge", name, help_, labels, when=when)

    def histogram(self, name: str, help_: str, *labels: Label, buckets: tuple[float, ...]) -> Metric:
        return self._declare("histogram", name, help_, labels, buckets=buckets)
