"""Whatever a script of Tianshou's hands over as environments, behind our VectorEnv. Called by the collector.

gymnasium.Env, or a list of them or of functions     stepped one after another in this process
envpool.make(...)                                    our own way of stepping EnvPool, around that pool
tianshou.env.*VectorEnv                              stepped through its own `step` and `reset`
gymnasium.vector.VectorEnv                           as `open_fleet` steps it
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import numpy as np

from cormorant_worker.envs.env_row import row_views
from cormorant_worker.envs.flat_vector import VectorSource
from cormorant_worker.envs.gymnasium_env import Env
from cormorant_worker.envs.info import InfoField, InfoMisfit, complete_fields, info_writer
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, Rows, Step, VectorEnv
from cormorant_worker.envs.request import info_fields
from cormorant_worker.envs.restarts import RestartLimits, Restarts
from cormorant_worker.envs.single_envs import InlineVectorEnv
from cormorant_worker.envs.vector import GymVectorEnv
from cormorant_worker.errors import EnvBuildError, EnvError
from cormorant_worker.scripted import Scripted
from cormorant_worker.spaces import Array, Arrays, flatten, leaves, unflattener


def as_vector_env(
    env: Any, seeds: Callable[[int], Sequence[int]], info: Sequence[str | Mapping[str, Any]] = ()
) -> VectorEnv:
    """Put environments behind our protocol, as the module says. `seeds`: returns n distinct ones, for environments that
    are seeded at their first reset; `info`: keys of their info that come with every step.
    """
    fields = info_fields(Scripted(env="given", info=info).job().spec.env) if info else ()
    if hasattr(env, "_state_keys") and hasattr(env, "_recv"):
        from cormorant_worker.envs.envpool import wrap_pool

        return wrap_pool(env, fields)
    if hasattr(env, "is_async") and (hasattr(env, "env_num") or innermost(env) is not env):
        return TheirAsyncVectorEnv(env, fields) if env.is_async else TheirVectorEnv(env, fields)
    if isinstance(env, gymnasium.vector.VectorEnv):
        source = VectorSource(type(env).__name__, lambda num_envs: env)
        return GymVectorEnv(source, seeds=seeds(env.num_envs), info=fields)
    given = list(env) if isinstance(env, list | tuple) else [env]
    if not given or not all(isinstance(each, gymnasium.Env) or callable(each) for each in given):
        raise EnvError(
            f"environments are {type(env).__name__}; give a gymnasium.Env, a list of them or of functions that make "
            "them, an EnvPool, or a vector environment of Tianshou's"
        )
    return GivenEnvs(given, seeds=seeds(len(given)), info=fields)


def innermost(env: Any) -> Any:
    """The environment inside Tianshou's wrappers (`VectorEnvNormObs`), which hand on `step` and `reset` alone: a vector
    environment of Tianshou's, or a pool of EnvPool's.
    """
    while hasattr(env, "venv"):
        env = env.venv
    return env


@contextmanager
def resetting_with(env: VectorEnv, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Give `kwargs` to every reset for a while; nothing when there are none."""
    if not kwargs:
        yield
        return
    takes: Any = env  # checked by `refuse_reset_kwargs`
    takes.reset_with(kwargs)
    try:
        yield
    finally:
        takes.reset_with({})


def refuse_reset_kwargs(env: VectorEnv, kwargs: Mapping[str, Any]) -> None:
    """Raise EnvError when environments cannot take arguments at resets."""
    if kwargs and not hasattr(env, "reset_with"):
        raise EnvError(
            f"gym_reset_kwargs has {sorted(kwargs)}, and {type(env).__name__} takes no arguments at a reset; seed it "
            "where it is made, or give a list of the functions that make its environments"
        )


