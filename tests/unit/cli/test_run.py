"""What `cormorant run` refuses before it imports the worker, how it finds the job, and how it waits for the end."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cormorant_cli import __main__ as entry
from cormorant_cli.commands.run import Interrupts, Site, _Session, read_job, translated_errors
from cormorant_cli.errors import BadInput, CliError, CommandFailed
from cormorant_cli.progress import JsonDisplay
from cormorant_testing.stats import make_stats
from cormorant_worker.errors import ControlTimeout, WorkerFailed
from cormorant_worker.fleet.stats import FleetStats

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
        ("spec: [", [], "is not valid YAML"),
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


def test_debug_shows_where_a_refusal_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["run", str(tmp_path / "absent.yaml"), "--debug"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--workers=-1", "--frames=-1", "--device=tpu", "--fleet=swarm"])
def test_bad_options_end_with_two(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["run", "job.yaml", option]) == 2
    assert "Invalid value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "error"), [("ManifestError", BadInput), ("UnknownEnv", BadInput), ("EnvCrashed", CommandFailed)]
)
def test_a_manifest_that_a_worker_refuses_is_invalid(kind: str, error: type[CliError]) -> None:
    with pytest.raises(error, match="cpu-0: no") as caught, translated_errors():
        raise WorkerFailed("cpu-0: no", kind=kind)
    assert caught.value.exit_code == (2 if error is BadInput else 1)


class FakeFleet:
    """Each wait is answered in turn: by what it returns, or by an error."""

    def __init__(self, *answers: object) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)

    def skip(self, *, timeout_s: float) -> Any:
        return self._answer(f"skip {timeout_s}")

    def wait_until_done(self, timeout_s: float) -> Any:
        return self._answer(f"wait {timeout_s}")

    def stats(self) -> FleetStats:
        return make_stats(frames=64 * len(self.asked), stepped_frames=64 * len(self.asked))

    def _answer(self, asked: str) -> object:
        self.asked.append(asked)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def session(tmp_path: Path) -> Any:
    def make(output: str) -> _Session:
        path = tmp_path / "job.yaml"
        path.write_text(f"{JOB}  output: {output}\n".replace("NAME", "one"))
        display = JsonDisplay()
        return _Session(read_job(str(path), ""), display, Interrupts(display), Site(fleet="local", ray_address=""))

    return make


LATE = ControlTimeout("no batch came within 0.2 s")
QUEUE, DATASET = "{queue: {}}", "{dataset: {uri: data}}"


def test_a_moment_without_a_batch_is_waited_for_and_shown(session: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = FakeFleet(LATE, LATE, 64, LATE, 0)
    assert session(QUEUE)._collect(fleet, None) == "done"
    assert fleet.asked == ["skip 0.2"] * 5
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines())  # one a second
    assert (shown["event"], shown["frames"]) == ("progress", 64)


def test_without_a_queue_the_end_of_the_fleet_is_waited_for(session: Any) -> None:
    fleet = FakeFleet(False, False, True)
    assert session(DATASET)._collect(fleet, None) == "done"
    assert fleet.asked == ["wait 0.2"] * 3


def test_a_control_call_that_is_not_answered_ends_a_run_without_a_queue(session: Any) -> None:
    with pytest.raises(ControlTimeout):
        session(DATASET)._collect(FakeFleet(False, LATE), None)


@pytest.mark.parametrize(("output", "answer"), [(QUEUE, 64), (QUEUE, LATE), (DATASET, False)])
def test_an_interrupt_ends_the_wait_after_the_next_answer(session: Any, output: str, answer: object) -> None:
    class Interrupting(FakeFleet):
        def _answer(self, asked: str) -> object:
            running._interrupts.requested = len(self.asked) == 1
            return super()._answer(asked)

    running = session(output)
    fleet = Interrupting(answer, answer)
    assert running._collect(fleet, None) == "interrupted"
    assert len(fleet.asked) == 2
