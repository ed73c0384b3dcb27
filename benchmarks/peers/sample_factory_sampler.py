"""Sample Factory's sampler without a learner (`SyncSamplingAPI`), in a venv of its own: it needs gymnasium < 1.0.

Environments are EnvPool's with batched sampling, as in its EnvPool examples, which reset ended ones in the same step.
As in its Atari example, rollout workers have their share of the environments, and a policy worker acts for all; in
one process (`serial_mode`) its sampler gave no trajectory. The network has the benchmark's layers, with the value that
its actor-critic always computes; nothing is normalized.
"""

import argparse
import queue
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import envpool
import gymnasium
import numpy as np
from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.env_info import extract_env_info
from sample_factory.algo.utils.make_env import make_env_func_batched
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env

from benchmarks import protocol
from benchmarks.workloads import Workload, num_cores

_QUEUED = 2
"""Trajectories that wait for the consumer: one of each rollout worker, so that none works far ahead."""


class _Pool(gymnasium.Wrapper):
    """EnvPool as Sample Factory's `EnvPoolResetFixWrapper` has it: ended environments are reset in the same step."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.num_agents = env.config["num_envs"]

    def step(self, action: np.ndarray) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            obs[ended], _ = self.env.reset(ended)
        return obs, reward, terminated, truncated, info

    def reset(self, **_: Any) -> Any:
        return self.env.reset()

    def close(self) -> None:
        """EnvPool's own looks for an attribute that gymnasium's VectorEnv did not have before 1.0."""


def _make(workload: Workload, workers: int, _name: str, _cfg: Any, env_config: Any, *_: Any, **__: Any) -> _Pool:
    pool = envpool.make(
        workload.task_id,
        env_type="gymnasium",
        num_envs=workload.share(workers),
        num_threads=max(1, num_cores() // workers),
        seed=7 if env_config is None else env_config.env_id,
    )
    return _Pool(pool)


@contextmanager
def open_sample_factory(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    register_env("task", partial(_make, workload, args.workers))
    folder = tempfile.TemporaryDirectory(prefix="sample-factory-")
    is_cnn = workload.policy == "atari_cnn"
    settings = {
        "env": "task",
        "device": "cpu",
        "num_workers": args.workers,
        "num_envs_per_worker": 1,
        "worker_num_splits": 1,
        "policy_workers_per_policy": 1,
        "batched_sampling": True,
        "rollout": workload.steps_per_batch,
        "use_rnn": False,
        "recurrence": 1,
        "batch_size": workload.num_envs * workload.steps_per_batch,
        "num_batches_per_epoch": 1,
        "normalize_input": False,
        "normalize_returns": False,
        "nonlinearity": "relu" if is_cnn else "tanh",
        "adaptive_stddev": False,
        "set_workers_cpu_affinity": False,
        "train_dir": folder.name,
    }
    argv = ["--algo=APPO", *(f"--{name}={value}" for name, value in settings.items())]
    argv += ["--encoder_mlp_layers", "64", "64", "--encoder_conv_architecture", "convnet_atari"]
    argv += ["--encoder_conv_mlp_layers", "512", "--obs_scale", "255.0" if is_cnn else "1.0"]
    parser, _ = parse_sf_args(argv=argv)
    cfg = parse_full_cfg(parser, argv)
    sampler = SyncSamplingAPI(cfg, extract_env_info(make_env_func_batched(cfg, None), cfg))
    sampler.traj_queue = queue.Queue(_QUEUED)
    sampler.start()

    def take() -> int:
        return sum(sampler.get_trajectories_sync()["rewards"].numel() for _ in range(args.workers))

    yield take
    sampler.stop()
    folder.cleanup()


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2)


if __name__ == "__main__":
    protocol.main(open_sample_factory, _arguments)
