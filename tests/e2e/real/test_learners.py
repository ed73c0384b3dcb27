"""Learners that lose the head, or an inference server in a pod of its own: no batch is too old, no frame is lost."""

import time
from collections.abc import Callable

import yaml

from cormorant_testing.real_cluster import ROOT, Installation
from cormorant_testing.real_job import SMALL, Job, deleted_afterwards, learning, note, running, small_job

TOTAL, FRAMES = 8192, 512


def on_cpus(text: str) -> str:
    """The example for a node of two processors without a GPU."""
    document = yaml.safe_load(text)
    spec = document["spec"]
    spec["collection"] |= {"totalFrames": TOTAL, "framesPerBatch": FRAMES}
    spec["env"]["envpool"]["numEnvs"] = 16
    spec["replicas"] = 2
    for part in (spec["head"], *spec["workerGroups"]):
        part["resources"] = SMALL
    spec["workerGroups"][1]["device"] = "cpu"
    return yaml.safe_dump(document)


def test_killed_server_pod_costs_time_and_nothing_else(installed: Installation) -> None:
    manifest = installed.folder / "pong-gpu.yaml"
    manifest.write_text(on_cpus((ROOT / "examples" / "pong-gpu.yaml").read_text()))
    installed.shell("cormorant weights init pong-gpu.yaml pong-gpu.safetensors", timeout_s=300)
    began = time.monotonic()
    installed.shell("kubectl apply -f pong-gpu.yaml")
    with deleted_afterwards(installed.jobs, "pong-gpu") as job:
        frames, versions = 0, []
        is_killed = False
        while (batch := job.take()).status == 200:
            if not frames:
                note(f"applied to first batch: {time.monotonic() - began:.1f} s")
                pushed = installed.shell("cormorant weights push pong-gpu.safetensors pong-gpu")
                assert pushed.startswith("version 1: applied"), pushed
            frames += int(batch.headers["cormorant-frames"])
            versions.append((int(batch.headers["cormorant-min-version"]), int(batch.headers["cormorant-max-version"])))
            job.ack(batch)
            if not is_killed and frames >= TOTAL // 3:
                workers = job.pods("worker")
                (server,) = [name for name in workers if name.startswith("pong-gpu-gpu-")]
                job.kill(server, "ray::WorkerActor")
                is_killed = True
        assert frames == TOTAL
        assert versions[-1] == (1, 1)
        assert all(0 <= low <= high <= 1 for low, high in versions)
        # The server's actor was replaced in its pod; no pod was.
        assert set(job.pods("worker")) <= set(workers)
        job.until(lambda: job.condition("Completed"), what="the job is complete")
        assert job.status["frames"]["collected"] == TOTAL
        note(f"applied to complete: {time.monotonic() - began:.1f} s")


LEARNER = """
import json

from cormorant import LearnerLink, connect
from cormorant.policies import mlp

with connect() as client:
    policy = mlp(*client.spaces)
    link = LearnerLink(client, policy, wait=60)
    for batch in link.batches():
        acted = batch["collector", "policy_version"]
        said = {"oldest": int(acted.min()), "newest": int(acted.max()), "published": link.version}
        print(json.dumps(said | {"staleness": link.staleness.max}), flush=True)
        link.step()
"""
MANIFEST = small_job(
    "onpolicy",
    {"envpool": {"taskId": "CartPole-v1", "numEnvs": 4}},
    policy="cormorant.policies:mlp",
    workers=2,
    collection={"mode": "sync", "framesPerBatch": 64, "weights": {"maxStaleness": 0}},
    output={"queue": {"capacityBatches": 1}},
)
LOSSES: dict[str, Callable[[Job], object]] = {
    "its process is killed": lambda job: job.kill(job.head(), "cormorant_api"),
    "its pod is deleted": lambda job: job.namespace("delete", "pod", job.head(), "--wait=false"),
    "every pod is deleted": lambda job: job.namespace("delete", "pod", job.head(), *job.pods("worker"), "--wait=false"),
}


def test_no_batch_is_older_than_what_its_learner_published(installed: Installation) -> None:
    namespace = installed.jobs
    namespace.apply_files("onpolicy", {"learner.py": LEARNER})
    command = ("python", "-u", "/code/learner.py")
    with running(namespace, MANIFEST) as job:
        job.until_ready()
        with learning(job, *command, image=installed.images.job, code="onpolicy") as pod:
            for what, lose in {"": lambda _: None, **LOSSES}.items():
                lose(job)
                known = len(job.said_by(pod))
                job.until(
                    lambda least=known + 20: len(job.said_by(pod)) >= least,
                    what=f"20 batches more, after the head: {what}",
                    within_s=180,
                )
            said = job.said_by(pod)
    stale = [(number, batch) for number, batch in enumerate(said) if batch["oldest"] < batch["published"]]
    assert stale == []
    assert max(batch["staleness"] for batch in said) == 0
    published = [batch["published"] for batch in said]
    assert published == sorted(set(published)), "a version was given twice"
