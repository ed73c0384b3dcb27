"""The chart as a release on a real API server, and the operator with the rights that the chart gives, no others.

There is no kubelet: the operator is a process of this machine, started with the Deployment's arguments and the service
account's token.
"""

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from cormorant_testing.api_proxy import RecordingProxy, Right, write_kubeconfig
from cormorant_testing.helm import CHART, Release, find, helm, render
from cormorant_testing.kubectl import RESTRICTED, Kubelet, Namespace, restricted_pod, skip_without_cluster
from cormorant_testing.operator_scene import Scene, StubHeads
from cormorant_testing.operator_world import make_spec
from cormorant_testing.real_job import Job
from cormorant_testing.scripts import unused_port
from manifest_making import collector_job

CRD = "collectorjobs.cormorant.dev"
ASKED_OF_A_TAINT = {Right("", "nodes", "get")}
"""What is asked for when a taint expels a head, which no test here plays."""
ASKED_BY_ADMISSION = {Right("cormorant.dev", "collectorjobs/finalizers", "update")}
"""Only where a cluster enforces permissions of owner references, which the test cluster does not."""
ASKED_OF_POD_GROUPS = {Right("scheduling.k8s.io", "podgroups", verb) for verb in ("get", "create", "patch", "delete")}
"""Only where the API server serves them; elsewhere the operator asks for a list, and finds that it does not."""


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    skip_without_cluster()
    helm("version")
    with Namespace("chart", RESTRICTED) as namespace:
        yield namespace


@pytest.fixture
def release(namespace: Namespace) -> Iterator[Release]:
    release = Release(namespace.name)
    yield release
    release.uninstall()


# -- releases ----------------------------------------------------------------------------------------------------------


