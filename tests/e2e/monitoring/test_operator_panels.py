"""A real Prometheus scrapes an operator that looks after jobs of a real API server: every panel has data."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cormorant_testing.kubectl import Namespace, apply_crd, skip_without_cluster
from cormorant_testing.operator_world import make_spec
from cormorant_testing.pods import free_port
from cormorant_testing.prometheus import Prometheus, skip_without_prometheus
from cormorant_testing.promql import substitute
from cormorant_testing.stub_heads import StubHeads

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
FILES = Path(__file__).resolve().parents[3] / "charts" / "cormorant" / "files"


def test_every_panel_of_the_operators_dashboard_has_data(tmp_path: Path) -> None:
    skip_without_cluster()
    skip_without_prometheus()
    apply_crd()
    port, key = free_port(), tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    with StubHeads() as heads, Namespace("panels") as namespace:
        document = {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": "pong"},
            "spec": make_spec(),
        }
        namespace("apply", "-f", "-", document=document)
        with (tmp_path / "operator.log").open("w") as log:
            operator = subprocess.Popen(
                [
                    sys.executable, "-m", "cormorant_operator", "--image", "example/cormorant:1",
                    "--key-file", str(key), "--namespace", namespace.name, "--head-url", heads.url,
                    "--poll-seconds", "1", "--probe-port", str(port),
                ],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            with Prometheus(tmp_path / "db", {f"127.0.0.1:{port}": {"namespace": "ops", "pod": "operator-0"}}) as db:
                db.wait_for(f'cormorant_operator_job_phase{{job_namespace="{namespace.name}"}}')
                # Answers that tell nothing new are not looked at: a change is.
                for paused in (True, False, True):
                    document["spec"]["paused"] = paused
                    namespace("apply", "-f", "-", document=document)
                    time.sleep(2)
                chosen = {
                    "__rate_interval": "30s", "job_namespace": namespace.name, "namespace": "ops",
                    "collectorjob": "pong",
                }  # fmt: skip
                dashboard = json.loads((FILES / "dashboards" / "cormorant-operator.json").read_text())
                asked = [(panel["title"], t["expr"]) for panel in dashboard["panels"] for t in panel.get("targets", ())]
                empty = {title for title, expr in asked if not db.numbers(substitute(expr, **chosen))}
                assert empty == set(), (tmp_path / "operator.log").read_text()[-3000:]
        finally:
            operator.terminate()
            assert operator.wait(30) == 0
