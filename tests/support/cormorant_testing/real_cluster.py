"""A cluster with nodes: images that are built from this checkout, a release of the chart, jobs whose pods run.

Where: KUBECONFIG. How an image comes there: CORMORANT_IMAGE_BUILDER, a command that is called with TAG CONTEXT
[options of `docker build`] and makes IMAGE_PREFIX/TAG known to every node.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.helm import CHART
from cormorant_testing.kubectl import Namespace, skip_without_cluster
from cormorant_testing.serving import Api, Reply

ROOT = Path(__file__).resolve().parents[3]
BUILDER = "CORMORANT_IMAGE_BUILDER"
PREFIX = os.environ.get("CORMORANT_IMAGE_PREFIX", "localhost")
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
OURS = "app.kubernetes.io/managed-by=cormorant-operator"
_BUILD_S, _UNPACK_S = 1500, 420
_SOURCES = ("Dockerfile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "api", "worker", "operator")
_KILL = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split("\\0")
    except OSError:
        continue
    is_other = int(pid) != os.getpid() and "cormorant_worker.supervisor" not in words
    if is_other and any(word.startswith(sys.argv[1]) for word in words):
        os.kill(int(pid), 9)
        print(pid)
"""


def skip_without_nodes() -> None:
    """Skips where no node runs pods, or nothing can bring images there."""
    skip_without_cluster()
    if shutil.which("helm") is None:
        pytest.skip("no helm on the PATH: the chart is not installed")
    if not _node_images():
        pytest.skip("the cluster has no node that runs pods")
    if not os.environ.get(BUILDER):
        pytest.skip(f"no images: set {BUILDER} to a command that builds TAG from CONTEXT and brings it to the nodes")


def _node_images() -> set[str]:
    """Names of images that nodes have; empty where there is no node with a container runtime."""
    shown = subprocess.run(["kubectl", "get", "nodes", "-o", "json"], capture_output=True, timeout=60, check=True)
    nodes = json.loads(shown.stdout)["items"]
    return {name for node in nodes for image in node["status"].get("images") or () for name in image["names"] or ()}


class Images:
    """Both images of this checkout, in the cluster."""

    def __init__(self) -> None:
        digest = hashlib.sha256()
        for source in _SOURCES:
            files = sorted((ROOT / source).rglob("*.py")) if (ROOT / source).is_dir() else [ROOT / source]
            for path in files:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
        self.tag = f"test-{digest.hexdigest()[:12]}"
        self.job, self.operator = f"{PREFIX}/cormorant:{self.tag}", f"{PREFIX}/cormorant-operator:{self.tag}"

    def provide(self) -> None:
        """Build what the nodes do not have."""
        found = _node_images()
        for name, image, options in (
            ("cormorant-operator", self.operator, ("--target", "operator")),
            ("cormorant", self.job, ()),
        ):
            if image not in found:
                command = [*os.environ[BUILDER].split(), f"{name}:{self.tag}", str(ROOT), *options]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S)
                assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-4000:]}"

    def unpack(self, namespace: Namespace) -> float:
        """Run a pod of the jobs' image once: a first container waits for gigabytes. Returns the seconds."""
        security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        container = {
            "name": "c", "image": self.job, "imagePullPolicy": "IfNotPresent", "securityContext": security,
            "command": ["cormorant", "--help"],
        }  # fmt: skip
        spec = {
            "restartPolicy": "Never", "containers": [container], "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        }  # fmt: skip
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "unpack"}, "spec": spec}
        namespace("create", "-f", "-", document=pod)
        took = namespace.until(
            lambda: namespace.get("pod", "unpack")["status"].get("phase") in ("Succeeded", "Failed"),
            what="the image is unpacked", within_s=_UNPACK_S,
        )  # fmt: skip
        assert namespace.get("pod", "unpack")["status"]["phase"] == "Succeeded"
        namespace("delete", "pod", "unpack", "--wait=false")
        return took


def chart_of(images: Images, folder: Path, *, watch: str) -> Path:
    """A copy of the chart whose defaults are these images and one namespace: commands stay as users write them."""
    chart = folder / "charts" / "cormorant"
    shutil.copytree(CHART, chart)
    values = (chart / "values.yaml").read_text()
    repositories = iter((images.operator, images.job))
    values = re.sub(r'repository: "[^"]*"', lambda _: f'repository: "{next(repositories).rpartition(":")[0]}"', values)
    values = values.replace('tag: ""', f'tag: "{images.tag}"').replace("watchNamespaces: []", f"watchNamespaces: [{watch}]")
    values = values.replace('cpu: "100m"', 'cpu: "20m"')
    (chart / "values.yaml").write_text(values)
    return chart


