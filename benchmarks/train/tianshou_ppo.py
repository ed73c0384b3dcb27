"""Tianshou's PPO with its Collector and trainer on EnvPool: one process."""

from collections.abc import Callable

import envpool
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.utils.net.common import MLP
from tianshou.utils.torch_utils import policy_within_training_step
from torch import nn

from benchmarks.train.task import Run, Task, main


class _Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = MLP(input_dim=4, output_dim=2, hidden_sizes=(64, 64), activation=nn.Tanh)

    def forward(self, obs: object, state: object = None, info: object = None) -> tuple[object, object]:
        return self.network(torch.as_tensor(obs)), state


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = MLP(input_dim=4, output_dim=1, hidden_sizes=(64, 64), activation=nn.Tanh)

    def forward(self, obs: object, **_: object) -> torch.Tensor:
        return self.network(torch.as_tensor(obs))


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    seed = torch.initial_seed()
    np.random.seed(seed)  # what Tianshou draws from
    env = envpool.make(task.id, env_type="gymnasium", num_envs=task.num_envs, num_threads=1, seed=seed)
    policy = DiscreteActorPolicy(actor=_Actor(), action_space=env.action_space, observation_space=env.observation_space)
    algorithm = PPO(
        policy=policy,
        critic=_Critic(),
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
            if run.add(stats.returns.tolist(), frames=int(stats.n_collected_steps)):
                break
            algorithm.update(buffer=collector.buffer, batch_size=task.minibatch, repeat=task.epochs)
            collector.reset_buffer(keep_statistics=True)
    env.close()
    return run


if __name__ == "__main__":
    main(learn)
