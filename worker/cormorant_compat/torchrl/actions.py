"""EnvPool's environments with the actions of TorchRL: one-hot vectors, and one action for several steps."""

from typing import Any

import gymnasium
import numpy as np

from cormorant_worker.envs.protocol import EVERY_ROW, Rows, Step, VectorEnv
from cormorant_worker.spaces import Arrays, OneHot


class _Forwarding(VectorEnv):
    """Forwards to a pool in lockstep, which has neither infos nor states nor restarts."""

    def __init__(self, env: VectorEnv) -> None:
        self._env = env
        self.num_envs, self.why_not_saved = env.num_envs, env.why_not_saved
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def start(self) -> Arrays:
        return self._env.start()

    def recv(self) -> Step:
        return self._env.recv()

    def restart(self, rows: Rows) -> Arrays:
        return self._env.restart(rows)

    def close(self) -> None:
        self._env.close()


class OneHotActions(_Forwarding):
    """Environments with one Discrete action, which is sent to them as a one-hot vector."""

    def __init__(self, env: VectorEnv) -> None:
        discrete: Any = env.action_space
        assert isinstance(discrete, gymnasium.spaces.Discrete), discrete
        super().__init__(env)
        self._start = int(discrete.start)
        self._dtype = np.dtype(discrete.dtype)
        self.action_space = OneHot(int(discrete.n))

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        self._env.send(((actions[0].argmax(-1) + self._start).astype(self._dtype),), rows)


class RepeatedActions(_Forwarding):
    """Environments each of whose steps is up to `times` steps of `env` with the same action.

    Rewards are summed, the observation is the last one. An episode that ends in between is over: the action is not
    carried into the next one.
    """

    def __init__(self, env: VectorEnv, times: int) -> None:
        """Take `times` >= 1."""
        super().__init__(env)
        self._times = times
        self._actions: Arrays = ()
        self._rows: slice | Rows = EVERY_ROW

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        self._actions, self._rows = actions, rows
        self._env.send(actions, rows)

    def recv(self) -> Step:
        first = self._env.recv()
        obs = tuple([leaf.copy() for leaf in first.obs])
        reward, terminated, truncated = first.reward.copy(), first.terminated.copy(), first.truncated.copy()
        final = tuple([np.zeros_like(leaf) for leaf in obs])
        for kept, last in zip(final, first.final, strict=True):
            kept[first.ended] = last
        numbers = np.arange(self.num_envs)[self._rows]
        for _ in range(1, self._times):
            going = np.flatnonzero(~(terminated | truncated))
            if not len(going):
                break
            self._env.send(tuple([leaf[going] for leaf in self._actions]), numbers[going])
            step = self._env.recv()
            reward[going] += step.reward
            terminated[going], truncated[going] = step.terminated, step.truncated
            for kept, now in zip(obs, step.obs, strict=True):
                kept[going] = now
            for kept, last in zip(final, step.final, strict=True):
                kept[going[step.ended]] = last
        ended = np.flatnonzero(terminated | truncated)
        return Step(self._rows, obs, reward, terminated, truncated, ended, tuple([a[ended] for a in final]))
