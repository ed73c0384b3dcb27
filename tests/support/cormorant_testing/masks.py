"""Environments that refuse illegal actions. Light, as each process of a subprocess environment imports this module."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Masked(gymnasium.Env[Any, Any]):
    """Of five actions, from 10 on, only the one after the last is legal, and the one after that. Refuses others."""

    action_space = spaces.Discrete(5, start=10)

    def __init__(self, *, in_info: bool = False) -> None:
        self._in_info = in_info
        self._box = spaces.Box(0, 100, (1,), np.float32)
        mask = spaces.Box(0, 1, (5,), np.int8)
        self.observation_space = self._box if in_info else spaces.Dict(observation=self._box, action_mask=mask)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._legal = {2, 3}
        return self._told({})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action - 10 not in self._legal:
            raise ValueError(f"action {action} is illegal; {self._legal} are legal")
        self._legal = {(action - 9) % 5, (action - 8) % 5}
        obs, info = self._told({"chosen": int(action)})
        return obs, 1.0, False, False, info

    def _told(self, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = np.array([i in self._legal for i in range(5)], np.int8)
        seen = np.zeros(1, np.float32)
        if self._in_info:
            return seen, info | {"action_mask": mask}
        return {"observation": seen, "action_mask": mask}, info


class MaskedAtTimes(gymnasium.Env[Any, Any]):
    """Only the last action is legal at even steps, and all are where the info has no mask. Can be saved."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self._told()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._steps % 2 == 0 and action.tolist() != [1, 2]:
            raise ValueError(f"action {action} is illegal")
        self._steps += 1
        return (told := self._told())[0], 1.0, self._steps == 5, False, told[1]

    def _told(self) -> tuple[Any, dict[str, Any]]:
        mask = (np.array([0, 1], np.int8), np.array([0, 0, 1], np.int8))
        return np.full(1, self._steps, np.float32), {"action_mask": mask} if self._steps % 2 == 0 else {}

    def get_state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def set_state(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
