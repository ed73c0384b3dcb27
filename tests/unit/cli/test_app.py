"""How the command line starts and ends; `init` and `dataset`."""

import json
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer

from cormorant_cli import __main__ as entry
from cormorant_cli.app import app
from cormorant_cli.commands.evaluate import show_table
from cormorant_client import connect
from cormorant_contract.schema import crd
from cormorant_testing.datasets import write_dataset
from cormorant_testing.scripts import run_script


@pytest.mark.parametrize(
    ("arguments", "words", "is_json"),
    [
        ("status pong -o json", "status pong", True),
        ("doctor --json pong", "doctor pong", True),
        ("evaluate job.yaml --output json", "evaluate job.yaml --output json", False),
        ("-o json version", "version", True),
    ],
)
def test_every_command_takes_json_in_two_spellings(arguments: str, words: str, is_json: bool) -> None:
    assert entry.without_json(arguments.split()) == (words.split(), is_json)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("run job.yaml --frames -1", "Invalid value for '--frames': must be at least 0"),
        ("dataset export d --to csv", "'csv' is not one of 'minari', 'parquet', 'lerobot'"),
        ("evaluate pong --episodes 2 --sample", "pong runs already with what its manifest says; give a manifest"),
        ("status --url http://h --token t --token-file f", "token and token_file both give a token"),
        ("status pong --url http://h", '"pong" names a job of the cluster and --url http://h a head'),
        ("status --url http://h -n rl", "--namespace and --context need a job's name"),
    ],
)
def test_refused_options_are_json_where_asked_and_never_the_librarys_words(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.run([*command.split(), "--json"]) == 2
    error = json.loads(capsys.readouterr().err)
    assert (error["exit_code"], sentence in error["error"]) == (2, True), error
    assert "Value error" not in error["error"]


def test_a_token_file_that_is_given_comes_before_the_environments_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("given")
    monkeypatch.setenv("CORMORANT_TOKEN", "another")
    assert connect("http://127.0.0.1:9", token_file=tmp_path / "token").again.keywords["token"] == "given"
    assert connect("http://127.0.0.1:9").again.keywords["token"] == "another"


@pytest.mark.parametrize("arguments", [["bogus"], ["validate"], ["validate", "--bogus"], []])
def test_usage_errors_end_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(arguments) == 2
    assert "cormorant" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("module", "event", "ending"),
    [
        ("cormorant_cli.app", "os.kill(os.getpid(), signal.SIGINT)", (-signal.SIGINT, "")),
        (
            "typer",
            "raise ModuleNotFoundError(name=name)",
            (1, "the command line needs typer, which is not installed: pip install 'cormorant[cli]'\n"),
        ),
    ],
    ids=["ctrl-c", "without-extras"],
)
def test_imports_that_end_print_no_traceback(module: str, event: str, ending: tuple[int, str]) -> None:
    script = f"""
import os, signal, sys
class Ends:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            {event}
sys.meta_path.insert(0, Ends())
import cormorant_cli.__main__
"""
    done = run_script(script)
    assert (done.returncode, done.stderr) == ending


@pytest.mark.parametrize(
    ("streams", "ending"),
    [
        ("1>&-", (0, "")),
        ("2>&-", (0, "")),
        ("1>/dev/full", (1, "the disk is full; free space, or write the output elsewhere")),
    ],
)
def test_command_whose_streams_fail_prints_no_traceback(streams: str, ending: tuple[int, str]) -> None:
    command = ["sh", "-c", f"exec {sys.executable} -m cormorant_cli version {streams}"]
    done = subprocess.run(command, timeout=60, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.strip()) == ending


