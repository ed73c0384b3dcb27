"""`python -m benchmarks.micro.envpool_xla`: EnvPool's XLA loop over its step loop, random actions: decision 0047.

Both keep nothing. The XLA loop is one `lax.scan` whose body draws actions and steps. Not part of `make bench`.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import envpool
import gymnasium
import jax
import numpy as np

from benchmarks.micro.rows import interleaved, main, median_ratio, row

CASES = (
    ("CartPole-v1", 8, 1),
    ("CartPole-v1", 64, 1),
    ("CartPole-v1", 512, 1),
    ("HalfCheetah-v4", 64, 2),
    ("Pong-v5", 16, 2),
)
"""Task, environments, EnvPool's threads."""
STEPS = 64


def measure(*, quick: bool) -> Iterator[dict]:
    """Rows of the report."""
    jax.config.update("jax_enable_x64", True)  # MuJoCo's actions are float64
    warnings.filterwarnings("ignore", module="gymnasium")  # of EnvPool's float64 bounds
    for task, num_envs, num_threads in CASES:
        by_step, by_scan = (
            envpool.make(task, env_type="gymnasium", num_envs=num_envs, num_threads=num_threads) for _ in range(2)
        )
        scanned, stepped = interleaved(_scan(by_scan), _step(by_step), rounds=5 if quick else 40)
        note = f"{num_envs} environments, {num_threads} threads"
        yield row(f"{task}: one lax.scan over a loop of step", median_ratio(stepped, scanned), "x", note=note)


def _scan(pool: Any) -> Any:
    pool.async_reset()
    handle, recv, _, step = pool.xla()
    handle, _ = recv(handle)
    num_envs, actions = len(pool.all_env_ids), pool.action_space

    def draw(key: jax.Array) -> jax.Array:
        if isinstance(actions, gymnasium.spaces.Discrete):
            return jax.random.randint(key, (num_envs,), 0, actions.n, dtype=np.int32)
        return jax.random.uniform(key, (num_envs, *actions.shape), actions.dtype, actions.low, actions.high)

    def body(carry: Any, _: None) -> Any:
        key, draws = jax.random.split(carry[1])
        handle, (observation, reward, *_rest) = step(carry[0], draw(draws))
        return (handle, key), (observation, reward)

    run = jax.jit(lambda carry: jax.lax.scan(body, carry, None, length=STEPS))
    state = [(handle, jax.random.key(0))]

    def loop() -> None:
        state[0], kept = run(state[0])
        jax.block_until_ready(kept)

    return loop


def _step(pool: Any) -> Any:
    pool.reset()
    num_envs, actions, draw = len(pool.all_env_ids), pool.action_space, np.random.default_rng(0)

    def loop() -> None:
        for _ in range(STEPS):
            if isinstance(actions, gymnasium.spaces.Discrete):
                pool.step(draw.integers(0, actions.n, num_envs, dtype=np.int32))
            else:
                pool.step(draw.uniform(actions.low, actions.high, (num_envs, *actions.shape)))

    return loop


if __name__ == "__main__":
    main(measure)
