"""One action for several steps of the environments underneath: TorchRL's `frame_skip`. Built by `torchrl/pool.py`."""

import numpy as np

from cormorant_worker.envs.protocol import EVERY_ROW, Rows, Step, VectorEnv
from cormorant_worker.spaces import Array, Arrays


class RepeatedActions:
    """Environments in lockstep, each of whose steps is up to `times` steps of `env` with the same action.

    Rewards are summed, the observation is the last one. An episode that ends in between is over: the action is not
    carried into the next one.
    """

    lockstep = True
    min_in_flight = 1

    def __init__(self, env: VectorEnv, times: int) -> None:
        """Take an environment in lockstep, and `times` >= 1."""
        self._env = env
        self._times = times
        self.num_envs = env.num_envs
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._actions: Arrays = ()
        self._rows: slice | Rows = EVERY_ROW

    @property
    def restarts(self) -> int:
        """How many environments were restarted after a crash or a hang, so far."""
        return self._env.restarts

    def start(self) -> Arrays:
        """Begin the first episode everywhere."""
        return self._env.start()

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Begin the first of the steps."""
        self._actions, self._rows = actions, rows
        self._env.send(actions, rows)

    def recv(self) -> Step:
        """Wait for that step and take the others."""
        first = self._env.recv()
        obs = tuple([leaf.copy() for leaf in first.obs])
        reward, terminated, truncated = first.reward.copy(), first.terminated.copy(), first.truncated.copy()
        final = tuple([np.zeros_like(leaf) for leaf in obs])
        for kept, last in zip(final, first.final, strict=True):
            kept[first.ended] = last
        fresh = np.zeros(len(reward), dtype=np.bool_)
        fresh[first.fresh] = True
        numbers = np.arange(self.num_envs) if isinstance(self._rows, slice) else self._rows
        for _ in range(1, self._times):
            going = np.flatnonzero(~(terminated | truncated | fresh))
            if not len(going):
                break
            self._env.send(tuple([leaf[going] for leaf in self._actions]), numbers[going])
            step = self._env.recv()
            reward[going] += step.reward
            terminated[going], truncated[going] = step.terminated, step.truncated
            fresh[going[step.fresh]] = True
            for kept, now in zip(obs, step.obs, strict=True):
                kept[going] = now
            for kept, last in zip(final, step.final, strict=True):
                kept[going[step.ended]] = last
        ended = np.flatnonzero((terminated | truncated) & ~fresh)
        lost: Array = np.flatnonzero(fresh)
        return Step(self._rows, obs, reward, terminated, truncated, ended, tuple([a[ended] for a in final]), lost)

    def restart(self, rows: Rows) -> Arrays:
        """Begin new episodes."""
        return self._env.restart(rows)

    def state(self) -> bytes | None:
        """Of the environments underneath: nothing is kept between two steps."""
        return self._env.state()

    def restore(self, state: bytes) -> None:
        """Go on from `state()`."""
        self._env.restore(state)

    def close(self) -> None:
        """Close the environments underneath."""
        self._env.close()
