"""The networks that every contender runs, and the field's own way to sample from them.

Legend: B environments, A actions (or action dimensions).
"""

import math

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from benchmarks.workloads import Workload


class Mlp(nn.Module):
    """Two hidden layers of 64. Returns logits, or (loc, scale) of a diagonal Gaussian for Box actions."""

    def __init__(self, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        super().__init__()
        self.is_discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if self.is_discrete else action_space.shape[0]
        self.body = nn.Sequential(
            nn.Linear(observation_space.shape[0], 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Linear(64, outputs),
        )
        _init_like_ppo(self.body)
        if not self.is_discrete:
            self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, obs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out_BA = self.body(obs.to(torch.float32))
        if self.is_discrete:
            return out_BA
        return out_BA, self.log_std.exp().expand_as(out_BA)


class AtariCnn(nn.Module):
    """The network of Mnih et al. 2015 ("Nature CNN") on four stacked 84x84 planes. Returns logits."""

    is_discrete = True

    def __init__(self, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(observation_space.shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
            nn.Linear(512, int(action_space.n)),
        )
        nn.init.orthogonal_(self.body[-1].weight, 0.01)

    def forward(self, obs: Tensor) -> Tensor:
        return self.body(obs.to(torch.float32).mul_(1 / 255))


def _init_like_ppo(body: nn.Sequential) -> None:
    """Nearly uniform actions, so that episodes are as long for everybody as under a fresh policy."""
    for layer in body:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 0.01 if layer is body[-1] else math.sqrt(2))
            nn.init.zeros_(layer.bias)


def build_network(
    workload: Workload, observation_space: gymnasium.Space, action_space: gymnasium.Space
) -> Mlp | AtariCnn:
    """The network of a workload with the same weights for everybody."""
    torch.manual_seed(0)
    kind = {"mlp": Mlp, "atari_cnn": AtariCnn}[workload.policy]
    return kind(observation_space, action_space).eval()


class Sampler(nn.Module):
    """A network and `torch.distributions`: observations in, sampled actions out."""

    def __init__(self, network: Mlp | AtariCnn) -> None:
        super().__init__()
        self.network = network

    def forward(self, obs: Tensor) -> Tensor:
        out = self.network(obs)
        if self.network.is_discrete:
            return Categorical(logits=out).sample()
        return Normal(*out).sample()
