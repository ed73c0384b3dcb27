"""EnvPool behind our protocol; the only module that imports it.

What EnvPool 1.2.5 does and this module hides (each one is pinned by a test):

- Its autoreset is one step late: the step after `done` drops its action and returns the next episode's first
  observation with reward 0. That phantom step is taken here, for just the rows that ended, with a dummy action. An
  explicit reset would do for most tasks, but restarts the whole game under `episodic_life`.
- Too few actions abort the process, an unknown environment number is a segmentation fault, NaN is accepted: callers
  send checked actions (`action_check.py`), rows come from `Step.rows`.
- Environment i is seeded with `seed + i` unless a list is given: always a list here.
- A fall on the very step of the time limit is reported as truncated only; Atari's own flag tells the truth.
- Unbounded Boxes are declared with the smallest and largest positive float as bounds.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import gymnasium
import numpy as np

from cormorant_contract.sentences import did_you_mean
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, NeverSaved, Rows, Step
from cormorant_worker.errors import EnvBuildError, EnvCrashed, UnknownEnv
from cormorant_worker.spaces import Array, Arrays, Space, cast_exactly, leaves

_OURS = {
    "num_envs": "spec.env.envpool.numEnvs",
    "batch_size": "spec.env.envpool.batchSize",
    "num_threads": "spec.env.envpool.numThreads",
    "max_episode_steps": "spec.env.maxEpisodeSteps",
    "seed": "spec.collection.seed",
    "env_seed": "spec.collection.seed",
    "max_num_players": "nothing: multi-agent tasks are not supported",
    "gym_reset_return_info": "nothing: it is always on",
}
"""EnvPool's arguments that the manifest sets elsewhere."""


