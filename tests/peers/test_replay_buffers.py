"""What docs/how-to/read-a-dataset.md says of TorchRL's ReplayBuffer, and that a buffer then has every frame."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs this test")

from tensordict.nn import TensorDictModule
from torchrl.data import LazyMemmapStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.envs import Compose, DoubleToFloat, GymEnv, ParallelEnv, RewardSum, StepCounter, TransformedEnv

import cormorant
from cormorant.torchrl import MultiaSyncDataCollector, SyncDataCollector, aSyncDataCollector
from cormorant_testing.collecting import make_job
from cormorant_testing.snippets import blocks

FRAMES = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a job has filled data/cartpole, episodes of which end and are cut."""
    tmp_path = tmp_path_factory.mktemp("collected")
    job = make_job(dataset=str(tmp_path / "data" / "cartpole"), num_envs=4, collection={"totalFrames": FRAMES})
    with cormorant.open_fleet(job, workers=2) as fleet:
        assert fleet.wait_until_done(60)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_the_page_fills_replay_buffers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (block for block in blocks("docs/how-to/read-a-dataset.md", "python") if "torchrl" in block)
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


def pendulum() -> Any:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(DoubleToFloat(), StepCounter(), RewardSum()))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "envs"),
    [
        pytest.param(MultiaSyncDataCollector, [pendulum, pendulum], id="rl#2614"),
        pytest.param(SyncDataCollector, partial(ParallelEnv, 2, pendulum), id="rl#2617"),
        pytest.param(aSyncDataCollector, partial(ParallelEnv, 2, pendulum), id="rl#3240"),
    ],
)
def test_collectors_that_are_given_a_buffer_fill_it(kind: Any, envs: Any) -> None:
    """TorchRL's own crash or hang, as these issues tell."""
    layers = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh())
    policy = TensorDictModule(layers, in_keys=["observation"], out_keys=["action"])
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000), sampler=RandomSampler(), batch_size=32, prefetch=3)
    collector = kind(envs, policy, frames_per_batch=40, total_frames=200, replay_buffer=buffer)
    assert [*collector] == [None] * 5
    assert len(buffer) == 200
    assert buffer.sample().batch_size == (32,)
    collector.shutdown()
