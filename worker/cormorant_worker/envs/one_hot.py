"""Discrete actions as one-hot vectors: what TorchRL's environments take by default."""

from typing import Any

import gymnasium
import numpy as np

from cormorant_worker.envs.around import EnvAround
from cormorant_worker.envs.protocol import Rows, VectorEnv
from cormorant_worker.spaces import Arrays, OneHot


class OneHotActions(EnvAround):
    """Environments with one Discrete action, which is sent to them as a one-hot vector."""

    def __init__(self, env: VectorEnv) -> None:
        """Take environments whose action space is Discrete."""
        discrete: Any = env.action_space
        assert isinstance(discrete, gymnasium.spaces.Discrete), discrete
        super().__init__(env)
        self._start = int(discrete.start)
        self._dtype = np.dtype(discrete.dtype)
        self.action_space = OneHot(int(discrete.n))

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Step with the number of each vector's one."""
        self._env.send(((actions[0].argmax(-1) + self._start).astype(self._dtype),), rows)
