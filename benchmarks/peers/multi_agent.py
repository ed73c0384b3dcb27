"""8 copies of a PettingZoo environment in processes, random actions: our collector, and TorchRL's over ParallelEnv, in
turns. Prints the median ratio.

    PYTHONPATH=api:worker .venv-peers/bin/python -m benchmarks.peers.multi_agent
"""

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

NUM_ENVS = 8
STEPS = 100


class Cheap(ParallelEnv[str, Any, Any]):
    """Three agents that see 18 numbers each, for 25 steps; a step computes next to nothing."""

    metadata: dict[str, Any] = {"name": "cheap"}  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = [f"agent_{number}" for number in range(3)]
        self._seen, self._acts = spaces.Box(-np.inf, np.inf, (18,), np.float32), spaces.Discrete(5)
        self._obs = np.zeros(18, np.float32)

    def observation_space(self, agent: str) -> spaces.Box:
        return self._seen

    def action_space(self, agent: str) -> spaces.Discrete:
        return self._acts

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents, self._step = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, self._obs), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self._step += 1
        agents, is_over = self.agents, self._step >= 25
        self.agents = [] if is_over else agents
        no, over = dict.fromkeys(agents, False), dict.fromkeys(agents, is_over)
        return dict.fromkeys(agents, self._obs), dict.fromkeys(agents, 1.0), no, over, {agent: {} for agent in agents}


def cheap() -> Any:
    return Cheap()


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env()


KINDS = {"cheap": cheap, "mpe2/simple_spread_v3": spread}


def main() -> None:
    from torchrl.collectors import Collector
    from torchrl.envs import ParallelEnv as TorchRLParallelEnv
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper

    from cormorant_worker.launch import make_collector

    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rounds = options.rounds
    for name, make in ((name, KINDS[name]) for name in options.kinds):
        entrypoint = f"benchmarks.peers.multi_agent:{make.__name__}"
        block = {"entrypoint": entrypoint, "numEnvs": NUM_ENVS, "groups": "all"}
        peer_env = TorchRLParallelEnv(
            NUM_ENVS, lambda make=make: PettingZooWrapper(make(), group_map={"agents": make().possible_agents})
        )
        theirs = Collector(peer_env, None, frames_per_batch=NUM_ENVS * STEPS, total_frames=-1)
        batches = iter(theirs)
        with make_collector(env={"pettingzoo": block}) as ours:
            rates: dict[str, list[float]] = {"ours": [], "theirs": []}
            for number in range(rounds + 1):
                for who in rates:
                    began = time.perf_counter()
                    batch = ours.collect(num_steps=NUM_ENVS * STEPS) if who == "ours" else next(batches)
                    assert batch.shape == (NUM_ENVS, STEPS)
                    assert batch["next", "agents", "reward"].shape == (NUM_ENVS, STEPS, 3, 1)
                    if number:  # the first one is warm-up
                        rates[who].append(NUM_ENVS * STEPS / (time.perf_counter() - began))
        theirs.shutdown()
        ratios = [mine / their for mine, their in zip(rates["ours"], rates["theirs"], strict=True)]
        print(
            f"{name}: ours {median(rates['ours']):,.0f} frames/s, TorchRL {median(rates['theirs']):,.0f}: "
            f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
