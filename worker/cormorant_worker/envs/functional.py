"""Environments that are pure functions in JAX, stepped as one vector on the CPU. Imports JAX: `jax.py` imports this.

One call of a compiled function steps every row and, where rows ended, resets those. The raw step is vectorized, so the
final observation and the first one of the next episode both come back, whatever the library's own autoreset loses.

Streams of row i, whose key is made of its seed: the n-th event of a row draws from `fold_in(key, 2 n)` if it is a step,
and from `fold_in(key, 2 n + 1)` if it is a reset. So an episode depends on its seed alone, not on the rows beside it.

# N rows, k of them ended
"""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces
from torch.utils.dlpack import from_dlpack

from cormorant_worker.envs.env_row import BadObservation, NanCheck
from cormorant_worker.envs.gymnasium_env import form_of
from cormorant_worker.envs.info import InfoField, completed, find_info
from cormorant_worker.envs.protocol import EVERY_ROW, NO_ROWS, Rows, Step, VectorEnv, WholeStep
from cormorant_worker.errors import EnvBuildError, EnvCrashed, StateError
from cormorant_worker.policy.jax_policy import JaxPolicy
from cormorant_worker.spaces import Array, Arrays, Leaf, Space, flatten, leaves, unflattener, zeros

Tree = Any
"""Nested dicts, tuples and dataclasses of JAX arrays."""


class Outcome(NamedTuple):
    """Result of a step of one row."""

    state: Tree
    obs: Tree
    reward: Any
    terminated: Any
    truncated: Any
    info: Tree


def _as_in_step(reset: Any, step: Any, action: Any) -> Any:
    """A reset whose whole numbers are of the floating type that they have after a step, as `lax.scan` would have them:
    one memory holds both, and a fraction would be lost.
    """
    key, number = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    before = jax.eval_shape(reset, key)
    after = tuple(jax.eval_shape(step, key, before[0], action, number)[:2])

    def wider(old: Any, new: Any) -> Any:
        is_float, was_float = (jnp.issubdtype(part.dtype, jnp.floating) for part in (new, old))
        return new if is_float and not was_float else old

    wanted = jax.tree.map(wider, before, after)
    if jax.tree.leaves(wanted) == jax.tree.leaves(before):
        return reset
    return _as_in_step(lambda key: _like(reset(key), wanted), step, action)


def _gymnax(env: Any, params: Any) -> tuple[Any, Any]:
    def reset(key: Any) -> tuple[Tree, Tree]:
        obs, state = env.reset(key, params)
        return state, obs

    def step(key: Any, state: Tree, action: Any, number: Any) -> Outcome:
        obs, state, reward, done, info = env.step_env(key, state, action, params)
        return Outcome(state, obs, reward, done, env.is_truncated(state, params), info)

    return reset, step


def _brax(env: Any) -> tuple[Any, Any]:
    def reset(key: Any) -> tuple[Tree, Tree]:
        state = env.reset(key)
        return state, state.obs

    def step(key: Any, state: Tree, action: Any, number: Any) -> Outcome:
        state = env.step(state, action)
        done, info = state.done.astype(bool), {**state.metrics, **state.info}
        truncated = done & info.get("truncation", jnp.zeros_like(done)).astype(bool)
        return Outcome(state, state.obs, state.reward, done & ~truncated, truncated, info)

    return reset, step


def _jumanji(env: Any) -> tuple[Any, Any]:
    def reset(key: Any) -> tuple[Tree, Tree]:
        state, first = env.reset(key)
        return state, first.observation

    def step(key: Any, state: Tree, action: Any, number: Any) -> Outcome:
        state, now = env.step(state, action)
        is_terminal = now.discount == 0
        return Outcome(
            state, now.observation, now.reward, now.last() & is_terminal, now.last() & ~is_terminal, now.extras or {}
        )

    return reset, step


def _refuse_wrappers(env: Any, name: str) -> None:
    layer = env
    while layer is not None:
        own = type(layer).__name__
        if "AutoReset" in own or "Vmap" in own:
            raise EnvBuildError(
                f"{name} is wrapped in {own}, and rows are vectorized and reset here, so that no final observation is "
                "lost; make it without (brax.envs.create: auto_reset=False, no batch_size)"
            )
        layer = vars(layer).get("env", vars(layer).get("_env")) if hasattr(layer, "__dict__") else None


