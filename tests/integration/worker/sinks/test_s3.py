"""Datasets on a real S3 server that is slow, frozen or gone.

The server is a process of its own, with a network in front of it. moto's server keeps objects in memory. CORMORANT_S3,
a command line, starts one that keeps them on disk instead, for example VersityGW: see CONTRIBUTING.md.
"""

import json
import os
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
import yaml
from torch.utils.data import DataLoader

import cormorant
from cormorant_testing.collecting import make_job
from cormorant_testing.datasets import described, iter_frames, write_dataset
from cormorant_testing.scripts import Server, environment, start_script, until, unused_port
from cormorant_worker.errors import DatasetError
from cormorant_worker.evaluation.results import PlayedEpisode, ResultFolder
from cormorant_worker.sinks.dataset import existing_dataset, open_dataset
from cormorant_worker.sinks.stores import ObjectStore
from cormorant_worker.sinks.verify import verify
from cormorant_worker.weights.blob import read_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WRITER = Path(__file__).with_name("writer_process.py")
SHARD_FRAMES = 128
"""Two batches are 5,000 bytes."""


HEAD = """
import os
from cormorant_worker.fleet.fleet import WorkerFleet
from cormorant_worker.fleet.options import FleetOptions
from cormorant_worker.launch import load_job

with WorkerFleet(load_job(os.environ["JOB"]), FleetOptions(workers=2, seal_after_s=0.5)) as fleet:
    assert fleet.wait_until_done(300)
"""


VARIABLE = "CORMORANT_S3"
"""`{port}`, `{folder}` and `{key}`, which is both the access key and its secret, are filled in."""
BUCKET = "cormorant"
KEY = "cormorant-key"
_LINGER_S = 30.0
_MOTO = f"{sys.executable} -m moto.server --host 127.0.0.1 --port {{port}}"


class S3Server(Server):
    def __init__(self, folder: Path) -> None:
        self.port, self.keeps_objects = unused_port(), bool(os.environ.get(VARIABLE))
        template = os.environ.get(VARIABLE) or _MOTO
        self._command = shlex.split(template.format(port=self.port, folder=folder, key=KEY))
        self._start()

    def _start(self) -> None:
        super().__init__(self._command, f"http://127.0.0.1:{self.port}/")

    def restart(self) -> None:
        self.kill()
        self.close()
        self._start()

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What clients are told. `port`: of a network in front of the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


class Network(socketserver.ThreadingTCPServer):
    """Passes connections on to a port. What a client has sent arrives although the client dies."""

    daemon_threads = True
    block_on_close = False
    delay_s = 0.0
    """Of everything that clients send."""
    is_cut = False
    """New connections are closed at once, and nothing passes on old ones."""

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.port, self._target = self.server_address[1], target

    def finish_request(self, client: Any, client_address: Any) -> None:
        with suppress(OSError):
            if self.is_cut:
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
                while (data := client.recv(1 << 16)) and not self.is_cut:
                    time.sleep(self.delay_s)
                    server.sendall(data)
                # Some servers drop the request of a client that hangs up; one that lost its power does not.
                if not self.is_cut:
                    time.sleep(_LINGER_S)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while (data := server.recv(1 << 16)) and not self.is_cut:
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def network(server: S3Server) -> Iterator[Network]:
    with Network(server.port) as network:
        threading.Thread(target=network.serve_forever, daemon=True).start()
        yield network
        network.shutdown()


