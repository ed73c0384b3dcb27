"""RLlib's EnvRunnerGroup: two remote EnvRunners that sample fragments with PPO's RLModule, the new API stack.

One take is a fragment of every runner (`foreach_env_runner`), without a learner. The module has the benchmark's layers;
Pong has RLlib's own Atari wrappers, whose observations are 84x84x4 in float32. RLlib's logs are off; each runner is an
actor with one CPU.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env

from benchmarks import protocol
from benchmarks.peers.gymnasium_tasks import make_env
from benchmarks.workloads import Workload

_CNN = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]


@contextmanager
def open_rllib(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    ray.init("local", num_cpus=args.runners + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register_env("task", lambda _: _make_task(workload))
    is_cnn = workload.policy == "atari_cnn"
    model = (
        DefaultModelConfig(conv_filters=_CNN, conv_activation="relu", head_fcnet_hiddens=[512], vf_share_layers=True)
        if is_cnn
        else DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
    )
    config = (
        PPOConfig()
        .environment("task")
        .env_runners(
            num_env_runners=args.runners,
            num_envs_per_env_runner=workload.share(args.runners),
            rollout_fragment_length=workload.steps_per_batch,
            gym_env_vectorize_mode=args.vectorize,
        )
        .learners(num_learners=0)
        .rl_module(model_config=model)
        .debugging(log_level="ERROR", seed=7)
    )
    algorithm = config.build_algo()
    group = algorithm.env_runner_group

    def sample(runner: Any) -> int:
        return sum(len(episode) for episode in runner.sample())

    def take() -> int:
        return sum(group.foreach_env_runner(sample, local_env_runner=False))

    try:
        yield take
    finally:
        algorithm.stop()
        ray.shutdown()


def _make_task(workload: Workload) -> gymnasium.Env:
    if workload.policy != "atari_cnn":
        return make_env(workload)
    return wrap_atari_for_new_api_stack(gymnasium.make("ALE/Pong-v5", frameskip=1), framestack=4, dim=84)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--vectorize", choices=("sync", "async"), default="sync")


if __name__ == "__main__":
    protocol.main(open_rllib, _arguments)
