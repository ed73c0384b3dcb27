"""What pods run beside or instead of the job's own image: user code from an image, libraries of other kinds of
environments, an OpenEnv sidecar, GPU groups. The release: the chart's own test, and its images.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cormorant_client.delivery import decode
from cormorant_testing.placements.parties import PartyJob, PartyLoop
from cormorant_testing.real_cluster import DISK_USAGE, PREFIX, ROOT, Installation, build_image
from cormorant_testing.real_job import SMALL, note, running, small_job

CODE = """
import gymnasium

def make():
    return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 7.0)
"""


def mounts_images(installed: Installation) -> bool:
    """Whether the API server keeps a pod's image volume (feature gate ImageVolume)."""
    spec = {"containers": [{"name": "c", "image": "a"}], "volumes": [{"name": "code", "image": {"reference": "b"}}]}
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "asks"}, "template": {"spec": spec}}
    shown = installed.jobs("create", "--dry-run=server", "-o", "json", "-f", "-", document=pods, check=False)
    return '"reference": "b"' in shown


@pytest.fixture(params=["copied", "mounted"])
def base(installed: Installation, request: pytest.FixtureRequest) -> Iterator[str]:
    """What the code's image is made from. Only an image that is copied needs `cp`."""
    is_copied = request.param == "copied"
    if not is_copied and not mounts_images(installed):
        pytest.skip("the API server has no image volumes: Kubernetes 1.35, or 1.33 with the feature gate ImageVolume")
    installed.upgrade(f"jobs.imageVolumes={'never' if is_copied else 'always'}")
    yield installed.images.operator if is_copied else "scratch"
    installed.upgrade()


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


SUPPORT = ROOT / "tests" / "support" / "cormorant_testing"
OPENENV = """
FROM python:3.11-slim-bookworm
RUN python -m venv /opt/venv && /opt/venv/bin/pip install --quiet "openenv>=0.10"
COPY openenv_server.py /srv/
# Not the first process, which no signal from inside kills.
CMD ["sh", "-c", "/opt/venv/bin/python /srv/openenv_server.py 8000 4 0.0.0.0; exit 1"]
"""


def build_with(image: str, dockerfile: str, folder: Path, *modules: str) -> None:
    """Build an image with modules of the tests' support."""
    for module in modules:
        (folder / module).write_text((SUPPORT / module).read_text())
    (folder / "Dockerfile").write_text(dockerfile)
    build_image(image, folder)


def test_a_sidecar_that_is_killed_comes_back_alone(installed: Installation, tmp_path: Path) -> None:
    image = f"{PREFIX}/openenv-walk:{installed.images.tag}"
    build_with(image, OPENENV, tmp_path, "openenv_server.py")
    fields = {"observation": [{"name": "total", "dtype": "int64"}]}
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


KINDS = """
FROM python:3.11-slim-bookworm AS libraries
RUN python -m venv /opt/pip \
 && /opt/pip/bin/pip install --quiet --no-deps --target /libraries jax jaxlib ml_dtypes opt_einsum scipy pettingzoo
FROM {image}
COPY --from=libraries /libraries /opt/libraries
COPY agents.py functional.py /opt/libraries/
ENV PYTHONPATH=/opt/cormorant:/opt/libraries
"""
BATCHES = 12


@pytest.fixture(scope="module")
def image(installed: Installation, tmp_path_factory: pytest.TempPathFactory) -> str:
    name, dockerfile = f"{PREFIX}/kinds:{installed.images.tag}", KINDS.format(image=installed.images.job)
    build_with(name, dockerfile, tmp_path_factory.mktemp("kinds"), "agents.py", "functional.py")
    return name


class ChainCheck:
    """What follows a frame is what the next one begins with, unless an episode ended there."""

    def __init__(self) -> None:
        self.frames, self.ended = 0, list[int]()
        self._following: torch.Tensor | None = None
        self._goes_on = torch.zeros(0)

    def take(self, batch: Any) -> None:
        for t in range(batch.shape[1]):
            observation, after = batch["observation"][:, t], batch["next", "observation"][:, t]
            if self._following is not None:
                is_same = (observation == self._following).all(-1)
                assert (is_same == self._goes_on).all(), (self.frames, t)
            self._following, self._goes_on = after, ~batch["next", "done"][:, t, 0]
            self.frames += len(batch)
            self.ended += [self.frames] * int((~self._goes_on).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block", "check"),
    [
        ("vector", {"id": "CartPole-v1"}, ChainCheck),
        ("pettingzoo", {"entrypoint": "agents:Party"}, partial(PartyLoop, PartyJob(absences="deaths", num_envs=4))),
        ("jax", {"entrypoint": "functional:make"}, ChainCheck),
    ],
)
def test_every_frame_is_the_environments(
    installed: Installation, image: str, kind: str, block: dict[str, Any], check: Callable[[], ChainCheck | PartyLoop]
) -> None:
    collection = {"framesPerBatch": 128, "totalFrames": 128 * BATCHES}
    manifest = small_job(kind, {kind: {**block, "numEnvs": 4}}, image=image, collection=collection)
    checked = check()
    with running(installed.jobs, manifest) as job:
        for _ in range(BATCHES):
            batch = job.take()
            checked.take(decode(memoryview(batch.body)).tensordict(copy=True))
            job.ack(batch)
        assert job.take().status == 410
        note(f"{kind}: {checked.frames} frames, {len(checked.ended)} ends of episodes")
    assert checked.frames == 128 * BATCHES
    assert checked.ended


# -- the release -----------------------------------------------------------------------------------------------


def test_helm_test_runs_under_the_restricted_level(installed: Installation) -> None:
    said = installed.shell("helm test cormorant --namespace cormorant --timeout 3m", timeout_s=240)
    assert "Phase:          Succeeded" in said


def test_images_are_as_small_as_promised(installed: Installation) -> None:
    used = installed.operators("exec", "deployment/cormorant", "--", "sh", "-c", DISK_USAGE)
    operator_mb = int(used.partition("MB")[0])
    note(f"operator: {operator_mb} MB; cpu: {installed.images.job_mb} MB")
    assert 0 < operator_mb <= 250
    assert 0 < installed.images.job_mb <= 1500
