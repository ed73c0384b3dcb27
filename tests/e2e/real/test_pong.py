"""Pong: what the README says of Kubernetes, run as it stands there, with new weights and a killed worker on the way;
and a killed inference server in a pod of its own.
"""

import os
import signal
import sys
import time

import pytest
import yaml

from cormorant_testing.real_cluster import ROOT, Installation
from cormorant_testing.real_job import deleted_afterwards, note, small_example
from cormorant_testing.snippets import blocks

TOTAL = int(os.environ.get("CORMORANT_E2E_FRAMES", "100000"))
"""The example's own number is a million: minutes more."""
SHORT = 8192


@pytest.mark.timeout(4200)
def test_commands_of_the_readme_collect_pong_to_the_end(installed: Installation) -> None:
    # `helm install` has run, as the fixture of all these tests.
    apply, wait, watch = [line for line in installed.commands() if line.startswith("kubectl")]
    assert (apply, wait.split()[1]) == ("kubectl apply -f examples/pong.yaml", "wait")
    document = small_example("pong.yaml", totalFrames=TOTAL)
    (installed.folder / "examples" / "pong.yaml").write_text(yaml.safe_dump(document))
    (installed.folder / "learner.py").write_text(blocks("README.md", "python")[1])
    began = time.monotonic()
    installed.shell(apply)
    with deleted_afterwards(installed.jobs, "pong") as job:
        installed.shell(wait, timeout_s=300)
        job.until(lambda: job.frames() > 0, what="frames are counted")
        note(f"applied to first frame counted: {time.monotonic() - began:.1f} s")
        watcher = int(installed.shell(f"timeout 600 {watch} > watched 2>&1 & echo $!"))
        lines = installed.shell(f"{sys.executable} learner.py", timeout_s=300).splitlines()
        assert [line.partition(" version ")[0] for line in lines] == ["torch.Size([8, 64])"] * 20
        job.until(lambda: job.ask("/v1/status").json["weights"]["min_applied_version"] == 20, what="weights act")
        # What the README shows of the watch: a line for each change, with these columns.
        columns = (ROOT / "README.md").read_text().partition("```text\nNAME   PHASE")[2].partition("\n")[0].split()
        watched = installed.folder / "watched"
        job.until(lambda: ["20"] in [line.split()[5:6] for line in watched.read_text().splitlines()], what="version 20")
        os.kill(watcher, signal.SIGTERM)
        assert watched.read_text().splitlines()[0].split()[2:] == columns
        victim, other = sorted(job.pods("worker"))
        uid = job.pods("worker")[other]
        job.namespace("delete", "pod", victim, "--now", "--wait=false")
        took_s = job.until(lambda: len(set(job.pods("worker")) - {victim}) == 2, what="a replacement")
        note(f"worker deleted to its replacement created: {took_s:.1f} s")
        assert job.pods("worker")[other] == uid
        job.until(lambda: job.condition("Completed"), what="the job is complete", within_s=300 + TOTAL / 500)
        frames = job.status["frames"]
        assert (frames["collected"], frames["target"]) == (TOTAL, TOTAL)
        assert job.condition("Failed") == ""


def test_killed_server_pod_costs_time_and_nothing_else(installed: Installation) -> None:
    document = small_example("pong-gpu.yaml", totalFrames=SHORT, framesPerBatch=512)
    spec = document["spec"]
    spec["env"]["envpool"]["numEnvs"], spec["replicas"], spec["workerGroups"][1]["device"] = 16, 2, "cpu"
    (installed.folder / "pong-gpu.yaml").write_text(yaml.safe_dump(document))
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
            if not is_killed and frames >= SHORT // 3:
                workers = job.pods("worker")
                (server,) = [name for name in workers if name.startswith("pong-gpu-gpu-")]
                job.kill(server, "ray::WorkerActor")
                is_killed = True
        assert frames == SHORT
        assert versions[-1] == (1, 1)
        assert all(0 <= low <= high <= 1 for low, high in versions)
        # The server's actor was replaced in its pod; no pod was.
        assert set(job.pods("worker")) <= set(workers)
        job.until(lambda: job.condition("Completed"), what="the job is complete")
        assert job.status["frames"]["collected"] == SHORT
        note(f"applied to complete: {time.monotonic() - began:.1f} s")
