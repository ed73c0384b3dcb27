"""The chart through Helm: rendered offline, or as a release of a real API server."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from cormorant_testing.needs import lacks

CHART = Path(__file__).resolve().parents[3] / "charts" / "cormorant"
# A Helm that was built by `go install` takes itself for one of Kubernetes 1.20.
KUBERNETES = "1.34.0"
POD_MONITOR = "monitoring.coreos.com/v1/PodMonitor"
Manifest = dict[str, Any]


def helm(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Helm; skips the test where there is none."""
    if shutil.which("helm") is None:
        lacks("helm", "no helm on the PATH: the chart is not rendered")
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=120)
    if check and done.returncode:
        raise AssertionError(f"helm {' '.join(arguments)}: {done.stderr}")
    return done


def sets(values: Iterable[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def render(*values: str, namespace: str = "ops", apis: tuple[str, ...] = ()) -> list[Manifest]:
    """Every object of the chart, hooks too."""
    api_arguments = [part for api in apis for part in ("--api-versions", api)]
    flags = ["--namespace", namespace, "--kube-version", KUBERNETES, *api_arguments, *sets(values)]
    text = helm("template", "cormorant", str(CHART), *flags).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def find(manifests: Iterable[Manifest], kind: str, name: str = "") -> Manifest:
    """The one object of a kind, and of a name when one is given."""
    (found,) = [m for m in manifests if m["kind"] == kind and (not name or m["metadata"]["name"] == name)]
    return found


def pod_template(manifests: Iterable[Manifest]) -> Manifest:
    template: Manifest = find(manifests, "Deployment")["spec"]["template"]
    return template


class Release:
    """One release in one namespace of the API server of KUBECONFIG."""

    name = "cormorant"

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def install(self, *values: str, chart: Path = CHART) -> None:
        # Tests of the CRD alone may have applied it without Helm.
        helm("install", self.name, str(chart), "-n", self.namespace, "--take-ownership", *sets(values))

    def upgrade(self, *values: str, chart: Path = CHART) -> None:
        """To the chart's own values but for these. Helm would keep the old ones where none is given."""
        helm("upgrade", self.name, str(chart), "-n", self.namespace, "--reset-values", *sets(values))

    def uninstall(self) -> None:
        helm("uninstall", self.name, "-n", self.namespace, "--ignore-not-found")

    def manifests(self) -> list[Manifest]:
        text = helm("get", "manifest", self.name, "-n", self.namespace).stdout
        return [document for document in yaml.safe_load_all(text) if document]
