"""`cormorant dataset export --push` to a server of this test that keeps what huggingface_hub commits."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from cormorant_testing.datasets import write_dataset
from cormorant_testing.scripted_head import Heard, Say, ScriptedHead


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ScriptedHead]:
    """Answers the requests of a commit of small files: https://huggingface.co/docs/hub/api. Keeps them in `hub`."""

    def answer(heard: Heard) -> Say:
        status, found = 200, dict[str, Any]()
        if heard.headers["authorization"] != "Bearer hf_mine":
            status, found = 401, {"error": "Invalid credentials"}
        elif heard.path == "/api/repos/create":
            asked = json.loads(heard.body)
            found = {"url": f"{server.url}/{asked['type']}s/{asked['organization']}/{asked['name']}"}
        elif heard.path == "/api/validate-yaml":
            found = {"errors": [], "warnings": []}
        elif heard.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(heard.body)["files"]]
            found = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        else:
            assert heard.path == "/api/datasets/me/pole/commit/main"
            for line in map(json.loads, heard.body.splitlines()):
                if line["key"] == "file":
                    path = tmp_path / "hub" / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            found = {"commitOid": "1", "commitUrl": f"{server.url}/datasets/me/pole/commit/1"}
        return Say(status, json.dumps(found).encode(), {"Content-Type": "application/json"})

    with ScriptedHead(answer) as server:
        yield server


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return write_dataset(str(tmp_path / "data"))


def push(hub: ScriptedHead, uri: str, token: str) -> "subprocess.CompletedProcess[str]":
    command = [Path(sys.executable).with_name("cormorant"), "dataset", "export", uri, "--to", "huggingface"]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": token, "NO_PROXY": "127.0.0.1"}
    return subprocess.run([*command, "--push", "me/pole"], env=environment, capture_output=True, text=True, check=False)


def test_what_was_pushed_is_the_dataset(hub: ScriptedHead, uri: str, tmp_path: Path) -> None:
    done = push(hub, uri, "hf_mine")
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.url}/datasets/me/pole/commit/1" in done.stdout
    read = datasets.load_dataset(str(tmp_path / "hub"), split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(read["reward"]) == list(range(8))


def test_a_hub_that_refuses_is_a_sentence(hub: ScriptedHead, uri: str, tmp_path: Path) -> None:
    done = push(hub, uri, "hf_other")
    assert done.returncode == 1
    assert f"cannot push to me/pole at {hub.url}: " in done.stderr
    assert "the folder is complete" in " ".join(done.stderr.split())
    assert (tmp_path / "data-huggingface" / "data" / "cpu-0-0.parquet").exists()
