"""An example of `examples/`, as it stands there, beside a job whose worker and heads end in every way."""

import pytest
import yaml

from cormorant_testing.real_cluster import ROOT, Installation
from cormorant_testing.real_job import SMALL, Job, learning, note, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples"
BATCH = 512
"""256 frames of each of two workers."""
TOTAL = 400 * BATCH
"""A minute: both heads end within it, however slow kubectl is."""


def num_printed(job: Job, pod: str) -> int:
    """Lines of the learner so far: one every ten updates."""
    return job.namespace("logs", pod, check=False).count(" frames ")


def test_learner_outlives_its_heads_and_a_worker(installed: Installation) -> None:
    document = yaml.safe_load((EXAMPLES / "cartpole-ppo.yaml").read_text())
    spec = document["spec"]
    spec["env"]["maxEpisodeSteps"] = 200  # the return that ends the example is out of reach
    spec["collection"]["totalFrames"] = TOTAL
    spec["head"], spec["workerGroups"] = {"resources": SMALL}, [{"name": "cpu", "resources": SMALL}]
    files = {name: (EXAMPLES / name).read_text() for name in ("rest_ppo_cartpole.py", "ppo.py")}
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "example"}, "data": files}
    installed.jobs("apply", "-f", "-", document=code)
    command = ("python", "-u", "/code/rest_ppo_cartpole.py")
    with running(installed.jobs, document) as job:
        job.until(lambda: job.condition("Ready") == "True/EnoughWorkers", what="the job is ready")
        with learning(job, *command, image=installed.images.job, code="example") as pod:
            job.until(lambda: num_printed(job, pod), what="the learner has made ten updates")

            def goes_on(after: str, *, epoch: int) -> None:
                job.until(lambda: job.status["epoch"] == epoch, what=f"epoch {epoch} after {after}")
                so_far = num_printed(job, pod)
                took_s = job.until(lambda: num_printed(job, pod) > so_far, what=f"the learner goes on after {after}")
                note(f"{after}, to ten more updates: {took_s:.1f} s")

            job.namespace("delete", "pod", job.head(), "--wait=false")
            goes_on("a head was drained", epoch=2)
            job.kill(job.head(), "cormorant_api")
            goes_on("a head was killed", epoch=3)
            job.namespace("delete", "pod", sorted(job.pods("worker"))[0], "--now", "--wait=false")
            goes_on("a worker was deleted", epoch=3)
            job.until(lambda: job.condition("Completed"), what="the job is complete", within_s=400)
            ended = {"Succeeded", "Failed"}
            job.until(lambda: job.namespace.get("pod", pod)["status"]["phase"] in ended, what="the learner has ended")
            log = job.namespace("logs", pod)
        note(log)
        frames = job.status["frames"]
        assert job.condition("Completed") == "True/AllFramesDelivered"
        assert (frames["collected"], frames["settled"], frames["target"]) == (TOTAL, TOTAL, TOTAL)
        assert (job.status["epoch"], job.status["headRestarts"]) == (3, 1)
        # It says that it fell short of its goal at the end of the stream, and not before.
        assert "at the end of the stream; 450.0 was the goal" in log
        assert "Traceback" not in log
