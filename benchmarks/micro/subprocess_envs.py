"""Environments in subprocesses against gymnasium's AsyncVectorEnv, with random actions and nothing stored.

`cartpole` is as cheap as environments get, so that the hand-over dominates. `busy-1ms` computes for one millisecond a
step, `sleep-1ms` waits for one (a simulator elsewhere), so that what they hide is how much steps overlap.
AsyncVectorEnv shares memory and resets in the step after an end (its defaults), and does not copy observations. Frames
are valid frames: what it spends on steps that only reset is in the time, not in the count.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from benchmarks.micro import rows
from cormorant_worker.envs.gymnasium_env import EnvFactory
from cormorant_worker.envs.protocol import EVERY_ROW
from cormorant_worker.envs.subprocess import SubprocessVectorEnv

NUM_ENVS = 8


class OneMillisecond(gymnasium.Env):
    """A step takes one millisecond, asleep or computing; an episode 200 steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, *, is_busy: bool) -> None:
        self._is_busy = is_busy
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        if self._is_busy:
            until = time.perf_counter() + 1e-3
            while time.perf_counter() < until:
                pass
        else:
            time.sleep(1e-3)
        return np.zeros(4, np.float32), 1.0, self._steps >= 200, False, {}


KINDS: dict[str, EnvFactory] = {
    "cartpole": EnvFactory(id="CartPole-v1"),
    "busy-1ms": EnvFactory(entrypoint="benchmarks.micro.subprocess_envs:OneMillisecond", kwargs={"is_busy": True}),
    "sleep-1ms": EnvFactory(entrypoint="benchmarks.micro.subprocess_envs:OneMillisecond", kwargs={"is_busy": False}),
}


def measure(*, quick: bool) -> Sequence[dict]:
    rounds, steps = (3, 100) if quick else (15, 400)
    return [_compare(kind, factory, rounds=rounds, steps=steps) for kind, factory in KINDS.items()]


def _compare(kind: str, factory: EnvFactory, *, rounds: int, steps: int) -> dict:
    """Rate of valid frames of ours over theirs."""
    ours = SubprocessVectorEnv(factory, seeds=list(range(NUM_ENVS)))
    theirs = AsyncVectorEnv([factory.build] * NUM_ENVS, copy=False)
    try:
        actions = np.random.default_rng(0).integers(2, size=(steps, NUM_ENVS))
        valid = 1.0 - _phantom_share(theirs, actions)
        ours_s, theirs_s = rows.interleaved(
            _stepper_ours(ours, actions), _stepper_theirs(theirs, actions), rounds=rounds
        )
    finally:
        ours.close()
        theirs.close()
    frames = NUM_ENVS * steps
    return rows.row(
        f"subprocess envs over AsyncVectorEnv, 8 x {kind}",
        rows.median_ratio(theirs_s, ours_s) / valid,
        "x",
        bar=">= 1",
        note=f"{frames / median(ours_s):,.0f} frames/s against {valid * frames / median(theirs_s):,.0f}",
    )


def _stepper_ours(env: SubprocessVectorEnv, actions: np.ndarray) -> Callable[[], None]:
    env.start()

    def run() -> None:
        for action in actions:
            env.send((action,), EVERY_ROW)
            env.recv()

    return run


def _stepper_theirs(env: AsyncVectorEnv, actions: np.ndarray) -> Callable[[], None]:
    env.reset(seed=0)

    def run() -> None:
        for action in actions:
            env.step(action)

    return run


def _phantom_share(env: AsyncVectorEnv, actions: np.ndarray) -> float:
    env.reset(seed=0)
    ends = 0
    for action in actions:
        _obs, _reward, terminated, truncated, _info = env.step(action)
        ends += np.count_nonzero(terminated | truncated)
    return ends / actions.size


if __name__ == "__main__":
    rows.main(measure)
