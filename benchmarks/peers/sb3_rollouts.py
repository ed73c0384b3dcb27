"""Stable-Baselines3's PPO collecting rollouts: its VecEnv, its policy (with the value that it stores), its buffer.

`--kind dummy`: DummyVecEnv, all environments in this process; `--kind subproc`: SubprocVecEnv, a process each. The
policy has the benchmark's layers: two hidden layers of 64 with tanh, or the Nature CNN, which actor and critic share.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from benchmarks import protocol
from benchmarks.peers.gymnasium_tasks import make_env
from benchmarks.workloads import Workload


@contextmanager
def open_sb3(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    makers = [partial(_make_monitored, workload)] * workload.num_envs
    envs = DummyVecEnv(makers) if args.kind == "dummy" else SubprocVecEnv(makers, start_method="fork")
    steps = workload.steps_per_batch
    policy = "CnnPolicy" if workload.policy == "atari_cnn" else "MlpPolicy"
    ppo = PPO(policy, envs, n_steps=steps, device="cpu", seed=7)
    callback = CallbackList([])
    callback.init_callback(ppo)
    ppo._setup_learn(total_timesteps=1)

    def take() -> int:
        ppo.collect_rollouts(envs, callback, ppo.rollout_buffer, n_rollout_steps=steps)
        return int(np.prod(ppo.rollout_buffer.rewards.shape))

    yield take
    envs.close()


def _make_monitored(workload: Workload) -> Monitor:
    return Monitor(make_env(workload))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=("dummy", "subproc"), default="dummy")


if __name__ == "__main__":
    protocol.main(open_sb3, _arguments)
