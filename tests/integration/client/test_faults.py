"""What is killed, slow or away: every frame still comes, and none twice after it was acknowledged; a learner goes on
from one place, with what it published.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cormorant_client import Client, LearnerLink, connect
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.heads import START_S, HeadProcess
from cormorant_testing.policies import numbered
from cormorant_testing.scripts import Logged, until, unused_port
from cormorant_testing.serving import Served, serve

OPTIONS = {"lengths": (3, 1, 7)}


CONSUMER = """
import os, signal, sys
from cormorant_client import Client, LearnerLink, connect
batches = connect(sys.argv[1], token=sys.argv[2], reconnect_s=20).deliveries(prefetch=2, consumer="victim")
next(batches); next(batches)                   # the first one is acknowledged
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_consumer_loses_nothing_slow_one_repeats_nothing(tmp_path: Path) -> None:
    collection = {"mode": "async", "framesPerBatch": 20, "totalFrames": 200}
    job = make_job(num_envs=2, collection=collection, queue={"capacityBatches": 6}, **OPTIONS)
    with (
        serve(job, directory=tmp_path, ack_within_s=1.0, linger_s=1.0) as served,
        connect(served.server.url, token=served.reader.token) as client,
    ):
        killed = subprocess.run(
            [sys.executable, "-c", CONSUMER, served.server.url, served.reader.token], timeout=START_S, check=False
        )
        assert killed.returncode == -9
        seen: dict[int, Any] = {}
        with client.deliveries(prefetch=2, memory="never") as batches:
            for batch in batches:
                number = int(batch.id.rpartition("-")[2])
                assert number not in seen
                seen[number] = batch.tensordict(copy=True)
                if len(seen) == 1:
                    time.sleep(1.5)  # longer than the head waits: it hands the batch out again
        assert sorted(seen) == list(range(1, 10)), "all but the one that the killed consumer had acknowledged"
        judge = make_checker(2, versions=False, gaps=True, **OPTIONS)
        for _, found in sorted(seen.items()):
            judge.take(found)
        assert judge.frames == 200 - 20
        report = client.status().queue
        assert (report.acked, report.ended) == (10, True)
        assert report.redelivered >= 1


def test_learner_gives_a_head_the_weights_that_its_predecessor_lost(tmp_path: Path) -> None:
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=4, collection={"weights": {"maxStaleness": 0}})
    port, weights = unused_port(), {"number": torch.tensor(1.0), "bias": torch.zeros(3)}
    with ExitStack() as heads, ExitStack() as before:
        first = before.enter_context(serve(job, directory=tmp_path / "first", port=port))
        with connect(first.server.url, token=first.writer.token) as client:
            link = LearnerLink(client, weights, wait=30)
            batches = heads.enter_context(closing(link.batches()))
            for _ in range(3):
                next(batches)
                link.step()
            lost = link.version
            before.close()
            (tmp_path / "second").mkdir()
            shutil.copy(tmp_path / "first/tokens.json", tmp_path / "second")
            settings = {"port": port, "published_version": lost, "weights_within_s": 300.0}
            heads.enter_context(serve(job, directory=tmp_path / "second", **settings))
            batch = next(batches)
    assert batch["collector", "policy_version"].unique().tolist() == [lost + 1] == [link.version]
    assert link.staleness.max == 0


def test_batch_that_a_new_head_lends_before_the_learner_has_published_is_dropped(tmp_path: Path) -> None:
    collection = {"mode": "sync", "framesPerBatch": 8, "weights": {"maxStaleness": 0}}
    job = make_job(num_envs=2, policy="versioned", action="box", lengths=4, collection=collection)
    port, weights = unused_port(), {"number": torch.tensor(1.0), "bias": torch.zeros(3)}
    with ExitStack() as heads, ExitStack() as before:
        first = before.enter_context(serve(job, directory=tmp_path, port=port))
        with connect(first.server.url, token=first.writer.token) as client, client.batches() as batches:
            version = client.publish(weights, wait=30).version
            while int(next(batches)["collector", "policy_version"].min()) < version:
                pass
            before.close()
            second = heads.enter_context(serve(job, directory=tmp_path, port=port))
            ledger = second.server.head.running.ledger
            until(lambda: ledger.counts().lent, what="the second head lends a batch of the first one's weights")
            assert client.publish(weights, wait=30).version == version + 1
            assert next(batches)["collector", "policy_version"].unique().tolist() == [version + 1]
            assert ledger.counts().stale_frames == 8


