"""8 copies of a PettingZoo environment, random actions, in turns. A process per copy: our collector, and TorchRL's over
ParallelEnv. All copies in one process: our collector, and RLlib's MultiAgentEnvRunner. Prints median ratios.

    PYTHONPATH=api:worker .venv-peers/bin/python -m benchmarks.peers.multi_agent      (after `make test-peers`)
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

Make = Callable[[], Any]
Take = Callable[[], int]
"""Collects a batch; returns its frames."""

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
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for name, make in ((name, KINDS[name]) for name in options.kinds):
        with ExitStack() as opened:
            contenders = {who: opened.enter_context(open_one(make)) for who, open_one in CONTENDERS.items()}
            rates: dict[str, list[float]] = {who: [] for who in contenders}
            for number in range(options.rounds + 1):
                for who, take in contenders.items():
                    began = time.perf_counter()
                    frames = take()
                    if number:  # the first one is warm-up
                        rates[who].append(frames / (time.perf_counter() - began))
        for ours, theirs in (("processes", "TorchRL"), ("one process", "RLlib")):
            ratios = [mine / their for mine, their in zip(rates[ours], rates[theirs], strict=True)]
            print(
                f"{name}, {ours}: ours {median(rates[ours]):,.0f} frames/s, {theirs} {median(rates[theirs]):,.0f}: "
                f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            )


@contextmanager
def open_ours(make: Make, vectorization: str) -> Iterator[Take]:
    from cormorant_worker.launch import make_collector

    entrypoint = f"benchmarks.peers.multi_agent:{make.__name__}"
    block = {"entrypoint": entrypoint, "numEnvs": NUM_ENVS, "groups": "all", "vectorization": vectorization}
    with make_collector(env={"pettingzoo": block}) as collector:
        yield lambda: _checked(collector.collect(num_steps=NUM_ENVS * STEPS))


@contextmanager
def open_torchrl(make: Make) -> Iterator[Take]:
    from torchrl.collectors import Collector
    from torchrl.envs import ParallelEnv as TorchRLParallelEnv
    from torchrl.envs.libs.pettingzoo import PettingZooWrapper

    env = TorchRLParallelEnv(NUM_ENVS, lambda: PettingZooWrapper(make(), group_map={"agents": make().possible_agents}))
    collector = Collector(env, None, frames_per_batch=NUM_ENVS * STEPS, total_frames=-1)
    batches = iter(collector)
    yield lambda: _checked(next(batches))
    collector.shutdown()


def _checked(batch: Any) -> int:
    assert batch.shape == (NUM_ENVS, STEPS)
    assert batch["next", "agents", "reward"].shape == (NUM_ENVS, STEPS, 3, 1)
    return NUM_ENVS * STEPS


@contextmanager
def open_rllib(make: Make) -> Iterator[Take]:
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register_env("task", lambda _: ParallelPettingZooEnv(make()))
    config = (
        PPOConfig()
        .environment("task")
        .env_runners(num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=STEPS)
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
        .debugging(log_level="ERROR", seed=7)
    )
    runner = MultiAgentEnvRunner(config=config)

    def take() -> int:
        episodes = runner.sample(num_timesteps=NUM_ENVS * STEPS, random_actions=True)
        return sum(episode.env_steps() for episode in episodes)

    yield take
    runner.stop()
    ray.shutdown()


CONTENDERS: dict[str, Callable[[Make], AbstractContextManager[Take]]] = {
    "processes": partial(open_ours, vectorization="subprocess"),
    "one process": partial(open_ours, vectorization="inline"),
    "TorchRL": open_torchrl,
    "RLlib": open_rllib,
}

if __name__ == "__main__":
    main()
