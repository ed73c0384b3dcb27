"""Operators on a real API server: jobs come, change and go; tokens, gangs, and a node that is lost."""

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cormorant_testing.kubectl import Kubelet, Namespace
from cormorant_testing.needs import lacks
from cormorant_testing.operator_scene import Scene
from cormorant_testing.real_job import Job
from cormorant_testing.scripts import Repeated


def test_unknown_fields_of_a_template_are_named(scene: Scene) -> None:
    with scene.operator():
        scene.submit(head={"template": {"nodeSelector": {"a": "b"}, "spec": {"nodeselector": {"a": "b"}}}})
        scene.until(lambda: scene.condition("Accepted") == "False/InvalidPodTemplate", "the template is refused")
        assert 'unknown field "spec.nodeselector", unknown field "nodeSelector"' in scene.message("Accepted")
        scene.submit(head={"template": {"spec": {"nodeSelector": {"a": "b"}}}})
        scene.until(lambda: scene.condition("Accepted") == "True/Accepted", "the corrected one is accepted")


def test_kubectl_scale_resizes_the_elastic_group(running: Scene) -> None:
    running.namespace("scale", "cjob/pong", "--replicas=4")
    running.until(lambda: len(running.namespace.names("pods")) == 5, "four workers and a head")
    running.until(lambda: running.stub.sizes == {"cpu": 4}, "the head is told")
    running.until(lambda: running.scale()["replicas"] == 4, "an autoscaler sees four")
    selected = running.namespace.names("pods", running.scale()["selector"])
    assert selected == running.namespace.names("pods", "cormorant.dev/role=worker")
    running.namespace("scale", "cjob/pong", "--replicas=1")
    running.until(lambda: len(running.namespace.names("pods")) == 2, "one worker and a head")
    running.until(lambda: running.status["elastic"]["replicas"] == 1, "the scale subresource knows")


def test_what_others_change_is_restored(scene: Scene) -> None:
    namespace, managed = scene.namespace, "app.kubernetes.io/managed-by"

    def policies() -> dict[str, Any]:
        return {item["metadata"]["name"]: item for item in namespace.items("networkpolicies")}

    with Kubelet(namespace):
        with scene.operator("--network-policies"):
            scene.submit()
            scene.until_ready()
            policy = policies()["pong-pods"]
            patch = '{"spec": {"selector": {"cormorant.dev/epoch": "99"}}}'
            namespace("patch", "service", "pong-head", "--type=merge", "-p", patch)
            scene.until(
                lambda: namespace.get("service", "pong-head")["spec"]["selector"]["cormorant.dev/epoch"] == "1",
                "the selector is back",
            )
            namespace("label", "service", "pong-api", f"{managed}-")
            scene.until(
                lambda: managed in namespace.get("service", "pong-api")["metadata"]["labels"], "so is the label"
            )
            # The API server's defaults make no difference: it is not applied again and again.
            assert policies() == {"pong-pods": policy}
        namespace("patch", "networkpolicy", "pong-pods", "--type=merge", "-p", '{"spec": {"ingress": []}}')
        with scene.operator("--network-policies"):
            scene.until(lambda: policies()["pong-pods"]["spec"] == policy["spec"], "the policy is back")


