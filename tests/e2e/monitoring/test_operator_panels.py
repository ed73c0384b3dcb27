"""A real Prometheus scrapes an operator that looks after jobs of a real API server: every panel has data."""

import json
import time
from pathlib import Path

import pytest

from cormorant_testing.kubectl import Namespace, require_crd
from cormorant_testing.operator_scene import Scene
from cormorant_testing.prometheus import Prometheus, skip_without_prometheus
from cormorant_testing.promql import substitute
from cormorant_testing.scripts import unused_port
from cormorant_testing.stub_heads import StubHeads

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
FILES = Path(__file__).resolve().parents[3] / "charts" / "cormorant" / "files"


def test_every_panel_of_the_operators_dashboard_has_data(tmp_path: Path) -> None:
    skip_without_prometheus()
    require_crd()
    port = unused_port()
    with StubHeads() as heads, Namespace("panels") as namespace:
        scene = Scene(namespace, heads, tmp_path, probe_port=port)
        scene.submit()
        targets = {f"127.0.0.1:{port}": {"namespace": "ops", "pod": "operator-0"}}
        with scene.operator() as operator, Prometheus(tmp_path / "db", targets) as db:
            db.wait_for(f'cormorant_operator_job_phase{{job_namespace="{namespace.name}"}}')
            # Answers that tell nothing new are not looked at: a change is.
            for paused in ("true", "false", "true"):
                scene.edit(f'{{"spec": {{"paused": {paused}}}}}')
                time.sleep(2)
            chosen = {
                "__rate_interval": "30s", "job_namespace": namespace.name, "namespace": "ops",
                "collectorjob": "pong",
            }  # fmt: skip
            dashboard = json.loads((FILES / "dashboards" / "cormorant-operator.json").read_text())
            asked = [(panel["title"], t["expr"]) for panel in dashboard["panels"] for t in panel.get("targets", ())]
            empty = {title for title, expr in asked if not db.numbers(substitute(expr, **chosen))}
            assert empty == set(), operator.log.read_text()[-3000:]
            assert operator.stop() == 0
