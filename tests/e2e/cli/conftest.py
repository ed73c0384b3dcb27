"""The command line as a process, and a namespace with an operator of its own.

Pods name a scheduler that nobody is: no kubelet takes them, with a node or without, and the test says what they do.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant_cli.__main__ import run
from cormorant_testing.kubectl import Kubelet, Namespace, require_crd
from cormorant_testing.operator_scene import Scene
from cormorant_testing.operator_world import make_spec
from cormorant_testing.stub_heads import StubHead, StubHeads

NOWHERE = {"spec": {"schedulerName": "nobody"}}


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str


class Cli:
    """Commands in one namespace."""

    def __init__(self, namespace: Namespace, heads: StubHeads, folder: Path) -> None:
        self.namespace, self.heads, self.folder = namespace, heads, folder
        self.kubeconfig = os.environ["KUBECONFIG"]

    def __call__(self, *arguments: str, namespace: str = "") -> Done:
        """Run a command in the namespace, or in another; in this process, whose imports take seconds."""
        out, err = io.StringIO(), io.StringIO()
        before, os.environ["KUBECONFIG"] = os.environ["KUBECONFIG"], self.kubeconfig
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = run([*arguments, "-n", namespace or self.namespace.name])
        finally:
            os.environ["KUBECONFIG"] = before
        return Done(code, out.getvalue(), err.getvalue())

    @property
    def head(self) -> StubHead:
        """The job's head, also before the operator has asked it."""
        return self.heads.by_job.setdefault("pong", StubHead())

    def good(self, *arguments: str) -> str:
        """As a call; it must work. Returns what it printed."""
        done = self(*arguments)
        assert done.code == 0, f"{arguments}: {done.err}"
        return done.out

    def write(self, name: str = "pong", **spec: Any) -> str:
        """A manifest whose pods no kubelet takes."""
        groups = [{"template": NOWHERE, **group} for group in spec.pop("workerGroups", [{"name": "cpu"}])]
        head = {"template": NOWHERE, **spec.pop("head", {})}
        document = {
            "apiVersion": "cormorant.dev/v1alpha1",
            "kind": "CollectorJob",
            "metadata": {"name": name, **spec.pop("metadata", {})},
            "spec": make_spec(head=head, workerGroups=groups, **spec),
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return str(path)

    def become_viewer(self) -> None:
        """Commands become those of somebody who may read jobs and pods, and no Secrets."""
        run = self.namespace
        run("create", "serviceaccount", "viewer")
        rules = ["--verb=get,list", "--resource=collectorjobs.cormorant.dev,pods,events"]
        run("create", "role", "viewer", *rules)
        run("create", "rolebinding", "viewer", "--role=viewer", f"--serviceaccount={run.name}:viewer")
        token = run("create", "token", "viewer").strip()
        config = yaml.safe_load(run("config", "view", "--minify", "--raw"))
        config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
        path = self.folder / "viewer.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        self.kubeconfig = str(path)

    @contextmanager
    def operator(self, *, has_kubelet: bool = True) -> Iterator[None]:
        """An operator process that looks after the namespace alone, and a kubelet that says that pods run."""
        scene = Scene(self.namespace, self.heads, self.folder)
        with scene.operator(), Kubelet(self.namespace) if has_kubelet else nullcontext():
            yield


@pytest.fixture(scope="session")
def crd() -> None:
    require_crd()


@pytest.fixture
def cli(crd: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cli]:
    prefix = getattr(request.module, "NAMESPACE", "kube-cli")
    with StubHeads() as heads, Namespace(prefix) as namespace:
        yield Cli(namespace, heads, tmp_path)


@pytest.fixture
def running(cli: Cli) -> Iterator[Cli]:
    """A submitted job of two workers, all ready."""
    with cli.operator():
        cli.good("submit", cli.write(), "--wait", "--timeout", "60")
        # `--wait` is content with the first of them.
        cli.namespace.until(
            lambda: cli.namespace.get("cjob", "pong")["status"]["workers"] == "2/2", what="both workers are ready"
        )
        yield cli
