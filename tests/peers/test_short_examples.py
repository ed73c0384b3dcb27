"""The short example that needs TorchRL: SAC, from a fleet into a replay buffer."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs this test")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_sac_fills_a_replay_buffer_and_learns() -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "short" / "sac.py"))["main"]
    assert -2000 < main(600) < 0
