"""A collector made of dice: fills blocks with known frames, and remembers every trajectory it made."""

import uuid
from collections import defaultdict
from copy import deepcopy

import gymnasium
import numpy as np
import pytest
import torch

from cormorant_postproc import frames_of
from cormorant_worker.collect.batch import to_tensordict
from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.sinks.dataset import open_dataset
from cormorant_worker.sinks.description import DatasetDescription
from cormorant_worker.sinks.schema import FrameSchema
from cormorant_worker.spaces import Leaf, leaf_spaces, leaves

BOX = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
IMAGE = gymnasium.spaces.Box(0, 255, (2, 4, 5), np.uint8)
NESTED = gymnasium.spaces.Dict(
    {
        "pos": BOX,
        "depth": gymnasium.spaces.Box(0, 60_000, (2,), np.uint16),  # torch cannot scatter into it
        "cam": gymnasium.spaces.Tuple([IMAGE, gymnasium.spaces.Discrete(5)]),
        "flag": gymnasium.spaces.Box(0, 1, (2,), np.bool_),
        "many": gymnasium.spaces.MultiDiscrete([3, 4]),
        "bits": gymnasium.spaces.MultiBinary(3),
    }
)
SPACES = {"box": BOX, "image": IMAGE, "nested": NESTED, "discrete": gymnasium.spaces.Discrete(4)}
LOG_PROB = Leaf(key=("action_log_prob",), shape=(), dtype=np.dtype(np.float32))
INFO = (
    Leaf(key=("info", "lives"), shape=(), dtype=np.dtype(np.int32)),
    Leaf(key=("info", "traj_id"), shape=(2,), dtype=np.dtype(np.float64)),  # a name that exports have, too
    Leaf(key=("info", "won"), shape=(), dtype=np.dtype(np.bool_)),
    Leaf(key=("red", "reward"), shape=(2, 1), dtype=np.dtype(np.float32)),  # of a group of agents
)
HIDDEN = Leaf(key=("hidden",), shape=(2, 3), dtype=np.dtype(np.float32))


