"""One release of the chart on a cluster with nodes, with images of this checkout, for all tests of this folder.

Its commands are the README's, run as they stand there: in a folder whose chart has these images for defaults, with a
kubeconfig whose namespace is the tests'.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cormorant_testing.helm import Release, helm
from cormorant_testing.kubectl import Namespace
from cormorant_testing.real_cluster import RESTRICTED, ROOT, Images, chart_of, skip_without_nodes

RELEASE = "cormorant"
CRD = "collectorjobs.cormorant.dev"


class Installation:
    """The release, and where jobs go."""

    def __init__(self, folder: Path, operators: Namespace, jobs: Namespace, images: Images) -> None:
        self.folder, self.operators, self.jobs, self.images = folder, operators, jobs, images
        self.chart = chart_of(images, folder, watch=jobs.name)
        self.release = Release(RELEASE, RELEASE)
        (folder / "examples").mkdir()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(jobs("config", "view", "--raw", "--minify"))
        self.kubeconfig.chmod(0o600)
        self.shell(f"kubectl config set-context --current --namespace {jobs.name}")

    def commands(self) -> list[str]:
        """The README's, on Kubernetes."""
        readme = (ROOT / "README.md").read_text()
        (block,) = [text for text in re.findall(r"^```sh\n(.*?)^```$", readme, re.M | re.S) if "helm install" in text]
        return [line for line in block.splitlines() if line and not line.startswith("#")]

    def shell(self, command: str, *, timeout_s: float = 120) -> str:
        """Run a line in the folder of the chart."""
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(
            ["bash", "-euc", command], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def install(self) -> None:
        self.shell(next(line for line in self.commands() if line.startswith("helm install")))
        self.wait()

    def wait(self) -> None:
        """Until the operator of this moment is ready."""
        self.operators("rollout", "status", f"deployment/{RELEASE}", "--timeout=50s")

    def log(self) -> str:
        return self.operators("logs", f"deployment/{RELEASE}", "--tail=40", check=False)


def adopt_crd(namespace: Namespace) -> None:
    """Other tests may have left the CRD to no release, or to theirs."""
    if namespace("get", "crd", CRD, "--ignore-not-found", "-o", "name"):
        owner = (f"meta.helm.sh/release-name={RELEASE}", f"meta.helm.sh/release-namespace={RELEASE}")
        namespace("annotate", "crd", CRD, "--overwrite", *owner)
        namespace("label", "crd", CRD, "--overwrite", "app.kubernetes.io/managed-by=Helm")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    skip_without_nodes()
    images = Images()
    images.provide()
    folder = tmp_path_factory.mktemp("real")
    with Namespace("real", RESTRICTED) as jobs:
        images.unpack(jobs)
        operators = Namespace(RELEASE)
        operators.name = RELEASE
        labels = " ".join(f"{key}={value}" for key, value in RESTRICTED.items())
        installation = Installation(folder, operators, jobs, images)
        installation.shell(f"kubectl create namespace {RELEASE} --dry-run=client -o yaml | kubectl apply -f -")
        installation.shell(f"kubectl label namespace {RELEASE} --overwrite {labels}")
        adopt_crd(jobs)
        helm("uninstall", RELEASE, "-n", RELEASE, "--ignore-not-found")
        installation.install()
        yield installation
        print(installation.log())
        jobs("delete", "collectorjobs", "--all", "--wait=false", check=False)
        installation.release.uninstall()
        jobs.until(lambda: not jobs.items("pods"), what="pods of the tests are gone", within_s=90)


def manifest_of(name: str) -> dict[str, object]:
    """An example's manifest."""
    (document,) = yaml.safe_load_all((ROOT / "examples" / name).read_text())
    return dict(document)
