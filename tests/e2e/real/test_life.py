"""The life of one job whose code comes from a ConfigMap: its tests follow each other, and share its pods."""

import json
import time
from collections.abc import Iterator

import pytest

from cormorant_client.delivery import decode
from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import OURS, Job, note, running, small_job

TOTAL, FRAMES = 40_000, 400
CODE = """
import gymnasium

def make():
    return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 7.0)
"""
MANIFEST = small_job(
    "marked",
    {"gymnasium": {"entrypoint": "my_env:make", "vectorization": "subprocess", "numEnvs": 4}},
    policy="cormorant.policies:mlp",
    code={"configMap": "my-code"},
    collection={"framesPerBatch": FRAMES, "totalFrames": TOTAL, "seed": 7},
    output={"queue": {"capacityBatches": 4}},
    runPolicy={"drainSeconds": 60},
)


class Learner:
    """Takes batches, and knows how many frames it has acknowledged."""

    def __init__(self, job: Job) -> None:
        self.job, self.frames = job, 0

    def step(self, times: int = 1) -> None:
        """Take batches, look at what they hold, and acknowledge them."""
        for _ in range(times):
            batch = self.job.take()
            assert batch.status == 200, batch
            data = decode(memoryview(batch.body)).tensordict()
            assert data["next", "reward"].unique().tolist() == [7.0], "the environment is not the ConfigMap's"
            self.job.ack(batch)
            self.frames += data.numel()


@pytest.fixture(scope="module")
def job(installed: Installation) -> Iterator[Job]:
    namespace = installed.jobs
    namespace.apply_files("my-code", {"my_env.py": CODE})
    with running(namespace, MANIFEST) as job:
        yield job


@pytest.fixture(scope="module")
def learner(job: Job) -> Learner:
    return Learner(job)


def test_config_map_code_runs_under_the_restricted_level(job: Job, learner: Learner) -> None:
    began = time.monotonic()
    ready_s = job.until_ready()
    learner.step()
    first_s = time.monotonic() - began
    job.until(lambda: job.frames() > 0, what="the status counts frames")
    note(f"applied to ready: {ready_s:.1f} s, to the first batch: {first_s:.1f} s")
    label = job.namespace("get", "namespace", job.namespace.name, "-o", "jsonpath={.metadata.labels}")
    assert json.loads(label)["pod-security.kubernetes.io/enforce"] == "restricted"


def test_healthy_start_gives_no_warnings(job: Job) -> None:
    events = job.namespace.items("events")
    assert [e["message"] for e in events if e["type"] == "Warning" and e["involvedObject"]["name"] in job.pods()] == []


def test_full_queue_is_no_stall(job: Job) -> None:
    job.until(lambda: job.condition("Progressing") == "True/WaitingForConsumer", what="workers wait for a learner")


def test_pause_stops_frames_and_keeps_pods(job: Job, learner: Learner) -> None:
    pods = job.pods()
    job.edit(paused=True)
    job.until(lambda: job.condition("Paused") == "True/Spec", what="the job is paused")
    job.until(lambda: job.ask("/v1/status").json["pause_state"] == "paused", what="the fleet is paused")
    learner.step(2)
    stepped = [job.ask("/v1/status").json["frames"]["stepped"] for _ in range(2) if time.sleep(1.5) is None]
    assert stepped[0] == stepped[1]
    job.edit(paused=False)
    job.until(lambda: job.ask("/v1/status").json["frames"]["stepped"] > stepped[0], what="frames again")
    assert job.pods() == pods


def test_scaling_loses_no_batch(job: Job, learner: Learner) -> None:
    pods = job.pods()
    job.namespace("scale", f"collectorjob/{job.name}", "--replicas=2")

    def collects(worker: str) -> bool:
        learner.step()
        return any(w["id"] == worker and w["frames"] > 0 for w in job.ask("/v1/workers").json["workers"])

    job.until(lambda: collects("cpu-1"), what="the second worker collects")
    assert job.raw["status"]["workers"] == "2/2"
    job.namespace("scale", f"collectorjob/{job.name}", "--replicas=1")
    job.until(lambda: learner.step() or job.pods() == pods, what="its pod is gone")
    assert job.ask("/v1/status").json["frames"]["dropped"] == {}


def test_killed_worker_is_replaced_and_nobody_else_is_touched(job: Job, learner: Learner) -> None:
    head = job.pods("head")
    created_s = job.replace_worker()
    job.until_ready()
    learner.step(6)
    note(f"worker deleted to its replacement created: {created_s:.1f} s")
    assert job.pods("head") == head


def test_job_survives_uninstalling_and_is_adopted(job: Job, learner: Learner, installed: Installation) -> None:
    pods = job.pods()
    installed.upgrade("resources.requests.cpu=30m")  # another pod of the operator
    collected = job.frames()
    learner.step(4)
    job.until(lambda: job.frames() > collected, what="the upgraded operator counts on")
    installed.release.uninstall()
    installed.operators.until(lambda: not installed.operators.items("pods"), what="the operator is gone")
    collected = job.frames()
    learner.step(4)
    installed.install()
    job.until(lambda: job.frames() > collected, what="the next operator counts on")
    assert job.pods() == pods


def test_job_completes_when_every_frame_was_acknowledged_once(job: Job, learner: Learner) -> None:
    while learner.frames < TOTAL:
        learner.step()
    assert learner.frames == TOTAL
    job.until(lambda: job.condition("Completed"), what="the job is complete")
    assert job.condition("Completed") == "True/AllFramesDelivered"
    frames = job.status["frames"]
    assert (frames["collected"], frames["settled"], frames["target"]) == (TOTAL, TOTAL, TOTAL)
    job.until(lambda: job.pods() == {}, what="workers have given their nodes back")


def test_deletion_leaves_nothing(job: Job) -> None:
    note(f"deleted to nothing left: {job.delete():.1f} s")
    assert [kind for kind in ("pods", "services", "configmaps", "secrets") if job.namespace.names(kind, OURS)] == []
