"""An autoscaled group on a real API server: it follows a learner that becomes faster and slower, and settles."""

import time

import pytest

from cormorant_testing.kubectl import Kubelet
from cormorant_testing.operator_scene import Scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Sizes:
    """Every size that the group had."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.seen = scene, [2]

    def watch(self, seconds: float, *, until: int = 0) -> None:
        """Look until the group has a size, or for so long."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            size = self.scene.status()["groups"][0]["desired"]
            if size != self.seen[-1]:
                self.seen.append(size)
            if size == until:
                return
            time.sleep(1)
        assert not until, f"not {until} workers within {seconds:.0f} s: {self.seen}"


def test_group_follows_its_learners_and_settles(scene: Scene) -> None:
    head = scene.head
    head.sizes, head.demand = {"cpu": 2}, 3.9
    with scene.operator(), Kubelet(scene.namespace):
        group = {"name": "cpu", "autoscale": {"minReplicas": 1, "maxReplicas": 8}}
        scene.submit(workerGroups=[group], replicas=2)
        scene.until_ready()
        sizes = Sizes(scene)
        sizes.watch(120, until=4)
        sizes.watch(45)
        head.demand = 1.6
        sizes.watch(300, until=2)
        sizes.watch(45)
        # The 120 s that decide on a smaller size begin before the learner slows down: two steps are right. No size
        # is taken back.
        assert sizes.seen[:2] == [2, 4]
        assert sizes.seen[1:] == sorted(sizes.seen[1:], reverse=True)
        assert sizes.seen[-1] == 2
