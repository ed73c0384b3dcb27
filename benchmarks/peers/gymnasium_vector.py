"""gymnasium's vector environments with one batched policy call a step, as scripts without a collector have it.

`--kind async`: AsyncVectorEnv, a process per environment. `--kind sync`: SyncVectorEnv, all of them in this process,
which is faster for CartPole. Autoreset happens in the same step, so every step is a frame. Rows are kept in `[T, B]`
arrays.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from benchmarks import protocol
from benchmarks.networks import Sampler, build_network
from benchmarks.peers.gymnasium_tasks import make_env
from benchmarks.workloads import Workload


@contextmanager
def open_vector(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    makers = [partial(make_env, workload)] * workload.num_envs
    kind = {"async": AsyncVectorEnv, "sync": SyncVectorEnv}[args.kind]
    envs: gymnasium.vector.VectorEnv = kind(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    act = Sampler(build_network(workload, envs.single_observation_space, envs.single_action_space))
    obs, _ = envs.reset(seed=7)
    steps, num = workload.steps_per_batch, workload.num_envs
    obs_TB = np.empty((steps, *obs.shape), obs.dtype)
    action_TB = np.empty((steps, *envs.action_space.shape), envs.action_space.dtype)
    reward_TB, done_TB = np.empty((steps, num), np.float32), np.empty((steps, num), bool)

    def take() -> int:
        nonlocal obs
        for t in range(steps):
            obs_TB[t] = obs
            action_TB[t] = act(torch.from_numpy(obs)).numpy()
            obs, reward_TB[t], terminated, truncated, _ = envs.step(action_TB[t])
            done_TB[t] = terminated | truncated
        return steps * num

    with torch.inference_mode():
        yield take
    envs.close()


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=("async", "sync"), default="async")


if __name__ == "__main__":
    protocol.main(open_vector, _arguments)
