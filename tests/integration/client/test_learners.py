"""The learners in `examples/`: processes that know a URL and a token file, against `cormorant run --serve`."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cormorant_testing.commands import START_S, Started
from cormorant_testing.scripts import until, unused_port

EXAMPLES = Path(__file__).parents[3] / "examples"


@contextmanager
def served(manifest: str, start: Started, folder: Path) -> Iterator[list[str]]:
    """Serve a manifest; yields the options that a learner needs."""
    port = unused_port()
    tokens = folder / "head/tokens.json"
    command = start(
        "run", str(EXAMPLES / manifest), "--serve", "--port", str(port), "--directory", str(folder / "head")
    )
    until(tokens.exists, seconds=START_S, what="the head makes a token file")
    yield ["--url", f"http://127.0.0.1:{port}", "--token-file", str(tokens)]
    command.interrupt()
    command.end()


def learn(script: str, *arguments: str, timeout_s: float) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(4 * START_S)
def test_the_cartpole_learner_runs(start: Started, tmp_path: Path) -> None:
    with served("cartpole-ppo.yaml", start, tmp_path) as head:
        out = learn("rest_ppo_cartpole.py", *head, "--quick", timeout_s=2 * START_S)
    assert out.splitlines()[-1].startswith("mean return of the last episodes: ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_cartpole_learner_reaches_450(start: Started, tmp_path: Path) -> None:
    with served("cartpole-ppo.yaml", start, tmp_path) as head:
        out = learn("rest_ppo_cartpole.py", *head, "--seed", "2", timeout_s=1500)
    assert float(out.split()[-1]) >= 450


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_pong_learner_lowers_its_loss(start: Started, tmp_path: Path) -> None:
    with served("pong-ppo.yaml", start, tmp_path) as head:
        out = learn("rest_ppo_pong.py", *head, "--updates", "6", timeout_s=1500)
    found = re.fullmatch(r"6 updates, loss (-?[\d.]+) -> (-?[\d.]+)", out.splitlines()[-1])
    assert found, out
    assert float(found[2]) < float(found[1])
