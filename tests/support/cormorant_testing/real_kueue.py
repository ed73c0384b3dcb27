"""A real Kueue on the API server of a test, and its queues."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cormorant_testing.kubectl import Namespace
from cormorant_testing.needs import lacks
from cormorant_testing.scripts import Logged, until, unused_port

VARIABLE = "CORMORANT_KUEUE"
_METRICS_CERTIFICATE = Path("/etc/kueue/metrics/certs/tls.crt")
_WEBHOOK_CERTIFICATES = Path("/tmp/k8s-webhook-server/serving-certs")
"""Kueue reads both at its start, wherever it runs."""
_START_S = 120


def skip_without_kueue() -> None:
    binary = Path(os.environ.get(VARIABLE, "/nowhere"))
    if not binary.is_file() or not (binary.parent / "crd").is_dir() or not _METRICS_CERTIFICATE.is_file():
        lacks(
            "kueue",
            f"no Kueue: set {VARIABLE} to the binary of its controller (go build sigs.k8s.io/kueue/cmd/kueue), put "
            f"config/components/crd/bases of its module beside it as crd/, and a certificate at {_METRICS_CERTIFICATE}",
        )


class KueueProcess(Logged):
    """A real Kueue on the API server of a test. Its webhooks are not installed."""

    def __init__(self, folder: Path) -> None:
        binary = Path(os.environ[VARIABLE])
        crds = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", str(binary.parent / "crd")]
        subprocess.run(crds, check=True, capture_output=True, timeout=120)
        # Not `kubectl wait`: it fails where a new CRD has no conditions yet.
        listed = ["kubectl", "get", "workloads.kueue.x-k8s.io", "-A"]
        until(
            lambda: subprocess.run(listed, capture_output=True, timeout=60).returncode == 0,
            seconds=_START_S, what="the API server serves Kueue's kinds",
        )  # fmt: skip
        # Its webhook server starts although nothing calls it.
        _WEBHOOK_CERTIFICATES.mkdir(parents=True, exist_ok=True)
        for name in ("tls.crt", "tls.key"):
            shutil.copy(_METRICS_CERTIFICATE.with_name(name), _WEBHOOK_CERTIFICATES / name)
        config = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{unused_port()}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": unused_port()},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {
                "frameworks": ["batch/job"],
                "externalFrameworks": ["CollectorJob.v1alpha1.cormorant.dev"],
            },
        }
        path = folder / "kueue.json"
        path.write_text(json.dumps(config))
        super().__init__([str(binary), f"--config={path}", "--feature-gates=VisibilityOnDemand=false"])

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        sys.stdout.write(self.text[-3000:])

    def wait_until_it_queues(self, namespace: Namespace) -> None:
        """Until it has looked at the LocalQueue of a namespace."""

        def is_active() -> bool:
            assert self.process.poll() is None, self.text[-3000:]
            queues = namespace.items("localqueues.kueue.x-k8s.io")
            return any(c["type"] == "Active" for item in queues for c in item.get("status", {}).get("conditions", ()))

        until(is_active, seconds=_START_S, what="Kueue has looked at the queue")


class Quota:
    """A ClusterQueue with one flavor, a LocalQueue `team`, and priority classes, named after a namespace."""

    def __init__(self, namespace: Namespace, *, cpu: str, node_labels: Mapping[str, str] | None = None) -> None:
        self._namespace, self.name = namespace, namespace.name
        self._apply("ResourceFlavor", self.name, {"spec": {"nodeLabels": dict(node_labels or {})}})
        self.set_cpu(cpu)
        for name, value in (("low", 1), ("high", 1000)):
            self._apply("WorkloadPriorityClass", f"{self.name}-{name}", {"value": value, "description": name})
        self._apply("LocalQueue", "team", {"spec": {"clusterQueue": self.name}}, namespace=self.name)

    def set_cpu(self, cpu: str) -> None:
        resources = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": "64Gi"}]
        groups = [
            {"coveredResources": ["cpu", "memory"], "flavors": [{"name": self.name, "resources": resources}]},
        ]
        spec = {
            "namespaceSelector": {},
            "resourceGroups": groups,
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        self._apply("ClusterQueue", self.name, {"spec": spec})

    def used_cpu(self) -> str:
        found = self._namespace.get("clusterqueues.kueue.x-k8s.io", self.name)
        flavors = found.get("status", {}).get("flavorsReservation") or ()
        return next((r["total"] for f in flavors for r in f["resources"] if r["name"] == "cpu"), "")

    def labels(self, priority: str) -> dict[str, str]:
        return {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": f"{self.name}-{priority}"}

    def close(self) -> None:
        for kind in ("clusterqueue", "resourceflavor"):
            self._namespace("delete", f"{kind}s.kueue.x-k8s.io", self.name, "--wait=false", check=False)

    def _apply(self, kind: str, name: str, body: Mapping[str, Any], *, namespace: str = "") -> None:
        metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
        document = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, **body}
        self._namespace("apply", "-f", "-", document=document)