def _tree(value: Any) -> Any:
    """Nested dicts of arrays, whatever an observation is made of."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple | list):
        value = {str(i): part for i, part in enumerate(value)}
    return {str(name): _tree(part) for name, part in value.items()} if isinstance(value, Mapping) else value


def _space(seen: Any, spec: Any, what: str) -> Space:
    """The space of what was seen, with the bounds of the library's own description, if there is one."""
    if isinstance(seen, dict):
        inner = getattr(spec, "spaces", getattr(spec, "_specs", None))
        inner = inner if isinstance(inner, Mapping) else {str(i): part for i, part in enumerate(inner or ())}
        return spaces.Dict({name: _space(part, inner.get(name), f"{what}.{name}") for name, part in seen.items()})
    if not isinstance(seen.dtype, np.dtype) or seen.dtype.kind not in "biuf":
        raise EnvBuildError(
            f"{what} is of type {seen.dtype}, which cannot be stored; wrap the environment to cast it or leave it out"
        )
    shape, dtype = tuple(seen.shape), np.dtype(seen.dtype)
    several = getattr(spec, "num_values", getattr(spec, "n", None))
    if dtype.kind == "b":
        return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
    if several is not None and dtype.kind in "iu":
        return spaces.MultiDiscrete(np.broadcast_to(several, shape)) if shape else spaces.Discrete(int(several))
    least, most = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)

    def bound(*names: str, otherwise: float) -> Array:
        declared = next((getattr(spec, name) for name in names if hasattr(spec, name)), otherwise)
        return np.broadcast_to(np.clip(np.asarray(declared), least, most), shape).astype(dtype)

    low, high = bound("low", "minimum", otherwise=least), bound("high", "maximum", otherwise=most)
    return spaces.Box(low, high, dtype=dtype.type)


class RowStates(NamedTuple):
    """State carried from step to step; [N, ...] each."""

    state: Tree
    key: Any
    count: Any
    """Events of the row so far."""
    number: Any
    """Steps of its episode."""


_SCAN_STEPS, _SCAN_BYTES = 64, 4 << 20
"""Limits of a scan: its results are copied while they are in the cache."""


