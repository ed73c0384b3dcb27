"""The Python of docs/how-to/multi-agent.md: on an environment of its own, and into TorchRL's MAPPOLoss."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from cormorant_testing.snippets import blocks

OWN, MAPPO = blocks("docs/how-to/multi-agent.md", "python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(script: str, folder: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_environment_of_ones_own_is_collected(tmp_path: Path) -> None:
    assert "torch.Size([4, 64, 2, 1])" in run(OWN, tmp_path)


def test_mappo_learns_from_batches_as_they_are(tmp_path: Path) -> None:
    for library in ("torchrl", "mpe2"):
        pytest.importorskip(library, reason=f"{library} is not installed; `make test-peers` runs this test")
    rewards = [float(line[7:-1]) for line in run(MAPPO, tmp_path) if line.startswith("tensor(")]
    assert len(rewards) == 5
    assert all(math.isfinite(reward) and reward < 0 for reward in rewards)
