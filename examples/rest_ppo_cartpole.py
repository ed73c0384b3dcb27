"""PPO on CartPole over HTTP: this process knows a URL and a token, and nothing of workers.

    cormorant run examples/cartpole-ppo.yaml --serve                       # prints where the token file is
    python examples/rest_ppo_cartpole.py --url http://127.0.0.1:8000 --token-file FILE

From an untrained network to a return of 450 in a minute or two on two cores.
"""

import argparse
import time

import torch
from ppo import Agent, Ppo, Settings, make_critic

from cormorant import Client, LearnerLink, connect
from cormorant.policies import mlp

GOAL = 450.0


def train(client: Client, *, goal: float, max_updates: int, seed: int) -> float:
    """Learn until the last 100 episodes return `goal` on average. Returns that average."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # networks this small are slower on several threads
    # The manifest's policy, built a second time: the head checks that names, shapes and dtypes are the same.
    policy = mlp(*client.spaces)
    ppo = Ppo(Agent(policy, make_critic(4)), Settings())
    began, score = time.monotonic(), 0.0
    link = LearnerLink(client, policy, wait=10)
    for number, batch in enumerate(link.batches(), start=1):
        ppo.update(batch)
        link.step()  # publishes, and waits until the workers act with it
        if number % 10 == 0 or number == max_updates:
            stats = client.stats()
            score = stats.mean_return or 0.0
            seconds = time.monotonic() - began
            print(
                f"{stats.frames:>7} frames  {seconds:5.0f} s  version {link.version:>4}  "
                f"staleness {link.staleness.max}  return {score:5.1f}"
            )
            if score >= goal or number >= max_updates:
                break
    return score


def main() -> None:
    """Train; say whether the goal was reached."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", help="the head; default: CORMORANT_URL")
    options.add_argument("--token-file", help="default: CORMORANT_TOKEN, CORMORANT_TOKEN_FILE")
    options.add_argument("--quick", action="store_true", help="a few updates only, to see that it runs")
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    with connect(chosen.url, token_file=chosen.token_file) as client:
        score = train(client, goal=GOAL, max_updates=3 if chosen.quick else 10_000, seed=chosen.seed)
    if not chosen.quick and score < GOAL:
        raise SystemExit(f"the return is {score:.1f} at the end of the stream; {GOAL} was the goal")
    print(f"mean return of the last episodes: {score:.1f}")


if __name__ == "__main__":
    main()
