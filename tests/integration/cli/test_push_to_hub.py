"""`cormorant dataset export --push` to a server of this test that keeps what huggingface_hub commits."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import pytest

from cormorant_testing.datasets import described
from cormorant_worker.collect.block import Block
from cormorant_worker.sinks.dataset import open_dataset


class Hub(BaseHTTPRequestHandler):
    """The requests of a commit of small files: https://huggingface.co/docs/hub/api."""

    server: "HubServer"

    def do_POST(self) -> None:  # http.server's name
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_mine":
            self.answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            self.answer(200, {"url": f"{self.server.url}/{asked['type']}s/{asked['organization']}/{asked['name']}"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer(200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        else:
            assert self.path == "/api/datasets/me/pole/commit/main"
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    path = self.server.folder / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            self.answer(200, {"commitOid": "1", "commitUrl": f"{self.server.url}/datasets/me/pole/commit/1"})

    def answer(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def uri(tmp_path: Path) -> str:
    layout, description = described(num_rows=4, num_envs=2, job="pole")
    block = Block(layout)
    block.begin(4)
    block.lengths[:] = 4
    block.traj_ids[:] = [0, 1]
    block.reward[:] = [[0, 1], [2, 3], [4, 5], [6, 7]]
    with open_dataset(str(tmp_path / "data"), description).writer("cpu-0-0", layout) as writer:
        writer.append(block)
    return str(tmp_path / "data")


def push(hub: HubServer, uri: str, token: str) -> "subprocess.CompletedProcess[str]":
    command = [Path(sys.executable).with_name("cormorant"), "dataset", "export", uri, "--to", "huggingface"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "NO_PROXY": "127.0.0.1"}
    return subprocess.run([*command, "--push", "me/pole"], env=environment, capture_output=True, text=True, check=False)


def test_what_was_pushed_is_the_dataset(hub: HubServer, uri: str, tmp_path: Path) -> None:
    done = push(hub, uri, "hf_mine")
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.url}/datasets/me/pole/commit/1" in done.stdout
    read = datasets.load_dataset(str(hub.folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(read["reward"]) == list(range(8))


def test_a_hub_that_refuses_is_a_sentence(hub: HubServer, uri: str, tmp_path: Path) -> None:
    done = push(hub, uri, "hf_other")
    assert done.returncode == 1
    assert f"cannot push to me/pole at {hub.url}: " in done.stderr
    assert "the folder is complete" in " ".join(done.stderr.split())
    assert (tmp_path / "data-huggingface" / "data" / "cpu-0-0.parquet").exists()