def test_crd_is_json_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["crd", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == crd()


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_version_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(arguments) == 0
    assert capsys.readouterr().out == f"cormorant {metadata.version('cormorant')}\n"


def test_examples_in_help_parse() -> None:
    group = typer.main.get_command(app)
    examples = [
        line.split()[1:]
        for command in group.commands.values()  # type: ignore[attr-defined]  # a group has commands
        for line in (command.epilog or "").splitlines()
        if line.startswith("cormorant ")
    ]
    assert len(examples) > 12
    for name, *arguments in examples:
        command = group.commands[name]  # type: ignore[attr-defined]  # as above
        with command.make_context(name, arguments) as context:
            assert context.params


def test_an_interrupted_evaluation_says_once_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = []

    def interrupt(*_arguments: object, directory: object, **_options: object) -> None:
        kept.append(directory)
        raise KeyboardInterrupt

    monkeypatch.setattr("cormorant_worker.run_evaluation.evaluate", interrupt)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the manifest's folder goes on it
    entry.run(["init", str(tmp_path)])
    arguments = [str(tmp_path / "job.yaml"), "--episodes", "2", "--output", "s3://bucket/results"]
    assert entry.run(["evaluate", *arguments, "--json"]) == 130
    assert kept == ["s3://bucket/results"], "the URI as it was given"
    hint = "interrupted; run it again with --output s3://bucket/results to continue"
    assert json.loads(capsys.readouterr().err) == {"error": hint, "exit_code": 130}


def test_no_two_columns_of_the_table_have_one_name() -> None:
    spread = {"mean": 1.0, "high": 1.5}
    found = {
        "episodes": 2,
        "return": spread,
        "length": spread,
        "metrics": {"success": spread, "ever": spread},
        "success": {"rate": 0.5, "low": 0.1, "high": 0.9},
    }
    header = show_table([("a", found)]).splitlines()[0].split()
    assert header[2:] == ["RETURN", "LENGTH", "SUCCESS", "METRICS.SUCCESS", "METRICS.EVER"]


# -- init ------------------------------------------------------------------------------------------------------


def test_init_writes_a_job_that_validates_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.run(["init", str(tmp_path / "new")]) == 0
    assert entry.run(["validate", str(tmp_path / "new" / "job.yaml")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("cartpole: ok")
    (tmp_path / "policy.py").write_text("mine")
    assert entry.run(["init", str(tmp_path / "job.yaml")]) == 2
    assert "job.yaml is a file's name, and init writes two files; name a folder" in capsys.readouterr().err
    assert entry.run(["init", str(tmp_path)]) == 2
    assert f"{tmp_path / 'policy.py'}: already there" in capsys.readouterr().err
    assert (tmp_path / "policy.py").read_text() == "mine"
    assert not (tmp_path / "job.yaml").exists()


# -- dataset ---------------------------------------------------------------------------------------------------


def dataset(*arguments):
    return entry.run(["dataset", *arguments])


def test_a_dataset_is_listed_exported_beside_it_and_verified(tmp_path, capsys):
    uri = write_dataset(str(tmp_path / "data"))
    assert dataset("ls", uri) == 0
    text = capsys.readouterr().out
    assert "cpu-0-0" in text
    assert "8 frames in 1 part" in text
    dataset("ls", uri, "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], told["frames"], told["parts"][0]["shards"]) == ("pole", 8, 1)
    assert dataset("export", f"file://{tmp_path}/da%74a", "--to", "parquet") == 0
    assert (tmp_path / "data-parquet" / "cpu-0-0.parquet").exists()
    assert "data-parquet: 8 frames" in capsys.readouterr().out
    assert dataset("export", uri, "--to", "lerobot", "--fps", "50", "--out", str(tmp_path / "robot")) == 0
    assert json.loads((tmp_path / "robot" / "meta" / "info.json").read_text())["fps"] == 50
    assert dataset("verify", uri) == 0
    assert "ok, 8 frames in 1 shard of 1 part" in capsys.readouterr().out
    with (tmp_path / "data" / "cpu-0-0" / "frames-000000.arrow").open("ab") as shard:
        shard.write(b"x")
    assert dataset("verify", uri) == 1
    assert "the manifest says" in capsys.readouterr().err


def test_what_cannot_be_is_a_sentence(tmp_path, capsys):
    assert dataset("export", "memory://nowhere", "--to", "parquet") == 2
    assert "--out is required" in capsys.readouterr().err
    assert dataset("export", str(tmp_path), "--to", "parquet", "--out", "s3://bucket/x") == 2
    assert "--out s3://bucket/x is not a local folder" in capsys.readouterr().err
    assert dataset("verify", str(tmp_path)) == 1
    assert "there is no dataset at" in capsys.readouterr().err