def test_release_upgrades_and_keeps_crd_key_and_jobs(namespace: Namespace, release: Release, tmp_path: Path) -> None:
    only = f"watchNamespaces={{{namespace.name}}}"
    release.install(only, "replicas=2")
    namespace.until(
        lambda: len(namespace.items("pods", "app.kubernetes.io/component=operator")) == 2,
        what="the restricted namespace takes the operator's pods",
    )
    namespace("apply", "-f", "-", document=collector_job("pong", make_spec()))
    key = namespace.get("secret", "cormorant-key")

    image = f"image.digest=sha256:{'ab' * 32}"
    release.upgrade(only, image, "replicas=1")
    (container,) = namespace.get("deployment", "cormorant")["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith("ab" * 32)
    assert namespace.items("poddisruptionbudgets") == []

    chart = tmp_path / "cormorant"
    shutil.copytree(CHART, chart)
    crd_file = chart / "files" / "crds" / "collectorjobs.yaml"
    words = "Summary of the conditions"
    crd_file.write_text(crd_file.read_text().replace(words, "A newer column"))
    release.upgrade(only, image, chart=chart)
    (version,) = namespace.get("crd", CRD)["spec"]["versions"]
    assert version["additionalPrinterColumns"][0]["description"] == "A newer column"
    release.upgrade(only, image)

    assert namespace.get("secret", "cormorant-key")["data"] == key["data"]
    crd = namespace.get("crd", CRD)
    release.uninstall()
    assert namespace.get("crd", CRD)["metadata"]["uid"] == crd["metadata"]["uid"]
    assert [item["metadata"]["name"] for item in namespace.items("collectorjobs")] == ["pong"]
    left = namespace("get", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/name=cormorant", "-o", "name")
    assert namespace.name not in left

    helm("install", release.name, str(CHART), "-n", namespace.name, "--set", only)  # without --take-ownership
    again = namespace.get("secret", "cormorant-key")
    assert (again["metadata"]["uid"], again["data"]) == (key["metadata"]["uid"], key["data"])
    release.uninstall()
    namespace("delete", "collectorjob", "pong", "--timeout=20s")


def test_api_server_takes_every_object_and_roles_reach_view_and_edit(namespace: Namespace, release: Release) -> None:
    release.install(f"watchNamespaces={{{namespace.name}}}")
    manifests = render(
        *("replicas=2", "networkPolicy.enabled=true", "imagePullSecrets={a}", "nodeSelector.disk=ssd"),
        *("tolerations[0].key=spot", "tolerations[0].operator=Exists", "podLabels.team=rl"),
        namespace=namespace.name,
    )
    for manifest in manifests:
        # The key was drawn anew, and the test's pod is taken when its account is there: both have tests of their own.
        if manifest["kind"] not in ("Secret", "Pod"):
            namespace("apply", "--dry-run=server", "--validate=strict", "-f", "-", document=manifest)
    for role in ("view", "edit"):
        namespace("create", "serviceaccount", role)
        namespace("create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={namespace.name}:{role}")

    def can(account: str, *asked: str) -> bool:
        user = f"--as=system:serviceaccount:{namespace.name}:{account}"
        return namespace("auth", "can-i", *asked, user, check=False).startswith("yes")

    namespace.until(lambda: can("edit", "create", "collectorjobs"), what="edit has gathered the rules")
    assert can("edit", "patch", "collectorjobs", "--subresource=scale")
    assert not can("edit", "patch", "collectorjobs", "--subresource=status")
    assert can("view", "list", "collectorjobs")
    assert not can("view", "create", "collectorjobs")


# -- the operator with its rights --------------------------------------------------------------------------------------


class Installed(Scene):
    """A release, and its operator as a process behind a proxy that writes down what it asks for."""

    def __init__(self, namespace: Namespace, folder: Path, heads: StubHeads) -> None:
        super().__init__(namespace, folder, heads=heads)
        context = json.loads(namespace("config", "view", "--raw", "--minify", "-o", "json"))["clusters"][0]["cluster"]
        self.server = context["server"]
        self.ca = base64.b64decode(context["certificate-authority-data"]).decode()
        self.probe_port = unused_port()

    @contextmanager
    def behind_a_proxy(self) -> Iterator[RecordingProxy]:
        """The Deployment's operator, but for what is of this machine; the last of two arguments of a kind holds."""
        (container,) = self.namespace.get("deployment", "cormorant")["spec"]["template"]["spec"]["containers"]
        key = self.folder / "key"
        key.write_bytes(base64.b64decode(self.namespace.get("secret", "cormorant-key")["data"]["key"]))
        own = [f"--key-file={key}", f"--probe-port={self.probe_port}", f"--head-url={self.heads.url}"]
        self.arguments = [*container["args"], "--poll-seconds=1", *own]
        with RecordingProxy(self.server, ca=self.ca) as proxy:
            token = self.token("cormorant")
            self.kubeconfig = str(write_kubeconfig(self.folder / "kubeconfig", proxy.url, token))
            with self.operator() as operator:
                yield proxy
                assert operator.end() == 0

    def token(self, account: str) -> str:
        return self.namespace("create", "token", account).strip()

    def until_gone(self, kind: str, name: str) -> None:
        self.until(
            lambda: self.namespace("get", kind, name, "--ignore-not-found", "-o", "name") == "", f"{name} is gone"
        )

    def live(self) -> None:
        """Everything that an operator ever does."""
        namespace = self.namespace
        self._meet_a_stranger()
        namespace("apply", "-f", "-", document=self._stale_secret())
        self.submit(runPolicy={"ttlSecondsAfterFinished": 1})
        self.until_ready()
        namespace("scale", "cjob/pong", "--replicas=1")
        namespace.until(lambda: len(namespace.names("pods")) == 2, what="one worker and the head")
        namespace("delete", "service", "pong-api")
        namespace.until(lambda: "pong-api" in namespace.names("services"), what="the Service is back")
        self.edit(runPolicy={"disruptionBudget": "None"})
        self.until_gone("poddisruptionbudget", "pong-head")
        (config,) = namespace.names("configmaps")
        self.edit(suspend=True)
        namespace.until(lambda: self.stub.phase == "Draining", what="the head is asked to drain")
        namespace.finish("pong-head-1", container="head", exit_code=143)
        namespace.until(lambda: self.condition("Suspended") == "True/Suspended", what="it is suspended")
        self.stub.phase = "Running"
        self.edit(suspend=False, collection={"framesPerBatch": 128})
        namespace.until(lambda: "pong-head-2" in namespace.names("pods"), what="the next head is there")
        self.until_gone("configmap", config)
        self.until_ready()
        namespace.finish("pong-head-2", container="head", exit_code=0, reason="Completed")
        self.until_gone("cjob", "pong")

    def _meet_a_stranger(self) -> None:
        stranger = restricted_pod("clash-head-1", {"name": "c", "image": "example/stranger:1"})
        self.namespace("create", "-f", "-", document=stranger)
        self.submit("clash")
        clash = Job(self.namespace, "clash")
        clash.until(lambda: clash.condition("Accepted") == "False/NameConflict", "the stranger is noticed")
        self.namespace("delete", "cjob", "clash")

    def _stale_secret(self) -> dict[str, Any]:
        """What a job of the same name left, which the garbage collector deletes."""
        owner = {"apiVersion": "cormorant.dev/v1alpha1", "kind": "CollectorJob", "name": "pong", "uid": "an-older-one"}
        metadata = {"name": "pong-tokens", "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}}


def granted(release: Release, *, is_cluster_wide: bool) -> set[Right]:
    """The operator's, by the chart."""
    kind, name = ("ClusterRole" if is_cluster_wide else "Role"), f"{release.namespace}-cormorant"
    manifests = release.manifests()
    rules = [*find(manifests, kind, name)["rules"], *find(manifests, "Role", "cormorant-lease")["rules"]]
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def skip_beside_jobs_of_others(namespace: Namespace) -> None:
    """An operator of all namespaces would touch them; those of tests before go within seconds."""

    def jobs() -> list[str]:
        shown = namespace("get", "cjob", "-A", "-o", "jsonpath={.items[*].metadata.namespace}", check=False)
        return [] if "error" in shown else shown.split()

    try:
        namespace.until(lambda: not jobs(), what="no job is there")
    except AssertionError:
        pytest.skip(f"there are jobs in {sorted(set(jobs()))}, which an operator of all namespaces would touch")


@pytest.mark.parametrize("scope", ["namespaces", "cluster"])
def test_operator_uses_every_right_that_it_has_and_lacks_none(
    namespace: Namespace, release: Release, tmp_path: Path, scope: str
) -> None:
    is_cluster_wide = scope == "cluster"
    if is_cluster_wide:
        skip_beside_jobs_of_others(namespace)
    values = [] if is_cluster_wide else [f"watchNamespaces={{{namespace.name}}}", "jobs.networkPolicy.enabled=true"]
    release.install(*values)
    # Its own pods would be started by the Kubelet below, as a process it is there already.
    namespace("scale", "deployment/cormorant", "--replicas=0")
    with StubHeads() as heads, Kubelet(namespace):
        installed = Installed(namespace, tmp_path, heads)
        with installed.behind_a_proxy() as proxy:
            installed.live()
            with urlopen(f"http://127.0.0.1:{installed.probe_port}/readyz", timeout=10) as answer:
                assert answer.status == 200
    assert proxy.denied == set()
    unasked = ASKED_BY_ADMISSION | ASKED_OF_A_TAINT | ASKED_OF_POD_GROUPS
    assert proxy.used - ASKED_OF_POD_GROUPS == granted(release, is_cluster_wide=is_cluster_wide) - unasked
