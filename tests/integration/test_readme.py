"""What the README shows is run: its Python, its manifest, its commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path = ROOT, timeout_s: float = 300) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(2))
def test_python_blocks_run_as_they_stand(number: int) -> None:
    assert len(blocks("python")) == 2
    run(sys.executable, "-c", blocks("python")[number])


@pytest.mark.timeout(300)
def test_the_manifest_is_valid_and_fills_its_dataset(tmp_path: Path) -> None:
    (manifest,) = blocks("yaml")
    (tmp_path / "job.yaml").write_text(manifest)
    run(BIN / "cormorant", "validate", "job.yaml", cwd=tmp_path)
    run(BIN / "cormorant", "run", "job.yaml", cwd=tmp_path)
    report = run(BIN / "cormorant", "dataset", "verify", "data/cheetah", cwd=tmp_path)
    assert "8192 frames" in report


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_make_run_collects_pong_and_the_dataset_commands_take_it(tmp_path: Path) -> None:
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone")
    clone = tmp_path / "clone"
    # This environment instead of a new one: what `make run` does after the install is the same.
    run("make", "run", f"VENV={BIN.parent}", cwd=clone, timeout_s=900)
    made_by_make, *later = blocks("sh")
    assert "make run" in made_by_make
    commands = [line for block in later for line in block.splitlines() if line.startswith(".venv/bin/")]
    assert len(commands) == 2
    for command in commands:
        run(*command.replace(".venv/bin", str(BIN)).split(), cwd=clone, timeout_s=600)
    assert "200000 frames" in run(BIN / "cormorant", "dataset", "verify", "data/pong", cwd=clone)
