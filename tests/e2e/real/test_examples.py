"""Pong: what the README says of Kubernetes, run as it stands there, with new weights on the way;
and a killed inference server in a pod of its own. An evaluation of two checkpoints, one of whose workers is killed: its
table is a laptop's, bit for bit; its volume is a folder of the node, which is this machine.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant_testing.real_cluster import ROOT, Installation
from cormorant_testing.real_job import Job, deleted_afterwards, note, running, small_example
from cormorant_testing.snippets import blocks

TOTAL = int(os.environ.get("CORMORANT_E2E_FRAMES", "150000"))
"""The example's own number is a million: minutes more. A learner has its 20 batches long before these end."""
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
        note(f"applied to ready: {time.monotonic() - began:.1f} s")
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


EXAMPLE = ROOT / "examples" / "cartpole-evaluation.yaml"
CHECKPOINTS = ("early.safetensors", "trained.safetensors")
EVERYONE = 0o777
COUNT, PLAYED = 600, 1200
"""Episodes of each checkpoint, and of both: half a minute, so that the commands find the head."""


@pytest.fixture
def volume(installed: Installation, tmp_path: Path) -> Iterator[Path]:
    """The folder behind the claim of the example."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # pods have another user
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(EVERYONE)
    for name in CHECKPOINTS:
        shutil.copy(ROOT / "examples" / "checkpoints" / name, data)
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        **common,
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": str(data), "type": "Directory"},
        "claimRef": {"name": "evaluations", "namespace": installed.jobs.name},
    }
    claim = {**common, "volumeName": "evaluations", "resources": {"requests": {"storage": "1Gi"}}}
    for kind, spec in (("PersistentVolume", volume), ("PersistentVolumeClaim", claim)):
        installed.jobs(
            "apply", "-f", "-",
            document={"apiVersion": "v1", "kind": kind, "metadata": {"name": "evaluations"}, "spec": spec},
        )  # fmt: skip
    yield data
    installed.jobs("delete", "pvc", "evaluations", "--wait=false", check=False)
    installed.jobs("delete", "pv", "evaluations", "--wait=false", check=False)


def tables(text: str) -> list[dict[str, Any]]:
    """What `cormorant evaluate --json` printed, without the paths of the weights."""
    found = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in table.items() if name != "weights"} for table in found]


@pytest.mark.slow
def test_table_of_a_cluster_is_that_of_a_laptop(installed: Installation, volume: Path) -> None:
    document = small_example(EXAMPLE.name)
    document["spec"]["collection"]["episodes"]["count"] = COUNT
    evaluate = f"cormorant evaluate {document['metadata']['name']}"
    began = time.monotonic()
    with running(installed.jobs, document) as job:
        played = wait_for_episodes(job, 20)
        victim = sorted(job.pods("worker"))[0]
        installed.jobs("delete", "pod", victim, "--grace-period=0", "--force", "--wait=false")
        assert len(job.ask("/v1/evaluation").json["episodes"]) < PLAYED, "everything was played before the kill"
        header, *lines = installed.shell(evaluate).splitlines()
        found = tables(installed.shell(f"{evaluate} --wait 300 --json", timeout_s=330))
        job.until(lambda: job.condition("Completed"), what="the job is complete")
        frames = job.status["frames"]
        assert (frames["collected"], frames["target"]) == (PLAYED, PLAYED)
        row = installed.jobs("get", "collectorjob", job.name).splitlines()[1].split()
        assert row[2:4] == [str(PLAYED)] * 2
    note(f"applied to complete: {time.monotonic() - began:.1f} s; killed after {played} of {PLAYED} episodes")
    assert header.split()[:3] == ["CHECKPOINT", "EPISODES", "RETURN"]
    assert lines[0].split()[0] == f"file:///data/{CHECKPOINTS[0]}"
    weights = " ".join(f"--weights {ROOT}/examples/checkpoints/{name}" for name in CHECKPOINTS)
    assert found == tables(
        installed.shell(f"cormorant evaluate {EXAMPLE} {weights} --episodes {COUNT} --json", timeout_s=300)
    )
    assert [table["summary"]["return"]["mean"] > 400 for table in found] == [False, True]


def wait_for_episodes(job: Job, least: int) -> int:
    """Until so many are recorded and every worker is there. Returns how many."""

    def num_played() -> int:
        reply = job.ask("/v1/evaluation")
        return len(reply.json["episodes"]) if reply.status == 200 else 0

    job.until(lambda: job.pods("head"), what="the head is made")
    job.until(lambda: num_played() >= least, what=f"{least} episodes are played")
    return num_played()
