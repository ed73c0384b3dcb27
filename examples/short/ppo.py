"""PPO on CartPole with workers of this machine: python examples/short/ppo.py."""

from itertools import islice

import torch

import cormorant
from cormorant.policies import mlp

UPDATES = 40


def main(updates: int = UPDATES) -> float:
    """Learn; returns the mean return of the last episodes."""
    torch.manual_seed(0)
    with cormorant.open_fleet(
        env="CartPole-v1", policy="cormorant.policies:mlp", num_envs=8, workers=2, frames_per_batch=1024, on_policy=True
    ) as fleet:
        policy = mlp(*fleet.spaces)
        value = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-3)
        fleet.publish(policy)
        for batch in islice(fleet.batches(), updates):  # TensorDict [16, 128]: a batch of each worker
            reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
            with torch.no_grad():
                now, following = (value(batch[key]).squeeze(-1) for key in ("observation", ("next", "observation")))
                delta = reward + 0.99 * following * ~batch["next", "terminated"].squeeze(-1) - now
                advantage, running = torch.zeros_like(delta), torch.zeros(delta.shape[0])
                for t in reversed(range(delta.shape[1])):  # generalized advantages
                    running = delta[:, t] + 0.99 * 0.95 * running * ~done[:, t]
                    advantage[:, t] = running
            observation, action = batch["observation"].flatten(0, 1), batch["action"].flatten(0, 1)
            goal, advantage = (now + advantage).flatten(), advantage.flatten()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            old = policy.evaluate(observation, action)[0].detach()
            for part in torch.randperm(len(goal)).repeat(4).split(256):
                log_prob, entropy = policy.evaluate(observation[part], action[part])
                ratio = (log_prob - old[part]).exp()
                gain = torch.min(ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part]).mean()
                error = (value(observation[part]).squeeze(-1) - goal[part]).square().mean()
                optimizer.zero_grad()
                (0.5 * error - gain - 0.01 * entropy.mean()).backward()
                optimizer.step()
            fleet.publish(policy)  # the next batch is from these weights
        return fleet.stats().mean_return or 0.0


if __name__ == "__main__":
    print(f"mean return {main():.1f}")
