"""Jobs in a queue of a real Kueue: held, admitted, preempted, finished. Heads are a stub's, kubelets the test's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.kubectl import Kubelet
from cormorant_testing.operator_scene import Scene
from cormorant_testing.real_job import Job
from cormorant_testing.real_kueue import KueueProcess, Quota, skip_without_kueue


@pytest.fixture
def quota(scene: Scene, tmp_path: Path) -> Iterator[Quota]:
    """A quota of a real Kueue that is too small for a job."""
    skip_without_kueue()
    with KueueProcess(tmp_path) as kueue, scene.operator(), Kubelet(scene.namespace):
        quota = Quota(scene.namespace, cpu="100m", node_labels={"kubernetes.io/os": "linux", "pool": "spot"})
        kueue.wait_until_it_queues(scene.namespace)
        yield quota
        quota.close()


def condition(scene: Scene, kind: str, job: str = "pong") -> dict[str, str]:
    """What Kueue or the operator says of the job's Workload."""
    (found,) = scene.namespace.items("workloads.kueue.x-k8s.io", f"cormorant.dev/collectorjob={job}")
    return next((c for c in found.get("status", {}).get("conditions", ()) if c["type"] == kind), {})


def pods(scene: Scene, job: str = "pong") -> list[dict[str, Any]]:
    return scene.namespace.items("pods", f"cormorant.dev/collectorjob={job}")


def test_preempted_job_drains_and_goes_on_where_it_was(scene: Scene, quota: Quota) -> None:
    scene.submit(labels=quota.labels("low"))
    scene.until(lambda: scene.condition("Scheduled") == "False/WaitingForQuota", "the condition says so")
    scene.until(lambda: condition(scene, "QuotaReserved").get("message"), "Kueue says why")
    scene.until(lambda: "insufficient quota" in str(scene.status["conditions"]), "the job says why")
    assert (pods(scene), scene.status["phase"]) == ([], "Pending")
    quota.set_cpu("500m")  # room for one job: a head of 250m and two workers of 100m
    scene.until_ready()
    assert {pod["spec"]["nodeSelector"]["pool"] for pod in pods(scene)} == {"spot"}
    scene.until(lambda: quota.used_cpu() == "450m", "its quota is used")
    scene.until(lambda: condition(scene, "PodsReady").get("status") == "True", "Kueue is told")
    scene.stub.frames = 1000
    scene.submit("urgent", labels=quota.labels("high"))
    scene.until(lambda: scene.stub.phase == "Draining", "the head drains")
    scene.until(lambda: scene.condition("Suspended") == "False/Evicted", "the condition says so")
    # Its quota is its own until its pods are gone: learners take the last batches.
    assert (pods(scene, "urgent"), len(pods(scene))) == ([], 3)
    scene.stub.frames = 1536
    scene.until(lambda: scene.status["frames"]["settled"] == 1536, "the last frames are in the status")
    scene.namespace.finish("pong-head-1", container="head", exit_code=143)
    Job(scene.namespace, "urgent").until_ready()
    assert pods(scene) == []
    assert scene.condition("Scheduled") == "False/WaitingForQuota"
    assert condition(scene, "Requeued")["reason"] == "Preempted"
    # The end of the other job gives its quota back.
    scene.stub.phase = "Running"
    scene.namespace.finish("urgent-head-1", container="head", exit_code=0, reason="Completed")
    scene.until(lambda: condition(scene, "Finished", "urgent").get("reason") == "Succeeded", "it finished")
    scene.until_ready()
    (head,) = [pod for pod in pods(scene) if pod["metadata"]["name"] == "pong-head-2"]
    command = " ".join(head["spec"]["containers"][0]["command"])
    assert "1536" in command, "settled frames are not collected again"
    assert (scene.status["frames"]["settled"], scene.status["headRestarts"]) == (1536, 0)
    scene.namespace.finish("pong-head-2", container="head", exit_code=0, reason="Completed")
    scene.until(lambda: condition(scene, "Finished").get("reason") == "Succeeded", "it finished")
    scene.until(lambda: quota.used_cpu() == "0", "all quota is free")
    assert scene.status["frames"]["settled"] == 100_000
