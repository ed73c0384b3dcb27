"""What `cormorant run` refuses before it imports the worker, and how it finds the job."""

import json
import sys
from pathlib import Path

import pytest

from cormorant_cli import __main__ as entry
from cormorant_cli.commands.run import translated_errors
from cormorant_cli.errors import BadInput, CliError, CommandFailed
from cormorant_worker.errors import WorkerFailed

JOB = """
apiVersion: cormorant.dev/v1alpha1
kind: CollectorJob
metadata: {name: NAME}
spec:
  env: {envpool: {taskId: CartPole-v1, numEnvs: 4}}
  policy: {random: {}}
  collection: {framesPerBatch: 64}
"""
TWO = JOB.replace("NAME", "one") + "---\n" + JOB.replace("NAME", "two")


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("text", "arguments", "sentence"),
    [
        (JOB.replace("numEnvs: 4", "numEnvs: 0"), [], "spec.env.envpool.numEnvs: 0 is less than 1"),
        (TWO, [], "contains 2 CollectorJobs; choose one with --name one or --name two"),
        (TWO, ["--name", "three"], 'contains 0 CollectorJobs named "three"; its jobs are one, two'),
    ],
)
def test_bad_manifests_end_with_two_and_a_sentence(
    text: str, arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert entry.run(["run", str(path), *arguments]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_machine_reads_the_refusal_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "absent.yaml"
    assert entry.run(["run", str(missing), "--json"]) == 2
    message = f"{missing}: no such file; check the path"
    said = capsys.readouterr()
    assert said.out == f'{{"event": "failed", "message": "{message}", "exit_code": 2}}\n'
    assert json.loads(said.err) == {"error": message, "exit_code": 2}
    assert entry.run(["run", str(missing), "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "error"), [("ManifestError", BadInput), ("UnknownEnv", BadInput), ("EnvCrashed", CommandFailed)]
)
def test_a_manifest_that_a_worker_refuses_is_invalid(kind: str, error: type[CliError]) -> None:
    with pytest.raises(error, match="cpu-0: no") as caught, translated_errors():
        raise WorkerFailed("cpu-0: no", kind=kind)
    assert caught.value.exit_code == (2 if error is BadInput else 1)
