"""An environment whose observations say where they come from, so that any stored frame can be judged by itself.

    observation [seed, life, born, episode, step, echo], float64

`life` is drawn anew whenever an environment is reset with a seed or put back into a state: two streams of equal frames
are told apart. `born` is 1 in a life that began with a state; the first observation of such a life is the saved one,
of the life before. `echo` is the last action as one number.
"""

import secrets
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from cormorant_testing.envs import IDENT_MODULUS, CountingEnv, Stateless
from cormorant_worker.spaces import Array

SEED, LIFE, BORN, EPISODE, STEP, ECHO = range(6)
LONGEST = 9
ENTRYPOINT = "cormorant_testing.chaos.witness:make_witness"


def length_of(seed: Array, episode: Array) -> Array:
    """Steps in an episode, from 1 to LONGEST."""
    return 1 + (seed % IDENT_MODULUS * 7 + episode * 3) % LONGEST


def reward_of(episode: Array, step: Array) -> Array:
    """The reward of the step that leads to `step`."""
    return (step + (episode % 1000) / 1000).astype(np.float32)


class WitnessEnv(CountingEnv):
    """Every second episode is terminated, the others are truncated. Can be saved, and lives another life afterwards."""

    def __init__(self, *, step_s: float = 0.0) -> None:
        super().__init__(longest=LONGEST, ends="alternate", step_s=step_s)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,), np.float64)
        self.action_space = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
        self._life, self._born = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        if seed is not None:
            self._life, self._born = secrets.randbits(50), 0
        return super().reset(seed=seed)

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._life, self._born = secrets.randbits(50), 1

    def _observe(self, hurt: str) -> Array:
        now = self._counts
        return np.array([now.seed, self._life, self._born, now.episode, now.step, now.echoed], np.float64)


def make_witness(*, saveable: bool, step_s: float) -> gymnasium.Env[Any, Any]:
    env = WitnessEnv(step_s=step_s)
    return env if saveable else Stateless(env)
