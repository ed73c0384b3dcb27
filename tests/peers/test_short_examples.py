"""The short example that needs TorchRL: SAC, from a fleet into a replay buffer."""

import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs this test")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_sac_fills_a_replay_buffer_and_learns(request: pytest.FixtureRequest) -> None:
    # Threads of small networks wait for each other beside other work: 9 s of CPU did not end within 300 s.
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "short" / "sac.py"))["main"]
    assert -2000 < main(600) < 0
