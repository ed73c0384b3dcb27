"""How the command line starts and ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cormorant_cli import __main__ as entry
from cormorant_cli.crd import crd_yaml
from cormorant_cli.errors import BadInput, CommandFailed
from cormorant_contract.errors import ManifestError, Problem

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "tensordict", "envpool", "gymnasium", "numpy", "ray", "kubernetes", "cormorant_worker")


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


def test_committed_crd_is_the_one_of_the_models() -> None:
    committed = ROOT / "charts/cormorant/files/crds/collectorjobs.yaml"
    assert committed.read_text() == crd_yaml(), f"run `cormorant crd > {committed.relative_to(ROOT)}`"


def test_crd_fits_client_side_apply() -> None:
    assert len(crd_yaml().encode()) < 64 * 1024


def test_crd_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["crd"]) == 0
    assert capsys.readouterr().out == crd_yaml()


def test_nothing_heavy_is_imported_before_a_command_needs_it() -> None:
    done = python("-c", f"import sys, cormorant_cli.app; print([name for name in {HEAVY} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


def test_the_contract_reads_no_yaml() -> None:
    done = python(
        "-c", "import sys, cormorant_contract.schema, cormorant_contract.parsing; print('yaml' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (CommandFailed("the disk is full"), 1, "the disk is full\n"),
        (BadInput("--workers 0 is less than 1"), 2, "--workers 0 is less than 1\n"),
        (ManifestError([Problem(message="no such file", source="a.yaml")]), 2, "a.yaml: no such file\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Exit(7), 7, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(entry, "app", app)
    assert entry.run([]) == code
    assert capsys.readouterr().err.lstrip() == sentence


@pytest.mark.parametrize("arguments", [["bogus"], ["validate"], ["validate", "--bogus"], []])
def test_usage_errors_end_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(arguments) == 2
    assert "cormorant" in "".join(capsys.readouterr())


@pytest.mark.skipif(os.name != "posix", reason="pipes of a shell")
def test_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m cormorant_cli crd | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
