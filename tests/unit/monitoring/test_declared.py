"""The contract's metrics keep the conventions, and their series stay few."""

import re

import pytest

from cormorant_contract.metrics import ALL_METRICS, METRICS, SCRAPE_LABELS, Metric

NAMES = [metric.name for metric in ALL_METRICS]


@pytest.mark.parametrize("metric", ALL_METRICS, ids=NAMES)
def test_names_keep_to_prometheus_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"cormorant_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith(".")
    assert "|" not in metric.help


def test_no_name_is_declared_twice() -> None:
    samples = [sample for metric in ALL_METRICS for sample in metric.sample_names]
    assert len(samples) == len(set(samples))


@pytest.mark.parametrize("metric", ALL_METRICS, ids=NAMES)
def test_no_label_is_one_that_scraping_adds(metric: Metric) -> None:
    assert not set(metric.label_names) & {*SCRAPE_LABELS, "pool", "le", "quantile", "__name__"}


def test_heads_and_workers_export_different_names() -> None:
    named = {exporter: {metric.name for metric in metrics} for exporter, metrics in METRICS.items()}
    assert not any(name.startswith(("cormorant_worker_joined", "cormorant_operator_")) for name in named["head"])
    assert not named["head"] & named["worker"]
    assert not named["head"] & named["operator"]
    assert all(name.startswith("cormorant_operator_") for name in named["operator"])


def test_what_is_of_a_job_names_it() -> None:
    assert all(metric.label_names[0] == "collectorjob" for metric in (*METRICS["head"], *METRICS["worker"]))
