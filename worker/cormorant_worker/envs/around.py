"""A VectorEnv wrapper that forwards everything; subclasses change one thing."""

from cormorant_worker.envs.protocol import Rows, Step, VectorEnv
from cormorant_worker.spaces import Arrays


class EnvAround:
    """Forwards everything to other environments. Implements VectorEnv."""

    def __init__(self, env: VectorEnv) -> None:
        self._env = env
        self.num_envs, self.lockstep, self.min_in_flight = env.num_envs, env.lockstep, env.min_in_flight
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.info_leaves, self.illegal = env.info_leaves, env.illegal

    @property
    def restarts(self) -> int:
        return self._env.restarts

    def start(self) -> Arrays:
        return self._env.start()

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        self._env.send(actions, rows)

    def recv(self) -> Step:
        return self._env.recv()

    def restart(self, rows: Rows) -> Arrays:
        return self._env.restart(rows)

    def state(self) -> bytes:
        return self._env.state()

    def restore(self, state: bytes) -> None:
        self._env.restore(state)

    def close(self) -> None:
        self._env.close()
