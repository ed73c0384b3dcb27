"""EnvPool behind our protocol. `envpool_library.py` imports it, nothing else does.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from cormorant_contract.errors import did_you_mean
from cormorant_worker.envs.envpool_players import PlayersPool, group_players, spaces_of_players
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, HeldEnds, Rows, Step, VectorEnv
from cormorant_worker.errors import EnvBuildError, EnvCrashed, UnknownEnv
from cormorant_worker.spaces import Array, Arrays, Space, cast_exactly, leaves, put, zeros


def envpool_module() -> Any:
    """EnvPool itself. Its import takes a quarter of a worker's start, which workers without it need not spend."""
    from cormorant_worker.envs.envpool_library import envpool

    return envpool


@contextmanager
def _building(described: object) -> Iterator[None]:
    """Say in an EnvBuildError what EnvPool refuses, and drop gymnasium's warnings of its float64 bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (AssertionError, TypeError, ValueError, RuntimeError, ImportError) as error:
            raise EnvBuildError(f"EnvPool cannot build {described}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPoolTask:
    """One EnvPool task with its own arguments, to be built."""

    task_id: str
    kwargs: Mapping[str, Any]
    max_episode_steps: int = 0
    """Time limit in frames; 0 = the task's own."""
    groups: str = "all"
    """perAgent: each player is a group; all: they are one group."""

    def __str__(self) -> str:
        return f"{self.task_id} with {dict(self.kwargs)}"

    def check(self) -> None:
        known = envpool_module().list_all_envs()
        if self.task_id not in known:
            hint = did_you_mean(self.task_id, known, otherwise="; `envpool.list_all_envs()` lists them")
            raise UnknownEnv(f'EnvPool has no task "{self.task_id}"{hint}')
        if "max_num_players" in self.kwargs:
            raise EnvBuildError("spec.env.envpool.kwargs.max_num_players: the task sets it; remove it here")
        # num_players has EnvPool judge kwargs.
        if self.num_players == 1 and self.groups != "all":
            raise EnvBuildError(f"spec.env.envpool.groups: {self.task_id} has a single player; remove groups")

    def spaces(self) -> tuple[Space, Space]:
        """Observation and action space of one environment, without building it."""
        spec, num_players = self._spec(), self.num_players
        spaces = _spaces_of(spec, self)
        if num_players == 1:
            return spaces
        return spaces_of_players(spaces, group_players(num_players, self.groups), spec._state_keys)

    @property
    def num_players(self) -> int:
        spec = self._spec()
        return _num_players(dict(zip(spec._config_keys, spec._config_values, strict=True)))

    def open(
        self, *, num_threads: int, seeds: Sequence[int], batch_size: int = 0, info: Sequence[InfoField] = ()
    ) -> "EnvPoolVectorEnv | AsyncEnvPoolVectorEnv":
        """Build one environment per seed, in lockstep or `batch_size` at a time. Takes seconds for Atari."""
        limit = {"max_episode_steps": self.max_episode_steps} if self.max_episode_steps else {}
        num_players = self.num_players
        if num_players > 1 and batch_size:
            raise EnvBuildError(f"{self.task_id} has {num_players} players and steps in lockstep; set batchSize: 0")
        with _building(self):
            pool = envpool_module().make(
                self.task_id,
                env_type="gymnasium",
                num_envs=len(seeds),
                batch_size=1 if num_players > 1 else batch_size or len(seeds),
                num_threads=num_threads,
                seed=list(seeds),
                **limit,
                **self.kwargs,
            )
        if num_players > 1:
            pool = PlayersPool(pool, self.spaces(), group_players(num_players, self.groups))
            info = (*pool.own_info, *info)
        return wrap_pool(pool, info, name=self.task_id)

    def _spec(self) -> Any:
        with _building(self):
            return envpool_module().make_spec(self.task_id, **self.kwargs)


def check_pool(pool: object) -> None:
    """Refuse anything but a pool whose environments are stepped together, of any `env_type`."""
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


def reseed_pool(pool: Any, seeds: Sequence[int]) -> Any:
    """Build a pool like another one, with a seed for each environment."""
    spec = type(pool.spec)
    with _building(type(pool).__name__):
        return type(pool)(spec(spec.gen_config(**{**pool.config, "env_seed": list(seeds)})))


