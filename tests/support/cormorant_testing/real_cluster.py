"""A cluster with nodes: images that are built from this checkout, a release of the chart, jobs whose pods run.

Where: KUBECONFIG. How an image comes there: CORMORANT_IMAGE_BUILDER, a command that is called with TAG CONTEXT
[options of `docker build`] and makes IMAGE_PREFIX/TAG known to every node.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from cormorant_testing.helm import CHART, Release
from cormorant_testing.kubectl import RESTRICTED, Namespace, restricted_pod, skip_without_cluster
from cormorant_testing.needs import lacks
from cormorant_testing.snippets import ROOT, blocks

BUILDER = "CORMORANT_IMAGE_BUILDER"
PREFIX = os.environ.get("CORMORANT_IMAGE_PREFIX", "localhost")
RELEASE = "cormorant"
DISK_USAGE = "du --one-file-system --summarize --block-size=MB / 2> /dev/null || true"
"""A command for a container. Users other than root cannot read a few folders; those are empty."""
_BUILD_S, _UNPACK_S = 1500, 420
_SOURCES = ("Dockerfile", "pyproject.toml", "images", "README.md", "LICENSE", "api", "worker", "operator")


def skip_without_nodes() -> None:
    """Skips where no node runs pods, or nothing can bring images there."""
    skip_without_cluster()
    if shutil.which("helm") is None:
        lacks("helm", "no helm on the PATH: the chart is not installed")
    if not _node_images():
        lacks("nodes", "the cluster has no node that runs pods")
    if not os.environ.get(BUILDER):
        lacks(
            "images", f"no images: set {BUILDER} to a command that builds TAG from CONTEXT and loads it into the nodes"
        )


def _node_images() -> set[str]:
    """Names of images that nodes have; empty where there is no node with a container runtime."""
    shown = subprocess.run(["kubectl", "get", "nodes", "-o", "json"], capture_output=True, timeout=60, check=True)
    nodes = json.loads(shown.stdout)["items"]
    return {name for node in nodes for image in node["status"].get("images") or () for name in image["names"] or ()}


def _digest() -> str:
    """Of everything that is in the images."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        found = sorted((ROOT / source).rglob("*")) if (ROOT / source).is_dir() else [ROOT / source]
        for path in (path for path in found if path.is_file() and "__pycache__" not in path.parts):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def build_image(image: str, context: Path, *options: str) -> None:
    command = [*os.environ[BUILDER].split(), image.removeprefix(f"{PREFIX}/"), str(context), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-4000:]}"


class Images:
    """The operator's image and the one without CUDA of this checkout, in the cluster."""

    def __init__(self) -> None:
        self.tag = os.environ.get("CORMORANT_IMAGE_TAG", "") or f"test-{_digest()[:12]}"
        self.job, self.operator = f"{PREFIX}/cormorant-cpu:{self.tag}", f"{PREFIX}/cormorant-operator:{self.tag}"
        self.job_mb = 0
        """Size of the file system that a job's containers see."""

    def provide(self) -> None:
        """Build what the nodes do not have."""
        found = _node_images()
        for image, target in ((self.operator, "operator"), (self.job, "cpu")):
            if image not in found:
                build_image(image, ROOT, "--target", target)

    def unpack(self, namespace: Namespace) -> float:
        """Run a pod of the jobs' image once: a first container waits for gigabytes. Returns the seconds."""
        command = ["sh", "-c", f"set -e; cormorant --help > /dev/null; {DISK_USAGE}"]
        container = {"name": "c", "image": self.job, "imagePullPolicy": "IfNotPresent", "command": command}
        namespace("create", "-f", "-", document=restricted_pod("unpack", container))
        took = namespace.until(
            lambda: namespace.get("pod", "unpack")["status"].get("phase") in ("Succeeded", "Failed"),
            what="the image is unpacked", within_s=_UNPACK_S,
        )  # fmt: skip
        assert namespace.get("pod", "unpack")["status"]["phase"] == "Succeeded"
        self.job_mb = int(namespace("logs", "unpack").partition("MB")[0])
        namespace("delete", "pod", "unpack", "--wait=false")
        return took


class Installation:
    """A release, and where its jobs go.

    Its commands are the README's, run as they stand there: in a folder whose chart has these images for defaults, with
    a kubeconfig whose namespace is the jobs'.
    """

    def __init__(self, folder: Path, jobs: Namespace, images: Images) -> None:
        self.folder, self.jobs, self.images = folder, jobs, images
        self.chart = self._copy_chart()
        self.release = Release(RELEASE)
        self.operators = Namespace(RELEASE)
        self.operators.name = RELEASE
        (folder / "examples").mkdir()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(jobs("config", "view", "--raw", "--minify"))
        self.shell(f"kubectl config set-context --current --namespace {jobs.name}")
        self.shell(f"kubectl create namespace {RELEASE} --dry-run=client -o yaml | kubectl apply -f -")
        labels = " ".join(f"{key}={value}" for key, value in RESTRICTED.items())
        self.shell(f"kubectl label namespace {RELEASE} --overwrite {labels}")

    def commands(self) -> list[str]:
        """The README's, on Kubernetes, with the registry of these images."""
        (block,) = [text for text in blocks("README.md", "sh") if "helm install" in text]
        lines = re.sub(r"\\\n\s*", "", block.replace("registry.example", PREFIX)).splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    def shell(self, command: str, *, timeout_s: float = 120) -> str:
        """Run a line in the folder of the chart."""
        scripts = Path(sys.executable).parent  # where `cormorant` is installed
        path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}
        bash = ["bash", "-euc", command]
        done = subprocess.run(bash, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def install(self) -> None:
        self.shell(next(line for line in self.commands() if line.startswith("helm install")))
        self.wait()

    def upgrade(self, *values: str) -> None:
        """The chart's own values but for these."""
        self.release.upgrade(*values, chart=self.chart)
        self.wait()

    def wait(self) -> None:
        """Until the operator of this moment is ready."""
        self.operators("rollout", "status", f"deployment/{RELEASE}", "--timeout=50s")

    def log(self) -> str:
        return self.operators("logs", f"deployment/{RELEASE}", "--tail=40", check=False)

    def _copy_chart(self) -> Path:
        """Its defaults are these images and one namespace: commands stay as users write them."""
        chart = self.folder / "charts" / "cormorant"
        shutil.copytree(CHART, chart)
        values = (chart / "values.yaml").read_text()
        job, operator = (image.rpartition(":")[0] for image in (self.images.job, self.images.operator))
        for default, own in (
            ('repository: "ghcr.io/example/cormorant-operator"', f'repository: "{operator}"'),
            ('repository: "ghcr.io/example/cormorant-cpu"', f'repository: "{job}"'),
            # A node of the tests has no device: groups that ask for one run the same image.
            ('repository: ""', f'repository: "{job}"'),
            ('tag: ""', f'tag: "{self.images.tag}"'),
            ("watchNamespaces: []", f"watchNamespaces: [{self.jobs.name}]"),
            ('cpu: "100m"', 'cpu: "20m"'),
        ):
            assert default in values, default
            values = values.replace(default, own)
        (chart / "values.yaml").write_text(values)
        return chart
