"""What is killed, slow or away: every frame still comes, and none twice after it was acknowledged."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cormorant_client import Client, connect
from cormorant_testing.collecting import make_checker, make_job
from cormorant_testing.policies import numbered
from cormorant_testing.serving import Served, serve

SUPPORT = Path(__file__).parents[2] / "support"
OPTIONS = {"lengths": (3, 1, 7)}
START_S = 90


@contextmanager
def counting_head(directory: Path, *, total: int, ack_within_s: float, workers: int = 1) -> Iterator[Served]:
    mode = "sync" if workers > 1 else "async"
    collection = {"framesPerBatch": 20, "totalFrames": total, "mode": mode}
    job = make_job(num_envs=2, collection=collection, queue={"capacityBatches": 6}, **OPTIONS)
    with serve(job, directory=directory, workers=workers, ack_within_s=ack_within_s, linger_s=1.0) as running:
        yield running


def test_all_frames_of_a_job_come_exactly_once_and_then_it_ends(tmp_path: Path) -> None:
    judge = make_checker(2, versions=False, **OPTIONS)
    with (
        counting_head(tmp_path, total=187, ack_within_s=30, workers=2) as served,
        connect(served.server.url, token=served.reader.token) as client,
        client.batches() as batches,
    ):
        for batch in batches:
            assert batch.mode == "sync"
            judge.take(batch.tensordict())
    assert judge.frames == batches.num_frames == 187
    assert len(judge.attempts) == 2


CONSUMER = """
import os, signal, sys
from cormorant_client import connect
batches = connect(sys.argv[1], token=sys.argv[2], reconnect_s=20).batches(prefetch=2, consumer="victim")
next(batches); next(batches)                   # the first one is acknowledged
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_consumer_that_is_killed_loses_nothing_and_one_that_is_slow_gets_nothing_twice(tmp_path: Path) -> None:
    with (
        counting_head(tmp_path, total=200, ack_within_s=1.0) as served,
        connect(served.server.url, token=served.reader.token) as client,
    ):
        killed = subprocess.run(
            [sys.executable, "-c", CONSUMER, served.server.url, served.reader.token], timeout=START_S, check=False
        )
        assert killed.returncode == -9
        seen: dict[int, Any] = {}
        with client.batches(prefetch=2, memory="never") as batches:
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


class HeadProcess:
    """`python -m cormorant_api` that can be killed and started again where it was."""

    def __init__(self, directory: Path) -> None:
        job = make_job(
            num_envs=2, policy="versioned", action="box", collection={"framesPerBatch": 20}, step_s=0.005, **OPTIONS
        )
        self.manifest = directory / "job.json"
        self.manifest.write_text(job.model_dump_json(by_alias=True, exclude_none=True))
        self.directory, self.log = directory / "head", directory / "head.log"
        self.ports = unused_ports()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def start(self) -> None:
        control, data = self.ports
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "cormorant_api", "--job", str(self.manifest), "--port", str(control),
                    "--data-port", str(data), "--directory", str(self.directory), "--workers", "1",
                ],
                env={**os.environ, "PYTHONPATH": str(SUPPORT)},
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def client(self) -> Client:
        deadline = time.monotonic() + START_S
        while (token := self._token()) is None:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"no token file: {self.log.read_text()}"
            time.sleep(0.1)
        return connect(self.url, token=token, reconnect_s=START_S)

    def _token(self) -> str | None:
        try:
            return str(json.loads((self.directory / "tokens.json").read_text())["write"])
        except (OSError, ValueError):
            return None


def unused_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


@pytest.fixture
def head(tmp_path: Path) -> Iterator[HeadProcess]:
    made = HeadProcess(tmp_path)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.slow
@pytest.mark.timeout(4 * START_S)
def test_an_iteration_and_a_publish_go_on_with_a_head_that_was_killed_and_started_again(head: HeadProcess) -> None:
    head.start()
    with head.client() as client, client.batches() as batches:
        first = next(batches)
        published = client.publish(numbered(1), wait=30).version
        head.kill()
        result: dict[str, Any] = {}
        publish = threading.Thread(target=lambda: result.update(version=client.publish(numbered(2), wait=30).version))
        publish.start()  # while the head is away
        head.start()
        ids = [next(batches).id for _ in range(8)]
        publish.join(START_S)
        assert result["version"] == published + 1
        epochs = {name.rpartition("-")[0] for name in ids}
        assert len(ids) == len({*ids, first.id}) - 1
        assert epochs - {first.id.rpartition("-")[0]}
        assert client.weights().numpy()["number"] == 2
        assert client.weights(version=published).numpy()["number"] == 1
