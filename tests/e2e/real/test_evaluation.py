"""An evaluation of two checkpoints on a cluster, one of whose workers is killed: its table is a laptop's, bit for bit.

The volume is a folder of the node, which is this machine.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cormorant_testing.real_cluster import ROOT, Installation
from cormorant_testing.real_job import Job, note, running, small_example

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "cartpole-evaluation.yaml"
CHECKPOINTS = ("early.safetensors", "trained.safetensors")
EVERYONE = 0o777
COUNT, TOTAL = 600, 1200
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


def test_table_of_a_cluster_is_that_of_a_laptop(installed: Installation, volume: Path) -> None:
    document = small_example(EXAMPLE.name)
    document["spec"]["collection"]["episodes"]["count"] = COUNT
    evaluate = f"cormorant evaluate {document['metadata']['name']}"
    began = time.monotonic()
    with running(installed.jobs, document) as job:
        played = wait_for_episodes(job, 20)
        victim = sorted(job.pods("worker"))[0]
        installed.jobs("delete", "pod", victim, "--grace-period=0", "--force", "--wait=false")
        assert len(job.ask("/v1/evaluation").json["episodes"]) < TOTAL, "everything was played before the kill"
        header, *lines = installed.shell(evaluate).splitlines()
        found = tables(installed.shell(f"{evaluate} --wait 300 --json", timeout_s=330))
        job.until(lambda: job.condition("Completed"), what="the job is complete")
        frames = job.status["frames"]
        assert (frames["collected"], frames["target"]) == (TOTAL, TOTAL)
        row = installed.jobs("get", "collectorjob", job.name).splitlines()[1].split()
        assert row[2:4] == [str(TOTAL)] * 2
    note(f"applied to complete: {time.monotonic() - began:.1f} s; killed after {played} of {TOTAL} episodes")
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
