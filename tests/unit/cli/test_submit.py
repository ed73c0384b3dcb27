"""What a submission sends: what the user wrote, and nothing that the user did not."""

from pathlib import Path
from typing import Any

import pytest

from cormorant_cli.__main__ import run
from cormorant_cli.commands.submit import code_name, document_of, obstacle_of
from cormorant_manifest.reader import parse_jobs

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


def test_code_is_named_in_the_spec() -> None:
    (job,) = parse_jobs(MANIFEST)
    files = {"mine.py": b"x = 1\n"}
    assert document_of(job, files, namespace="rl")["spec"]["code"] == {"configMap": code_name(files, "pong")}


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (MANIFEST.replace("name: pong,", "name: pong, namespace: a,"), ["-n", "b"], 'puts pong in namespace "a"'),
        (MANIFEST + HERE, ["--code", "code"], 'spec.code of pong names the ConfigMap "mine"'),
        (MANIFEST + "  code: {image: me/code:1}\n", ["--code", "code"], 'names the image "me/code:1"'),
        (MANIFEST + "---" + MANIFEST, ["--code", "code"], "--code works with one job"),
        (MANIFEST, ["--code", "none"], "--code none: no such folder"),
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


def test_job_waits_for_what_its_first_bad_condition_says() -> None:
    conditions = [
        {"type": "Accepted", "status": "True", "reason": "Accepted"},
        {"type": "Scheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available"},
        {"type": "Ready", "status": "False", "reason": "HeadNotReady"},
    ]
    assert obstacle_of({"status": {"conditions": conditions}}) == "Unschedulable: 0/1 nodes are available"
    assert obstacle_of({"status": {"conditions": conditions[:1]}}) == ""
