"""Tianshou 2.0.1's Collector on EnvPool: one process, a replay buffer, all environments, a thread a core.

`--door`: this project's collector in its place, with the same policy and the same buffer.

The buffer holds four collects. Atari observations are stored as Tianshou's Atari examples store them (the newest plane
only, `obs_next` derived). Tianshou resets ended environments itself, so it has no ignored steps: all frames count.
"""

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import envpool
import torch
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.data import Collector, VectorReplayBuffer
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from benchmarks import protocol
from benchmarks.networks import build_network
from benchmarks.workloads import Workload, num_cores


class Actor(nn.Module):
    """The benchmark's network with the signature that Tianshou's policies call."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: object, state: object = None, info: object = None) -> tuple[object, object]:
        return self.network(torch.as_tensor(obs)), state


def gaussian(loc_scale: tuple[Tensor, Tensor]) -> Distribution:
    return Independent(Normal(*loc_scale), 1)


@contextmanager
def open_tianshou(workload: Workload, args: argparse.Namespace) -> Iterator[protocol.Take]:
    env = envpool.make(
        workload.task_id,
        env_type="gymnasium",
        num_envs=workload.num_envs,
        num_threads=args.env_threads or num_cores(),
        seed=7,
    )
    actor = Actor(build_network(workload, env.observation_space, env.action_space))
    spaces = {"action_space": env.action_space, "observation_space": env.observation_space}
    if actor.network.is_discrete:
        policy = DiscreteActorPolicy(actor=actor, **spaces)
    else:
        policy = ProbabilisticActorPolicy(
            actor=actor, dist_fn=gaussian, action_scaling=False, action_bound_method=None, **spaces
        )
    frames = workload.steps_per_batch * workload.num_envs
    storage = {"ignore_obs_next": True, "save_only_last_obs": True, "stack_num": 4}
    buffer = VectorReplayBuffer(4 * frames, workload.num_envs, **(storage if workload.policy == "atari_cnn" else {}))
    if args.door:
        collector = _door()(policy, env, buffer)
    else:
        collector = Collector(policy, env, buffer, raise_on_nan_in_buffer=False)
    collector.reset()

    def take() -> int:
        return int(collector.collect(n_step=frames).n_collected_steps)

    with torch.no_grad():
        yield take
    env.close()


def _door() -> type:
    from cormorant import tianshou

    return tianshou.Collector


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env-threads", type=int, default=0, help="0 = as many as cores")
    parser.add_argument("--door", action="store_true", help="this project's collector in place of Tianshou's")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    protocol.main(open_tianshou, _arguments)