def wrap_pool(
    pool: Any, info: Sequence[InfoField] = (), *, name: str = ""
) -> "EnvPoolVectorEnv | AsyncEnvPoolVectorEnv":
    """Step a pool that `envpool.make` built, of any `env_type`, and that has not been stepped; nothing else may step it
    from now on. Raises EnvBuildError where it is multi-agent, or its batch size does not divide the number of
    environments.
    """
    config: Mapping[str, Any] = pool.config
    if _num_players(config) > 1 and not isinstance(pool, PlayersPool):
        raise EnvBuildError(f"the pool has {_num_players(config)} players; name its task instead: env.envpool.taskId")
    num_envs, batch_size = int(config["num_envs"]), int(config["batch_size"]) or int(config["num_envs"])
    if num_envs % batch_size:
        raise EnvBuildError(
            f"the pool's batch_size {batch_size} does not divide num_envs {num_envs}; choose one that does"
        )
    name = name or str(config.get("task_id", type(pool).__name__))
    if batch_size == num_envs:
        return EnvPoolVectorEnv(pool, name, info)
    return AsyncEnvPoolVectorEnv(pool, name, info)


class _OverPool(VectorEnv):
    """A pool that `envpool.make` built, and the translation of its arrays."""

    why_not_saved = "EnvPool can neither save nor read an environment's state or generator"

    def __init__(self, pool: Any, name: str, info: Sequence[InfoField]) -> None:
        spaces = pool.spaces if isinstance(pool, PlayersPool) else _spaces_of(pool.spec, name)
        self.observation_space, self.action_space = spaces
        num_envs = self.num_envs = int(pool.config["num_envs"])
        self._name, self._pool = name, pool
        self._pool_send, self._pool_recv = pool._send, pool._recv
        names, parts = list(pool._state_keys), leaves(self.observation_space, ())
        self._obs_at = [names.index(f"obs:{'.'.join(leaf.key)}" if leaf.key else "obs") for leaf in parts]
        self._id_at, self._done_at, self._trunc_at, self._reward_at = (
            names.index(key) for key in ("info:env_id", "done", "trunc", "reward")
        )
        self._terminated_at = names.index("info:terminated") if "info:terminated" in names else None
        known = [key for key in names if key.startswith("info:") or key in _INFO_AT_ROOT]
        self._info_at: list[int] = []
        for field in info:
            at = next((key for key in (f"info:{field.key}", field.key) if key in known), None)
            if at is None:
                has = ", ".join(sorted(key.removeprefix("info:") for key in known))
                raise EnvBuildError(f"spec.env.info: {name} has no {field.key} in its info, which has {has}")
            self._info_at.append(names.index(at))
            spec = pool.spec.state_array_spec[at]
            leaf = field.complete(np.dtype(spec.dtype), tuple(size for size in spec.shape if size > 0)).leaf
            self.info_leaves += (leaf,)
        actions = pool.spec.action_array_spec
        self._action_dtypes = [np.dtype(spec.dtype) for name, spec in actions.items() if name not in _ID_KEYS]
        self.dummy_actions: Arrays = tuple(
            np.full((num_envs, *leaf.shape), getattr(self.action_space, "start", 0), dtype)
            for leaf, dtype in zip(leaves(self.action_space, ()), self._action_dtypes, strict=True)
        )
        """[num_envs, ...] per leaf: actions that are valid and mean nothing."""

    def close(self) -> None:
        # Collected, a pool stops its threads; its own close() does not.
        self._pool = self._pool_send = self._pool_recv = None

    def _send(self, actions: Arrays, ids: Array) -> None:
        # EnvPool reads these arrays while it steps and holds references until then, so they are copies: an actor may
        # write its next decision over this one. The caller makes new ids for each call, or never changes them.
        copies = [np.array(a, dtype, order="C") for a, dtype in zip(actions, self._action_dtypes, strict=True)]
        self._pool_send([ids, ids, *copies])

    def _receive(self) -> list[Array]:
        try:
            state: list[Array] = self._pool_recv()
        except RuntimeError as error:
            raise EnvCrashed(f"EnvPool's {self._name} failed: {error}") from error
        return state

    def _obs(self, state: list[Array]) -> Arrays:
        return tuple([state[i] for i in self._obs_at])

    def _info(self, state: list[Array]) -> Arrays:
        try:
            return tuple(
                [cast_exactly(state[i], leaf.dtype) for i, leaf in zip(self._info_at, self.info_leaves, strict=True)]
            )
        except ValueError as error:
            keys = ", ".join(leaf.key[-1] for leaf in self.info_leaves)
            raise EnvCrashed(
                f"{self._name} returned info that does not fit the dtypes declared in env.info ({keys}): {error}; "
                "leave the dtype out"
            ) from error

    def _ends(self, state: list[Array]) -> tuple[Array, Array]:
        """[n] terminated and truncated."""
        done = state[self._done_at]
        truncated = state[self._trunc_at] & done
        terminated = done & ~truncated
        if self._terminated_at is not None:
            terminated |= (state[self._terminated_at] != 0) & done
        return terminated, truncated


