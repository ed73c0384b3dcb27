"""What tests of VectorEnvs share."""

from typing import Any

import numpy as np

from cormorant_worker.envs.gymnasium_env import EnvFactory
from cormorant_worker.envs.protocol import EVERY_ROW, Step, VectorEnv
from cormorant_worker.spaces import leaves

COUNTING = "cormorant_testing.envs:CountingEnv"


def counting(**kwargs: Any) -> EnvFactory:
    return EnvFactory(entrypoint=COUNTING, kwargs=kwargs)


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
