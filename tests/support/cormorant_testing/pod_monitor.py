"""PodMonitors as the Prometheus operator turns them into scrapes, for a Prometheus beside the cluster.

Pods are found and reached through the API server: none of their addresses need be known to this machine. Debian's
Prometheus is built without a discovery of Kubernetes: a thread writes a file with the same labels.
"""

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cormorant_testing.helm import Manifest
from cormorant_testing.scripts import Repeated

LOOK_S = 1.0


class PodDiscovery(Repeated):
    """Pods of some namespaces, in a file for `file_sd_configs`. Use as a context manager."""

    proxy: str
    """Address of the API server without its credentials, on this machine."""

    def __init__(self, folder: Path, monitors: Sequence[Manifest]) -> None:
        super().__init__(self._look, every_s=LOOK_S, unless=(OSError,))  # the API server is busy: what is known stays
        self.file = folder / "pods.json"
        self._monitors = monitors

    def __enter__(self) -> "PodDiscovery":
        command = ["kubectl", "proxy", "--address=127.0.0.1", "--port=0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", line)
        if found is None:
            self._process.kill()
            self._process.communicate(timeout=30)
            raise AssertionError(f"kubectl proxy said: {line}")
        self.proxy = found[0]
        self._look()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._process.kill()
        self._process.communicate(timeout=30)

    def scrape_configs(self) -> Iterator[dict[str, Any]]:
        """One for each endpoint of each monitor, with the labels that the Prometheus operator gives."""
        place = ("namespace", "pod_name", "pod_container_port_number")
        for monitor in self._monitors:
            name = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
            labels = monitor["spec"]["selector"]["matchLabels"].items()
            for number, endpoint in enumerate(monitor["spec"]["podMetricsEndpoints"]):
                yield {
                    "job_name": f"podMonitor/{name}/{number}",
                    "metrics_path": endpoint["path"],
                    "file_sd_configs": [{"files": [str(self.file)]}],
                    "relabel_configs": [
                        _keep("__meta_kubernetes_namespace", "|".join(_namespaces(monitor))),
                        *(_keep(_label(label), re.escape(value)) for label, value in labels),
                        _keep("__meta_kubernetes_pod_container_port_name", re.escape(endpoint["port"])),
                        _copy("__meta_kubernetes_namespace", "namespace"),
                        _copy("__meta_kubernetes_pod_name", "pod"),
                        _copy("__meta_kubernetes_pod_container_name", "container"),
                        _copy("__address__", "instance"),
                        {"target_label": "job", "replacement": name},
                        {"target_label": "endpoint", "replacement": endpoint["port"]},
                        {
                            "source_labels": [*(f"__meta_kubernetes_{part}" for part in place), "__metrics_path__"],
                            "regex": "(.+);(.+);(.+);(.+)",
                            "target_label": "__metrics_path__",
                            "replacement": "/api/v1/namespaces/$1/pods/$2:$3/proxy$4",
                        },
                        {"target_label": "__address__", "replacement": self.proxy},
                    ],
                }

    def _look(self) -> None:
        namespaces = {name for monitor in self._monitors for name in _namespaces(monitor)}
        groups: list[dict[str, Any]] = []
        for name in sorted(namespaces):
            path = f"http://{self.proxy}/api/v1/namespaces/{name}/pods"
            with urllib.request.urlopen(path, timeout=30) as response:
                groups += [group for pod in json.load(response)["items"] for group in _target_groups(pod)]
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(groups))
        fresh.replace(self.file)


def _namespaces(monitor: Manifest) -> list[str]:
    """Where its pods are."""
    selected = monitor["spec"].get("namespaceSelector", {})
    return list(selected.get("matchNames", [monitor["metadata"]["namespace"]]))


def _target_groups(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the discovery of Kubernetes says of a pod that has an address and has not ended."""
    status, metadata = pod["status"], pod["metadata"]
    if not status.get("podIP") or status["phase"] in ("Failed", "Succeeded"):
        return
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            yield {
                "targets": [f"{status['podIP']}:{port['containerPort']}"],
                "labels": {
                    "__meta_kubernetes_namespace": metadata["namespace"],
                    "__meta_kubernetes_pod_name": metadata["name"],
                    "__meta_kubernetes_pod_container_name": container["name"],
                    "__meta_kubernetes_pod_container_port_name": port["name"],
                    "__meta_kubernetes_pod_container_port_number": str(port["containerPort"]),
                    **{_label(label): value for label, value in metadata.get("labels", {}).items()},
                },
            }


def _label(label: str) -> str:
    return "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)


def _keep(source: str, regex: str) -> dict[str, Any]:
    return {"action": "keep", "source_labels": [source], "regex": regex}


def _copy(source: str, target: str) -> dict[str, Any]:
    return {"source_labels": [source], "target_label": target}
