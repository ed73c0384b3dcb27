"""Clipped PPO with generalized advantages (Schulman et al. 2017, 2016) in plain torch: what the learners here share.

# B envs, T steps, N frames
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from cormorant.policies import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Constants of PPO; the defaults are for CartPole."""

    gamma: float = 0.98
    lambda_: float = 0.9
    clip: float = 0.2
    epochs: int = 10
    minibatch: int = 128
    learning_rate: float = 1e-3
    entropy_bonus: float = 0.005
    max_grad_norm: float = 0.5


class Agent(nn.Module):
    """A policy and a critic with a network of its own."""

    def __init__(self, policy: Policy, critic: nn.Module) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def value(self, observation: Tensor) -> Tensor:
        """[n, ...] -> [n]"""
        return self.critic(observation).squeeze(-1)

    def evaluate(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, [n] each."""
        return *self.policy.evaluate(observation, action), self.value(observation)


class SharedAgent(Agent):
    """A policy whose features the critic shares: one pass through the convolutions serves both."""

    def _features(self, observation: Tensor) -> Tensor:
        return self.policy.body(self.policy.encoder(observation))

    def value(self, observation: Tensor) -> Tensor:
        return self.critic(self._features(observation)).squeeze(-1)

    def evaluate(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self._features(observation)
        heads = self.policy.heads
        params = heads(features)
        return heads.log_prob(params, action), heads.entropy(params), self.critic(features).squeeze(-1)


def make_critic(num_features: int) -> nn.Module:
    """A small network for the value of a vector observation."""
    return nn.Sequential(nn.Linear(num_features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


class Ppo:
    """An agent that learns."""

    def __init__(self, agent: Agent, settings: Settings) -> None:
        self.agent, self.settings = agent, settings
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=settings.learning_rate)

    def advantages(self, batch: TensorDict, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Generalized advantages and value targets, [B, T] each.

        A truncated episode is bootstrapped from its true final observation, a terminated one is worth nothing after
        its end: `("next", "observation")` holds that observation, `terminated` and `done` are apart.
        """
        settings, after = self.settings, batch["next"]
        with torch.no_grad():
            value_BT = self._values(batch["observation"])
            next_value_BT = self._values(after["observation"])
        goes_on_BT = (~after["terminated"].squeeze(-1)).float()
        same_episode_BT = (~after["done"].squeeze(-1)).float()
        delta_BT = after["reward"].squeeze(-1) + settings.gamma * goes_on_BT * next_value_BT - value_BT
        advantage_BT = torch.zeros_like(delta_BT)
        running_B = torch.zeros(len(delta_BT))
        for t in reversed(range(delta_BT.shape[1])):
            running_B = delta_BT[:, t] + settings.gamma * settings.lambda_ * same_episode_BT[:, t] * running_B
            running_B = running_B * mask_BT[:, t]
            advantage_BT[:, t] = running_B
        return advantage_BT, advantage_BT + value_BT

    def update(self, batch: TensorDict) -> tuple[float, float]:
        """A few epochs over one batch [B, T]. Returns the mean loss of the first one and of the last one."""
        settings, agent = self.settings, self.agent
        mask_BT = torch.ones(batch.shape, dtype=torch.bool)
        if ("collector", "mask") in batch.keys(True):  # the last batch of a job may be ragged
            mask_BT = batch["collector", "mask"]
        advantage_BT, target_BT = self.advantages(batch, mask_BT)
        obs_N, action_N = batch["observation"][mask_BT], batch["action"][mask_BT]
        advantage_N, target_N = advantage_BT[mask_BT], target_BT[mask_BT]
        advantage_N = (advantage_N - advantage_N.mean()) / (advantage_N.std() + 1e-8)
        if "action_log_prob" in batch.keys():  # noqa: SIM118  # a TensorDict, not a dict
            old_log_prob_N = batch["action_log_prob"][mask_BT]
        else:  # strictly on-policy: the weights that acted are these
            with torch.no_grad():
                old_log_prob_N = agent.policy.evaluate(obs_N, action_N)[0]
        means: list[float] = []
        for _ in range(settings.epochs):
            losses: list[float] = []
            for part in torch.randperm(len(obs_N)).split(settings.minibatch):
                log_prob, entropy, value = agent.evaluate(obs_N[part], action_N[part])
                ratio = (log_prob - old_log_prob_N[part]).exp()
                clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
                gain = torch.minimum(ratio * advantage_N[part], clipped * advantage_N[part]).mean()
                value_loss = nn.functional.mse_loss(value, target_N[part])
                loss = -gain + 0.5 * value_loss - settings.entropy_bonus * entropy.mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), settings.max_grad_norm)
                self.optimizer.step()
                losses.append(loss.item())
            means.append(sum(losses) / len(losses))
        return means[0], means[-1]

    def _values(self, observation_BT: Tensor) -> Tensor:
        flat = observation_BT.flatten(0, 1)
        return torch.cat([self.agent.value(part) for part in flat.split(1024)]).view(observation_BT.shape[:2])
