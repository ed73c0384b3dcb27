"""Evaluate a network on 100 seeded episodes, each exactly once: python examples/short/evaluation.py."""

import torch

import cormorant
from cormorant.policies import mlp


def main(episodes: int = 100) -> float:
    """Play; returns the mean return."""
    torch.manual_seed(0)
    with cormorant.make_collector(env="CartPole-v1", num_envs=1) as collector:
        policy = mlp(*collector.spaces)
    table = cormorant.evaluate(
        env="CartPole-v1", policy="cormorant.policies:mlp", weights=policy.state_dict(), episodes=episodes, seed=7
    )
    for episode in table.episodes[:3]:
        print(f"seed {episode.seed}: return {episode.total:.0f}")
    mean: float = table.summary["return"]["mean"]
    return mean


if __name__ == "__main__":
    print(f"mean return {main():.1f}")
