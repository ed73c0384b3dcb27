"""A namespace of a real API server, through kubectl; and a kubelet that says what it is told to say."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from cormorant_cli.app import crd_yaml
from cormorant_testing.needs import lacks
from cormorant_testing.scripts import Repeated, until

RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
"""Labels of a namespace that takes no other pods."""
LOCKED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""Security context of a container in one of its pods."""


def restricted_pod(name: str, container: Mapping[str, Any], *, labels: Mapping[str, str] = {}, **spec: Any) -> Any:
    """A pod that such a namespace takes, of one container."""
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    own = {"restartPolicy": "Never", "automountServiceAccountToken": False, "securityContext": security}
    containers = [{**container, "securityContext": LOCKED}]
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**own, "containers": containers, **spec}}


def skip_without_cluster() -> None:
    if not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None:
        lacks("cluster", "no cluster: set KUBECONFIG and put kubectl on the PATH")
    if subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True, timeout=60).returncode:
        lacks("cluster", f"the API server of {os.environ['KUBECONFIG']} does not answer")


def require_crd() -> None:
    """Applies the CRD as it is printed now; skips where there is no API server, or no kubectl."""
    skip_without_cluster()
    apply = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-"]
    subprocess.run(apply, input=crd_yaml().encode(), check=True, timeout=60)
    wait = ["kubectl", "wait", "--for=condition=Established", "--timeout=30s", "crd/collectorjobs.cormorant.dev"]
    # `kubectl wait` fails at once where a new CRD has no conditions yet.
    until(lambda: subprocess.run(wait, timeout=60).returncode == 0, what="the API server serves the CRD")


def forward(*arguments: str) -> tuple["subprocess.Popen[str]", int]:
    """Start `kubectl proxy` or `port-forward`. Returns the process and its port on this machine."""
    process = subprocess.Popen(["kubectl", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not (found := re.search(r"127\.0\.0\.1:(\d+)", line)):
        process.kill()
        process.communicate(timeout=30)
        raise AssertionError(f"kubectl {arguments} said: {line}")
    return process, int(found[1])


class Namespace:
    """One namespace of its own; use as a context manager."""

    def __init__(self, prefix: str, labels: dict[str, str] | None = None) -> None:
        self.name = f"{prefix}-{uuid4().hex[:8]}"
        self._labels = labels or {}

    def __enter__(self) -> "Namespace":
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name, "labels": self._labels}}
        self("create", "-f", "-", document=manifest)
        return self

    def __exit__(self, *_: object) -> None:
        self("delete", "namespace", self.name, "--wait=false", check=False)

    def run(self, *arguments: str, document: object = None) -> "subprocess.CompletedProcess[str]":
        text = json.dumps(document) if document is not None else None
        command = ["kubectl", "--namespace", self.name, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)

    def __call__(self, *arguments: str, document: object = None, check: bool = True) -> str:
        done = self.run(*arguments, document=document)
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout + ("" if check else done.stderr)

    def get(self, kind: str, *arguments: str) -> Any:
        return json.loads(self("get", kind, *arguments, "-o", "json"))

    def items(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        return list(self.get(kind, *(["-l", selector] if selector else []))["items"])

    def apply_files(self, name: str, files: Mapping[str, str]) -> None:
        """As a ConfigMap."""
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(files)}
        self("apply", "-f", "-", document=manifest)

    def names(self, kind: str, selector: str = "app.kubernetes.io/managed-by=cormorant-operator") -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.items(kind, selector))

    def until(self, is_so: Callable[[], object], *, what: str, within_s: float = 30.0) -> float:
        try:
            return until(is_so, seconds=within_s, what=what)
        except AssertionError as late:
            events = self("get", "events", "--sort-by=.lastTimestamp", check=False)
            raise AssertionError(f"{late}; the last events of {self.name}:\n{events[-2000:]}") from None

    # -- what a kubelet would say ------------------------------------------------------------------------------

    def say(self, pod: str, status: dict[str, Any]) -> None:
        self("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))

    def start(self, pod: str) -> None:
        """A pod has a node and its probes answer."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": now}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        ip = {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
        self.say(pod, {"phase": "Running", "conditions": conditions, **ip})

    def finish(self, pod: str, *, container: str, exit_code: int, reason: str = "Error") -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"exitCode": exit_code, "reason": reason, "startedAt": now, "finishedAt": now, "containerID": "c://1"}
        ended["message"] = '{"frames": 0}' if exit_code == 0 else ""  # what a head leaves
        state = {"name": container, "ready": False, "restartCount": 0, "image": "i", "imageID": "i"}
        self.say(
            pod,
            {
                "phase": "Failed" if exit_code else "Succeeded",
                "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}],
                "containerStatuses": [{**state, "state": {"terminated": ended}}],
            },
        )


class Kubelet(Repeated):
    """Starts every pod of a namespace that waits. Use as a context manager."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(self._start_all, every_s=0.3, unless=(AssertionError,))  # pods are deleted meanwhile
        self._namespace = namespace

    def _start_all(self) -> None:
        for pod in self._namespace.items("pods"):
            if pod["status"].get("phase") == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                self._namespace.start(pod["metadata"]["name"])