def client_of(served: Served) -> Client:
    return connect(served.server.url, token=served.writer.token, reconnect_s=0)


def pair(client: Client, version: int) -> tuple[float, str | None]:
    """The weights of a version, and the metadata that came with them."""
    found = client.weights(version=version)
    return float(found.numpy()["number"]), found.metadata.get("learner")


def test_metadata_is_of_one_publish_whoever_makes_it_and_outlives_the_head(tmp_path: Path) -> None:
    job = make_job(num_envs=1, policy="versioned", action="box", collection={"framesPerBatch": 30})
    with serve(job, directory=tmp_path) as served, client_of(served) as one, client_of(served) as two:
        first = one.publish({"policy": numbered(1)}, metadata={"learner": "one 1"}).version
        assert two.publish(numbered(2), metadata={"learner": "two 2"}).version == first + 1
        # `one` does not know of it, and asks for the same number.
        assert one.publish(numbered(3), metadata={"learner": "one 3"}).version == first + 2
        assert [pair(two, first + n) for n in range(3)] == [(1, "one 1"), (2, "two 2"), (3, "one 3")]
        assert pair(one, one.rollback(first + 2).version) == (3, "one 3")
        assert pair(one, one.publish(numbered(5)).version) == (5, None)
        last = one.rollback(first + 2).version
    with serve(job, directory=tmp_path) as served, client_of(served) as client:
        assert pair(client, last) == (3, "one 3")
        text = "x" * ((1 << 20) - len('{"learner": ""}'))
        assert pair(client, client.publish(numbered(1), metadata={"learner": text}).version) == (1, text)


EXAMPLES = Path(__file__).parents[3] / "examples"
TOTAL, BATCH = 3001, 256
UPDATES = 12
"""The last batch has the frames that are left."""
STEPS = 10 * BATCH // 64
"""Steps of the optimizer in an update."""


def learner(head: HeadProcess, checkpoints: Path) -> Logged:
    ready, script = head.wait_for("head_ready"), str(EXAMPLES / "rest_ppo_halfcheetah.py")
    options = ["--url", ready["url"], "--token-file", ready["token_file"], "--checkpoints", str(checkpoints)]
    return Logged([sys.executable, script, *options])


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
    with HeadProcess(manifest, tmp_path / "head", "--ack-within", "2", "--linger-seconds", "5") as head:
        ready = head.wait_for("head_ready")
        with connect(ready["url"], token_file=ready["token_file"]) as client:
            with learner(head, checkpoints) as first:
                begun = {"event": "start", "version": 1, "updates": 0, "frames": 0}
                assert first.wait_for("start", seconds=START_S) == begun
                first.wait_for("update", times=3)  # killed between two updates, or in the next one
            before = published(client)
            with learner(head, checkpoints) as second:
                assert second.wait_for("start", seconds=START_S) == {"event": "start", **before}
                # Killed before it publishes, or soon after.
                until((checkpoints / "update-7.pt").exists, seconds=START_S, every_s=0.001)
            before = published(client)
            with learner(head, checkpoints) as third:
                assert third.wait_for("start", seconds=START_S) == {"event": "start", **before}
                third.wait_for("update", times=UPDATES - before["updates"])
                frames = client.status().frames
                assert third.wait(START_S) == 0
                assert f"\n{UPDATES} updates, {TOTAL} frames, " in third.text
        assert frames.collected == TOTAL
    lines = [line for one in (first, second, third) for line in one.said("update")]
    updates = [line["updates"] for line in lines]
    assert len(set(updates)) == len(updates), "an update was made twice"
    assert set(range(1, UPDATES + 1)) - set(updates) <= {4, 7}, "an update is missing that was not cut short"
    assert [line["version"] for line in lines] == [number + 1 for number in updates]
    assert [line["frames"] for line in lines] == [min(number * BATCH, TOTAL) for number in updates]