@pytest.fixture
def uri(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """URI of a new dataset. This process asks the server itself, not the network before it."""
    import s3fs  # with boto's client, which the default tests do not wait for

    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    if not fs.exists(BUCKET):
        fs.mkdir(BUCKET)
    yield f"s3://{BUCKET}/{request.node.name}"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def write(server: S3Server, network: Network, uri: str) -> "Iterator[subprocess.Popen[str]]":
    """A worker that appends to cpu-0-0 through the network until it is killed."""
    with subprocess.Popen(
        [sys.executable, str(WRITER), uri, "0"],
        env=environment(**server.environment(network.port)),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def promised(writer: "subprocess.Popen[str]", frames: int) -> int:
    """Durable frames by the writer's word, once they are so many."""
    assert writer.stdout is not None
    for line in writer.stdout:
        if line.split()[0].isdigit() and int(line.split()[0]) >= frames:
            return int(line.split()[0])
    raise AssertionError(f"the writer ended with {writer.wait()}")


def assert_kept(writer: "subprocess.Popen[str]", uri: str, frames: int) -> None:
    """Kill the writer: the frames that it promised are in the dataset, which has no fault."""
    writer.kill()
    writer.wait()
    assert existing_dataset(uri).part("cpu-0-0", has_ended=True).frames >= frames
    assert verify(uri).is_good


def test_a_learner_reads_from_the_store(uri: str) -> None:
    dataset = cormorant.read_dataset(write_dataset(uri, shards=6))
    stream = dataset.to_torch(batch_size=3, shuffle=True)
    read = list(
        DataLoader(stream, batch_size=None, collate_fn=stream.collate, num_workers=2)
    )  # forked after this process has used the store
    found = Counter(torch.cat([frames["observation"] for frames in read])[:, 0].tolist())
    assert found == {float(shard): 8 for shard in range(6)}
    assert len(dataset) == sum(map(len, dataset.frames())) == 48


def test_of_runs_that_begin_at_once_one_has_the_epoch(uri: str) -> None:
    _, description = described(num_rows=1, num_envs=1)
    datasets, barrier = [open_dataset(uri, description) for _ in range(6)], threading.Barrier(6)

    def begin(number: int) -> str:
        barrier.wait()
        try:
            datasets[number].begin_run(0, f"run {number}".encode())
        except DatasetError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(begin, range(6)))
    (winner,) = (number for number in range(6) if not told[number])
    assert all(f"at the same moment (run {winner})" in words for words in told if words)
    assert existing_dataset(uri).runs() == (0,)


def test_what_another_process_puts_is_read(uri: str) -> None:
    store, folder, fs = ObjectStore(uri), ResultFolder(uri), fsspec.filesystem("s3", skip_instance_cache=True)
    folder.open({"checkpoint": "a"})
    assert (folder.played(), store.read_root("run-000000.json")) == ({}, None)
    row = PlayedEpisode(task="", seed=7, options={}, total=1.0, length=2, terminated=True)
    fs.pipe_file(f"{uri}/played/b.json", json.dumps([row.document()]).encode())
    fs.pipe_file(f"{uri}/w.safetensors", safetensors.torch.save({"a": torch.ones(3)}))
    fs.pipe_file(f"{uri}/run-000000.json", b"another")
    assert list(folder.played().values()) == [row]
    assert read_file(f"{uri}/w.safetensors", allow_nonfinite=False)["policy"]["a"].tolist() == [1, 1, 1]
    assert store.read_root("run-000000.json") == b"another"
    assert set(store.files()) >= {"run-000000.json", "w.safetensors"}


def test_a_store_that_never_answered_is_told_at_once(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(DatasetError, match="cannot be read: Could not connect to the endpoint URL"):
        existing_dataset(uri)


def test_a_leading_slash_hides_no_frame(uri: str) -> None:
    for dataset in map(existing_dataset, (write_dataset(uri.replace("s3://", "s3:///")), uri)):
        assert (dataset.part("cpu-0-0").frames, dataset.part("cpu-0-0", has_ended=True).frames) == (8, 8)


def test_a_bucket_is_never_made(uri: str) -> None:
    store = ObjectStore(uri.replace(BUCKET, f"{BUCKET}-missing"))
    with pytest.raises(DatasetError, match=r"there is no dataset at s3://cormorant-missing/.*; check the URI"):
        existing_dataset(store.uri)
    _, description = described(num_rows=1, num_envs=1)
    with pytest.raises(DatasetError, match="cannot be written: The specified bucket does not exist; choose another"):
        open_dataset(store.uri, description)
    assert not store._fs.exists(f"{BUCKET}-missing")


def test_a_store_that_is_gone_for_a_while_costs_time_alone(
    network: Network, write: "subprocess.Popen[str]", uri: str
) -> None:
    kept = promised(write, SHARD_FRAMES)
    network.is_cut = True
    time.sleep(25)  # longer than the client library repeats by itself
    assert write.poll() is None
    network.is_cut = False
    kept = promised(write, kept + 10 * SHARD_FRAMES)
    assert_kept(write, uri, kept)


def test_kill_9_of_the_store_loses_nothing_durable(server: S3Server, write: "subprocess.Popen[str]", uri: str) -> None:
    if not server.keeps_objects:
        pytest.skip(f"moto keeps objects in memory: {VARIABLE} names a server that keeps them (CONTRIBUTING.md)")
    kept = 0
    for _ in range(3):
        kept = promised(write, kept + 5 * SHARD_FRAMES)
        server.restart()
    kept = promised(write, kept + 5 * SHARD_FRAMES)
    assert_kept(write, uri, kept)


def test_kill_9_of_heads_and_workers_with_a_slow_store_is_exact(
    server: S3Server, network: Network, uri: str, tmp_path: Path
) -> None:
    job = make_job(
        num_envs=2, policy="counter", dataset=uri, workers=2, step_s=0.005, run_policy={"maxRestartsPerSlot": 20},
        collection={"totalFrames": 6000}, lengths=[3, 8, 5], ends="alternate",
    )  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.to_document()))
    more = {**server.environment(network.port), "JOB": str(tmp_path / "job.yaml")}
    heads: list[subprocess.Popen[str]] = []

    def frames() -> int:
        assert heads[-1].poll() is None, heads[-1].communicate()
        try:
            return existing_dataset(uri).frames
        except DatasetError:
            return 0

    network.delay_s = 0.02
    kept = 0
    for _ in range(2):
        heads.append(start_script(HEAD, **more))
        until(lambda goal=kept + 200: frames() >= goal, seconds=300)
        # A worker in the middle of its requests, later its head.
        psutil.Process(heads[-1].pid).children(recursive=True)[-1].kill()
        time.sleep(1)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        heads[-1].kill()
        server.process.send_signal(signal.SIGCONT)
        kept = existing_dataset(uri).frames
    heads.append(start_script(HEAD, **more))
    words = heads[-1].communicate(timeout=300)
    assert heads[-1].returncode == 0, words
    for head in heads:
        head.communicate()
    time.sleep(1)  # what dead workers had sent has arrived
    report = verify(uri)
    assert (report.is_good, report.frames) == (True, 6000), report
    found = list(iter_frames(existing_dataset(uri)))
    ids = np.concatenate([np.stack([part.traj_id, part.step], axis=1) for part in found])
    assert len(np.unique(ids, axis=0)) == 6000