def envpool_module() -> Any:
    """EnvPool itself. Its import takes a quarter of a worker's start, which workers without it need not spend."""
    import envpool

    return envpool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPoolTask:
    """What to build: one EnvPool task with its own arguments."""

    task_id: str
    kwargs: Mapping[str, Any]
    max_episode_steps: int = 0
    """Time limit in frames; 0 = the task's own."""

    def check(self) -> None:
        if self.task_id not in envpool_module().list_all_envs():
            known = envpool_module().list_all_envs()
            hint = did_you_mean(self.task_id, known, otherwise="; `cormorant envs` lists them")
            raise UnknownEnv(f'EnvPool has no task "{self.task_id}"{hint}')
        for name in self.kwargs:
            if name in _OURS:
                raise EnvBuildError(f"spec.env.envpool.kwargs.{name}: it is set by {_OURS[name]}; remove it here")
        known = self._make_spec({})._config_keys
        for name in self.kwargs:
            if name not in known and name not in _RENDER_OPTIONS:
                hint = did_you_mean(name, known, most=1, otherwise=f"; known: {', '.join(sorted({*known} - {*_OURS}))}")
                raise EnvBuildError(f"spec.env.envpool.kwargs.{name}: {self.task_id} has no such argument{hint}")
        spec = self._make_spec(dict(self.kwargs))
        config = dict(zip(spec._config_keys, spec._config_values, strict=True))
        if config.get("max_num_players", 1) != 1:
            raise EnvBuildError(
                f"{self.task_id} has {config['max_num_players']} players; multi-agent tasks are not supported: "
                "use a single-agent task"
            )

    def spaces(self) -> tuple[Space, Space]:
        """Observation and action space of one environment, without building it."""
        spec = self._make_spec(dict(self.kwargs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium warns of EnvPool's float64 bounds
            try:
                return _repair(spec.observation_space), _repair(spec.action_space)
            except (AssertionError, ValueError) as error:
                raise EnvBuildError(
                    f"{self.task_id} with {dict(self.kwargs)} has no valid spaces: {error}; check its arguments"
                ) from error

    @property
    def loses_lives(self) -> bool:
        """True when an episode ends with a life instead of the game."""
        return bool(self.kwargs.get("episodic_life", False))

    def make(self, *, num_envs: int, batch_size: int, num_threads: int, seeds: Sequence[int]) -> Any:
        """Build a pool. Takes seconds for Atari."""
        limit = {"max_episode_steps": self.max_episode_steps} if self.max_episode_steps else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium warns of EnvPool's float64 bounds at every build
            try:
                return envpool_module().make(
                    self.task_id,
                    env_type="gymnasium",
                    num_envs=num_envs,
                    batch_size=batch_size,
                    num_threads=num_threads,
                    seed=list(seeds),
                    **limit,
                    **self.kwargs,
                )
            except (AssertionError, TypeError, ValueError, RuntimeError, ImportError) as error:
                raise EnvBuildError(f"EnvPool cannot build {self.task_id} with {dict(self.kwargs)}: {error}") from error

    def _make_spec(self, kwargs: dict[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return envpool_module().make_spec(self.task_id, **kwargs)
            except (AssertionError, TypeError, ValueError, RuntimeError, ImportError) as error:
                raise EnvBuildError(f"EnvPool cannot build {self.task_id} with {kwargs}: {error}") from error


_RENDER_OPTIONS = ("from_pixels", "render_mode", "render_env_id", "render_width", "render_height", "render_camera_id")


def task_ids() -> list[str]:
    """All tasks that this install of EnvPool names, sorted."""
    return sorted(envpool_module().list_all_envs())


def check_pool(pool: object) -> None:
    """Refuse what is not a pool of single-agent environments that are stepped together. Any `env_type` will do."""
    if not all(hasattr(pool, name) for name in ("_send", "_recv", "_reset", "_state_keys", "config", "spec")):
        raise EnvBuildError(
            f"{type(pool).__module__}.{type(pool).__name__} is not an EnvPool environment; "
            "pass what envpool.make returned"
        )
    config: Mapping[str, Any] = pool.config  # type: ignore[attr-defined]  # looked for above
    if config["batch_size"] not in (0, config["num_envs"]):
        raise EnvBuildError(
            f"the pool hands out batch_size {config['batch_size']} of num_envs {config['num_envs']} environments at a "
            "time; a TorchRL environment steps all of them: make it without batch_size"
        )
    if config["max_num_players"] != 1:
        raise EnvBuildError(f"the pool has {config['max_num_players']} players; use a single-agent task")


def reseed_pool(pool: Any, seeds: Sequence[int]) -> Any:
    """Build a pool like another one, with a seed for each environment."""
    spec = type(pool.spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium warns of EnvPool's float64 bounds at every build
        return type(pool)(spec(spec.gen_config(**{**pool.config, "env_seed": list(seeds)})))


class _Pool:
    """One built pool and the translation of its arrays. Shared by the two ways of stepping it."""

    def __init__(self, pool: Any, *, name: str, spaces: tuple[Space, Space], info: Sequence[InfoField] = ()) -> None:
        self.observation_space, self.action_space = spaces
        num_envs = self.num_envs = int(pool.config["num_envs"])
        self.batch_size = int(pool.config["batch_size"])
        self._name = name
        self._pool = pool
        self._send, self._recv = self._pool._send, self._pool._recv
        names, parts = list(self._pool._state_keys), leaves(self.observation_space, ())
        self._obs_at = [names.index(f"obs:{'.'.join(leaf.key)}" if leaf.key else "obs") for leaf in parts]
        self.id_at, self.done_at, self._trunc_at = (names.index(k) for k in ("info:env_id", "done", "trunc"))
        self.reward_at = names.index("reward")
        self._info_at = [self._find_info(field.key, names) for field in info]
        specs = self._pool.spec.state_array_spec
        complete = [
            field.complete(np.dtype(specs[names[at]].dtype), tuple(size for size in specs[names[at]].shape if size > 0))
            for field, at in zip(info, self._info_at, strict=True)
        ]
        self.info_leaves = tuple([field.leaf for field in complete])
        self._info_fits = all(
            leaf.dtype == specs[names[at]].dtype for leaf, at in zip(self.info_leaves, self._info_at, strict=True)
        )
        self._terminated_at = names.index("info:terminated") if "info:terminated" in names else None
        actions = self._pool.spec.action_array_spec
        self._action_dtypes = [np.dtype(spec.dtype) for name, spec in actions.items() if name not in _ID_KEYS]
        self.dummy_actions = tuple(
            np.full((num_envs, *leaf.shape), getattr(self.action_space, "start", 0), dtype)
            for leaf, dtype in zip(leaves(self.action_space, ()), self._action_dtypes, strict=True)
        )

    @classmethod
    def build(
        cls, task: EnvPoolTask, *, batch_size: int, num_threads: int, seeds: Sequence[int], info: Sequence[InfoField]
    ) -> "_Pool":
        spaces = task.spaces()
        pool = task.make(num_envs=len(seeds), batch_size=batch_size, num_threads=num_threads, seeds=seeds)
        return cls(pool, name=task.task_id, spaces=spaces, info=info)

    @classmethod
    def around(cls, pool: Any, info: Sequence[InfoField]) -> "_Pool":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium warns of EnvPool's float64 bounds
            spaces = _repair(pool.spec.observation_space), _repair(pool.spec.action_space)
        return cls(pool, name=str(pool.config.get("task_id", type(pool).__name__)), spaces=spaces, info=info)

    def send(self, actions: Arrays, ids: Array) -> None:
        # EnvPool reads these arrays while it steps and holds references until then, so they are copies: an actor may
        # write its next decision over this one. The caller makes new ids for each call, or never changes them.
        copies = [np.array(a, dtype, order="C") for a, dtype in zip(actions, self._action_dtypes, strict=True)]
        self._send([ids, ids, *copies])

    def send_dummies(self, ids: Array) -> None:
        """Take the phantom step of ended environments."""
        self.send(tuple([a[: len(ids)] for a in self.dummy_actions]), ids)

    def reset(self, ids: Array) -> None:
        self._pool._reset(ids)

    def recv(self) -> list[Array]:
        try:
            state: list[Array] = self._recv()
        except RuntimeError as error:
            raise EnvCrashed(f"EnvPool's {self._name} failed: {error}") from error
        return state

    def obs(self, state: list[Array]) -> Arrays:
        return tuple([state[i] for i in self._obs_at])

    def info(self, state: list[Array]) -> Arrays:
        values = tuple([state[i] for i in self._info_at])
        if self._info_fits:
            return values
        try:
            return tuple([cast_exactly(v, leaf.dtype) for v, leaf in zip(values, self.info_leaves, strict=True)])
        except ValueError as error:
            keys = ", ".join(leaf.key[-1] for leaf in self.info_leaves)
            raise EnvCrashed(
                f"{self._name} returned info that does not fit the dtypes declared in env.info ({keys}): {error}; "
                "leave the dtype out"
            ) from error

    def _find_info(self, key: str, names: list[str]) -> int:
        for name in (f"info:{key}", key):
            if name in names and (name.startswith("info:") or name in _INFO_AT_ROOT):
                return names.index(name)
        known = [name.removeprefix("info:") for name in names if name.startswith("info:") or name in _INFO_AT_ROOT]
        hint = did_you_mean(key, known, most=1, otherwise="; remove it")
        raise EnvBuildError(
            f"spec.env.info: {self._name} has no {key} in its info, which has {', '.join(sorted(known))}{hint}"
        )

    def ends(self, state: list[Array]) -> tuple[Array, Array]:
        """[n] terminated and truncated."""
        done = state[self.done_at]
        truncated = state[self._trunc_at] & done
        terminated = done & ~truncated
        if self._terminated_at is not None:
            terminated |= (state[self._terminated_at] != 0) & done
        return terminated, truncated

    def close(self) -> None:
        self._pool = self._send = self._recv = None  # collected, it stops its threads; its own close() does not


class _OverPool(NeverSaved):
    """What both ways of stepping a pool have in common."""

    restarts = 0
    why_not_saved = "EnvPool can neither save nor read an environment's state or generator"

    @classmethod
    def around(cls, built: Any, info: Sequence[InfoField] = ()) -> Self:
        """Step a pool that `envpool.make` built, of any `env_type`, and that has not been stepped; nothing else may
        step it from now on.
        """
        env = cls.__new__(cls)
        env._take(_Pool.around(built, info))
        return env

    def _take(self, pool: _Pool) -> None:
        self._pool = pool
        self.num_envs = pool.num_envs
        self.observation_space, self.action_space = pool.observation_space, pool.action_space
        self.info_leaves = pool.info_leaves
        self.illegal: Array | None = None

    def close(self) -> None:
        self._pool.close()


class EnvPoolVectorEnv(_OverPool):
    """All environments of a pool, in lockstep."""

    lockstep = True
    min_in_flight = 1

    def __init__(
        self, task: EnvPoolTask, *, num_threads: int, seeds: Sequence[int], info: Sequence[InfoField] = ()
    ) -> None:
        self._take(_Pool.build(task, batch_size=len(seeds), num_threads=num_threads, seeds=seeds, info=info))

    def _take(self, pool: _Pool) -> None:
        super()._take(pool)
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._rows: slice | Rows = EVERY_ROW
        self._no_final = tuple(np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves(self.observation_space, ()))

    @property
    def dummy_actions(self) -> Arrays:
        """[num_envs, ...] a leaf: actions that are valid and mean nothing."""
        return self._pool.dummy_actions

    def start(self) -> Arrays:
        return self.restart(np.arange(self.num_envs))

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Begin to step rows. Returns at once; EnvPool's threads step."""
        self._rows = rows
        self._pool.send(actions, self._all if isinstance(rows, slice) else rows.astype(np.int32))

    def recv(self) -> Step:
        """Wait for the rows that were sent, and past the phantom step of those that ended."""
        pool = self._pool
        state = pool.recv()
        obs, done = pool.obs(state), state[pool.done_at]
        ended = done.nonzero()[0]
        if not len(ended):
            info = pool.info(state) if self.info_leaves else ()
            return Step(self._rows, obs, state[pool.reward_at], done, done, NO_ROWS, self._no_final, NO_ROWS, info)
        # The first observations of the next episodes are under way while the rest is sorted out.
        pool.send_dummies(state[pool.id_at][ended])
        terminated, truncated = pool.ends(state)
        final = tuple([a[ended] for a in obs])
        for stored, first in zip(obs, pool.obs(pool.recv()), strict=True):
            stored[ended] = first
        info = pool.info(state)
        return Step(self._rows, obs, state[pool.reward_at], terminated, truncated, ended, final, NO_ROWS, info)

    def restart(self, rows: Rows) -> Arrays:
        """Begin new episodes; under `episodic_life`, new games."""
        self._pool.reset(rows.astype(np.int32))
        return self._pool.obs(self._pool.recv())


class AsyncEnvPoolVectorEnv(_OverPool):
    """A pool that returns `batch_size` environments as soon as any of them are ready."""

    lockstep = False

    def __init__(
        self,
        task: EnvPoolTask,
        *,
        batch_size: int,
        num_threads: int,
        seeds: Sequence[int],
        info: Sequence[InfoField] = (),
    ) -> None:
        """Build a pool of one environment a seed that hands out `batch_size` of them at a time."""
        self._take(_Pool.build(task, batch_size=batch_size, num_threads=num_threads, seeds=seeds, info=info))

    def _take(self, pool: _Pool) -> None:
        super()._take(pool)
        self.min_in_flight = pool.batch_size
        self._is_under_way: Array = np.zeros(self.num_envs, dtype=np.bool_)
        self._has_started = False
        # The transition of an ended row waits here until its next episode's first observation is known.
        self._waits: Array = np.zeros(self.num_envs, dtype=np.bool_)
        shape = [(self.num_envs, *leaf.shape) for leaf in leaves(self.observation_space, ())]
        dtypes = [leaf.dtype for leaf in leaves(self.observation_space, ())]
        self._final = tuple(np.zeros(s, d) for s, d in zip(shape, dtypes, strict=True))
        self._info = tuple(np.zeros((self.num_envs, *leaf.shape), leaf.dtype) for leaf in pool.info_leaves)
        self._reward: Array = np.zeros(self.num_envs, dtype=np.float32)
        self._terminated: Array = np.zeros(self.num_envs, dtype=np.bool_)
        self._truncated: Array = np.zeros(self.num_envs, dtype=np.bool_)

    def start(self) -> Arrays:
        """Begin the first episode everywhere and wait for all of them.

        Called again, it drops what is under way: a pool hands out whole batches only, so those that rest are reset
        beside those that step, and then everybody comes back.
        """
        num_batches = self.num_envs // self.min_in_flight
        if self._has_started:
            self._pool.reset(np.flatnonzero(~self._is_under_way).astype(np.int32))
            for _ in range(num_batches):
                self._pool.recv()
        self._has_started = True
        self._is_under_way[:] = self._waits[:] = False
        self._pool.reset(np.arange(self.num_envs, dtype=np.int32))
        first = tuple(np.zeros_like(a) for a in self._final)
        for _ in range(num_batches):
            state = self._pool.recv()
            for stored, obs in zip(first, self._pool.obs(state), strict=True):
                stored[state[self._pool.id_at]] = obs
        return first

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        ids = np.arange(self.num_envs, dtype=np.int32) if isinstance(rows, slice) else rows.astype(np.int32)
        self._is_under_way[ids] = True
        self._pool.send(actions, ids)

    def recv(self) -> Step:
        """Wait for some rows. May return none of them: those whose next episode is not under way yet."""
        pool = self._pool
        state = pool.recv()
        ids, received, reward = state[pool.id_at], pool.obs(state), state[pool.reward_at]
        info = pool.info(state)
        terminated, truncated = pool.ends(state)
        begins = self._waits[ids]
        ended_now = state[pool.done_at] & ~begins
        if ended_now.any():
            which = ids[ended_now]
            pool.send_dummies(which)
            for kept, value in zip((*self._final, *self._info), (*received, *info), strict=True):
                kept[which] = value[ended_now]
            self._reward[which] = reward[ended_now]
            self._terminated[which] = terminated[ended_now]
            self._truncated[which] = truncated[ended_now]
            self._waits[which] = True
        ready = ~ended_now
        rows = ids[ready].astype(np.int64)
        begun = begins[ready]
        self._waits[rows] = self._is_under_way[rows] = False
        return Step(
            rows,
            tuple(obs[ready] for obs in received),
            np.where(begun, self._reward[rows], reward[ready]),
            np.where(begun, self._terminated[rows], terminated[ready]),
            np.where(begun, self._truncated[rows], truncated[ready]),
            np.flatnonzero(begun),
            tuple(kept[rows[begun]] for kept in self._final),
            NO_ROWS,
            tuple(_merged(value[ready], kept[rows], begun) for value, kept in zip(info, self._info, strict=True)),
        )

    def restart(self, rows: Rows) -> Arrays:
        """Not possible while other rows are in flight; `build.py` refuses the settings that would need it."""
        raise EnvCrashed("environments of an asynchronous EnvPool cannot be restarted one by one")


_INFO_AT_ROOT = ("elapsed_step",)
"""What EnvPool's info has beside the state keys that begin with "info:"."""
_ID_KEYS = ("env_id", "players.env_id")


def _merged(values: Array, kept: Array, is_kept: Array) -> Array:
    """[n, ...] values, replaced by those that were kept where the mask [n] says so."""
    values[is_kept] = kept[is_kept]
    return values


def _repair(space: Space) -> Space:
    """Give unbounded Boxes their infinite bounds back: EnvPool declares the smallest and largest positive double."""
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({name: _repair(part) for name, part in space.spaces.items()})
    if not isinstance(space, gymnasium.spaces.Box) or np.dtype(space.dtype).kind != "f":
        return space
    low = np.where(space.low == np.finfo(np.float64).tiny, -np.inf, space.low)
    high = np.where(space.high == np.finfo(np.float64).max, np.inf, space.high)
    return gymnasium.spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
