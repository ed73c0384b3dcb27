"""Dashboards ask for metrics and labels that exist, and say what they show."""

import json
from pathlib import Path
from typing import Any

import pytest
from charts.monitoring.dashboards import dashboards
from charts.monitoring.expressions import RECORDINGS

from cormorant_contract.metrics import ALL_METRICS, SCRAPE_LABELS
from cormorant_contract.metrics.metric import by_name
from cormorant_testing.promql import grouping, selectors, substitute

FILES = Path(__file__).resolve().parents[3] / "charts" / "cormorant" / "files" / "dashboards"
MADE = {name: json.loads(text) for name, text in dashboards().items()}
KNOWN = by_name(ALL_METRICS)
RECORDED = {rule.record for rule in RECORDINGS}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


EXPRESSIONS = [
    pytest.param(substitute(target["expr"]), target.get("legendFormat", ""), id=f"{name}: {panel['title']}")
    for name, dashboard in MADE.items()
    for panel in panels(dashboard)
    for target in panel["targets"]
]


@pytest.mark.parametrize("name", MADE)
def test_the_committed_file_is_current(name: str) -> None:
    assert json.loads((FILES / f"{name}.json").read_text()) == MADE[name], "run make docs"


def test_no_other_file_is_shipped() -> None:
    assert {path.stem for path in FILES.glob("*")} == set(MADE)


@pytest.mark.parametrize(("expr", "legend"), EXPRESSIONS)
def test_metrics_and_labels_of_queries_exist(expr: str, legend: str) -> None:
    found = selectors(expr)
    assert found
    labels: set[str] = {*SCRAPE_LABELS, "le"}
    for selected in found:
        assert selected.name in KNOWN, selected.name
        assert selected.labels <= {*KNOWN[selected.name].label_names, *SCRAPE_LABELS}
        labels |= set(KNOWN[selected.name].label_names)
    assert grouping(expr) <= labels
    shown = {part.partition("}}")[0] for part in legend.split("{{")[1:]}
    assert shown <= grouping(expr), "a legend names a label that the query takes away"


@pytest.mark.parametrize(("expr", "legend"), EXPRESSIONS)
def test_every_query_keeps_to_the_chosen_job(expr: str, legend: str) -> None:
    assert legend
    for selected in selectors(expr):
        assert "namespace" in selected.labels


@pytest.mark.parametrize("name", MADE)
def test_panels_say_what_they_show(name: str) -> None:
    found = panels(MADE[name])
    assert all(panel["title"] and panel["description"].endswith(".") for panel in found)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in found)
    assert all(panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for panel in found)
    titles = [panel["title"] for panel in found]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("name", MADE)
def test_panels_have_a_place_of_their_own(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in MADE[name]["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_ids_are_unique() -> None:
    for dashboard in MADE.values():
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))
    assert len({dashboard["uid"] for dashboard in MADE.values()}) == len(MADE)


@pytest.mark.parametrize("name", MADE)
def test_dashboards_have_variables_and_cannot_be_edited_in_place(name: str) -> None:
    dashboard = MADE[name]
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert {"datasource", "namespace", "collectorjob"} <= set(variables)
    assert dashboard["editable"] is False
    assert dashboard["schemaVersion"] >= 36
    for variable in variables.values():
        if variable["type"] == "query":
            assert variable["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize(("expr", "legend"), EXPRESSIONS)
def test_rates_leave_their_window_to_grafana(expr: str, legend: str) -> None:
    raw = [t["expr"] for d in MADE.values() for p in panels(d) for t in p["targets"] if substitute(t["expr"]) == expr]
    assert all("[" not in text.replace("[$__rate_interval]", "") for text in raw), legend


def test_rates_name_what_they_count() -> None:
    units = [
        (panel["title"], panel["fieldConfig"]["defaults"]["unit"], target["expr"])
        for text in dashboards().values()
        for panel in json.loads(text)["panels"]
        for target in panel.get("targets", ())
    ]
    assert not [title for title, unit, _ in units if unit == "cps"], "counts per second of what?"
    assert not [title for title, unit, expr in units if unit == "bytes" and "rate(" in expr]


def test_series_of_the_fleet_lead_to_the_job() -> None:
    panels = [panel for panel in json.loads(dashboards()["cormorant-fleet"])["panels"] if "targets" in panel]
    by_job = [panel for panel in panels if "{{collectorjob}}" in panel["targets"][0]["legendFormat"]]
    assert len(by_job) == 8
    for panel in by_job:
        (link,) = panel["fieldConfig"]["defaults"]["links"]
        assert link["url"].startswith("/d/cormorant-job?")
        assert "var-collectorjob=${__field.labels.collectorjob}" in link["url"]