def test_deleted_and_reapplied_job_runs_within_seconds(running: Scene) -> None:
    # Kubelet lets pods end at once; a head that drains is one whose finalizer holds it.
    hold = '{"metadata": {"finalizers": ["example.com/drains"]}}'
    running.namespace("patch", "pod", "pong-head-1", "--type=merge", "-p", hold)
    try:
        first = running.namespace.get("cjob", "pong")["metadata"]["uid"]
        running.namespace("delete", "cjob", "pong")
        running.submit()
        running.until(lambda: running.condition("Ready") == "True/EnoughWorkers", "the second job is ready")
        assert running.namespace.get("cjob", "pong")["metadata"]["uid"] != first
        assert running.namespace.get("pod", "pong-head-1")["metadata"]["deletionTimestamp"]
        assert running.status["epoch"] == 2
        owners = {
            name: running.namespace.get(kind, name)["metadata"]["ownerReferences"][0]["uid"]
            for kind, name in (("service", "pong-head"), ("service", "pong-api"), ("secret", "pong-tokens"))
        }
        assert first not in owners.values()
    finally:
        running.namespace("patch", "pod", "pong-head-1", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')


def test_deletion_leaves_nothing_also_without_an_operator(scene: Scene) -> None:
    kinds = ("pods", "services", "secrets", "configmaps")
    with Kubelet(scene.namespace):
        with scene.operator() as operator:
            scene.submit()
            scene.until_ready()
            operator.kill()
        assert all(scene.namespace.names(kind) for kind in kinds)
        scene.namespace("delete", "cjob", "pong")
        for kind in kinds:
            scene.until(lambda kind=kind: scene.namespace.names(kind) == [], f"no {kind} are left")


@pytest.mark.timeout(600)
def test_two_shards_by_label_share_jobs_and_take_over(scene: Scene) -> None:
    def shard(name: str, selector: str) -> Any:
        lease = f"{scene.namespace.name}/{name}"
        return scene.operator("--selector", selector, "--lease", lease)

    def replace_worker() -> None:
        before = scene.uids()
        victim = next(name for name in before if name.startswith("pong-cpu-0"))
        scene.namespace("delete", "pod", victim, "--wait=false")
        scene.namespace.until(
            lambda: len(scene.uids()) == 6 and victim not in scene.uids(), what="it is replaced", within_s=90
        )
        after = scene.uids()
        assert {name: uid for name, uid in before.items() if name != victim}.items() <= after.items()
        scene.until_ready(within_s=90)

    with shard("a", "team=a") as a, shard("rest", "team!=a") as rest, Kubelet(scene.namespace):
        scene.submit(labels={"team": "a"})
        scene.submit("other")
        scene.until_ready(within_s=90)
        Job(scene.namespace, "other").until_ready(within_s=90)
        assert len(scene.namespace.names("leases", "")) == 2
        assert ('"job": "pong"' in a.text, '"job": "other"' in a.text) == (True, False)
        assert ('"job": "pong"' in rest.text, '"job": "other"' in rest.text) == (False, True)
        scene.namespace("label", "cjob", "pong", "team=b", "--overwrite")
        a.kill()  # what happens now is the other's work
        replace_worker()
        assert '"job": "pong"' in rest.text
    with shard("a", "team=a"), shard("rest", "team!=a"), Kubelet(scene.namespace):
        for team in ("a", "b", "a"):
            scene.namespace("label", "cjob", "pong", f"team={team}", "--overwrite")
            replace_worker()


def test_changed_secret_is_replaced_and_no_pod_with_it(running: Scene) -> None:
    namespace, head = running.namespace, running.stub
    before, pods = namespace.get("secret", "pong-tokens"), running.uids()
    wrong = base64.b64encode(b"of another hand").decode()
    namespace("patch", "secret", "pong-tokens", "--type=merge", "-p", f'{{"data": {{"operator": "{wrong}"}}}}')
    head.accepted = "Bearer of another hand"  # as soon as its kubelet shows it to the head
    running.until(lambda: running.condition("Progressing") == "Unknown/TokenRefused", "the condition says so")

    def secret() -> dict[str, Any]:
        return next((item for item in namespace.items("secrets") if item["metadata"]["name"] == "pong-tokens"), {})

    namespace.until(
        lambda: secret().get("data") == before["data"], what="it holds the job's own tokens again", within_s=120
    )
    assert secret()["metadata"]["uid"] != before["metadata"]["uid"]
    head.accepted = f"Bearer {base64.b64decode(before['data']['operator']).decode()}"
    running.until(lambda: not running.condition("Progressing").startswith("Unknown"), "the head answers again")
    assert running.uids() == pods


ROOM = "cormorant.dev/test-room"
"""Label of a node that has room for workers."""


@pytest.fixture
def node(scene: Scene) -> Iterator[str]:
    if "podgroups" not in scene.namespace("get", "--raw", "/apis/scheduling.k8s.io/v1beta1", check=False):
        lacks("podgroups", "the API server serves no PodGroups of scheduling.k8s.io/v1beta1")
    nodes = scene.namespace.names("nodes", "")
    if not nodes:
        lacks("nodes", "the cluster has no node")
    yield nodes[0]
    scene.namespace("label", "node", nodes[0], f"{ROOM}-")


def nodes_of(scene: Scene) -> dict[str, str]:
    """Nodes of the pods, by the pods' names; empty: none yet."""
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in scene.namespace.items("pods")}