class Compiled:
    """Compiled functions of one environment, shared by vectors of any number of rows. It is recognized by its API:
    gymnax, Brax (and MuJoCo Playground) or jumanji.

    Raises:
        EnvBuildError: it has none of these APIs, resets itself, or has spaces that cannot be stored.
    """

    def __init__(self, made: Any, name: str, *, max_episode_steps: int, info: Sequence[InfoField] = ()) -> None:
        """`made`: the environment, or a gymnax environment with its parameters, as `gymnax.make` returns them."""
        self.name, self._limit = name, max_episode_steps
        env, *given = made if isinstance(made, tuple) else (made,)
        _refuse_wrappers(env, name)
        match form_of(env):
            case "gymnax":
                params = given[0] if given else env.default_params
                specs = env.observation_space(params), env.action_space(params)
                reset, step = _gymnax(env, params)
            case "brax":
                specs = None, spaces.Box(-1.0, 1.0, (env.action_size,), np.float32)
                reset, step = _brax(env)
            case "jumanji":
                specs = env.observation_spec, env.action_spec
                reset, step = _jumanji(env)
            case _:
                raise EnvBuildError(
                    f"{name} returned a {type(env).__module__}.{type(env).__name__}, which is not a functional "
                    "environment of gymnax (step_env), Brax or MuJoCo Playground (action_size) or jumanji "
                    "(action_spec); return one of these without wrappers of a training loop"
                )
        action = specs[1]
        if not isinstance(action, gymnasium.Space):
            if not hasattr(action, "shape") or not hasattr(action, "dtype"):
                raise EnvBuildError(
                    f"{name} has the action space {action}, of several parts; wrap it so that an action is one array"
                )
            action = _space(jax.ShapeDtypeStruct(action.shape, action.dtype), action, f"{name}: action")
        (leaf,) = leaves(action, ("action",))
        self.no_action = np.zeros(leaf.shape, np.int32 if leaf.dtype.kind in "iu" else leaf.dtype)
        """In the dtype that JAX has."""
        try:
            reset = _as_in_step(reset, step, jax.ShapeDtypeStruct(leaf.shape, self.no_action.dtype))
            seen = jax.eval_shape(lambda key: _tree(reset(key)[1]), jax.ShapeDtypeStruct((2,), jnp.uint32))
        except Exception as error:
            raise EnvBuildError(
                f"{name} raised {type(error).__name__} in a reset and a step: {error}; fix the environment"
            ) from error
        self._reset_row: Callable[[Any], tuple[Tree, Tree]] = reset
        """Takes a key; returns a state and an observation."""
        self._step_row: Callable[[Any, Tree, Any, Any], Outcome] = step
        """Takes a key, a state, an action, and the number of the step within its episode, from 1."""
        self.observation_space, self.action_space = _space(seen, specs[0], f"{name}: observation"), action
        self.leaves = leaves(self.observation_space, ("observation",))
        self.fields = self._complete(info)
        self.begin = jax.jit(self._begin)
        self.step = jax.jit(self._step, donate_argnums=0)
        self.restart = jax.jit(self._restart, donate_argnums=0)
        self.scan_with = cache(self._scan_with)

    def _complete(self, info: Sequence[InfoField]) -> tuple[InfoField, ...]:
        if not info:
            return ()
        shown = jax.eval_shape(
            lambda key: self._step_row(key, self._reset_row(key)[0], self.no_action, 1).info, jax.random.PRNGKey(0)
        )

        def find(key: str) -> Array | None:
            found = find_info(shown, key)[0]
            return None if found is None else np.zeros(found.shape, found.dtype)

        return completed(info, self.name, find, known=shown)

    def _observe(self, obs: Tree) -> tuple[Any, ...]:
        def unpacked(space: Space, value: Any) -> Any:
            return value.astype(np.int8) if isinstance(space, spaces.MultiBinary) else value

        return flatten(self.observation_space, _tree(obs), unpacked)

    def _begin(self, seeds: Any) -> tuple[RowStates, tuple[Any, ...]]:
        keys = jax.vmap(jax.random.PRNGKey)(seeds)
        count = jnp.zeros(len(seeds), jnp.uint32)
        state, obs = self._reset(keys, count)
        return RowStates(state, keys, count + 1, jnp.zeros(len(seeds), jnp.int32)), obs

    def _reset(self, keys: Any, count: Any) -> tuple[Tree, tuple[Any, ...]]:
        state, obs = jax.vmap(self._reset_row)(jax.vmap(jax.random.fold_in)(keys, 2 * count + 1))
        return state, self._observe(obs)

    def _restart(self, carry: RowStates, which: Any) -> tuple[RowStates, tuple[Any, ...]]:
        state, obs = self._reset(carry.key, carry.count)
        fresh = RowStates(state, carry.key, carry.count + 1, jnp.zeros_like(carry.number))
        return _choose(which, fresh, carry), obs

    def _step(self, carry: RowStates, action: Any, which: Any = None) -> tuple[Any, ...]:
        """The next carry; first observations of the next episodes, elsewhere those of this step; those of this step;
        reward, terminated, truncated and info. `which`: [N] bool, the rows that step; None: all.
        """
        keys = jax.vmap(jax.random.fold_in)(carry.key, 2 * carry.count)
        number = carry.number + 1
        state, obs, reward, terminated, truncated, info = jax.vmap(self._step_row)(keys, carry.state, action, number)
        seen, terminated, truncated = self._observe(obs), terminated.astype(bool), truncated.astype(bool)
        if self._limit:
            truncated |= number >= self._limit
        moved = RowStates(_like(state, carry.state), carry.key, carry.count + 1, number)
        ended = terminated | truncated
        if which is not None:
            moved, ended = _choose(which, moved, carry), ended & which

        def reset() -> tuple[RowStates, tuple[Any, ...]]:
            after, first = self._restart(moved, ended)
            return after, _choose(ended, first, seen)

        after, first = jax.lax.cond(ended.any(), reset, lambda: (moved, seen))
        values = [find_info(info, field.key)[0] for field in self.fields]
        columns = tuple(
            jnp.broadcast_to(field.filling, (len(reward), *field.leaf.shape)) if value is None else value
            for field, value in zip(self.fields, values, strict=True)
        )
        return after, first, seen, reward.astype(jnp.float32), terminated, truncated, columns

    def _scan_with(self, act: Callable[[Any, Any, Any], Any] | None) -> Callable[..., Any]:
        """A compiled function of a carry, observations [N, ...] per leaf, parameters, K keys or None, a number of steps
        up to K, and K; returns a carry, and [K, N, ...] each, zero beyond that number: what `act` chose, and the
        results of `_step`. Without `act`, actions [K, N, ...] take the place of the keys.
        """
        nested = unflattener(self.observation_space)

        def step(carry: RowStates, obs: Any, params: Any, drawn: Any) -> Any:
            chosen = drawn if act is None else act(params, nested(obs), drawn)
            action = chosen["action"] if isinstance(chosen, Mapping) else chosen
            after, first, *results = self._step(carry, action.astype(self.no_action.dtype))
            # As they are stored: a flag, or a number of a few bits, is an int64 there, whose JAX is int32.
            return after, _like(first, obs), (chosen, first, *results)

        def scan(carry: RowStates, obs: Any, params: Any, drawn: Any, num_steps: Any, num_rows: int) -> Any:
            def drawn_at(t: Any) -> Any:
                return None if drawn is None else drawn[t]

            def advance(t: Any, now: Any) -> Any:
                before, seen, kept = now
                after, first, results = step(before, seen, params, drawn_at(t))
                return after, first, jax.tree.map(lambda rows, row: rows.at[t].set(row), kept, results)

            row = jax.eval_shape(step, carry, tuple(obs), params, drawn_at(0))[2]
            kept = jax.tree.map(lambda part: jnp.zeros((num_rows, *part.shape), part.dtype), row)
            # Not lax.scan, which is compiled for one number of steps.
            after, _, kept = jax.lax.fori_loop(0, num_steps, advance, (carry, tuple(obs), kept))
            return after, kept

        compiled: Callable[..., Any] = jax.jit(scan, donate_argnums=0, static_argnums=5)
        return compiled


