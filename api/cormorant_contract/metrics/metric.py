"""One metric, as every process, dashboard, rule and page of the docs knows it. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Exporter = Literal["head", "worker", "operator"]

_PARTS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label, and what it may be."""

    name: str
    help: str
    values: tuple[str, ...] = ()
    """All values that there are; empty: they come from the manifest or the cluster."""
    at_most: int = 1
    """How many values one process may have of it, where `values` is empty."""

    @property
    def limit(self) -> int:
        """Most values that one process has of it."""
        return len(self.values) or self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """As it is scraped; a counter's ends with `_total`."""
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""
    when: str = ""
    """Where it is exported under a condition: which."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels, without those that scraping adds."""
        return tuple(label.name for label in self.labels)

    @property
    def sample_names(self) -> tuple[str, ...]:
        """What its samples are called. A histogram of negative values has buckets only: its sum could fall."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(self.name + part for part in (_PARTS if self.buckets[0] >= 0 else _PARTS[:1]))

    @property
    def most_series(self) -> int:
        """Series that one process can make of it at most."""
        combinations = 1
        for label in self.labels:
            combinations *= label.limit
        # A histogram has one series a bucket, +Inf, the sum and the count.
        return combinations * (len(self.buckets) + 3 if self.kind == "histogram" else 1)


def by_name(metrics: tuple[Metric, ...]) -> Mapping[str, Metric]:
    return {name: metric for metric in metrics for name in metric.sample_names}
