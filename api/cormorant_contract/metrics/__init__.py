"""All metrics: names, kinds, labels, buckets, exporting process. Dashboards, alerts and docs are generated from
this.
"""

from collections.abc import Mapping

from cormorant_contract.metrics.head import HEAD_METRICS
from cormorant_contract.metrics.labels import Exporter, Metric
from cormorant_contract.metrics.operator import OPERATOR_METRICS
from cormorant_contract.metrics.worker import WORKER_METRICS

METRICS: Mapping[Exporter, tuple[Metric, ...]] = {
    "head": HEAD_METRICS,
    "worker": WORKER_METRICS,
    "operator": OPERATOR_METRICS,
}
"""Metrics by exporting process."""
ALL_METRICS = (*HEAD_METRICS, *WORKER_METRICS, *OPERATOR_METRICS)
SCRAPE_LABELS = ("namespace", "pod", "container", "instance", "job", "node")
"""Labels that scraping adds; no metric has its own label of the same name."""

BUDGET: Mapping[Exporter, int] = {"head": 500, "worker": 50, "operator": 150}
"""Series that one process may export in use: a head of a job with two groups, a worker's pod, an operator less those
that it has for each job."""
BUDGET_PER_GROUP = 80
"""Additional series of a head for each further worker group."""
BUDGET_PER_JOB_OF_OPERATOR = 3
"""Additional series of an operator for each job."""
