"""The head over a Ray fleet: the same requests, the same values."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from cormorant_client.delivery import decode
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.heads import HeadProcess
from cormorant_testing.scripts import until
from cormorant_testing.serving import weights_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATH = "/v1/models/policy/weights"
OPTIONS = {"lengths": (3, 8), "step_s": 0.002}


def actors(head: HeadProcess) -> list[psutil.Process]:
    below = psutil.Process(head.process.pid).children(recursive=True)
    return [process for process in below if process.is_running() and "WorkerActor" in process.name()]


def test_publish_pause_a_killed_actor_and_batches_until_the_end(tmp_path: Path) -> None:
    job = make_job(
        num_envs=2, policy="versioned", action="box", **OPTIONS,
        collection={"framesPerBatch": 20, "totalFrames": 2000},
    )  # fmt: skip
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job.to_document()))
    checker = make_checker(2, action="box", acts_by_version=True, **OPTIONS)
    with HeadProcess(manifest, tmp_path / "head", "--fleet", "ray") as head:
        api = head.api()
        below = psutil.Process(head.process.pid).children(recursive=True)
        assert api.put(f"{PATH}?version=1", weights_file(1), Prefer="wait=60").json["state"] == "applied"
        frames, replaced = 0, False
        while (reply := api.get("/v1/batches/next?wait=60")).status == 200:
            frames += checker.take(decode(memoryview(reply.body)).tensordict())
            assert api.post(f"/v1/batches/{reply.headers['cormorant-batch-id']}/ack").status == 204
            if not replaced and frames >= 400:
                assert api.post("/v1/pause").json["state"] == "paused"
                assert api.put(f"{PATH}?version=2", weights_file(2)).status == 202
                (victim,) = actors(head)
                os.kill(victim.pid, signal.SIGKILL)
                assert api.post("/v1/resume").status == 200
                until(lambda: [worker["attempt"] for worker in api.get("/v1/workers").json["workers"]] == [1])
                replaced = True
        assert reply.kind == "stream-ended"
        assert head.process.wait(60) == 0
        until(lambda: not [process for process in below if process.is_running()], seconds=30)
    late = {stream.version for (attempt, _), stream in checker.streams.items() if attempt[2] == 1}
    assert (frames, checker.frames, late) == (2000, 2000, {2})


def test_an_actors_environments_can_be_looked_at(tmp_path: Path) -> None:
    job = make_job(num_envs=2, observation="image", queue={"onFull": "drop_oldest"}, **OPTIONS)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job.to_document()))
    with HeadProcess(manifest, tmp_path / "head", "--fleet", "ray") as head:
        api = head.api("read")
        seen: set[bytes] = set()

        def look() -> bool:
            reply = api.get("/v1/workers/cpu-0/picture?env=1")
            assert reply.status in (200, 429), reply
            if reply.status == 200:
                seen.add(reply.body)
            return len(seen) >= 3

        until(look)
        assert all(png.startswith(b"\x89PNG") for png in seen)
        head.end()
