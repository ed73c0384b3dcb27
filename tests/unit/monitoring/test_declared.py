"""The contract's metrics keep the conventions, and their series stay few."""

import re

import pytest

from cormorant_contract.metrics import (
    ALL_METRICS,
    BUDGET,
    BUDGET_PER_GROUP,
    BUDGET_PER_JOB_OF_OPERATOR,
    METRICS,
    SCRAPE_LABELS,
)
from cormorant_contract.metrics.labels import GROUP, JOB_NAMESPACE, Metric

NAMES = [metric.name for metric in ALL_METRICS]


@pytest.mark.parametrize("metric", ALL_METRICS, ids=NAMES)
def test_metrics_keep_to_prometheus_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"cormorant_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith(".")
    assert "|" not in metric.help
    assert not set(metric.label_names) & {*SCRAPE_LABELS, "pool", "le", "quantile", "__name__"}


def test_no_name_is_declared_twice() -> None:
    samples = [sample for metric in ALL_METRICS for sample in metric.sample_names]
    assert len(samples) == len(set(samples))


def test_heads_and_workers_export_different_names() -> None:
    named = {exporter: {metric.name for metric in metrics} for exporter, metrics in METRICS.items()}
    assert not any(name.startswith(("cormorant_worker_joined", "cormorant_operator_")) for name in named["head"])
    assert not named["head"] & named["worker"]
    assert not named["head"] & named["operator"]
    assert all(name.startswith("cormorant_operator_") for name in named["operator"])


def test_what_is_of_a_job_names_it() -> None:
    assert all(metric.label_names[0] == "collectorjob" for metric in (*METRICS["head"], *METRICS["worker"]))


def test_series_stay_within_the_budgets_of_the_docs() -> None:
    # A head in use is counted in tests/integration/api: of all requests that there could be it answers few.
    of_groups = [metric for metric in METRICS["head"] if GROUP in metric.labels]
    assert sum(metric.most_series for metric in of_groups) // GROUP.limit <= BUDGET_PER_GROUP
    # A pod is of one group.
    assert sum(metric.most_series for metric in METRICS["worker"]) // GROUP.limit <= BUDGET["worker"]
    of_jobs = [metric for metric in METRICS["operator"] if JOB_NAMESPACE in metric.labels]
    assert len(of_jobs) <= BUDGET_PER_JOB_OF_OPERATOR
    others = sum(metric.most_series for metric in METRICS["operator"] if metric not in of_jobs)
    assert others <= BUDGET["operator"]


def test_most_series_counts_labels_and_buckets() -> None:
    by_name = {metric.name: metric for metric in ALL_METRICS}
    assert by_name["cormorant_paused"].most_series == 1
    assert by_name["cormorant_weight_update_duration_seconds"].most_series == 5 * (11 + 3)
