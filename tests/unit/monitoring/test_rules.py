"""Rules ask for metrics and labels that exist, and every alert has its page in the runbooks."""

import re
from pathlib import Path

import pytest
import yaml
from charts.monitoring.expressions import ALERTS, RECORDINGS, Alert
from charts.monitoring.rule_file import RUNBOOKS, rules

from cormorant_contract.metrics import ALL_METRICS
from cormorant_testing.prometheus import check_labels, grouping, selectors

ROOT = Path(__file__).resolve().parents[3]
KNOWN = {name: metric.label_names for metric in ALL_METRICS for name in metric.sample_names}
RECORDED = {rule.record: grouping(rule.expr) for rule in RECORDINGS}
RULES = [(rule.record, rule.expr) for rule in RECORDINGS] + [(alert.alert, alert.expr) for alert in ALERTS]
NAMES = [alert.alert for alert in ALERTS]


@pytest.mark.parametrize(("name", "expr"), RULES, ids=[name for name, _ in RULES])
def test_metrics_and_labels_of_rules_exist(name: str, expr: str) -> None:
    check_labels(expr, KNOWN | RECORDED)


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_alerts_name_labels_that_their_expression_keeps(alert: Alert) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    kept = grouping(alert.expr)
    for selected in selectors(alert.expr):
        kept |= RECORDED.get(selected.name, frozenset())
    assert named <= kept


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_a_runbook(name: str) -> None:
    text = (ROOT / "docs" / "how-to" / "runbooks.md").read_text()
    (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert "**Means.**" in section
    assert "**Look.**" in section
    assert "**Do.**" in section


def test_runbooks_are_of_alerts_that_exist() -> None:
    text = (ROOT / "docs" / "how-to" / "runbooks.md").read_text()
    assert set(re.findall(r"^## (Cormorant\w+)", text, re.MULTILINE)) == set(NAMES)


def test_the_committed_file_is_current() -> None:
    committed = yaml.safe_load((ROOT / "charts/cormorant/files/rules/cormorant.yaml").read_text())
    assert committed == rules(), "run make docs"
    for rule in committed["groups"][1]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"
        assert (ROOT / RUNBOOKS.rpartition("/blob/main/")[2]).is_file()
