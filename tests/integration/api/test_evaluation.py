"""An evaluation under a head: its table over REST, and the same bits after heads and workers were killed."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from cormorant import evaluate
from cormorant_cli import __main__ as entry
from cormorant_testing.collecting import make_job
from cormorant_testing.heads import HeadProcess
from cormorant_testing.pods import tokens_file
from cormorant_testing.scripts import until, unused_port


def write_evaluation(folder: Path, results: Path, *, episodes: int = 30, step_s: float = 0.005) -> Path:
    job = make_job(
        policy="cormorant.policies:mlp", dataset=str(results), longest=60, step_s=step_s,
        collection={"framesPerBatch": 2, "episodes": {"count": episodes, "deterministic": False}},
    )  # fmt: skip
    path = folder / "evaluation.yaml"
    path.write_text(yaml.safe_dump(job.to_document()))
    return path


def table_of(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in ("planned", "episodes", "summary", "tasks")}


def test_command_waits_for_a_head_that_has_yet_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = write_evaluation(tmp_path, tmp_path / "results", episodes=5, step_s=0)
    tokens, port = tokens_file(tmp_path), unused_port()
    arguments = ["evaluate", "--url", f"http://127.0.0.1:{port}", "--token-file", str(tokens), "--wait"]
    assert entry.run([*arguments, "0.5"]) == 1
    said = capsys.readouterr().err
    assert "no table after 0.5 s: " in said
    assert "for 3 s" not in said, "the client's own patience"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(entry.run, [*arguments, "120", "--json"])
        until(lambda: str(port) in capsys.readouterr().err or waiting.done())
        options = ("--port", str(port), "--token-file", str(tokens), "--linger-seconds", "5")
        with HeadProcess(manifest, tmp_path / "head", *options) as head:
            assert waiting.result(120) == 0
            assert head.process.wait(60) == 0
    assert len(json.loads(capsys.readouterr().out)["episodes"]) == 5


@pytest.mark.slow
def test_heads_and_workers_that_are_killed_change_no_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    manifest = write_evaluation(tmp_path, results)
    with HeadProcess(manifest, tmp_path / "head", "--workers", "2") as head:
        reader = head.api("read")
        until(lambda: len(reader.get("/v1/evaluation").json["episodes"]) >= 4)
        os.kill(reader.get("/v1/workers").json["workers"][0]["pid"], signal.SIGKILL)
        until(lambda: len(reader.get("/v1/evaluation").json["episodes"]) >= 8)
        head.kill()
    before = len(list((results / "played").iterdir()))
    with HeadProcess(manifest, tmp_path / "head", "--workers", "1", "--linger-seconds", "5") as head:
        reader = head.api("read")
        until(lambda: reader.get("/v1/status").json["phase"] == "Completed")
        served = reader.get("/v1/evaluation").json
        url = f"http://127.0.0.1:{reader.port}"
        arguments = ["evaluate", "--url", url, "--token-file", str(tmp_path / "head/tokens.json")]
        assert entry.run(arguments) == 0
        assert head.process.wait(60) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [url, "30"]
    assert len(list((results / "played").iterdir())) > before
    alone = json.loads(evaluate(manifest, workers=1).to_json())
    assert alone["planned"] == len(alone["episodes"]) == 30
    assert table_of(json.loads((results / "evaluation.json").read_text())) == alone
    assert table_of(served) == alone
