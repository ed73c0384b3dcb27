"""Episodes of one step or of many, by the toss of a coin: what favors short episodes shows at once.

Ten environments, `tossers()`, end early with a probability of 0.1 or of 0.9, half of them each: over environments that
count alike, half of all episodes are short. Who gives the next episode to whoever has ended one first finds far more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np

LONG = 30


class CoinEnv(gymnasium.Env[Any, Any]):
    """Each episode takes 1 step with a probability of `short`, else LONG steps; every step earns 1."""

    def __init__(self, short: float = 0.5) -> None:
        self.short = short
        self.observation_space = gymnasium.spaces.Box(0, LONG, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 1 if self.np_random.random() < self.short else LONG
        return np.array([self.left], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.array([self.left], np.float32), 1.0, self.left == 0, False, {}


def tossers() -> list[Callable[[], CoinEnv]]:
    """Ten environments, half of them hasty."""
    return [partial(CoinEnv, 0.9 if number % 2 else 0.1) for number in range(10)]
