"""TorchRL's PPO: ClipPPOLoss and GAE on its collectors over EnvPool, as its example for Atari and MuJoCo has them.

    single      Collector with all environments in this process
    multi_sync  MultiSyncCollector, two workers with half of them each

EnvPool's ignored steps, which TorchRL's wrapper stores as transitions, are taken out before the loss.
"""

import functools
from collections.abc import Callable

import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.peers.torchrl_env import make_env
from benchmarks.train.task import Run, Task, main
from benchmarks.workloads import WORKLOADS


def _mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    workers = 1 if kind == "single" else 2
    makers = [
        functools.partial(
            make_env,
            WORKLOADS["cartpole-8"],
            num_envs=task.num_envs // workers,
            num_threads=1,
            seed=torch.initial_seed() + 1000 * index,
        )
        for index in range(workers)
    ]
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(_mlp(2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True, log_prob_key="sample_log_prob"
        ),
    )
    critic = ValueOperator(_mlp(1), in_keys=["observation"])
    advantage = GAE(gamma=task.gamma, lmbda=task.lambda_, value_network=critic)
    loss_of = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=task.clip,
        entropy_coeff=task.entropy_bonus,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    loss_of.set_keys(sample_log_prob="sample_log_prob")
    optimizer = torch.optim.Adam(loss_of.parameters(), lr=task.learning_rate)
    common = {"frames_per_batch": task.frames_per_update, "total_frames": -1}
    if kind == "single":
        collector = Collector(makers[0], actor, **common)
    else:
        collector = MultiSyncCollector(makers, actor, cat_results="stack", **common)
    run = start()
    ended = torch.zeros(task.num_envs, dtype=torch.bool)
    for collected in collector:
        batch = collected.reshape(task.num_envs, task.steps)
        after = batch["next"]
        reward, done = after["reward"], after["done"]
        before = torch.cat([ended.unsqueeze(1), done[:, :-1]], dim=1)
        ended = done[:, -1]
        if run.add_rewards(reward * ~before, done, frames=int((~before).sum())):
            break
        for key in ("reward", "done", "terminated"):  # the wrapper leaves out the last dimension, which GAE wants
            after[key] = after[key].unsqueeze(-1)
        with torch.no_grad():
            advantage(batch)
        data = batch[~before]
        for _ in range(task.epochs):
            for part in torch.randperm(len(data)).split(task.minibatch):
                losses = loss_of(data[part])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss_of.parameters(), task.max_grad_norm)
                optimizer.step()
        collector.update_policy_weights_()
    collector.shutdown()
    return run


if __name__ == "__main__":
    main(learn, "single", "multi_sync")
