"""The contract's metrics keep the conventions, and their series stay few. Dashboards and rules ask for metrics and
labels that exist; dashboards say what they show, and every alert has its page in the runbooks.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from charts.monitoring.dashboards import dashboards
from charts.monitoring.expressions import ALERTS, RECORDINGS, Alert, Recording

from cormorant_contract.metrics import (
    ALL_METRICS,
    BUDGET,
    BUDGET_PER_GROUP,
    BUDGET_PER_JOB_OF_OPERATOR,
    METRICS,
    SCRAPE_LABELS,
)
from cormorant_contract.metrics.labels import GROUP, JOB_NAMESPACE, Metric

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "charts" / "cormorant" / "files" / "dashboards"
MADE = {name: json.loads(text) for name, text in dashboards().items()}
KNOWN = {name: metric.label_names for metric in ALL_METRICS for name in metric.sample_names}


def nodes(expr: str) -> Iterator[Any]:
    """Every part of a query."""
    left = [promql_parser.parse(expr)]
    while left:
        yield (node := left.pop())
        for part in ("lhs", "rhs", "expr", "vector_selector", "args", "param"):
            below = getattr(node, part, None)
            found = below if isinstance(below, (list, tuple)) else [below]
            left += [child for child in found if type(child).__module__.startswith("promql_parser")]


def selectors(expr: str) -> list[tuple[str, set[str]]]:
    """The metrics that a query reads, and the labels by which it chooses."""
    found = [node for node in nodes(expr) if isinstance(node, promql_parser.VectorSelector)]
    return [(node.name, {matcher.name for matcher in node.matchers.matchers}) for node in found]


def grouping(expr: str) -> frozenset[str]:
    """Every label that is grouped or matched by."""
    aggregates = [node for node in nodes(expr) if isinstance(node, promql_parser.AggregateExpr)]
    found = {label for node in aggregates if node.modifier is not None for label in node.modifier.labels}
    for clause in re.findall(r"\b(?:on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expr):
        found |= {label.strip() for label in clause.split(",") if label.strip()}
    return frozenset(found)


def check_labels(expr: str, known: Mapping[str, Collection[str]]) -> None:
    """Everything that an expression names exists: labels by metric, beside those of scraping."""
    labels: set[str] = {*SCRAPE_LABELS, "le"}
    for name, chosen_by in selectors(expr):
        assert name in known, name
        assert chosen_by <= {*known[name], *SCRAPE_LABELS}
        labels |= set(known[name])
    assert grouping(expr) <= labels


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """All of them: those of a closed row stand in it."""
    rows = dashboard["panels"]
    return [panel for row in rows for panel in ([row] if row["type"] != "row" else row["panels"])]


QUERIES = [
    pytest.param(target["expr"], target.get("legendFormat", ""), id=f"{name}: {panel['title']}")
    for name, dashboard in MADE.items()
    for panel in panels(dashboard)
    for target in panel["targets"]
]


@pytest.mark.parametrize("metric", ALL_METRICS, ids=lambda metric: metric.name)
def test_metrics_keep_to_prometheus_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"cormorant_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith(".")
    assert "|" not in metric.help
    assert not set(metric.label_names) & {*SCRAPE_LABELS, "pool", "le", "quantile", "__name__"}


def series_of(metrics: Sequence[Metric]) -> int:
    """Of one job, worker group and device: a histogram has one series a bucket, +Inf, the sum and the count."""
    sizes = [[len(label.values) or 1 for label in metric.labels] for metric in metrics]
    return sum(
        math.prod(size) * (len(m.buckets) + 3 if m.buckets else 1) for m, size in zip(metrics, sizes, strict=True)
    )


def test_series_have_one_exporter_name_the_job_and_stay_within_the_budgets() -> None:
    samples = [sample for metric in ALL_METRICS for sample in metric.sample_names]
    assert len(samples) == len(set(samples))
    assert all(metric.name.startswith("cormorant_operator_") for metric in METRICS["operator"])
    assert all(metric.label_names[0] == "collectorjob" for metric in (*METRICS["head"], *METRICS["worker"]))
    # A head and an operator in use are counted where they are scraped.
    assert series_of([metric for metric in METRICS["head"] if GROUP in metric.labels]) <= BUDGET_PER_GROUP
    assert series_of(METRICS["worker"]) <= BUDGET["worker"]
    assert (
        len([metric for metric in METRICS["operator"] if JOB_NAMESPACE in metric.labels]) <= BUDGET_PER_JOB_OF_OPERATOR
    )


@pytest.mark.parametrize(("expr", "legend"), QUERIES)
def test_queries_keep_to_metrics_labels_and_the_chosen_job(expr: str, legend: str) -> None:
    assert "[" not in expr.replace("[$__rate_interval]", ""), "Grafana chooses the windows of rates"
    expr = expr.replace("$__rate_interval", "1m")
    check_labels(expr, KNOWN)
    assert {"namespace" in labels for _, labels in selectors(expr)} == {True}
    assert legend
    shown = {part.partition("}}")[0] for part in legend.split("{{")[1:]}
    assert shown <= grouping(expr), "a legend names a label that the query takes away"


@pytest.mark.parametrize("dashboard", MADE.values(), ids=MADE)
def test_dashboards_have_links_and_variables_and_panels_say_what_they_show(dashboard: dict[str, Any]) -> None:
    assert [link["tags"] for link in dashboard["links"]] == [["cormorant"]]
    assert dashboard["editable"] is False
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert {"datasource", "namespace", "collectorjob"} <= set(variables)
    queried = [variable for variable in variables.values() if variable["type"] == "query"]
    found = panels(dashboard)
    assert {one["datasource"]["uid"] for one in (*queried, *found)} == {"${datasource}"}
    assert all(panel["title"] and panel["description"].endswith(".") for panel in found)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in found)
    for unique in ("id", "title"):
        assert len({panel[unique] for panel in found}) == len(found)


def test_series_of_the_fleet_lead_to_the_job_and_no_other_file_is_shipped() -> None:
    assert {path.stem for path in FILES.glob("*")} == set(MADE)
    found = panels(MADE["cormorant-fleet"])
    by_job = [panel for panel in found if "{{collectorjob}}" in panel["targets"][0]["legendFormat"]]
    assert by_job
    for panel in by_job:
        (link,) = panel["fieldConfig"]["defaults"]["links"]
        assert link["url"].startswith("/d/cormorant-job?")
        assert "var-collectorjob=${__field.labels.collectorjob}" in link["url"]


RECORDED = {rule.record: grouping(rule.expr) for rule in RECORDINGS}


@pytest.mark.parametrize("rule", [*RECORDINGS, *ALERTS], ids=lambda rule: getattr(rule, "alert", "recording"))
def test_rules_name_metrics_and_labels_that_exist_and_alerts_those_they_keep(rule: Recording | Alert) -> None:
    check_labels(rule.expr, KNOWN | RECORDED)
    if isinstance(rule, Alert):
        kept = grouping(rule.expr).union(*(RECORDED.get(metric, frozenset()) for metric, _ in selectors(rule.expr)))
        assert set(re.findall(r"\$labels\.(\w+)", rule.summary + rule.description)) <= kept


def test_every_alert_and_no_other_has_a_runbook() -> None:
    text = (ROOT / "docs" / "how-to" / "runbooks.md").read_text()
    sections = re.findall(r"^## (Cormorant\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert sorted(name for name, _ in sections) == sorted(alert.alert for alert in ALERTS)
    for name, section in sections:
        assert [word for word in ("**Means.**", "**Look.**", "**Do.**") if word not in section] == [], name
