"""What the README shows is run: its Python, its manifest, its commands."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.numpy

from cormorant_testing.scripts import unused_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path = ROOT, timeout_s: float = 300, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=env,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(2))
def test_python_blocks_run_as_they_stand(number: int, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run(sys.executable, "-c", local_python()[number], cwd=tmp_path)
    saved = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert saved == (["policy.safetensors"] if number == 0 else [])


def local_python() -> list[str]:
    """Those that need no head, in their order: the first one saves the weights that the others publish."""
    first, second = [block for block in blocks("python") if "cormorant_client" not in block]
    return [first, second]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_rest_api_answers_as_shown(tmp_path: Path) -> None:
    """The served run, the curl lines against it, and the learner's Python, in this order and as they stand."""
    (serve,) = [line for block in blocks("sh") for line in block.splitlines() if "--serve" in line and "head" in line]
    (curls,) = [block for block in blocks("sh") if "curl" in block and "kubectl" not in block]
    (learner,) = [block for block in blocks("python") if "cormorant_client" in block]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run(sys.executable, "-c", local_python()[0], cwd=tmp_path)
    port = unused_port()
    command = serve.partition("#")[0].split()
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "CORMORANT_URL": f"http://127.0.0.1:{port}",
        "CORMORANT_TOKEN_FILE": "head/tokens.json",
    }
    with subprocess.Popen(
        [*command, "--port", str(port)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as head:
        try:
            await_head(f"http://127.0.0.1:{port}/readyz", head)
            shell = curls.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
            run("bash", "-euc", shell, cwd=tmp_path, env=environment)
            assert safetensors.numpy.load_file(tmp_path / "batch.safetensors")["0/next/reward"].shape == (32, 8)
            run(BIN / "cormorant", "resume", cwd=tmp_path, env=environment)
            printed = run(sys.executable, "-c", learner, cwd=tmp_path, env=environment)
            assert printed.count("state='applied'") >= 2048 // 512
            assert int(printed.splitlines()[-1]) >= 2048
        finally:
            head.send_signal(signal.SIGINT)
            head.communicate(timeout=30)


def await_head(url: str, head: "subprocess.Popen[bytes]", *, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while True:
        assert head.poll() is None, head.communicate()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} did not answer in time"
            time.sleep(0.2)


@pytest.mark.timeout(300)
def test_the_manifest_is_valid_and_fills_its_dataset(tmp_path: Path) -> None:
    (manifest,) = blocks("yaml")
    (tmp_path / "job.yaml").write_text(manifest)
    run(BIN / "cormorant", "validate", "job.yaml", cwd=tmp_path)
    run(BIN / "cormorant", "run", "job.yaml", cwd=tmp_path)
    report = run(BIN / "cormorant", "dataset", "verify", "data/cheetah", cwd=tmp_path)
    assert "8,192 frames" in report


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_make_run_collects_pong_and_the_dataset_commands_take_it(tmp_path: Path) -> None:
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone")
    clone = tmp_path / "clone"
    # This environment instead of a new one, and not installed anew: it would run the clone's code from then on.
    run("make", f"--assume-old={BIN.parent}/.installed", "run", f"VENV={BIN.parent}", cwd=clone, timeout_s=900)
    made_by_make, *later = blocks("sh")
    assert "make run" in made_by_make
    commands = [line for block in later for line in block.splitlines() if line.startswith(".venv/bin/")]
    assert len(commands) == 2
    for command in commands:
        run(*command.replace(".venv/bin", str(BIN)).split(), cwd=clone, timeout_s=600)
    assert "200,000 frames" in run(BIN / "cormorant", "dataset", "verify", "data/pong", cwd=clone)
