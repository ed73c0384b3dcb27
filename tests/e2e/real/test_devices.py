"""CPU and GPU groups in one job. The policies of the gpu group run on the CPU, by the setting for nodes without one."""

from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import SMALL, running, small_job

ON_CPU = {"spec": {"containers": [{"name": "head", "env": [{"name": "CORMORANT_DEVICE", "value": "cpu"}]}]}}
GPU_GROUP = {"name": "gpu", "device": "gpu", "replicas": 1, "resources": SMALL}
MANIFEST = small_job(
    "mixed",
    {"envpool": {"taskId": "CartPole-v1", "numEnvs": 8, "numThreads": 1}},
    policy="cormorant.policies:mlp",
    collection={"framesPerBatch": 256, "seed": 7},
    output={"queue": {"capacityBatches": 4, "onFull": "drop_oldest"}},
    head={"resources": SMALL, "template": ON_CPU},
    workerGroups=[{"name": "cpu", "resources": SMALL}, GPU_GROUP],
)


def test_groups_of_both_kinds_collect_in_one_job(installed: Installation) -> None:
    with running(installed.jobs, MANIFEST) as job:
        job.until_ready()
        (pod,) = job.namespace.items("pods", f"cormorant.dev/collectorjob={job.name},cormorant.dev/group=gpu")
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert pod["spec"]["nodeName"]

        def counts() -> dict[str, int]:
            return {worker["id"]: worker["frames"] for worker in job.ask("/v1/workers").json["workers"]}

        job.until(
            lambda: counts().keys() == {"cpu-0", "gpu-0"} and min(counts().values()) > 1000,
            what="both workers collect",
        )  # fmt: skip
        job.until(lambda: job.frames() > 2000, what="the status counts them")
        assert {group["name"]: group["ready"] for group in job.status["groups"]} == {"cpu": 1, "gpu": 1}
        job.delete()
