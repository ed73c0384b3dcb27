"""`cormorant evaluate`: what bad input is told."""

from pathlib import Path

import pytest

from cormorant_cli import __main__ as entry
from cormorant_testing.commands import Written

MLP = {"entrypoint": "cormorant.policies:mlp"}


def test_run_names_the_command_for_evaluations(write: Written, capsys: pytest.CaptureFixture[str]) -> None:
    collection = {"framesPerBatch": 64, "episodes": {"count": 2}}
    job = write(collection=collection, output={"dataset": {"uri": "results"}})
    assert entry.run(["run", str(job)]) == 2
    assert f"small is an evaluation; run it with: cormorant evaluate {job}" in capsys.readouterr().err


def test_bad_input_gets_a_sentence(write: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(write(policy=MLP))
    for arguments, sentence in (
        ([], "small has no collection.episodes; say how many to play"),
        (["--episodes", "2", "--video", "1"], "--video needs a folder for its files; give --output"),
        (["--episodes", "2", "--weights", "a.st", "--weights", "a.st"], "--weights a.st is given more than once"),
        (["--episodes", "2", "--seed", str(2**31 - 1)], "leaves no room for the episodes' own seeds"),
    ):
        assert entry.run(["evaluate", job, *arguments]) == 2
        assert sentence in capsys.readouterr().err
    assert entry.run(["evaluate", job, "--episodes", "2", "--weights", str(tmp_path / "none.safetensors")]) == 1
    assert "there is no such file; correct its path" in capsys.readouterr().err
