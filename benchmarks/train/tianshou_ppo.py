"""Tianshou's PPO with its Collector and trainer on EnvPool: one process."""

from collections.abc import Callable

import envpool
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.utils.torch_utils import policy_within_training_step
from torch import nn

from benchmarks.peers.tianshou_collector import gaussian
from benchmarks.train.task import Run, Task, main, make_mlp


class _Actor(nn.Module):
    def __init__(self, network: nn.Module, num_deviations: int) -> None:
        super().__init__()
        self.network = network
        self.log_std = nn.Parameter(torch.zeros(num_deviations)) if num_deviations else None

    def forward(self, obs: object, state: object = None, info: object = None) -> tuple[object, object]:
        out = self.network(obs)
        return (out if self.log_std is None else (out, self.log_std.exp().expand_as(out))), state


class _Critic(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: object, **_: object) -> torch.Tensor:
        return self.network(obs)


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    seed = torch.initial_seed()
    np.random.seed(seed)  # what Tianshou draws from
    env = envpool.make(
        task.task_id, env_type="gymnasium", num_envs=task.num_envs, num_threads=task.env_threads(1), seed=seed
    )
    spaces = {"action_space": env.action_space, "observation_space": env.observation_space}
    num_inputs, num_actions = env.observation_space.shape[0], sum(env.action_space.shape)
    if num_actions:
        actor = _Actor(make_mlp(num_inputs, num_actions, gain=0.01), num_actions)
        unbounded = {"action_scaling": False, "action_bound_method": None}
        policy = ProbabilisticActorPolicy(actor=actor, dist_fn=gaussian, **unbounded, **spaces)
    else:
        policy = DiscreteActorPolicy(actor=_Actor(make_mlp(num_inputs, env.action_space.n, gain=0.01), 0), **spaces)
    algorithm = PPO(
        policy=policy,
        critic=_Critic(make_mlp(num_inputs, 1, gain=1.0)),
        optim=AdamOptimizerFactory(lr=task.learning_rate),
        eps_clip=task.clip,
        ent_coef=task.entropy_bonus,
        max_grad_norm=task.max_grad_norm,
        gae_lambda=task.lambda_,
        gamma=task.gamma,
        max_batchsize=1024,
    )
    collector = Collector(policy, env, VectorReplayBuffer(task.frames_per_update, task.num_envs))
    collector.reset()
    run = start()
    with policy_within_training_step(policy):
        while True:
            stats = collector.collect(n_step=task.frames_per_update)
            algorithm.update(buffer=collector.buffer, batch_size=task.minibatch, repeat=task.epochs)
            collector.reset_buffer(keep_statistics=True)
            if run.add(stats.returns.tolist(), frames=int(stats.n_collected_steps)):
                break
    env.close()
    return run


if __name__ == "__main__":
    main(learn)
