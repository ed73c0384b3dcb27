"""Workers and an inference server in pods of their own: the server is killed, and nothing but time is lost."""

import time

import yaml

from cormorant_testing.real_cluster import ROOT, Installation
from cormorant_testing.real_job import SMALL, deleted_afterwards, note

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
