"""A CollectorJob of a real API server, as a person sees it; and as a learner does, if its pods run."""

import base64
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from cormorant_testing.kubectl import Namespace, forward, restricted_pod
from cormorant_testing.serving import Api, Reply
from cormorant_testing.snippets import ROOT
from manifest_making import collector_job

WAIT_S = 180.0
"""For what takes seconds on a machine that does nothing else."""
OURS = "app.kubernetes.io/managed-by=cormorant-operator"
SMALL = {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}
"""Resources of a pod on a node of two processors."""
_SIGNAL = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split("\\0")
    except OSError:
        continue
    is_other = int(pid) != os.getpid() and "cormorant_worker.supervisor" not in words
    if is_other and any(word.rpartition("/")[2].startswith(sys.argv[1]) for word in words):
        os.kill(int(pid), int(sys.argv[2]))
        print(pid)
"""


def small_job(name: str, env: dict[str, Any], *, policy: str = "", workers: int = 1, **spec: Any) -> dict[str, Any]:
    """A job of one group for a node of two processors; random without a policy's entrypoint."""
    acting = {"entrypoint": policy} if policy else {"random": {}}
    parts = {"head": {"resources": SMALL}, "workerGroups": [{"name": "cpu", "resources": SMALL}]}
    return collector_job(name, {"env": env, "policy": acting, **parts, "replicas": workers, **spec})


def small_example(name: str, **collection: Any) -> Any:
    """An example of this repository for such a node."""
    document = yaml.safe_load((ROOT / "examples" / name).read_text())
    document["spec"]["collection"] |= collection
    for part in (document["spec"]["head"], *document["spec"]["workerGroups"]):
        part["resources"] = SMALL
    return document


def note(text: str) -> None:
    """A figure or a log for people; pytest shows it with -rP."""
    sys.stdout.write(f"{text}\n")


class Job:
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
        """`True/Reason` of a condition; empty when there is none."""
        found = next((c for c in self.status.get("conditions", ()) if c["type"] == kind), None)
        return f"{found['status']}/{found['reason']}" if found is not None else ""

    def message(self, kind: str) -> str:
        """The message of a condition; empty if the job does not have it."""
        return next((c["message"] for c in self.status.get("conditions", ()) if c["type"] == kind), "")

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

    def said_by(self, pod: str) -> list[dict[str, Any]]:
        lines = self.namespace("logs", pod, check=False).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def until(self, is_so: Callable[[], object], what: str, *, within_s: float = WAIT_S) -> float:
        """Wait for a fact; when it does not come, the failure says how the job stands."""
        try:
            return self.namespace.until(is_so, what=what, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def until_ready(self, *, within_s: float = WAIT_S) -> float:
        is_ready = "True/EnoughWorkers"
        return self.until(lambda: self.condition("Ready") == is_ready, what=f"{self.name} is ready", within_s=within_s)

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

    def api(self) -> Api:
        """The job's Service, through a port-forward."""
        if self._forward is None or self._forward.poll() is not None:
            self._connect()
        secret = self.namespace.get("secret", f"{self.name}-tokens")
        return Api(self._port, base64.b64decode(secret["data"]["operator"]).decode())

    def ask(self, path: str, *, method: str = "GET", within_s: float = WAIT_S) -> Reply:
        """Ask until somebody answers: a port-forward ends with its pod."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                return self.api().call(method, path, timeout=40)
            except (OSError, AssertionError) as error:
                self.disconnect()
                if time.monotonic() > deadline:
                    raise AssertionError(f"{method} {path}: {error!r}\n{self.describe()}") from error
                time.sleep(0.3)

    def take(self, *, within_s: float = WAIT_S) -> Reply:
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
        service = f"service/{self.name}-api"
        self._forward, self._port = forward("-n", self.namespace.name, "port-forward", service, ":8000")

    def disconnect(self) -> None:
        """End the port-forward."""
        if self._forward is not None:
            self._forward.kill()
            self._forward.communicate(timeout=30)
            self._forward = None

    # -- what happens to it --------------------------------------------------------------------------------------

    def edit(self, **spec: object) -> None:
        self.namespace("patch", "collectorjob", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def suspend(self) -> None:
        self.edit(suspend=True)
        self.until(lambda: self.condition("Suspended") == "True/Suspended", what="the job is suspended")

    def replace_worker(self) -> float:
        """Delete the only worker's pod. Returns the seconds to the next one's creation."""
        (worker,) = self.pods("worker")
        self.namespace("delete", "pod", worker, "--now", "--wait=false")
        return self.until(lambda: self.pods("worker") and worker not in self.pods("worker"), what="a replacement")

    def kill(self, pod: str, word: str) -> None:
        self.signal(pod, word, signal.SIGKILL)

    def signal(self, pod: str, word: str, number: signal.Signals) -> None:
        """A signal to processes of a pod whose command line has a word, or the name of a path, that begins so."""
        told = self.namespace("exec", pod, "--", "python", "-c", _SIGNAL, word, str(int(number)))
        assert told.strip(), f"there is no process of {word} in {pod}"

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
def learning(job: Job, *command: str, image: str, code: str) -> Iterator[str]:
    """A learner in a pod beside a job, with its write token. Gives the pod's name; it tolerates every taint.

    Args:
        job: what it learns from, by the Service.
        command: that is run.
        image: of the pod.
        code: ConfigMap that is mounted at /code.
    """
    name = f"{job.name}-learner"
    token = {"secretKeyRef": {"name": f"{job.name}-tokens", "key": "write"}}
    container = {
        "name": "learner",
        "image": image,
        "command": [*command],
        "env": [
            {"name": "CORMORANT_URL", "value": f"http://{job.name}-api:8000"},
            {"name": "CORMORANT_TOKEN", "valueFrom": token},
            {"name": "HOME", "value": "/tmp"},
        ],
        "resources": {"requests": {"cpu": "20m", "memory": "128Mi"}},
        "volumeMounts": [{"name": "code", "mountPath": "/code"}],
    }
    pod = restricted_pod(
        name, container, terminationGracePeriodSeconds=1, tolerations=[{"operator": "Exists"}],
        volumes=[{"name": "code", "configMap": {"name": code}}],
    )  # fmt: skip
    job.namespace("create", "-f", "-", document=pod)
    try:
        yield name
    finally:
        job.namespace("delete", "pod", name, "--wait=false", check=False)


@contextmanager
def running(namespace: Namespace, manifest: dict[str, Any]) -> Iterator[Job]:
    namespace("apply", "-f", "-", document=manifest)
    with deleted_afterwards(namespace, manifest["metadata"]["name"]) as job:
        yield job


@contextmanager
def deleted_afterwards(namespace: Namespace, name: str) -> Iterator[Job]:
    """A job that the block applies, or has applied."""
    job = Job(namespace, name)
    try:
        yield job
    finally:
        if namespace("get", "collectorjob", job.name, "--ignore-not-found", "-o", "name"):
            sys.stdout.write(job.describe())
            job.delete()
        job.disconnect()