class GivenEnvs(InlineVectorEnv):
    """Environments that a script made, or functions that make them. One that raises ends the collecting."""

    def __init__(self, given: Sequence[Any], *, seeds: Sequence[int], info: Sequence[InfoField] = ()) -> None:
        made = [each if isinstance(each, gymnasium.Env) else each() for each in given]
        for number, env in enumerate(made):
            if not isinstance(env, gymnasium.Env):
                raise EnvBuildError(f"function {number} made {type(env).__name__}, not a gymnasium.Env")
        source: Any = SimpleNamespace(
            name=f"{type(made[0].unwrapped).__name__} given to the collector",
            called=lambda row: f"environment {row}",
            build=made.__getitem__,
        )
        super().__init__(source, seeds=seeds, limits=RestartLimits(total=0), info=info)

    def seed(self, seeds: Sequence[int]) -> None:
        self._restarts = Restarts(seeds, RestartLimits(total=0))

    def _fail(self, row: int, error: BaseException) -> None:
        if self._starting:
            super()._fail(row, error)
        error.add_note(f"in environment {row}, after {self._running[row].steps} completed steps")
        raise error

    def reset_with(self, kwargs: Mapping[str, Any]) -> None:
        for row in self._running.values():
            row.reset_kwargs = dict(kwargs)

    def render(self) -> None:
        for row in self._running.values():
            row.env.render()


