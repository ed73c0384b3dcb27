"""The CollectorJobs that the operator's benchmarks submit: of the size that people write."""

from typing import Any


def manifest(number: int, *, namespace: str, workers: int, is_played: bool = False) -> dict[str, Any]:
    """One job of so many workers, for nodes without kubelets alone, which asks for nothing that these could lack.

    Args:
        number: of the job.
        namespace: where it is.
        workers: beside its head.
        is_played: no node is there, and no scheduler is to look for one.
    """
    resources = {"requests": {"cpu": "1m", "memory": "1Mi"}, "limits": {"memory": "4Gi"}}
    place = {"schedulerName": "nobody"} if is_played else {"nodeSelector": {"type": "fake"}}
    on_fake_nodes = {"spec": place}
    return {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": f"bench-{number}", "namespace": namespace},
        "spec": {
            "env": {"envpool": {"taskId": "Pong-v5", "numEnvs": 64}, "maxEpisodeSteps": 27000},
            "policy": {"entrypoint": "cormorant.policies:atari_cnn"},
            "collection": {"framesPerBatch": 4096, "totalFrames": 50_000_000_000},
            "image": "example/cormorant:1",
            "head": {"resources": resources, "template": on_fake_nodes},
            "workerGroups": [{"name": "cpu", "resources": resources, "template": on_fake_nodes}],
            "replicas": workers,
        },
    }
