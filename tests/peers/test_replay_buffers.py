"""What docs/how-to/read-a-dataset.md says of TorchRL's ReplayBuffer, and that a buffer then has every frame."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs this test")

import cormorant
from cormorant_testing.collecting import make_job

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "read-a-dataset.md"
FRAMES = 600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which a job has filled data/cartpole, episodes of which end and are cut."""
    job = make_job(dataset=str(tmp_path / "data" / "cartpole"), num_envs=4, collection={"totalFrames": FRAMES})
    with cormorant.open_fleet(job, workers=2) as fleet:
        assert fleet.wait_until_done(60)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_the_page_fills_replay_buffers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    first, second = (block for block in found if "torchrl" in block)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(first, names)
    dataset, buffer = names["dataset"], names["buffer"]
    assert len(buffer) == len(dataset) == FRAMES
    assert (buffer[:]["observation"] == torch.cat(list(dataset.frames()))["observation"]).all()
    exec(second, names)
    stored = names["buffer"][:]
    for key in (("next", "observation"), ("next", "done"), ("collector", "traj_ids")):
        assert (stored[key] == torch.cat(list(dataset.trajectories()))[key]).all()
    sampled = names["buffer"].sample()["collector", "traj_ids"]
    assert set(sampled.tolist()) <= set(dataset.episodes["traj_id"].to_pylist())
