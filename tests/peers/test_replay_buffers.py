"""What docs/how-to/read-a-dataset.md says of TorchRL's ReplayBuffer, and that a buffer then has every frame."""

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl", reason="TorchRL is not installed; `make test-peers` runs this test")

from tensordict.nn import TensorDictModule
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.envs import Compose, DoubleToFloat, GymEnv, ParallelEnv, RewardSum, StepCounter, TransformedEnv

import cormorant
from cormorant.torchrl import MultiaSyncDataCollector, SyncDataCollector, aSyncDataCollector
from cormorant_testing.collecting import make_job

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "read-a-dataset.md"
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


STORAGES = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(FRAMES, alpha=0.7, beta=0.9),
    "slices": lambda: SliceSampler(traj_key=("collector", "traj_ids"), slice_len=2, strict_length=False),
}


COMBINATIONS = [pair for pair in itertools.product(STORAGES, SAMPLERS) if pair != ("list", "slices")]
"""TorchRL samples slices from storages of tensors only."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_two_dimensions_take_trajectories_and_batches(folder: Path, storage: Any) -> None:
    dataset = cormorant.read_dataset(str(folder / "data" / "cartpole"))
    buffer = ReplayBuffer(storage=storage(FRAMES, ndim=2), sampler=SAMPLERS["slices"](), batch_size=32)
    for trajectory in dataset.trajectories():
        buffer.extend(trajectory[None])
    assert len(buffer) == FRAMES
    assert (buffer[:][0]["observation"] == torch.cat(list(dataset.trajectories()))["observation"]).all()
    assert buffer.sample().batch_size == (32,)
    live = ReplayBuffer(storage=storage(80, ndim=2), batch_size=32)
    with cormorant.open_fleet(make_job(num_envs=4, collection={"totalFrames": 80}, queue={}), workers=1) as fleet:
        for batch in fleet.batches():
            live.extend(batch)
    assert len(live) == 80


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("read", ["frames", "trajectories"])
@pytest.mark.parametrize(("storage", "sampler"), COMBINATIONS)
def test_every_buffer_takes_what_is_read(folder: Path, storage: str, sampler: str, read: str) -> None:
    dataset = cormorant.read_dataset(str(folder / "data" / "cartpole"))
    buffer = TensorDictReplayBuffer(storage=STORAGES[storage](FRAMES), sampler=SAMPLERS[sampler](), batch_size=32)
    for part in getattr(dataset, read)():
        buffer.extend(part)
    known = {tuple(row) for row in torch.cat(list(dataset.frames()))["observation"].tolist()}
    sample = buffer.sample()
    assert len(buffer) == FRAMES
    assert {tuple(row) for row in sample["observation"].tolist()} <= known
