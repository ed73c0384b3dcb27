"""PPO on CartPole through Cormorant's Python API: from an untrained network to a return of 450 in about a minute.

    python examples/learner_cartpole.py

Two worker processes play (examples/cartpole-ppo.yaml); this process learns from their batches and publishes new
weights after each. The mathematics is in ppo.py.
"""

import argparse
import time
from pathlib import Path

import torch
from ppo import Agent, Ppo, Settings, make_critic

from cormorant import open_fleet
from cormorant.policies import mlp

MANIFEST = Path(__file__).with_name("cartpole-ppo.yaml")
GOAL = 450.0


def train(goal: float, max_updates: int, seed: int) -> float:
    """Learn until the last 100 episodes return `goal` on average. Returns that average."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with open_fleet(MANIFEST) as fleet:
        observation_space, action_space = fleet.spaces
        policy = mlp(observation_space, action_space)
        ppo = Ppo(Agent(policy, make_critic(observation_space.shape[0])), Settings())
        fleet.publish(policy)
        began, score = time.monotonic(), 0.0
        for number, batch in enumerate(fleet.batches(), start=1):
            ppo.update(batch)
            fleet.publish(policy)  # maxStaleness: 0: the next batch waits for these weights
            stats = fleet.stats()
            score = stats.mean_return or 0.0
            if number % 10 == 0 or score >= goal:
                seconds = time.monotonic() - began
                print(f"{stats.frames:>7} frames  {seconds:5.0f} s  version {stats.version:>4}  return {score:5.1f}")
            if (score >= goal and stats.episodes >= 20) or number == max_updates:
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
