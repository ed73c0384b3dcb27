"""The migration guide's snippets run as they stand."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
GUIDE = (ROOT / "docs" / "how-to" / "migrating-from-torchrl.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
OURS = [block for block in BLOCKS if block.startswith("# Cormorant")]
THEIRS = [block for block in BLOCKS if block.startswith("# TorchRL")]


def run(block: str) -> None:
    # A Ray of its own; at Ray's niceness of 15, workers never start beside other work.
    env = {**os.environ, "RAY_ADDRESS": "local"}
    command = [sys.executable, "-W", "ignore", "-c", block]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def test_every_block_is_somebodys() -> None:
    assert (len(OURS), len(THEIRS), len(BLOCKS)) == (4, 4, 8)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(4))
def test_our_half_runs_as_it_stands(number: int) -> None:
    run(OURS[number])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("torchrl") is None, reason="TorchRL is not installed; install it to run its half")
@pytest.mark.parametrize("number", range(4))
def test_torchrls_half_runs_as_it_stands(number: int) -> None:
    run(THEIRS[number])
