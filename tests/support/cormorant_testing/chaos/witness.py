"""An environment whose observations say where they come from, so that any stored frame can be judged by itself.

    observation [seed, life, born, episode, step, echo], float64

`life` is drawn anew whenever an environment is reset with a seed or put back into a state: two streams of equal frames
are told apart. `born` is 1 in a life that began with a state; the first observation of such a life is the saved one,
of the life before. `echo` is the last action as one number.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from cormorant_worker.spaces import Array

SEED, LIFE, BORN, EPISODE, STEP, ECHO = range(6)
LONGEST = 9
ENTRYPOINT = "cormorant_testing.chaos.witness:make_witness"


def length_of(seed: Array, episode: Array) -> Array:
    """Steps in an episode, from 1 to LONGEST."""
    return 1 + (seed * 7 + episode * 3) % LONGEST


def reward_of(episode: Array, step: Array) -> Array:
    """The reward of the step that leads to `step`."""
    return (step + (episode % 1000) / 1000).astype(np.float32)


class WitnessEnv(gymnasium.Env[Any, Any]):
    """Every second episode is terminated, the others are truncated."""

    def __init__(self, *, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,), np.float64)
        self.action_space = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
        self._values = np.zeros(6)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        values = self._values
        if seed is not None:
            values[:] = (seed, secrets.randbits(50), 0, -1, 0, 0)
        values[EPISODE] += 1
        values[[STEP, ECHO]] = 0
        return values.copy(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self._step_s:
            time.sleep(self._step_s)
        values = self._values
        values[STEP] += 1
        values[ECHO] = float(action[0]) + 2 * float(action[1])
        seed, episode, step = (values[i : i + 1].astype(np.int64) for i in (SEED, EPISODE, STEP))
        is_over = bool(step[0] >= length_of(seed, episode)[0])
        is_even = bool(episode[0] % 2 == 0)
        return values.copy(), float(reward_of(episode, step)[0]), is_over and is_even, is_over and not is_even, {}


class SaveableWitness(WitnessEnv):
    """Can be saved, and lives another life afterwards."""

    def get_state(self) -> dict[str, Any]:
        return {"values": self._values.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._values = np.array(state["values"])
        self._values[[LIFE, BORN]] = (secrets.randbits(50), 1)


def make_witness(*, saveable: bool = True, **kwargs: Any) -> WitnessEnv:
    return SaveableWitness(**kwargs) if saveable else WitnessEnv(**kwargs)
