"""`cormorant evaluate`: the table, a sweep, resuming in a folder, and what bad input is told."""

import json
from pathlib import Path

import pytest
import torch

from cormorant_cli import __main__ as entry
from cormorant_testing.commands import Written

MLP = {"entrypoint": "cormorant.policies:mlp"}


@pytest.fixture
def checkpoints(write: Written, tmp_path: Path) -> list[str]:
    """Two safetensors files for `job.yaml`, whose policies differ."""
    from safetensors.torch import load_file, save_file

    job, first, second = write(policy=MLP), tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    assert entry.run(["weights", "init", str(job), str(first)]) == 0
    save_file({name: torch.flip(value, (0,)) for name, value in load_file(first).items()}, second)
    return [str(first), str(second)]


@pytest.mark.slow
def test_a_sweep_is_one_line_a_checkpoint(
    write: Written, checkpoints: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = checkpoints
    job = str(write(policy=MLP))
    arguments = ["evaluate", job, *("--episodes", "9"), *("--seed", "4"), *("--output", str(tmp_path / "all"))]
    capsys.readouterr()
    assert entry.run([*arguments, "--weights", first, "--weights", second, "--workers", "2"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["CHECKPOINT", "EPISODES", "RETURN", "MEDIAN", "MIN", "MAX", "LENGTH"]
    assert [line.split()[:2] for line in lines] == [[first, "9"], [second, "9"]]
    assert (tmp_path / "all" / "first" / "episodes.parquet").exists()
    # What a folder has is not played again, and the table is the one that another number of workers makes.
    assert entry.run([*arguments[:-1], str(tmp_path / "all/first"), "--weights", first, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert entry.run([*arguments[:-2], "--weights", first, "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == again
    assert again["weights"] == first
    assert [episode["seed"] for episode in again["episodes"]] == list(range(4, 13))


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
