"""REINFORCE from a job that runs elsewhere: python examples/short/remote.py pong-job, or http://127.0.0.1:8000.

cormorant run examples/cartpole-ppo.yaml --serve --directory head       # such a job on this machine
CORMORANT_TOKEN_FILE=head/tokens.json python examples/short/remote.py http://127.0.0.1:8000
"""

import sys

import torch

import cormorant
from cormorant.policies import mlp


def main(job: str, updates: int = 100) -> float:
    """Learn; returns the mean return of the last episodes."""
    with cormorant.connect(job) as fleet:
        policy = mlp(*fleet.spaces)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        receipt = fleet.publish(policy, wait=30)
        for _ in range(updates):
            if (batch := fleet.next_batch(timeout=120)) is None:
                break  # everything is collected
            reward, done = batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
            to_go, running = torch.zeros(batch.shape), torch.zeros(len(batch))
            for t in reversed(range(batch.shape[1])):  # returns of each episode
                to_go[:, t] = running = reward[:, t] + 0.99 * running * ~done[:, t]
            log_prob, _ = policy.evaluate(batch["observation"].flatten(0, 1), batch["action"].flatten(0, 1))
            optimizer.zero_grad()
            (-log_prob * (to_go - to_go.mean()).flatten()).mean().backward()
            optimizer.step()
            receipt = fleet.publish(policy)
        print(f"version {receipt.version} is with {', '.join(receipt.wait(30).applied)}")
        return fleet.stats().mean_return or 0.0


if __name__ == "__main__":
    print(f"mean return {main(sys.argv[1]):.1f}")