class Dice:
    def __init__(
        self,
        observation="box",
        action="discrete",
        *,
        num_envs=3,
        num_rows=4,
        recurrent=False,
        info=False,
        end_odds=0.3,
        seed=0,
    ):
        self.rng = np.random.default_rng(seed)
        self.end_odds = end_odds
        observation = self.observation_space = SPACES[observation] if isinstance(observation, str) else observation
        action = self.action_space = SPACES[action] if isinstance(action, str) else action
        self.layout = Layout(
            num_rows=num_rows,
            num_envs=num_envs,
            observation=leaves(observation, ("observation",)),
            action=leaves(action, ("action",)),
            outputs=(LOG_PROB,),
            states=(HIDDEN,) if recurrent else (),
            info=INFO if info else (),
        )
        self.block = Block(self.layout)
        # The frames of each trajectory, batch by batch, as a learner gets them.
        self.made = defaultdict(list)
        self.next_id = num_envs
        self.ids = list(range(num_envs))
        self.obs = [self._observe() for _ in range(num_envs)]
        self.states = [self._remember() for _ in range(num_envs)]
        self.fresh = [True] * num_envs
        self.version = 0
        self.frames = 0

    def description(self, **notes):
        return DatasetDescription(
            **{
                "env": {"gymnasium": {"id": "Dice-v0"}},
                "observation_space": self.observation_space,
                "action_space": self.action_space,
                "schema": FrameSchema.of(self.layout),
                **notes,
            }
        )

    def fill(self, lengths=None):
        """A sealed block whose columns have these lengths, all full by default. Padding holds rubbish."""
        block, layout = self.block, self.layout
        lengths = [layout.num_rows] * layout.num_envs if lengths is None else lengths
        self.version += 1
        block.begin(max(lengths))
        for array in (*block.observation, *block.states, *block.action, block.reward, block.traj_ids):
            array[...] = 1
        block.terminated[...] = block.truncated[...] = True
        block.lengths[:] = lengths
        for column, length in enumerate(lengths):
            for row in range(length):
                self._step(row, column)
            for carried, value in zip(
                block.observation + block.states, self.obs[column] + self.states[column], strict=True
            ):
                carried[length, column] = value
        self.frames += sum(lengths)
        frames = frames_of(to_tensordict(deepcopy(block)))  # which clears the padding
        for number in frames["collector", "traj_ids"].unique().tolist():
            self.made[number].append(frames[frames["collector", "traj_ids"] == number])
        return block

    def _step(self, row, column):
        block = self.block
        terminated, truncated = (bool(x) for x in self.rng.random(2) < self.end_odds)
        leaves_of = {
            "observation": self.obs[column],
            "states": self.states[column],
            "action": tuple(np.asarray(space.sample()) for space in leaf_spaces(self.action_space)),
            "outputs": (np.float32(self.rng.normal()),),
            "info": tuple((self.rng.normal(size=leaf.shape) * 2).astype(leaf.dtype) for leaf in self.layout.info),
        }
        plain = {
            "reward": np.float32(self.rng.normal()),
            "terminated": terminated,
            "truncated": truncated,
            "policy_version": self.version,
            "is_init": self.fresh[column],
            "traj_ids": self.ids[column],
        }
        for name, values in leaves_of.items():
            for array, value in zip(getattr(block, name), values, strict=True):
                array[row, column] = value
        for name, value in plain.items():
            getattr(block, name)[row, column] = value
        self.obs[column], self.states[column] = self._observe(), self._remember()
        self.fresh[column] = False
        if terminated or truncated:
            final = tuple(np.asarray(a)[None] for a in self.obs[column])
            block.end(row, np.array([column]), (*final, *(a[None] for a in self.states[column])))
            self.ids[column], self.next_id = self.next_id, self.next_id + 1
            self.obs[column], self.states[column] = self._observe(), self._remember()
            self.fresh[column] = True

    def _observe(self):
        rng, leaves = self.rng, self.layout.observation
        values = [rng.normal(size=a.shape) if a.dtype.kind == "f" else rng.integers(0, 4, a.shape) for a in leaves]
        return tuple(np.asarray(value).astype(leaf.dtype) for leaf, value in zip(leaves, values, strict=True))

    def _remember(self):
        return tuple(self.rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in self.layout.states)

    def assert_stored(self, trajectories):
        """Every trajectory, every value."""
        trajectories = list(trajectories)
        assert sorted(int(frames.traj_id[0]) for frames in trajectories) == sorted(self.made)
        for frames in trajectories:
            assert frames.step.tolist() == list(range(len(frames)))
            self.assert_trajectory(frames.to_tensordict())

    def assert_trajectory(self, read):
        """A TensorDict `[T]` has every value of the trajectory that was made."""
        made = self.trajectory(int(read["collector", "traj_ids"][0]))
        assert set(read.keys(True, True)) == set(made.keys(True, True))
        for key, values in made.items(True, True):
            np.testing.assert_array_equal(read[key].numpy(), values.numpy(), str(key), strict=True)

    def trajectory(self, number):
        return torch.cat(self.made[number])

    def go_on(self, writer):
        """Tell a writer where the trajectories are, as a worker does that goes on with another one's."""
        lengths = [sum(map(len, self.made.get(number, ()))) for number in self.ids]
        writer.go_on(np.array(self.ids), np.array(lengths))


@pytest.fixture(scope="session")
def make_dice():
    return Dice


@pytest.fixture
def memory_uri():
    return f"memory://cormorant-{uuid.uuid4().hex}"


@pytest.fixture
def stored(tmp_path):
    """A dataset of two parts with three shards each."""

    def store(dice, *, uri=None, parts=("cpu-0-0", "cpu-1-0"), shards=3):
        dataset = open_dataset(str(uri or tmp_path / "dataset"), dice.description())
        for part in parts:
            with dataset.writer(part, dice.layout) as writer:
                dice.go_on(writer)
                for _ in range(shards):
                    writer.append(dice.fill())
                    writer.flush()
        return dataset

    return store
