"""What a submission sends: what the user wrote, and nothing that the user did not; a folder of code as a ConfigMap."""

import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cormorant_cli.__main__ import run
from cormorant_cli.commands.submit import MOST_BYTES, code_manifest, code_name, document_of, read_code
from cormorant_cli.errors import BadInput
from cormorant_contract.children import CODE_ARCHIVE
from cormorant_contract.parsing import parse_job
from cormorant_manifest.reader import parse_jobs
from cormorant_testing.scripted_head import Heard, Say
from manifest_cases import VALID
from manifest_making import collector_job

MANIFEST = """
apiVersion: cormorant.dev/v1alpha1
kind: CollectorJob
metadata: {name: pong, labels: {team: rl}, resourceVersion: "7", uid: u}
spec:
  env: {envpool: {taskId: Pong-v5, kwargs: {frame_skip: null}}}
  policy: {random: {}, entrypoint: null}
  collection: {framesPerBatch: 64}
  workerGroups: [{name: cpu, resources: {limits: {cpu: "2"}}}]
"""
HERE = "  code: {configMap: mine}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("x = 1\n")
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    return path


def test_no_default_is_sent_so_that_nothing_else_is_owned() -> None:
    (job,) = parse_jobs(MANIFEST)
    assert document_of(job, None, namespace="rl") == {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": "pong", "labels": {"team": "rl"}, "namespace": "rl"},
        "spec": {
            # A null in kwargs is the user's own; elsewhere it counts as an absent field.
            "env": {"envpool": {"taskId": "Pong-v5", "kwargs": {"frame_skip": None}}},
            "policy": {"random": {}},
            "collection": {"framesPerBatch": 64},
            "workerGroups": [{"name": "cpu", "resources": {"limits": {"cpu": "2"}}}],
        },
    }
    files = {"mine.py": b"x = 1\n"}
    assert document_of(job, files, namespace="rl")["spec"]["code"] == {"configMap": code_name(files, "pong")}


@pytest.mark.parametrize("manifest", VALID.values(), ids=VALID)
def test_every_manifest_is_sent_as_it_was_written(manifest: Any) -> None:
    job = parse_job(manifest)
    assert parse_job(json.loads(json.dumps(document_of(job, None, namespace="rl")))).spec == job.spec


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (MANIFEST.replace("name: pong,", "name: pong, namespace: a,"), ["-n", "b"], 'puts pong in namespace "a"'),
        (MANIFEST + HERE, ["--code", "code"], "spec.code of pong names other code than --code"),
        (MANIFEST + "---" + MANIFEST, ["--code", "code"], "--code works with one job"),
    ],
)
def test_bad_submissions_end_with_two_before_a_cluster_is_asked(
    text: str, options: list[str], sentence: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    file.write_text(text)
    assert run(["submit", "job.yaml", *options]) == 2
    assert sentence in capsys.readouterr().err


JOB = collector_job("pong", {}, namespace="rl", uid="u1")


def test_job_that_is_being_deleted_is_not_submitted(
    file: Path, api_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    leaving = {**JOB, "metadata": {**JOB["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    methods = list[str]()

    def answer(heard: Heard) -> Say:
        methods.append(heard.method)
        return Say(200, json.dumps(leaving).encode())

    with api_server(answer):
        assert run(["submit", str(file)]) == 1
    assert (methods, "rl/pong is being deleted; submit it again" in capsys.readouterr().err) == (["GET"], True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "code"
    (found / "my_pkg" / "deep").mkdir(parents=True)
    (found / "my_policies.py").write_text("WHO = 'a module'\n")
    (found / "table.bin").write_bytes(b"\xff\x00\x01")
    (found / "my_pkg" / "__init__.py").write_text("")
    (found / "my_pkg" / "deep" / "__init__.py").write_text("WHO = 'a package'\n")
    (found / "my_pkg" / "__pycache__").mkdir()
    (found / "my_pkg" / "__pycache__" / "deep.pyc").write_bytes(b"x")
    (found / ".git").mkdir()
    (found / ".git" / "config.py").write_text("secret")
    return found


def test_python_imports_files_and_packages_of_the_config_map(folder: Path, tmp_path: Path) -> None:
    manifest, mounted = code_manifest(read_code(folder), JOB), tmp_path / "mounted"
    (owner,) = manifest["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("CollectorJob", "pong", "u1")
    assert manifest["immutable"] is True
    assert len(code_name(read_code(folder), "p" * 40)) <= 63, "the longest name of a job makes one that fits a label"
    mounted.mkdir()
    for name, text in manifest["binaryData"].items():
        (mounted / name).write_bytes(base64.b64decode(text))
    assert {path.name for path in mounted.iterdir()} == {"my_policies.py", CODE_ARCHIVE, "table.bin"}
    assert (mounted / "table.bin").read_bytes() == b"\xff\x00\x01"
    code = "import my_policies, my_pkg.deep; print(my_policies.WHO, my_pkg.deep.WHO)"
    path = f"{mounted}:{mounted}/{CODE_ARCHIVE}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "a module a package\n", done.stderr


def test_too_large_a_folder_is_refused(folder: Path) -> None:
    (folder / "my_pkg" / "weights.bin").write_bytes(random.Random(7).randbytes(MOST_BYTES))
    with pytest.raises(BadInput, match=r"do not fit a ConfigMap.* 1,048,576; remove data files"):
        read_code(folder)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "no such folder"),
        (lambda path: path.write_text(""), "is a file; name its folder"),
        (lambda path: path.mkdir(), "no Python files found"),
        (lambda path: (path.mkdir(), (path / "my code.py").write_text("")), "cannot be a key of a ConfigMap"),
    ],
)
def test_what_is_no_folder_of_code_is_refused(tmp_path: Path, make, sentence: str) -> None:
    path = tmp_path / "code"
    make(path)
    with pytest.raises(BadInput, match=sentence):
        read_code(path)
