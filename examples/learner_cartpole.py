"""PPO on CartPole through Cormorant's front door: from an untrained network to a return of 450 in about a minute.

    python examples/learner_cartpole.py

Two worker processes play (examples/cartpole-ppo.yaml); this process learns from their batches and publishes new
weights after each. Clipped PPO with generalized advantages (Schulman et al. 2017, 2016) in plain torch.

# B envs, T steps, N = B * T frames
"""

import argparse
import time
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from cormorant_worker import open_fleet
from cormorant_worker.policies import Policy, mlp

MANIFEST = Path(__file__).with_name("cartpole-ppo.yaml")
GOAL = 450.0
GAMMA, LAMBDA, CLIP = 0.98, 0.9, 0.2
EPOCHS, MINIBATCH, LEARNING_RATE = 10, 128, 1e-3
ENTROPY_BONUS, MAX_GRAD_NORM = 0.005, 0.5


def advantages(batch: TensorDict, critic: nn.Module) -> tuple[Tensor, Tensor]:
    """Generalized advantages and value targets, [B, T] each.

    A truncated episode is bootstrapped from its true final observation, a terminated one is worth nothing after its
    end: `("next", "observation")` holds that observation, `terminated` and `done` are apart.
    """
    after = batch["next"]
    with torch.no_grad():
        value_BT = critic(batch["observation"]).squeeze(-1)
        next_value_BT = critic(after["observation"]).squeeze(-1)
    goes_on_BT = (~after["terminated"].squeeze(-1)).float()
    same_episode_BT = (~after["done"].squeeze(-1)).float()
    delta_BT = after["reward"].squeeze(-1) + GAMMA * goes_on_BT * next_value_BT - value_BT
    advantage_BT = torch.zeros_like(delta_BT)
    running_B = torch.zeros(len(delta_BT))
    for t in reversed(range(delta_BT.shape[1])):
        running_B = delta_BT[:, t] + GAMMA * LAMBDA * same_episode_BT[:, t] * running_B
        advantage_BT[:, t] = running_B
    return advantage_BT, advantage_BT + value_BT


def update(batch: TensorDict, policy: Policy, critic: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A few epochs of clipped PPO over one batch."""
    advantage_BT, target_BT = advantages(batch, critic)
    obs_N, action_N = batch["observation"].flatten(0, 1), batch["action"].flatten(0, 1)
    advantage_N, target_N = advantage_BT.flatten(), target_BT.flatten()
    advantage_N = (advantage_N - advantage_N.mean()) / (advantage_N.std() + 1e-8)
    with torch.no_grad():  # the weights that acted: the batch is strictly on-policy
        old_log_prob_N, _ = policy.evaluate(obs_N, action_N)
    parameters = [*policy.parameters(), *critic.parameters()]
    for _ in range(EPOCHS):
        for part in torch.randperm(len(obs_N)).split(MINIBATCH):
            log_prob, entropy = policy.evaluate(obs_N[part], action_N[part])
            ratio = (log_prob - old_log_prob_N[part]).exp()
            gain = torch.minimum(ratio * advantage_N[part], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage_N[part]).mean()
            value_loss = nn.functional.mse_loss(critic(obs_N[part]).squeeze(-1), target_N[part])
            loss = -gain + 0.5 * value_loss - ENTROPY_BONUS * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            optimizer.step()


def train(goal: float, max_updates: int, seed: int) -> float:
    """Learn until the last 100 episodes return `goal` on average. Returns that average."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with open_fleet(MANIFEST) as fleet:
        observation_space, action_space = fleet.spaces
        policy = mlp(observation_space, action_space)
        critic = nn.Sequential(
            nn.Linear(observation_space.shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=LEARNING_RATE)
        fleet.publish(policy.state_dict(), wait_s=10)
        began, score = time.monotonic(), 0.0
        for number, batch in enumerate(fleet.batches(), start=1):
            update(batch, policy, critic, optimizer)
            fleet.publish(policy.state_dict(), wait_s=10)
            stats = fleet.stats()
            returns = stats.recent_returns
            score = sum(returns) / max(1, len(returns))
            if number % 10 == 0 or score >= goal:
                seconds = time.monotonic() - began
                print(f"{stats.frames:>7} frames  {seconds:5.0f} s  version {stats.version:>4}  return {score:5.1f}")
            if (score >= goal and len(returns) >= 20) or number == max_updates:
                break
    return score


def main() -> None:
    """Train; say whether the goal was reached."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a few updates only, to see that it runs")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    score = train(GOAL, max_updates=3 if chosen.quick else 10_000, seed=chosen.seed)
    if not chosen.quick and score < GOAL:
        raise SystemExit(f"the return is {score:.1f} after all frames of {MANIFEST.name}; {GOAL} was the goal")
    print(f"mean return of the last episodes: {score:.1f}")


if __name__ == "__main__":
    main()