class EnvPoolVectorEnv(_OverPool):
    """All environments of a pool, in lockstep."""

    def __init__(self, pool: Any, name: str, info: Sequence[InfoField]) -> None:
        super().__init__(pool, name, info)
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._rows: slice | Rows = EVERY_ROW
        self._no_final = zeros(leaves(self.observation_space, ()), 0)

    def start(self) -> Arrays:
        return self.restart(np.arange(self.num_envs))

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Begin to step rows. Returns at once; EnvPool's threads step."""
        self._rows = rows
        self._send(actions, self._all if isinstance(rows, slice) else rows.astype(np.int32))

    def recv(self) -> Step:
        """Wait for the rows that were sent. Rows that ended also take their phantom step here."""
        state = self._receive()
        obs, reward, done = self._obs(state), state[self._reward_at], state[self._done_at]
        ended = done.nonzero()[0]
        if not len(ended):
            info = self._info(state) if self.info_leaves else ()
            return Step(self._rows, obs, reward, done, done, NO_ROWS, self._no_final, NO_ROWS, info)
        # The phantom step: the first observations of the next episodes are under way while the rest is sorted out.
        self._send(tuple([a[: len(ended)] for a in self.dummy_actions]), state[self._id_at][ended])
        terminated, truncated = self._ends(state)
        final = tuple([a[ended] for a in obs])
        put(obs, ended, self._obs(self._receive()))
        return Step(self._rows, obs, reward, terminated, truncated, ended, final, NO_ROWS, self._info(state))

    def restart(self, rows: Rows) -> Arrays:
        """Begin new episodes; under `episodic_life`, new games."""
        self._pool._reset(rows.astype(np.int32))
        return self._obs(self._receive())


class AsyncEnvPoolVectorEnv(_OverPool):
    """A pool that returns `batch_size` environments as soon as any of them are ready."""

    lockstep = False

    def __init__(self, pool: Any, name: str, info: Sequence[InfoField]) -> None:
        super().__init__(pool, name, info)
        num_envs, self.min_in_flight = self.num_envs, int(pool.config["batch_size"])
        self._is_under_way: Array = np.zeros(num_envs, dtype=np.bool_)
        self._has_started = False
        self._held = HeldEnds(num_envs, leaves(self.observation_space, ()), self.info_leaves)

    def start(self) -> Arrays:
        """Begin the first episode everywhere and wait for all of them.

        Called again, it drops steps in flight: a pool returns only whole batches, so idle environments are reset
        beside those that step, until all have returned.
        """
        num_batches = self.num_envs // self.min_in_flight
        if self._has_started:
            self._pool._reset(np.flatnonzero(~self._is_under_way).astype(np.int32))
            for _ in range(num_batches):
                self._receive()
        self._has_started = True
        self._is_under_way[:] = self._held.waits[:] = False
        self._pool._reset(np.arange(self.num_envs, dtype=np.int32))
        first = zeros(leaves(self.observation_space, ()), self.num_envs)
        for _ in range(num_batches):
            state = self._receive()
            put(first, state[self._id_at], self._obs(state))
        return first

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        ids = np.arange(self.num_envs, dtype=np.int32) if isinstance(rows, slice) else rows.astype(np.int32)
        self._is_under_way[ids] = True
        self._send(actions, ids)

    def recv(self) -> Step:
        """Wait for some rows. Rows that just ended return after their phantom step, so the result may be empty."""
        state = self._receive()
        ids = state[self._id_at].astype(np.int64)
        self._is_under_way[ids] = False
        columns = state[self._reward_at], *self._ends(state), *self._info(state)
        step = self._held.pass_on(ids, self._obs(state), columns)
        if len(ended := ids[self._held.waits[ids]]):
            self.send(tuple([a[: len(ended)] for a in self.dummy_actions]), ended)  # the phantom step
        return step

    def restart(self, rows: Rows) -> Arrays:
        """Begin new episodes in all rows. `build.py` refuses settings that would restart only some of them."""
        return self.start()


_INFO_AT_ROOT = ("elapsed_step",)
"""Keys of EnvPool's info beside the state keys that begin with "info:"."""
_ID_KEYS = ("env_id", "players.env_id")


def _num_players(config: Mapping[str, Any]) -> int:
    return int(config.get("max_num_players", 1))


def _spaces_of(spec: Any, described: object) -> tuple[Space, Space]:
    with _building(described):
        return _repair(spec.observation_space), _repair(spec.action_space)


def _repair(space: Space) -> Space:
    """Give unbounded Boxes their infinite bounds back: EnvPool declares the smallest and largest positive double."""
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({name: _repair(part) for name, part in space.spaces.items()})
    if not isinstance(space, gymnasium.spaces.Box) or np.dtype(space.dtype).kind != "f":
        return space
    low = np.where(space.low == np.finfo(np.float64).tiny, -np.inf, space.low)
    high = np.where(space.high == np.finfo(np.float64).max, np.inf, space.high)
    return gymnasium.spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
