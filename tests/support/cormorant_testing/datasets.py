"""Datasets of a small environment, and the frames of any."""

from collections.abc import Iterator

import gymnasium
import numpy as np

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.sinks.dataset import StoredDataset, open_dataset
from cormorant_worker.sinks.description import DatasetDescription
from cormorant_worker.sinks.frames import Frames
from cormorant_worker.sinks.schema import FrameSchema
from cormorant_worker.spaces import leaves


def described(*, num_rows: int, num_envs: int, job: str = "") -> tuple[Layout, DatasetDescription]:
    """Blocks of two numbers and one action of three a frame, and the dataset that they belong to."""
    observation, action = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32), gymnasium.spaces.Discrete(3)
    layout = Layout(
        num_rows=num_rows,
        num_envs=num_envs,
        observation=leaves(observation, ("observation",)),
        action=leaves(action, ("action",)),
    )
    return layout, DatasetDescription(
        env={"gymnasium": {"id": "Count"}},
        observation_space=observation,
        action_space=action,
        schema=FrameSchema.of(layout),
        job=job,
    )


def write_dataset(uri: str, *, shards: int = 1) -> str:
    """Four steps of two environments of the job pole: each shard's observations are its number, rewards go on."""
    layout, description = described(num_rows=4, num_envs=2, job="pole")
    block = Block(layout)
    block.begin(4)
    block.lengths[:] = 4
    block.traj_ids[:] = [0, 1]
    with open_dataset(uri, description).writer("cpu-0-0", layout) as writer:
        for shard in range(shards):
            block.observation[0][:] = shard
            block.reward[:] = np.arange(8 * shard, 8 * shard + 8).reshape(4, 2)
            writer.append(block)
            writer.flush()
    return uri


def iter_frames(dataset: StoredDataset) -> Iterator[Frames]:
    """Every durable frame: parts in order, each part's batches as they were collected."""
    for part in dataset.parts():
        yield from dataset.iter_frames(part)
