"""What pods run beside or instead of the job's own image: user code from an image, an OpenEnv sidecar, GPU groups."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cormorant_client.delivery import decode
from cormorant_testing.real_cluster import PREFIX, ROOT, Installation, build_image
from cormorant_testing.real_job import SMALL, note, running, small_job

CODE = """
import gymnasium

def make():
    return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 7.0)
"""


def mounts_images(installed: Installation) -> bool:
    """Whether the API server keeps a pod's image volume (feature gate ImageVolume)."""
    spec = {
        "containers": [{"name": "c", "image": "a"}],
        "volumes": [{"name": "code", "image": {"reference": "b"}}],
    }
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "asks"}, "template": {"spec": spec}}
    shown = installed.jobs("create", "--dry-run=server", "-o", "json", "-f", "-", document=pods, check=False)
    return '"reference": "b"' in shown


@pytest.fixture(params=["copied", "mounted"])
def base(installed: Installation, request: pytest.FixtureRequest) -> Iterator[str]:
    """What the code's image is made from. Only an image that is copied needs `cp`."""
    is_copied = request.param == "copied"
    if not is_copied and not mounts_images(installed):
        pytest.skip("the API server has no image volumes: Kubernetes 1.35, or 1.33 with the feature gate ImageVolume")
    installed.release.upgrade(f"jobs.imageVolumes={'never' if is_copied else 'always'}", chart=installed.chart)
    installed.wait()
    yield installed.images.operator if is_copied else "scratch"
    installed.release.upgrade("jobs.imageVolumes=auto", chart=installed.chart)
    installed.wait()


def test_code_of_an_image_runs(installed: Installation, base: str, tmp_path: Path) -> None:
    image = f"{PREFIX}/my-code-{'of-scratch' if base == 'scratch' else 'with-cp'}:{installed.images.tag}"
    (tmp_path / "my_env.py").write_text(CODE)
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nCOPY my_env.py /code/\n")
    build_image(image, tmp_path)
    env = {"gymnasium": {"entrypoint": "my_env:make", "numEnvs": 2}}
    manifest = small_job("from-image", env, code={"image": image}, collection={"framesPerBatch": 64})
    with running(installed.jobs, manifest) as job:
        batch = job.take()
        assert decode(memoryview(batch.body)).tensordict()["next", "reward"].unique().tolist() == [7.0]
        job.ack(batch)
        job.delete()


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


SERVER = ROOT / "tests" / "support" / "cormorant_testing" / "openenv_server.py"
DOCKERFILE = """
FROM python:3.11-slim-bookworm
RUN python -m venv /opt/venv && /opt/venv/bin/pip install --quiet "openenv>=0.10"
COPY openenv_server.py /srv/
# Not the first process, which no signal from inside kills.
CMD ["sh", "-c", "/opt/venv/bin/python /srv/openenv_server.py 8000 4 0.0.0.0; exit 1"]
"""


def test_a_sidecar_that_is_killed_comes_back_alone(installed: Installation, tmp_path: Path) -> None:
    image = f"{PREFIX}/openenv-walk:{installed.images.tag}"
    (tmp_path / SERVER.name).write_text(SERVER.read_text())
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    build_image(image, tmp_path)
    fields = {"observation": [{"name": "total", "dtype": "int64"}], "legalActions": "legal"}
    env = {"openenv": {"image": image, "numEnvs": 2, "fields": fields}}
    manifest = small_job("walk", env, collection={"framesPerBatch": 64})
    with running(installed.jobs, manifest) as job:

        def take() -> None:
            batch = job.take()
            after = decode(memoryview(batch.body)).tensordict()["next"]
            assert after["observation"].squeeze(-1).tolist() == after["reward"].squeeze(-1).long().tolist()
            job.ack(batch)

        take()
        (pod,) = job.pods("worker")
        installed.jobs("exec", pod, "-c", "openenv", "--", "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
        for _ in range(12):  # more than the workers hold ready
            take()
        status = installed.jobs.get("pod", pod)["status"]
        (server,) = status["initContainerStatuses"]
        assert server["restartCount"] == 1
        assert [c["restartCount"] for c in status["containerStatuses"]] == [0]
        assert set(job.pods("worker")) == {pod}
        note(f"frames: {job.ask('/v1/status').json['frames']}")
        job.delete()