def count(scene: Scene) -> int:
    """Pods that the scheduler binds together."""
    (group,) = scene.namespace.items("podgroups")
    return int(group["spec"]["schedulingPolicy"]["gang"]["minCount"])


def test_first_pods_get_nodes_together_and_later_ones_alone(scene: Scene, node: str) -> None:
    namespace = scene.namespace
    template = {"spec": {"nodeSelector": {ROOM: namespace.name}}}
    with scene.operator():
        scene.submit(workerGroups=[{"name": "cpu", "minReplicas": 2, "template": template}])
        scene.until(lambda: "minCount" in scene.message("Scheduled"), "the scheduler has tried the gang")
        assert (set(nodes_of(scene).values()), count(scene)) == ({""}, 3), "the head alone would have fit"
        namespace("label", "node", node, f"{ROOM}={namespace.name}")
        scene.until(lambda: "" not in nodes_of(scene).values(), "all pods have a node")
        scene.until(lambda: count(scene) == 1, "later pods need no others")
        namespace("label", "node", node, f"{ROOM}-")
        before = nodes_of(scene)
        worker = next(name for name in before if "-cpu-" in name)
        namespace("delete", "pod", worker, "--force", "--grace-period=0")
        scene.until(lambda: nodes_of(scene).keys() - before.keys(), "the worker is replaced")
        namespace("delete", "pod", "pong-head-1", "--force", "--grace-period=0")
        scene.until(lambda: nodes_of(scene).get("pong-head-2"), "the next head has a node")
        assert "" in nodes_of(scene).values(), "the other worker has none yet"


class Node(Repeated):
    """A node that is ready for as long as its kubelet says so, every 5 s. Use as a context manager."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        super().__init__(self._say, every_s=5)
        self.name = f"{namespace.name}-{name}"
        self._kubectl = namespace

    def __enter__(self) -> "Node":
        labels = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": self.name}
        self._kubectl("apply", "-f", "-", document={
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name, "labels": labels},
        })  # fmt: skip
        self._say()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._kubectl("delete", "node", self.name, "--wait=false", check=False)

    def stop(self) -> None:
        """The kubelet stops; what it said last stays."""
        super().__exit__()

    def is_ready(self) -> bool:
        found = self._kubectl.get("node", self.name)["status"]["conditions"]
        return next(c["status"] for c in found if c["type"] == "Ready") == "True"

    def _say(self) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        room = {"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"}
        status: dict[str, Any] = {"conditions": [ready], "allocatable": room, "capacity": room}
        patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
        self._kubectl("patch", "node", self.name, *patch, check=False)


def pods_on(scene: Scene, node: Node) -> dict[str, bool]:
    """Whether it is told to end, by pod of a node."""
    return {
        pod["metadata"]["name"]: "deletionTimestamp" in pod["metadata"]
        for pod in scene.namespace.items("pods")
        if pod["spec"].get("nodeName") == node.name
    }


def test_lost_node_gives_its_pods_successors_and_none_is_forced_away(scene: Scene) -> None:
    with Node(scene.namespace, "a") as first, scene.operator(), Kubelet(scene.namespace):
        scene.submit()
        scene.until_ready(within_s=60)
        before = pods_on(scene, first)
        assert "pong-head-1" in before
        assert not any(before.values())
        assert len(before) == 3
        with Node(scene.namespace, "b") as second:
            first.stop()
            # Silence is no loss: until the controllers say so, and the taint's 30 s have passed, nothing is done.
            scene.namespace.until(lambda: not first.is_ready(), what="its node is called lost", within_s=120)
            assert pods_on(scene, first) == before
            assert pods_on(scene, second) == {}
            scene.namespace.until(lambda: len(pods_on(scene, second)) == 3, what="successors", within_s=120)
            # No kubelet confirms their end, so they stay, under their own names, and count for nothing.
            assert pods_on(scene, first) == dict.fromkeys(before, True)
            assert not set(before) & set(pods_on(scene, second))
            scene.until_ready(within_s=60)
            assert scene.status["workers"] == "2/2"
            # The node comes back, and its kubelet ends what was told to end.
            scene.namespace("delete", "pod", *before, "--force", "--grace-period=0")
            time.sleep(3)
            assert len(pods_on(scene, second)) == 3
            assert not any(pods_on(scene, second).values())
