"""One namespace of a real API server, and operators as processes that look after it alone; heads are a stub's."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cormorant_testing.kubectl import Namespace, condition_of
from cormorant_testing.operator_world import make_spec
from cormorant_testing.stub_heads import StubHeads


class Operator:
    """One operator process."""

    def __init__(self, arguments: list[str], log: Path, kubeconfig: str) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cormorant_operator", *arguments],
                stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "KUBECONFIG": kubeconfig},
            )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


class Scene:
    """A namespace with an operator that looks after it alone."""

    def __init__(
        self, namespace: Namespace, heads: StubHeads, folder: Path, *, kubeconfig: str = "", probe_port: int = 0
    ) -> None:
        self.namespace, self.heads, self.folder = namespace, heads, folder
        self.kubeconfig = kubeconfig or os.environ["KUBECONFIG"]
        key = folder / "key"
        key.write_text("0123456789abcdef" * 4)
        self.arguments = [
            *("--image", "example/cormorant:1", "--key-file", str(key), "--namespace", namespace.name),
            *("--head-url", heads.url, "--poll-seconds", "1", "--probe-port", str(probe_port)),
        ]

    @contextmanager
    def operator(self, *more: str, log: str = "operator.log") -> Iterator[Operator]:
        operator = Operator([*self.arguments, *more], self.folder / log, self.kubeconfig)
        try:
            yield operator
        finally:
            operator.kill()
            sys.stdout.write(operator.log.read_text()[-5000:])

    def submit(self, *names: str, labels: dict[str, str] | None = None, **spec: Any) -> None:
        """Apply jobs of one spec; without a name, `pong`."""
        manifests = [
            {
                "apiVersion": "cormorant.dev/v1alpha1",
                "kind": "CollectorJob",
                "metadata": {"name": name, "labels": labels or {}},
                "spec": make_spec(**spec),
            }
            for name in names or ("pong",)
        ]
        self.namespace("apply", "-f", "-", document={"apiVersion": "v1", "kind": "List", "items": manifests})

    def edit(self, patch: str, name: str = "pong") -> None:
        self.namespace("patch", "cjob", name, "--type=merge", "-p", patch)

    def status(self, name: str = "pong") -> dict[str, Any]:
        return dict(self.namespace.get("cjob", name).get("status") or {})

    def condition(self, kind: str, name: str = "pong") -> str:
        return condition_of(self.status(name), kind)

    def scale(self, name: str = "pong") -> dict[str, Any]:
        """What the scale subresource says to autoscalers."""
        path = f"/apis/cormorant.dev/v1alpha1/namespaces/{self.namespace.name}/collectorjobs/{name}/scale"
        return dict(json.loads(self.namespace("get", "--raw", path))["status"])

    def uids(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.namespace.items("pods")}

    def until_ready(self, name: str = "pong", *, within_s: float = 30.0) -> None:
        is_ready = "True/EnoughWorkers"
        self.namespace.until(
            lambda: self.condition("Ready", name) == is_ready, what=f"{name} is ready", within_s=within_s
        )

    def until(self, is_so: Any, what: str) -> float:
        return self.namespace.until(is_so, what=what)
