"""`env.jax` beside bare loops on gymnax's CartPole, in one run: with a torch policy, one compiled call a step; with
random actions, one compiled scan a batch that keeps what a batch holds.

.venv-jax/bin/python benchmarks/micro/jax_envs.py [NUM_ENVS]      (after `make test-jax`)
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnax
import jax
import numpy as np
import torch

from cormorant_worker.launch import make_collector

STEPS, ROUNDS = 192, 15


def build(observation: Any, action: Any) -> torch.nn.Module:
    class Policy(torch.nn.Sequential):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return super().forward(observation).argmax(-1)

    return Policy(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))


def main(num_envs: int) -> None:
    """Print medians of ours over the bare loops, and all rounds."""
    torch.set_num_threads(1)
    block = {"entrypoint": "gymnax:make", "numEnvs": num_envs, "kwargs": {"env_id": "CartPole-v1"}}
    env, params = gymnax.make("CartPole-v1")
    step = jax.vmap(env.step, in_axes=(0, 0, 0, None))
    for name, bare, factory in (
        ("a torch policy", _steps(env, params, jax.jit(step), num_envs), build),
        ("random actions", _scan(env, params, step, num_envs), None),
    ):
        with make_collector(env={"jax": block}, policy_factory=factory) as collector:
            ours = partial(collector.collect, num_steps=num_envs * STEPS)
            bare(), ours()
            ratios = sorted(_seconds(bare) / _seconds(ours) for _ in range(ROUNDS))
        median = statistics.median(ratios)
        print(f"{num_envs} envs, {name}: {median:.2f} of the bare loop", [f"{ratio:.2f}" for ratio in ratios])


def _steps(env: Any, params: Any, step: Any, num_envs: int) -> Callable[[], None]:
    split = jax.jit(lambda key: jax.random.split(key, num_envs))
    key, policy = jax.random.PRNGKey(0), build(None, None)
    obs, state = jax.vmap(env.reset, in_axes=(0, None))(split(key), params)

    def play() -> None:
        nonlocal key, obs, state
        for _ in range(STEPS):
            with torch.inference_mode():
                action = policy(torch.from_numpy(np.array(obs))).numpy()
            keys = split(key)
            key = keys[0]
            obs, state, *rest, _ = step(keys, state, action, params)
            [np.asarray(part) for part in rest]

    return play


def _scan(env: Any, params: Any, step: Any, num_envs: int) -> Callable[[], None]:
    def advance(carry: Any, key: Any) -> Any:
        obs, state = carry
        action = jax.random.randint(key, (num_envs,), 0, 2)
        after, state, reward, *done, _ = step(jax.random.split(key, num_envs), state, action, params)
        return (after, state), (obs, action, reward, *done)

    scan = jax.jit(lambda carry, key: jax.lax.scan(advance, carry, jax.random.split(key, STEPS)))
    key = jax.random.PRNGKey(0)
    carry = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, num_envs), params)

    def play() -> None:
        nonlocal carry, key
        key, drawn = jax.random.split(key)
        carry, kept = scan(carry, drawn)
        [np.array(part) for part in kept]

    return play


def _seconds(play: Callable[[], object]) -> float:
    began = time.perf_counter()
    play()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
