"""A plain pool of one environment, stepped by hand: what EnvPool must give for stored actions."""

from typing import Any

import envpool
import numpy as np


class ByHand:
    """Takes EnvPool's phantom step where an episode ended."""

    def __init__(self, task: str, seed: int, **kwargs: Any) -> None:
        self._pool = envpool.make(task, env_type="gymnasium", num_envs=1, seed=[seed], **kwargs)

    def reset(self) -> Any:
        return self._pool.reset()[0][0].copy()

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        self._action = np.array([action])
        obs, reward, terminated, truncated, self.info = self._pool.step(self._action)
        return obs[0].copy(), float(reward[0]), bool(terminated[0]), bool(truncated[0])

    def go_on(self) -> Any:
        return self._pool.step(np.zeros_like(self._action))[0][0].copy()
