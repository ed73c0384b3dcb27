"""A Ray cluster in pods, as KubeRay makes it: plain `ray start`, workers come and go, and our fleet is the driver."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cormorant_testing.kubectl import Namespace, restricted_pod
from cormorant_testing.numbered import CODE, FRAMES, manifest
from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import SMALL, note
from cormorant_testing.scripts import until

TOTAL = 60 * FRAMES
DRIVER = f"""
import json
import time

from cormorant import RayOptions, open_fleet

with open_fleet("/code/job.yaml", engine=RayOptions(address="auto")) as fleet:
    frames = 0
    for batch in fleet.batches():
        frames += batch.numel()
        print(json.dumps({{"at": time.time(), "frames": frames}}), flush=True)
        if frames >= {TOTAL}:
            break
"""
START = "ray start --block --disable-usage-stats --node-ip-address=$POD_IP --object-store-memory=104857600"
ROLES = {
    "head": f"{START} --head --port=6379 --num-cpus=0 --include-dashboard=false",
    "worker": f"{START} --address=ray-head:6379 --num-cpus=1",
}


def pod(name: str, role: str, image: str) -> Any:
    """A node of the cluster, as KubeRay starts it from a RayCluster's group."""
    container = {
        "name": "ray",
        "image": image,
        "command": ["bash", "-c", ROLES[role]],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_AUTH_TOKEN", "value": "f" * 32},
            {"name": "HOME", "value": "/tmp"},
            {"name": "PYTHONPATH", "value": "/code"},
        ],
        "resources": SMALL,
        "volumeMounts": [{"name": "code", "mountPath": "/code"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "code", "configMap": {"name": "driver"}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return restricted_pod(name, container, labels={"ray": role}, terminationGracePeriodSeconds=1, volumes=volumes)


@pytest.fixture
def cluster(installed: Installation) -> Iterator[Namespace]:
    kubectl = installed.jobs
    job = manifest("numbered", {}, on_full="wait", workers=2)
    # Its code is a ConfigMap of the cluster's pods, as any image's.
    del job["spec"]["code"]
    kubectl.apply_files("driver", {"numbered.py": CODE, "driver.py": DRIVER, "job.yaml": yaml.safe_dump(job)})
    service = {"selector": {"ray": "head"}, "ports": [{"port": 6379}]}
    made = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "ray-head"}, "spec": service},
        pod("ray-head-0", "head", installed.images.job),
        pod("ray-worker-0", "worker", installed.images.job),
        pod("ray-worker-1", "worker", installed.images.job),
    ]
    for document in made:
        kubectl("apply", "-f", "-", document=document)
    yield kubectl
    for kind, name in (("service", "ray-head"), ("configmap", "driver")):
        kubectl("delete", kind, name, "--wait=false", check=False)
    kubectl("delete", "pods", "-l", "ray", "--wait=false", check=False)


def test_fleet_on_an_existing_ray_cluster_outlives_its_workers(cluster: Namespace, installed: Installation) -> None:
    kubectl = cluster

    def log() -> str:
        return kubectl("exec", "ray-head-0", "--", "cat", "/tmp/driver.log", check=False)

    def frames() -> int:
        lines = [line for line in log().splitlines() if line.startswith('{"at"')]
        return int(json.loads(lines[-1])["frames"]) if lines else 0

    def has_answered() -> bool:
        return (
            kubectl.run("exec", "ray-head-0", "--", "ray", "health-check", "--address", "ray-head:6379").returncode == 0
        )

    until(has_answered, seconds=180, what="Ray's head answers")
    # A RayJob's entrypoint runs on the head's node, like this.
    kubectl("exec", "ray-head-0", "--", "bash", "-c", "nohup python /code/driver.py > /tmp/driver.log 2>&1 &")
    try:
        until(lambda: frames() > 5 * FRAMES, seconds=240, what="frames come")
        kubectl("delete", "pod", "ray-worker-0", "--now", "--wait=false")
        lost = time.monotonic()
        kubectl("apply", "-f", "-", document=pod("ray-worker-2", "worker", installed.images.job))
        before = frames()
        until(lambda: frames() > before + 10 * FRAMES, seconds=240, what="frames come without that worker")
        note(f"a worker's node went and another came: 10 batches after {time.monotonic() - lost:.1f} s")
        until(lambda: frames() >= TOTAL, seconds=240, what="all frames are there")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log()[-4000:]}") from None