def _like(values: Tree, before: Tree) -> Tree:
    """In the dtypes of an earlier state: a Python number of a first state becomes another one in a step."""
    return jax.tree.map(lambda value, old: _cast(value, old.dtype), values, before)


def _cast(value: Any, dtype: Any) -> Any:
    return value if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.asarray(value, dtype)


def _data_of(leaf: Any) -> Any:
    """The numbers of a typed key; of anything else, itself."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _choose(which: Any, ours: Tree, theirs: Tree) -> Tree:
    def choose(one: Any, other: Any) -> Any:
        return jnp.where(which.reshape(which.shape + (1,) * (other.ndim - 1)), _cast(one, other.dtype), other)

    return jax.tree.map(choose, ours, theirs)


def _stored(parts: Sequence[Any], rows: slice | Rows, of: Sequence[Leaf]) -> Arrays:
    """[n, ...] per leaf, in its dtype."""
    return tuple(np.asarray(p)[rows].astype(leaf.dtype, copy=False) for p, leaf in zip(parts, of, strict=True))


class FunctionalVectorEnv(VectorEnv):
    """Rows of a functional environment, in lockstep. Rows that are not sent stay as they are. `compiled` is shared by
    all vectors of the environment; the seeds, one per row, decide every episode of it.
    """

    options: dict[str, Any] | None = None
    """Resets take none."""

    def __init__(self, compiled: Compiled, *, seeds: Sequence[int]) -> None:
        self.num_envs, self.seeds = len(seeds), seeds
        self._compiled, self._name = compiled, compiled.name
        self.observation_space, self.action_space = compiled.observation_space, compiled.action_space
        self.info_leaves = tuple(field.leaf for field in compiled.fields)
        self._nan = NanCheck(self.observation_space)
        self._no_final = zeros(compiled.leaves, 0)
        self._action = np.zeros((self.num_envs, *compiled.no_action.shape), compiled.no_action.dtype)
        stored = sum(2 * int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in compiled.leaves)
        self.scan_length = int(np.clip(_SCAN_BYTES // (self.num_envs * stored), 1, _SCAN_STEPS))
        self._rows: slice | Rows = EVERY_ROW
        self._stepped: Any = None
        if (place := jax.devices()[0]).platform == "gpu":  # on a CPU, numpy reads JAX's memory, in half the time
            self.device = torch.device("cuda", place.id)
        # Compiled before the first step is waited for.
        self._carry = self._call(compiled.begin, np.asarray(seeds, np.uint32))[0]
        self._carry = self._call(compiled.step, self._carry, self._action)[0]

    def start(self) -> Arrays:
        self._carry, obs = self._call(self._compiled.begin, np.asarray(self.seeds, np.uint32))
        return self._checked(obs, EVERY_ROW)

    def send(self, actions: Arrays, rows: slice | Rows) -> None:
        """Begin to step; JAX's own threads may continue."""
        self._rows = rows
        self._action[rows] = actions[0]
        # A copy: JAX may still read it while the next one is written.
        given = (self._action.copy(), *(() if isinstance(rows, slice) else (self._mask(rows),)))
        self._carry, *self._stepped = self._call(self._compiled.step, self._carry, *given)

    def recv(self) -> Step:
        rows, (obs, seen, *rest, info) = self._rows, self._stepped
        reward, terminated, truncated = (np.asarray(part)[rows] for part in rest)
        if np.isnan(reward).any():
            row = int(np.arange(self.num_envs)[rows][np.isnan(reward)][0])
            raise BadObservation(f"environment {row} of {self._name} returned a NaN reward; fix it", row=row)
        ended, final = np.flatnonzero(terminated | truncated), self._no_final
        if len(ended):
            final = self._checked(seen, np.arange(self.num_envs)[rows][ended])
        columns = _stored(info, rows, self.info_leaves)
        return Step(rows, self._checked(obs, rows), reward, terminated, truncated, ended, final, NO_ROWS, columns)

    def scan(
        self, obs: Arrays, num_steps: int, given: Array | None, policy: JaxPolicy | None = None
    ) -> tuple[Any, WholeStep]:
        most = self.scan_length
        if given is not None and num_steps < most:
            given = np.resize(given, (most, *given.shape[1:]))
        scan = self._compiled.scan_with(None if policy is None else policy.act)
        params = None if policy is None else policy.arrays()
        self._carry, kept = self._call(scan, self._carry, obs, params, given, num_steps, most)
        chosen, *results = jax.tree.map(lambda rows: np.asarray(rows)[:num_steps], kept)
        return chosen, WholeStep(*results)

    def step_tensors(self, actions: Sequence[torch.Tensor]) -> WholeStep:
        given = actions[0].to(torch.from_numpy(self._action).dtype)
        self._carry, *step = self._call(self._compiled.step, self._carry, jnp.from_dlpack(given))
        return WholeStep(*jax.tree.map(from_dlpack, tuple(step)))

    def check_steps(self, obs: Arrays, reward: Array, at: tuple[Array, Array], final: Arrays) -> None:
        self._nan.check_steps(obs, reward, at, final)

    def restart(self, rows: Rows) -> Arrays:
        self._carry, obs = self._call(self._compiled.restart, self._carry, self._mask(rows))
        return self._checked(obs, rows)

    def state(self) -> bytes:
        """The arrays of every row's state and stream."""
        out = io.BytesIO()
        parts = [np.asarray(_data_of(leaf)) for leaf in jax.tree.leaves(self._carry)]
        np.savez(out, *[np.frombuffer(part.tobytes(), np.uint8) for part in parts])
        return out.getvalue()

    def restore(self, state: bytes) -> None:
        """Continue from `state()`. Raises StateError where it is of another environment, or of other rows."""
        carry, shape = jax.tree.flatten(self._carry)
        own = [_data_of(leaf) for leaf in carry]
        try:
            saved = np.load(io.BytesIO(state), allow_pickle=False)
            parts = [saved[f"arr_{i}"].tobytes() for i in range(len(saved.files))]
        except (ValueError, OSError, KeyError) as error:
            raise StateError(f"this is not a state of functional environments: {error}") from error
        if [len(part) for part in parts] != [leaf.nbytes for leaf in own]:
            raise StateError(f"the state is not of {self.num_envs} rows of {self._name}; restore it where it was saved")
        # Copies: a step gives its memory away.
        found = [jnp.array(np.frombuffer(p, o.dtype).reshape(o.shape)) for p, o in zip(parts, own, strict=True)]
        found = [
            part if data is leaf else jax.random.wrap_key_data(part, impl=jax.random.key_impl(leaf))
            for part, data, leaf in zip(found, own, carry, strict=True)
        ]
        self._carry = jax.tree.unflatten(shape, found)

    def close(self) -> None:
        self._carry = self._stepped = None

    def _mask(self, rows: Rows) -> Array:
        mask = np.zeros(self.num_envs, dtype=np.bool_)
        mask[rows] = True
        return mask

    def _checked(self, obs: Sequence[Any], rows: slice | Rows) -> Arrays:
        parts = _stored(obs, rows, self._compiled.leaves)
        self._nan.look(parts, rows)
        return parts

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise EnvCrashed(
                f"{self._name} raised {type(error).__name__}: {error}; fix the environment", has_stepped=False
            ) from error
