"""An on-policy learner whose head is lost: with `maxStaleness: 0` no later batch is older than what it published."""

from collections.abc import Callable

from cormorant_testing.real_cluster import Installation
from cormorant_testing.real_job import Job, learning, running, small_job

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
