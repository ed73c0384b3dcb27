"""`examples/rest_ppo_halfcheetah.py` as a process that is killed twice, against a real head."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cormorant_client import Client, connect
from cormorant_testing.heads import START_S, HeadProcess
from cormorant_testing.scripts import until

EXAMPLES = Path(__file__).parents[3] / "examples"
TOTAL, BATCH = 3001, 256
UPDATES = 12
"""The last batch has the frames that are left."""
STEPS = 10 * BATCH // 64
"""Steps of the optimizer in an update."""


@contextmanager
def learning(head: HeadProcess, checkpoints: Path) -> Iterator[subprocess.Popen[str]]:
    ready = head.wait_for("head_ready")
    learner = subprocess.Popen(
        [
            sys.executable, EXAMPLES / "rest_ppo_halfcheetah.py", "--url", ready["url"],
            "--token-file", ready["token_file"], "--checkpoints", checkpoints,
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with learner:
        try:
            yield learner
        finally:
            learner.kill()


def read_line(learner: subprocess.Popen[str]) -> dict[str, Any]:
    assert learner.stdout is not None
    line = learner.stdout.readline()
    assert line, "the learner ended early"
    return dict(json.loads(line))


def published(client: Client) -> dict[str, Any]:
    """The newest version with its state; checks that the optimizer's file belongs to it."""
    time.sleep(1)  # the head may still be reading a request of the learner that was killed
    version = client.models().version
    state: dict[str, Any] = json.loads(client.weights(version=version).metadata["learner"])
    content = Path(state["checkpoint"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == state["sha256"]
    optimizer = torch.load(state["checkpoint"], weights_only=True)["optimizer"]
    assert {int(entry["step"]) for entry in optimizer["state"].values()} == {state["updates"] * STEPS}
    assert optimizer["param_groups"][0]["lr"] == state["learning_rate"]
    assert version == state["updates"] + 1
    assert state["frames"] == state["updates"] * BATCH
    return {"version": version, "updates": state["updates"], "frames": state["frames"]}


@pytest.mark.slow
@pytest.mark.timeout(4 * START_S)
def test_a_killed_learner_goes_on_from_one_place(tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "halfcheetah-ppo.yaml").read_text())
    job["spec"]["env"]["envpool"]["numEnvs"] = 4
    job["spec"]["collection"].update(framesPerBatch=BATCH, totalFrames=TOTAL)
    manifest, checkpoints = tmp_path / "job.yaml", tmp_path / "checkpoints"
    manifest.write_text(yaml.safe_dump(job))
    lines: list[dict[str, Any]] = []
    with HeadProcess(manifest, tmp_path / "head", "--ack-within", "2", "--linger-seconds", "5") as head:
        ready = head.wait_for("head_ready")
        with connect(ready["url"], token_file=ready["token_file"]) as client:
            with learning(head, checkpoints) as learner:
                assert read_line(learner) == {"event": "start", "version": 1, "updates": 0, "frames": 0}
                lines += [read_line(learner) for _ in range(3)]  # killed between two updates, or in the next one
            before = published(client)
            with learning(head, checkpoints) as learner:
                assert read_line(learner) == {"event": "start", **before}
                # Killed before it publishes, or soon after.
                until((checkpoints / "update-7.pt").exists, seconds=START_S, every_s=0.001)
                learner.kill()
                assert learner.stdout is not None
                lines += [json.loads(line) for line in learner.stdout]
            before = published(client)
            with learning(head, checkpoints) as learner:
                assert read_line(learner) == {"event": "start", **before}
                while lines[-1]["updates"] < UPDATES:
                    lines.append(read_line(learner))
                frames = client.status().frames
                assert learner.stdout is not None
                assert learner.stdout.read().startswith(f"{UPDATES} updates, {TOTAL} frames, ")
                assert learner.wait(START_S) == 0
        assert frames.collected == TOTAL
    updates = [line["updates"] for line in lines]
    assert len(set(updates)) == len(updates), "an update was made twice"
    assert set(range(1, UPDATES + 1)) - set(updates) <= {4, 7}, "an update is missing that was not cut short"
    assert [line["version"] for line in lines] == [number + 1 for number in updates]
    assert [line["frames"] for line in lines] == [min(number * BATCH, TOTAL) for number in updates]
