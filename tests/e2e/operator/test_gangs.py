"""PodGroups of a real API server and its scheduler. Nodes need no image: pods that have a node are enough."""

from collections.abc import Iterator

import pytest

from cormorant_testing.needs import lacks
from cormorant_testing.operator_scene import Scene

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
