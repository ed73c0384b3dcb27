"""One namespace of a real API server: operators as processes, the command line, and one small server for all heads."""

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant_cli.__main__ import run
from cormorant_testing.kubectl import Namespace
from cormorant_testing.operator_world import make_spec
from cormorant_testing.real_job import Job
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead, job_status
from cormorant_testing.scripts import Logged
from manifest_making import collector_job


@dataclass
class StubHead:
    """What one head says, and was told."""

    frames: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: {"cpu": 1})
    empty_slots: dict[str, list[int]] = field(default_factory=dict)
    paused: bool = False
    phase: str = "Running"
    tokens: set[str] = field(default_factory=set)
    """Authorization headers that were sent."""
    accepted: str = ""
    """The Authorization header that is accepted; empty: any."""


class StubHeads(ScriptedHead):
    """Use as a context manager; `url` goes into the operator's --head-url."""

    def __init__(self) -> None:
        self.by_job: dict[str, StubHead] = {}
        super().__init__(self._answer)
        self.url += "/{job}"

    def _answer(self, heard: Heard) -> Say:
        job, _, path = heard.path.lstrip("/").partition("/")
        head = self.by_job.setdefault(job, StubHead())
        token = heard.headers.get("authorization", "")
        head.tokens.add(token)
        if head.accepted not in ("", token):
            return Say(401)
        if path == "v1/desired":
            body = json.loads(heard.body)
            head.sizes |= body.get("groups", {})
            head.empty_slots = body.get("empty_slots", {})
            head.paused = body["paused"] if body.get("paused") is not None else head.paused
        elif path == "v1/drain":
            head.phase = "Draining"
        desired = {"groups": head.sizes, "paused": head.paused, "pending": False, "empty_slots": head.empty_slots}
        status = job_status(
            job=job, phase=head.phase, pause_state="paused" if head.paused else "running", desired=desired
        )
        counted = {"collected": head.frames, "settled": head.frames, "stepped": head.frames, "per_second": 10.0}
        status["frames"] |= counted
        status["queue"]["capacity"] = 16
        drained = {"draining": True, "waiting_batches": 0, "lent_batches": 0, "ended": False}
        document = {"v1/desired": desired, "v1/drain": drained}.get(path, status)
        return Say(body=json.dumps(document).encode())


class Scene(Job):
    """A job, and operators that look after its namespace alone. Its heads are a stub's."""

    name = "pong"

    def __init__(self, namespace: Namespace, folder: Path, *, heads: StubHeads, kubeconfig: str = "") -> None:
        super().__init__(namespace, self.name)
        self.folder, self.heads = folder, heads
        self.kubeconfig = kubeconfig or os.environ["KUBECONFIG"]
        key = folder / "key"
        key.write_text("0123456789abcdef" * 4)
        self.arguments = [
            *("--image", "example/cormorant:1", "--key-file", str(key), "--namespace", namespace.name),
            *("--head-url", heads.url, "--poll-seconds", "1", "--probe-port", "0"),
        ]

    @contextmanager
    def operator(self, *more: str) -> Iterator[Logged]:
        command = [sys.executable, "-m", "cormorant_operator", *self.arguments, *more]
        operator = Logged(command, env={**os.environ, "KUBECONFIG": self.kubeconfig})
        try:
            with operator:
                yield operator
        finally:
            sys.stdout.write(operator.text[-5000:])

    @property
    def stub(self) -> StubHead:
        """The head of the job, also before the operator has asked it."""
        return self.heads.by_job.setdefault(self.name, StubHead())

    def submit(self, *names: str, labels: Mapping[str, str] = {}, **spec: Any) -> None:
        """Apply jobs of one spec; without a name, the scene's own."""
        manifests = [collector_job(name, make_spec(**spec), labels=dict(labels)) for name in names or (self.name,)]
        self.namespace("apply", "-f", "-", document={"apiVersion": "v1", "kind": "List", "items": manifests})

    def scale(self) -> dict[str, Any]:
        """What the scale subresource says to autoscalers."""
        path = f"/apis/cormorant.dev/v1alpha1/namespaces/{self.namespace.name}/collectorjobs/{self.name}/scale"
        return dict(json.loads(self.namespace("get", "--raw", path))["status"])

    def uids(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.namespace.items("pods")}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


class Cli(Scene):
    """A scene, and commands in its namespace."""

    def __call__(self, *arguments: str) -> Done:
        """Run a command in the namespace; in this process, whose imports take seconds."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("KUBECONFIG", self.kubeconfig)
            code = run([*arguments, "-n", self.namespace.name])
        return Done(code, out.getvalue(), err.getvalue())

    def good(self, *arguments: str) -> str:
        """As a call; it must work. Returns what it printed."""
        done = self(*arguments)
        assert done.code == 0, f"{arguments}: {done.out}{done.err}"
        return done.out

    def write(self, **spec: Any) -> str:
        """A manifest whose pods name a scheduler that does not exist: the test plays their kubelet."""
        nowhere = {"template": {"spec": {"schedulerName": "nobody"}}}
        path = self.folder / "pong.yaml"
        document = collector_job("pong", make_spec(head=nowhere, workerGroups=[{"name": "cpu", **nowhere}], **spec))
        path.write_text(yaml.safe_dump(document))
        return str(path)
