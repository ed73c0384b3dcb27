"""Discrete actions as one-hot vectors: what TorchRL's environments take by default."""

from typing import Any

import gymnasium
import numpy as np

from cormorant_worker.envs.protocol import Rows, Step, VectorEnv
from cormorant_worker.spaces import Arrays, OneHot, Space


class OneHotActions:
    """Environments with one Discrete action, which is sent to them as a one-hot vector."""

    def __init__(self, env: VectorEnv) -> None:
        """Take environments whose action space is Discrete."""
        discrete: Any = env.action_space
        assert isinstance(discrete, gymnasium.spaces.Discrete), discrete
        self._env = env
        self._start = int(discrete.start)
        self._dtype = np.dtype(discrete.dtype)
        self.num_envs, self.lockstep, self.min_in_flight = env.num_envs, env.lockstep, env.min_in_flight
        self.observation_space = env.observation_space
        self.action_space: Space = OneHot(int(discrete.n))

    @property
    def restarts(self) -> int:
        """How many environments were restarted after a crash or a hang, so far."""
        return self._env.restarts

    def start(self) -> Arrays:
        """Begin the first episode everywhere."""
        return self._env.start()

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Step with the number of each vector's one."""
        self._env.send(((actions[0].argmax(-1) + self._start).astype(self._dtype),), rows)

    def recv(self) -> Step:
        """As the environments underneath."""
        return self._env.recv()

    def restart(self, rows: Rows) -> Arrays:
        """Begin new episodes."""
        return self._env.restart(rows)

    def state(self) -> bytes | None:
        """Of the environments underneath."""
        return self._env.state()

    def restore(self, state: bytes) -> None:
        """Go on from `state()`."""
        self._env.restore(state)

    def close(self) -> None:
        """Close the environments underneath."""
        self._env.close()
