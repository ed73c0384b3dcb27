"""`env.jax` beside a bare loop of one compiled call a step, on gymnax's CartPole, in one run.

.venv-jax/bin/python benchmarks/micro/jax_envs.py [NUM_ENVS]      (after `make test-jax`)
"""

import statistics
import sys
import time
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
    """Print the median of ours over the bare loop, and all rounds."""
    torch.set_num_threads(1)
    block = {"entrypoint": "gymnax:make", "numEnvs": num_envs, "kwargs": {"env_id": "CartPole-v1"}}
    collector = make_collector(
        env={"jax": block}, policy_factory=build, collection={"framesPerBatch": num_envs * STEPS}
    )
    env, params = gymnax.make("CartPole-v1")
    step = jax.jit(jax.vmap(env.step, in_axes=(0, 0, 0, None)))
    split = jax.jit(lambda key: jax.random.split(key, num_envs))
    key, policy = jax.random.PRNGKey(0), build(None, None)
    obs, state = jax.vmap(env.reset, in_axes=(0, None))(split(key), params)

    def bare() -> None:
        nonlocal key, obs, state
        for _ in range(STEPS):
            with torch.inference_mode():
                action = policy(torch.from_numpy(np.array(obs))).numpy()
            keys = split(key)
            key = keys[0]
            obs, state, *rest, _ = step(keys, state, action, params)
            [np.asarray(part) for part in rest]

    def seconds(play: Any) -> float:
        began = time.perf_counter()
        play()
        return time.perf_counter() - began

    def ours() -> None:
        collector.collect(num_steps=num_envs * STEPS)

    bare(), ours()
    ratios = sorted(seconds(bare) / seconds(ours) for _ in range(ROUNDS))
    print(f"{num_envs} envs: {statistics.median(ratios):.2f} of the bare loop", [f"{ratio:.2f}" for ratio in ratios])
    collector.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
