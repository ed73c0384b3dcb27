"""TorchRL's PPO: ClipPPOLoss and GAE on its collectors over EnvPool, as its example for Atari and MuJoCo has them.

    single      Collector with all environments in this process
    multi_sync  MultiSyncCollector, two workers with half of them each

EnvPool's ignored steps, which TorchRL's wrapper stores as transitions, are taken out before the loss.
"""

import functools
from collections.abc import Callable

import envpool
import torch
from tensordict.nn import (
    AddStateIndependentNormalScale,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.modules import IndependentNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.peers.torchrl_env import make_env
from benchmarks.train.task import Run, Task, main, make_cnn, make_mlp


def _make_models(task: Task) -> tuple[nn.Module, nn.Module]:
    """Actor and critic; with pixels, both on the features of one network."""
    spec = envpool.make(task.task_id, env_type="gymnasium", num_envs=1)
    num_inputs, num_actions = spec.observation_space.shape[0], sum(spec.action_space.shape)
    if task.policy == "atari_cnn":
        logits, value = nn.Linear(512, int(spec.action_space.n)), nn.Linear(512, 1)
        nn.init.orthogonal_(logits.weight, 0.01)
        shared = TensorDictModule(_Rows(make_cnn()), in_keys=["observation"], out_keys=["features"])
        head = TensorDictModule(logits, in_keys=["features"], out_keys=["logits"])
        critic = TensorDictSequential(shared, ValueOperator(value, in_keys=["features"]))
        return _acting(shared, head, keys=["logits"], kind=Categorical), critic
    critic = ValueOperator(make_mlp(num_inputs, 1, gain=1.0), in_keys=["observation"])
    if num_actions:
        network = make_mlp(num_inputs, num_actions, gain=0.01).append(AddStateIndependentNormalScale(num_actions))
        keys, kind = ["loc", "scale"], IndependentNormal
    else:
        network, keys, kind = make_mlp(num_inputs, int(spec.action_space.n), gain=0.01), ["logits"], Categorical
    return _acting(TensorDictModule(network, in_keys=["observation"], out_keys=keys), keys=keys, kind=kind), critic


class _Rows(nn.Module):
    """Frames [..., 4, 84, 84] through a network that takes one dimension of them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.network(frames.flatten(0, -4)).unflatten(0, frames.shape[:-3])


def _acting(*networks: TensorDictModule, keys: list[str], kind: type) -> ProbabilisticTensorDictSequential:
    draw = ProbabilisticTensorDictModule(
        keys, ["action"], distribution_class=kind, return_log_prob=True, log_prob_key="sample_log_prob"
    )
    return ProbabilisticTensorDictSequential(*networks, draw)


def learn(task: Task, start: Callable[[], Run], kind: str) -> Run:
    workers = 1 if kind == "single" else 2
    makers = [
        functools.partial(
            make_env,
            task,
            num_envs=task.share(workers),
            num_threads=task.env_threads(workers),
            seed=torch.initial_seed() + 1000 * index,
        )
        for index in range(workers)
    ]
    actor, critic = _make_models(task)
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
    torch.set_num_threads(task.torch_threads)  # making an environment set it to 1
    run = start()
    ended = torch.zeros(task.num_envs, dtype=torch.bool)
    for collected in collector:
        batch = collected.reshape(task.num_envs, task.steps_per_batch)
        after = batch["next"]
        reward, done = after["reward"], after["done"]
        before = torch.cat([ended.unsqueeze(1), done[:, :-1]], dim=1)
        ended = done[:, -1]
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
        if run.add_rewards(reward * ~before, done, frames=len(data)):
            break
    collector.shutdown()
    return run


if __name__ == "__main__":
    main(learn, "single", "multi_sync")
