"""A node whose kubelet stops: the controllers of a real API server find it, and evict its pods."""

import json
import time
from typing import Any

from cormorant_testing.kubectl import Kubelet, Namespace
from cormorant_testing.operator_scene import Scene
from cormorant_testing.scripts import Repeated


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