class TheirVectorEnv(VectorEnv):
    """Tianshou's DummyVectorEnv, SubprocVectorEnv, ShmemVectorEnv or RayVectorEnv, or a wrapper of one, in lockstep."""

    why_not_saved = "Tianshou's vector environments have no get_state and set_state"

    def __init__(self, env: Any, info: Sequence[InfoField] = ()) -> None:
        self._env = env
        self._inner = innermost(env)
        self._is_pool = hasattr(self._inner, "_recv")
        self._is_closed = False
        self.num_envs = len(env)
        # Tianshou's have a list of all environments' spaces, a pool has one. A DummyVectorEnv lists those that its
        # environments have inside all wrappers, where their actions and observations are others.
        made = next((getattr(worker, "env", None) for worker in getattr(self._inner, "workers", ())), None)
        shown = made if isinstance(made, gymnasium.Env) else env
        self.observation_space, self.action_space = (
            spaces[0] if isinstance(spaces, list | tuple) else spaces
            for spaces in (shown.observation_space, shown.action_space)
        )
        self._is_array = not isinstance(self.action_space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)
        self._unflatten = unflattener(self.action_space)
        self._kwargs: dict[str, Any] = {}
        self._seeds: Sequence[int] = ()
        self._rows: Rows = NO_ROWS
        self._actions: Arrays = ()
        leaves(self.observation_space, ("observation",))
        fields = complete_fields(info, cast(Env, self._first()), type(self._inner).__name__)
        self.info_leaves = tuple(field.leaf for field in fields)
        self._info = tuple(np.zeros((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.info_leaves)
        self._write_info = [info_writer(fields, row_views(self._info, row)) for row in range(self.num_envs)]

    def _first(self) -> Any:
        """The first environment as gymnasium's, for a look at its info."""
        env, ids = self._env, self._ids(np.zeros(1, np.int64))

        def step(action: Any) -> tuple[Mapping[str, Any]]:
            return (_info_at(env.step(np.asarray([action]) if self._is_array else [action], ids)[-1], 0),)

        return SimpleNamespace(
            action_space=self.action_space, reset=lambda: (None, _info_at(env.reset(ids)[1], 0)), step=step
        )

    def seed(self, seeds: Sequence[int]) -> None:
        self._seeds = tuple(seeds)

    def reset_with(self, kwargs: Mapping[str, Any]) -> None:
        self._kwargs = dict(kwargs)

    def start(self) -> Arrays:
        if not self._seeds:
            return self.restart(np.arange(self.num_envs))
        seeds, self._seeds = self._seeds, ()
        parts = [
            self._reset(np.array([row]), {**self._kwargs, "seed": seed}) for row, seed in enumerate(seeds)
        ]  # one by one: each has a seed of its own
        return tuple(np.concatenate(same) for same in zip(*parts, strict=True))

    def restart(self, rows: Rows) -> Arrays:
        return self._reset(rows, self._kwargs)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        self._rows = np.arange(self.num_envs) if isinstance(rows, slice) else rows
        self._actions = actions

    def recv(self) -> Step:
        rows = self._rows
        stepped = self._env.step(self._as_theirs(self._actions, len(rows)), self._ids(rows))
        every = len(rows) == self.num_envs and bool((rows == np.arange(self.num_envs)).all())
        return self._step(EVERY_ROW if every else rows, rows, stepped)

    def render(self) -> None:
        self._env.render()

    def close(self) -> None:
        if not self._is_closed and not getattr(self._inner, "is_closed", False):
            self._env.close()
        self._is_closed = True

    def _reset(self, rows: Rows, kwargs: Mapping[str, Any]) -> Arrays:
        return self._obs(self._env.reset(self._ids(rows), **kwargs)[0], len(rows))

    def _ids(self, rows: Rows) -> Rows:
        return rows.astype(np.int32) if self._is_pool else rows

    def _step(self, which: slice | Rows, rows: Rows, found: Any) -> Step:
        theirs, reward, terminated, truncated, infos = found
        reward = np.asarray(reward, np.float32)
        if reward.ndim != 1:
            raise EnvError(f"the environments returned rewards of shape {reward.shape}; return one number for each")
        if self._info:
            for i, row in enumerate(rows.tolist()):
                try:
                    self._write_info[row](_info_at(infos, i))
                except InfoMisfit as error:
                    raise EnvError(f"environment {row} returned {error}") from error
        obs = tuple(a.copy() for a in self._obs(theirs, len(rows)))
        terminated, truncated = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        ended = np.flatnonzero(terminated | truncated)
        final = tuple(a[ended] for a in obs)
        if len(ended):
            for stored, first in zip(obs, self.restart(rows[ended]), strict=True):
                stored[ended] = first
        info = tuple([values[rows] for values in self._info])
        return Step(which, obs, reward, terminated, truncated, ended, final, info=info)

    def _obs(self, theirs: Any, n: int) -> Arrays:
        space = self.observation_space
        if not isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
            array: Array = np.asarray(theirs, dtype=space.dtype).reshape(n, *(space.shape or ()))
            return (array,)
        return tuple(np.stack(parts) for parts in zip(*(flatten(space, each) for each in theirs), strict=True))

    def _as_theirs(self, actions: Arrays, n: int) -> Any:
        if self._is_array:
            return actions[0]
        return [self._unflatten([a[i] for a in actions]) for i in range(n)]


def _info_at(infos: Any, i: int) -> Mapping[str, Any]:
    # A list of dicts, or a dict of arrays as EnvPool gives it.
    if not isinstance(infos, Mapping):
        info: Mapping[str, Any] = infos[i]
        return info
    return {
        key: _info_at(value, i) if isinstance(value, Mapping) else value[i]
        for key, value in infos.items()
        if isinstance(value, Mapping) or np.ndim(value)
    }


class TheirAsyncVectorEnv(TheirVectorEnv):
    """The same with `wait_num` or `timeout`: environments come back as they are ready."""

    lockstep = False

    def __init__(self, env: Any, info: Sequence[InfoField] = ()) -> None:
        super().__init__(env, info)
        self.min_in_flight = int(self._inner.wait_num)

    def start(self) -> Arrays:
        while self._inner.waiting_id:  # a reset takes none that are being stepped
            self._env.step(None, list(self._inner.waiting_id))
        return super().start()

    def recv(self) -> Step:
        """Step what was sent, and wait for those that are ready."""
        rows, self._rows = self._rows, NO_ROWS
        stepped = self._env.step(self._as_theirs(self._actions, len(rows)) if len(rows) else None, rows)
        back = np.array([info["env_id"] for info in stepped[-1]], dtype=np.int64)
        return self._step(back, back, stepped)
