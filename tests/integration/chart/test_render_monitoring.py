"""The chart's rules and dashboards arrive as they were generated: nothing in them is taken for a template."""

import json
from pathlib import Path

import yaml

from cormorant_testing.helm import CHART, find, render

RULE = "monitoring.coreos.com/v1/PrometheusRule"


def test_prometheus_rules_equal_the_plain_file() -> None:
    assert not [m for m in render() if m["kind"] == "PrometheusRule"]
    assert not [m for m in render("prometheusRule.enabled=false", apis=(RULE,)) if m["kind"] == "PrometheusRule"]
    rule = find(render("prometheusRule.labels.release=prometheus", apis=(RULE,)), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "rules" / "cormorant.yaml").read_text())


def test_dashboards_are_config_maps_that_the_sidecar_finds() -> None:
    found = {m["metadata"]["name"]: m for m in render() if m["kind"] == "ConfigMap"}
    assert set(found) == {f"cormorant-{name}-dashboard" for name in ("fleet", "job", "operator")}
    for manifest in found.values():
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = manifest["data"].items()
        committed = Path(CHART / "files" / "dashboards" / name).read_text()
        assert json.loads(text) == json.loads(committed)
        assert len(text) < 1_000_000


def test_dashboards_go_where_values_say() -> None:
    values = ("dashboards.namespace=grafana", "dashboards.annotations.grafana_folder=RL", "dashboards.labels.team=rl")
    manifest = find(render(*values), "ConfigMap", "cormorant-job-dashboard")
    assert manifest["metadata"]["namespace"] == "grafana"
    assert manifest["metadata"]["annotations"] == {"grafana_folder": "RL"}
    assert manifest["metadata"]["labels"]["team"] == "rl"
    assert not [m for m in render("dashboards.enabled=false") if m["kind"] == "ConfigMap"]
