"""Drives a VectorEnv of CountingEnvs and compares every value of every step with the oracle."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from cormorant_testing.envs import ACTION_SPACES, OBSERVATION_SPACES, Oracle
from cormorant_worker.envs.gymnasium_env import EnvFactory
from cormorant_worker.envs.protocol import EVERY_ROW, Step, VectorEnv
from cormorant_worker.spaces import Arrays, flatten, leaves

COUNTING = "cormorant_testing.envs:CountingEnv"


def counting(**kwargs: Any) -> EnvFactory:
    return EnvFactory(entrypoint=COUNTING, kwargs=kwargs)


def sample_actions(kind: str, num_steps: int, num_envs: int) -> list[list[Any]]:
    """[step][env] actions of a kind of space."""
    space = ACTION_SPACES[kind]
    space.seed(0)
    return [[space.sample() for _ in range(num_envs)] for _ in range(num_steps)]


def step_times(env: VectorEnv, times: int) -> Step:
    """Step every row with zeros so many times; returns the last Step."""
    zeros = tuple(np.zeros((env.num_envs, *leaf.shape), leaf.dtype) for leaf in leaves(env.action_space, ("action",)))
    for _ in range(times):
        env.send(zeros, EVERY_ROW)
        step = env.recv()
    return step


def transitions(env: VectorEnv, actions: Any) -> list[list[tuple[Any, ...]]]:
    """What each row plays with its own `actions` [T, B]: observation, action, reward, both flags, what followed, info.
    Observations and info have an entry a leaf.
    """
    obs, idle = tuple(leaf.copy() for leaf in env.start()), np.arange(env.num_envs)
    frames: list[list[tuple[Any, ...]]] = [[] for _ in idle]
    while min(map(len, frames)) < len(actions):
        now = np.array([actions[min(len(frames[row]), len(actions) - 1)][row] for row in range(env.num_envs)])
        env.send((now[idle],), EVERY_ROW if env.lockstep else idle)
        step = env.recv()
        idle = np.arange(env.num_envs)[step.rows]
        following = tuple(leaf.copy() for leaf in step.obs)
        for leaf, final in zip(following, step.final, strict=True):
            leaf[step.ended] = final
        for i, row in enumerate(idle):
            told = step.reward[i], bool(step.terminated[i]), bool(step.truncated[i])
            after, info = ([leaf[i].copy() for leaf in leaves_] for leaves_ in (following, step.info))
            frames[row].append((*(leaf[row].copy() for leaf in obs), now[row], *told, *after, *info))
        for leaf, seen in zip(obs, step.obs, strict=True):
            leaf[idle] = seen
    return [row_frames[: len(actions)] for row_frames in frames]


def stack(space: gymnasium.Space[Any], values: Sequence[Any]) -> Arrays:
    """Nested values of several environments, as [n, ...] a leaf."""
    return tuple(np.stack(leaf) for leaf in zip(*(flatten(space, value) for value in values), strict=True))


def assert_arrays(found: Arrays, expected: Arrays) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


class Referee:
    """Knows what each row must be, step by step; rows may be restarted with other seeds."""

    def __init__(self, seeds: Sequence[int], options: Mapping[str, Any], *, action: str = "discrete") -> None:
        self._options = options
        self.observation_space = OBSERVATION_SPACES[options.get("observation", "box")]
        self.action_space = ACTION_SPACES[action]
        self.oracles = [Oracle.of(seed, options) for seed in seeds]
        self.at = [(0, 0)] * len(seeds)

    def first(self) -> Arrays:
        return stack(self.observation_space, [oracle.obs(0, 0) for oracle in self.oracles])

    def drive(self, env: VectorEnv, actions: Sequence[Any], rows: Sequence[int] | None = None) -> Step:
        """Send one action for each row, receive, and check all that is not fresh. Fresh rows' idents are learned."""
        numbers = range(env.num_envs) if rows is None else rows
        env.send(stack(self.action_space, actions), EVERY_ROW if rows is None else np.array(rows, np.int64))
        step = env.recv()
        self.check(step, numbers, actions)
        return step

    def check(self, step: Step, numbers: Sequence[int], actions: Sequence[Any]) -> None:
        assert (step.rows == EVERY_ROW) if isinstance(step.rows, slice) else list(step.rows) == list(numbers)
        assert step.reward.dtype == np.float32
        assert step.terminated.dtype == step.truncated.dtype == np.bool_
        obs, ended, final = [], [], []
        for position, (row, action) in enumerate(zip(numbers, actions, strict=True)):
            if position in step.fresh:
                ident = int(step.obs[0][position].reshape(-1)[0])
                self.oracles[row] = Oracle.of(ident, self._options)
                self.at[row] = (0, 0)
                obs.append(self.oracles[row].obs(0, 0))
                assert (step.reward[position], step.terminated[position], step.truncated[position]) == (0, False, False)
                continue
            episode, count = self.at[row]
            moment = self.oracles[row].moment(episode, count + 1, action)
            obs.append(moment.obs)
            assert step.reward[position] == moment.reward
            assert (step.terminated[position], step.truncated[position]) == (moment.terminated, moment.truncated)
            self.at[row] = (episode, count + 1)
            if moment.final is not None:
                ended.append(position)
                final.append(moment.final)
                self.at[row] = (episode + 1, 0)
        assert_arrays(step.obs, stack(self.observation_space, obs))
        assert list(step.ended) == ended
        assert all(len(leaf) == len(ended) for leaf in step.final)
        if ended:
            assert_arrays(step.final, stack(self.observation_space, final))
