"""The environment of the placements that EnvPool does not step: it writes down all that it was given. Imports no torch:
processes of environments start faster.

    observation [ident, episode, step, action[0], action[1]], float32, each a fraction that float32 holds exactly
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

IDENTS = 1 << 20
STEPS = 64


def length_of(ident: int, episode: int) -> int:
    """Steps of an episode, from 1 to 9. Even episodes are terminated, the others are truncated."""
    return 1 + (ident * 7 + episode * 3) % 9


class EchoEnv(gymnasium.Env[Any, Any]):
    """`crashes`: every second environment raises in this step of its life, if it is not 0."""

    def __init__(self, *, crashes: int = 0) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._crashes, self._life = crashes, 0
        self._ident, self._episode, self._step = 0, -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._ident, self._episode = seed % IDENTS, -1
        self._episode, self._step = self._episode + 1, 0
        return self._observe(0.0, 0.0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._life += 1
        if self._life == self._crashes and self._ident % 2:
            raise OSError("the simulator died")
        self._step += 1
        is_over, is_even = self._step >= length_of(self._ident, self._episode), self._episode % 2 == 0
        info = {"echo": action[1], **({"won": is_even} if is_over else {})}
        reward = float(np.float32(self._step / STEPS) + action[0])
        return self._observe(*action), reward, is_over and is_even, is_over and not is_even, info

    def get_state(self) -> dict[str, Any]:
        return {"counts": np.array([self._life, self._ident, self._episode, self._step])}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._life, self._ident, self._episode, self._step = (int(n) for n in state["counts"])

    def _observe(self, *action: float) -> Any:
        return np.array([self._ident / IDENTS, self._episode / STEPS, self._step / STEPS, *action], np.float32)


def make_vector(num_envs: int, mode: str) -> Any:
    """Entrypoint of the manifests. `held`: NEXT_STEP, of rows that cannot be reset by a mask alone."""
    makers = [EchoEnv] * num_envs
    if mode == "held":
        return gymnasium.vector.AsyncVectorEnv(makers, shared_memory=False)
    modes = {"next": "NextStep", "same": "SameStep", "disabled": "Disabled"}
    return gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=modes[mode])
