"""The life of one job that the command line submits with its code, and reaches through the API server: its tests
follow each other, and share its pods.
"""

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import cormorant
from cormorant.errors import BadAddress
from cormorant.policies import mlp
from cormorant_client.delivery import decode
from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import OURS, Job, deleted_afterwards, note, small_job

TOTAL, FRAMES = 40_000, 400
HIDDEN = [1024, 1024]
CODE = f"""
import gymnasium
from cormorant.policies import mlp

def make():
    return gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 7.0)

def policy(observation_space, action_space):
    return mlp(observation_space, action_space, hidden={HIDDEN})
"""
MANIFEST = small_job(
    "marked",
    {"gymnasium": {"entrypoint": "my_pkg:make", "vectorization": "subprocess", "numEnvs": 4}},
    policy="my_pkg:policy",
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
    package = installed.folder / "code" / "my_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CODE)
    (installed.folder / "marked.yaml").write_text(yaml.safe_dump(MANIFEST))
    with deleted_afterwards(installed.jobs, "marked") as job:
        yield job


@pytest.fixture(scope="module")
def learner(job: Job) -> Learner:
    return Learner(job)


def test_submitted_code_runs_under_the_restricted_level(job: Job, learner: Learner, installed: Installation) -> None:
    installed.shell("cormorant submit marked.yaml --code code")
    began = time.monotonic()
    learner.step()
    note(f"submitted to the first batch: {time.monotonic() - began:.1f} s")
    job.until_ready()
    job.until(lambda: job.frames() > 0, what="the status counts frames")
    assert installed.shell("cormorant status marked").startswith("marked: Running\n")
    label = job.namespace("get", "namespace", job.namespace.name, "-o", "jsonpath={.metadata.labels}")
    assert json.loads(label)["pod-security.kubernetes.io/enforce"] == "restricted"


def test_healthy_start_gives_no_warnings(job: Job) -> None:
    events = job.namespace.items("events")
    assert [e["message"] for e in events if e["type"] == "Warning" and e["involvedObject"]["name"] in job.pods()] == []


def test_full_queue_is_no_stall(job: Job) -> None:
    job.until(lambda: job.condition("Progressing") == "True/WaitingForConsumer", what="workers wait for a learner")


def test_weights_go_out_and_come_back(job: Job, installed: Installation) -> None:
    with cormorant.connect(job.name, namespace=job.namespace.name) as fleet:
        sent = mlp(*fleet.spaces, hidden=HIDDEN).state_dict()
    file, back = installed.folder / "sent.safetensors", installed.folder / "back.safetensors"
    save_file(sent, file)
    assert file.stat().st_size > 4_000_000  # many pieces of a forwarded connection
    pushed = installed.shell(f"cormorant weights push {file} marked --wait 60")
    assert pushed.startswith("version 1: applied, 1 of 1 workers")
    installed.shell(f"cormorant weights pull {back} marked")
    torch.testing.assert_close(load_file(back), dict(sent), rtol=0, atol=0)
    assert "version 1" in installed.shell("cormorant weights list marked")


def test_a_script_reads_and_trains_the_job_by_its_name(job: Job, learner: Learner) -> None:
    """`cormorant.connect("marked")`: what two processes read, and weights, go through the API server."""
    with cormorant.connect(job.name, namespace=job.namespace.name) as fleet:
        receipt = fleet.publish(mlp(*fleet.spaces, hidden=HIDDEN), wait=60)
        assert receipt.applied == ("cpu-0",)
        assert fleet.version == receipt.version == fleet.stats().version
        with fleet.batches(frames=3 * FRAMES) as batches:
            learner.frames += sum(batch.numel() for batch in batches)
        (shard,) = pickle.loads(pickle.dumps(fleet.streaming_split(1)))
        read_one = "with pickle.load(sys.stdin.buffer).iter_batches() as batches: print(next(batches).numel())"
        command = [sys.executable, "-c", f"import pickle, sys\n{read_one}"]
        said = subprocess.run(command, input=pickle.dumps(shard), capture_output=True, check=True).stdout
        assert int(said) == FRAMES
        learner.frames += FRAMES
        assert job.ask("/v1/status").json["frames"]["settled"] == learner.frames
        with fleet.pause(wait=60):
            assert fleet.stats().is_paused
    with pytest.raises(BadAddress, match="nobody"):
        cormorant.connect("nobody", namespace=job.namespace.name)


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
