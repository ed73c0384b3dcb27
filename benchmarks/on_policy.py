"""PPO on CartPole on-policy: two workers beside one process with the same network, frames per update and settings.

    python -m benchmarks.on_policy [--seeds 3] [--goal 450]

Runs are interleaved. Seconds count from the first batch asked for; the opening of the fleet is printed apart. Compare
ratios of one run only.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cormorant import make_collector, open_fleet
from cormorant.policies import mlp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from ppo import Agent, Ppo, Settings, make_critic

NUM_ENVS, STEPS, MOST_UPDATES = 16, 32, 1000
Tensors = Mapping[str, torch.Tensor]


def learn(
    goal: float, spaces: tuple[Any, Any], take: Callable[[], Any], publish: Callable[[Tensors], Any]
) -> list[float]:
    """Learn until the last 50 episodes return `goal` on average. Returns updates, and seconds: all, collecting."""
    policy = mlp(*spaces)
    ppo = Ppo(Agent(policy, make_critic(spaces[0].shape[0])), Settings())
    publish(policy.state_dict())
    returns: deque[float] = deque(maxlen=50)
    running = torch.zeros(NUM_ENVS)
    began, collecting = time.perf_counter(), 0.0
    updates = 0
    while updates < MOST_UPDATES:
        updates += 1
        asked = time.perf_counter()
        batch = take()
        collecting += time.perf_counter() - asked
        for t in range(batch.shape[1]):
            running += batch["next", "reward"][:, t, 0]
            done = batch["next", "done"][:, t, 0]
            returns.extend(running[done].tolist())
            running[done] = 0.0
        if len(returns) == returns.maxlen and statistics.mean(returns) >= goal:
            break
        ppo.update(batch)
        publish(policy.state_dict())
    return [updates, time.perf_counter() - began, collecting]


def alone(goal: float, seed: int) -> list[float]:
    """Collect in this process."""
    began = time.perf_counter()
    with make_collector(job(NUM_ENVS, seed)) as collector:
        opening = time.perf_counter() - began
        versions = iter(range(1, MOST_UPDATES + 2))

        def publish(weights: Tensors) -> None:
            collector.weights.offer({"policy": {k: v.clone() for k, v in weights.items()}}, version=next(versions))

        return [*learn(goal, collector.spaces, lambda: collector.collect(num_steps=NUM_ENVS * STEPS), publish), opening]


def two_workers(goal: float, seed: int) -> list[float]:
    """Collect in two workers, half of the environments each."""
    began = time.perf_counter()
    with open_fleet(job(NUM_ENVS // 2, seed), workers=2) as fleet:
        opening = time.perf_counter() - began
        return [*learn(goal, fleet.spaces, fleet.next_batch, fleet.publish), opening]


def job(num_envs: int, seed: int) -> dict[str, Any]:
    return {
        "apiVersion": "cormorant.dev/v1alpha1",
        "kind": "CollectorJob",
        "metadata": {"name": "on-policy"},
        "spec": {
            "env": {"envpool": {"taskId": "CartPole-v1", "numEnvs": num_envs, "numThreads": 1}},
            "policy": {"entrypoint": "cormorant.policies:mlp"},
            "collection": {
                "mode": "sync",
                "framesPerBatch": num_envs * STEPS,
                "seed": seed,
                "weights": {"maxStaleness": 0},
            },
            "output": {"queue": {"capacityBatches": 1}},
            "replicas": 2,
        },
    }


def main() -> None:
    """Print a line per run, and the ratio of medians."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.on_policy", description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--goal", type=float, default=450.0)
    chosen = options.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    per_update: dict[str, list[float]] = {}
    for seed in range(1, chosen.seeds + 1):
        for run in (alone, two_workers):
            torch.manual_seed(seed)
            updates, seconds, collecting, opening = run(chosen.goal, seed)
            per_update.setdefault(run.__name__, []).append(seconds / updates)
            print(
                f"{run.__name__:11} seed {seed}: {updates:.0f} updates of {NUM_ENVS * STEPS} frames, {seconds:.1f} s, "
                f"{collecting / seconds:4.0%} of it waiting for frames; opened in {opening:.1f} s",
                flush=True,
            )
    ratio = statistics.median(per_update["two_workers"]) / statistics.median(per_update["alone"])
    print(f"seconds per update, two workers over one process: {ratio:.2f}")


if __name__ == "__main__":
    main()