class Job:
    """One CollectorJob whose pods run."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace, self.name = namespace, name
        self._forward: subprocess.Popen[str] | None = None
        self._port = 0

    # -- what the API server says --------------------------------------------------------------------------------

    @property
    def raw(self) -> Any:
        return self.namespace.get("collectorjob", self.name)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.raw.get("status") or {})

    def condition(self, kind: str) -> str:
        """`True/Reason`; empty when there is none."""
        found = [c for c in self.status.get("conditions", ()) if c["type"] == kind]
        return f"{found[0]['status']}/{found[0]['reason']}" if found else ""

    def frames(self) -> int:
        return int(self.status.get("frames", {}).get("collected", 0))

    def pods(self, role: str = "") -> dict[str, str]:
        """Uids of live pods by name."""
        selector = f"cormorant.dev/collectorjob={self.name}" + (f",cormorant.dev/role={role}" if role else "")
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in self.namespace.items("pods", selector)
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") in ("Pending", "Running")
        }

    def head(self) -> str:
        (name,) = self.pods("head")
        return name

    def until(self, is_so: Callable[[], object], *, what: str, within_s: float = 60) -> float:
        """Wait for a fact; when it does not come, the failure says how the job stands."""
        try:
            return self.namespace.until(is_so, what=what, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def describe(self) -> str:
        """What a person would look at."""
        parts = [
            self.namespace("get", "collectorjob,pods", "-o", "wide", check=False),
            json.dumps(self.status, indent=1),
            self.namespace("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:],
        ]
        for pod in self.namespace.names("pods"):
            parts += [f"--- {pod}", self.namespace("logs", pod, "--tail=15", check=False)[-2500:]]
        return "\n".join(parts)

    # -- what the job says ---------------------------------------------------------------------------------------

    def token(self, role: str) -> str:
        return base64.b64decode(self.namespace.get("secret", f"{self.name}-tokens")["data"][role]).decode()

    def api(self, role: str = "operator") -> Api:
        """The job's Service, through a port-forward."""
        if self._forward is None or self._forward.poll() is not None:
            self._connect()
        return Api(self._port, self.token(role))

    def ask(self, path: str, *, method: str = "GET", within_s: float = 60, role: str = "operator") -> Reply:
        """Ask until somebody answers: a port-forward ends with its pod."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                return self.api(role).call(method, path, timeout=40)
            except (OSError, AssertionError) as error:
                self.disconnect()
                assert time.monotonic() < deadline, f"{method} {path}: {error!r}\n{self.describe()}"
                time.sleep(0.3)

    def take(self, *, within_s: float = 60) -> Reply:
        """The next batch; 410 when there will be none."""
        deadline = time.monotonic() + within_s
        while True:
            reply = self.ask("/v1/batches/next?wait=5", within_s=within_s)
            if reply.status in (200, 410):
                return reply
            assert time.monotonic() < deadline, f"no batch: {reply}\n{self.describe()}"
            time.sleep(0.2)

    def ack(self, batch: Reply) -> None:
        reply = self.ask(f"/v1/batches/{batch.headers['cormorant-batch-id']}/ack", method="POST")
        assert reply.status == 204, reply

    def _connect(self) -> None:
        self.disconnect()
        command = ["kubectl", "-n", self.namespace.name, "port-forward", f"service/{self.name}-api", ":8000"]
        self._forward = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._forward.stdout is not None
        line = self._forward.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+) ->", line)
        assert found, f"kubectl port-forward said: {line}"
        self._port = int(found[1])

    def disconnect(self) -> None:
        """End the port-forward."""
        if self._forward is not None:
            self._forward.kill()
            self._forward.communicate(timeout=30)
            self._forward = None

    # -- what happens to it --------------------------------------------------------------------------------------

    def edit(self, **spec: object) -> None:
        self.namespace("patch", "collectorjob", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def kill(self, pod: str, word: str) -> None:
        """SIGKILL to processes of a pod whose command line has a word that begins so."""
        killed = self.namespace("exec", pod, "--", "python", "-c", _KILL, word)
        assert killed.strip(), f"there is no process of {word} in {pod}"

    def delete(self) -> float:
        """Delete it. Returns the seconds until nothing is left of it."""
        self.disconnect()
        self.namespace("delete", "collectorjob", self.name, "--wait=false")
        mine = f"cormorant.dev/collectorjob={self.name}"
        return self.namespace.until(
            lambda: not any(self.namespace.items(kind, mine) for kind in ("pods", "services", "configmaps", "secrets")),
            what=f"nothing is left of {self.name}", within_s=90,
        )  # fmt: skip


@contextmanager
def running(namespace: Namespace, manifest: dict[str, Any]) -> Iterator[Job]:
    """A job for some tests."""
    job = Job(namespace, manifest["metadata"]["name"])
    namespace("apply", "-f", "-", document=manifest)
    try:
        yield job
    finally:
        if namespace("get", "collectorjob", job.name, "--ignore-not-found", "-o", "name"):
            sys.stdout.write(job.describe())
            job.delete()
        job.disconnect()
