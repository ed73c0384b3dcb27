"""Functional environments in JAX, one of each form, whose episodes are short and depend on their keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LIMIT = 9


class Box(NamedTuple):
    low: float
    high: float
    shape: tuple[int, ...]
    dtype: Any = jnp.float32


class Discrete(NamedTuple):
    n: int
    shape: tuple[int, ...] = ()
    dtype: Any = jnp.int32


class Params(NamedTuple):
    force: float = 10.0
    max_steps_in_episode: int = LIMIT


class State(NamedTuple):
    x: Any
    time: Any


class CartPole:
    """gymnax's form, without gravity; wide starts, so that poles fall before the limit or stay up."""

    default_params = Params()

    def reset(self, key: Any, params: Params) -> tuple[Any, State]:
        x = jax.random.uniform(key, (4,), minval=-0.15, maxval=0.15)
        return x, State(x, 0)

    def step_env(self, key: Any, state: State, action: Any, params: Params) -> tuple[Any, ...]:
        x, v, angle, spin = state.x
        force = jnp.where(action == 1, params.force, -params.force) + jax.random.normal(key)
        after = jnp.array([x + 0.02 * v, v + 0.02 * force, angle + 0.02 * spin, spin - 0.06 * force])
        fell = jnp.abs(after[2]) > 0.2095
        return after, State(after, state.time + 1), 1.0, fell, {"angle": after[2], "deep": {"fell": fell}}

    def is_truncated(self, state: State, params: Params) -> Any:
        return state.time >= params.max_steps_in_episode

    def observation_space(self, params: Params) -> Box:
        return Box(-5.0, 5.0, (4,))

    def action_space(self, params: Params) -> Discrete:
        return Discrete(2)


def make(force: float = 10.0) -> tuple[CartPole, Params]:
    """As `gymnax.make`."""
    return CartPole(), Params(force=force)


class Physics(NamedTuple):
    """Brax's `State`."""

    pipeline_state: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any]
    info: dict[str, Any]


class Ball:
    """Brax's form, with its episode wrapper's `truncation`: a ball that leaves [-1, 1] ends its episode."""

    action_size = 2
    observation_size = 3

    def reset(self, key: Any) -> Physics:
        obs = jax.random.uniform(key, (3,), minval=-0.6, maxval=0.6)
        return Physics(obs, obs, jnp.zeros(()), jnp.zeros(()), {"speed": jnp.zeros(())}, self._told(0.0, 0.0))

    def step(self, state: Physics, action: Any) -> Physics:
        obs = state.pipeline_state + 0.2 * jnp.append(action, action[0] * action[1])
        left, steps = (jnp.abs(obs) > 1).any().astype(jnp.float32), state.info["steps"] + 1
        late = (steps >= LIMIT).astype(jnp.float32)
        told = self._told(steps, late * (1 - left))
        return Physics(obs, obs, obs.sum(), jnp.maximum(left, late), {"speed": jnp.abs(action).sum()}, told)

    def _told(self, steps: Any, truncation: Any) -> dict[str, Any]:
        return {"steps": jnp.float32(steps), "truncation": jnp.float32(truncation)}


class Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    num_values: Any


class Board(NamedTuple):
    cells: Any
    action_mask: Any


class TimeStep(NamedTuple):
    reward: Any
    discount: Any
    observation: Board
    step_type: Any
    extras: dict[str, Any]

    def last(self) -> Any:
        return self.step_type == 2


class Grid(NamedTuple):
    at: Any
    steps: Any
    key: Any


class Walk:
    """jumanji's form: a walk on 5 cells, which ends at the last one, or after LIMIT steps."""

    observation_spec = discount_spec = None
    action_spec = Spec((), jnp.int32, 3)

    def reset(self, key: Any) -> tuple[Grid, TimeStep]:
        state = Grid(jax.random.randint(key, (), 0, 3), 0, key)
        return state, self._timestep(state, 0)

    def step(self, state: Grid, action: Any) -> tuple[Grid, TimeStep]:
        key, now = jax.random.split(state.key)
        slips = jax.random.bernoulli(now, 0.2)
        state = Grid(jnp.clip(state.at + jnp.where(slips, 0, action - 1), 0, 4), state.steps + 1, key)
        return state, self._timestep(state, 1)

    def _timestep(self, state: Grid, kind: int) -> TimeStep:
        won = state.at == 4
        last = (won | (state.steps >= LIMIT)) & (kind == 1)
        cells = jnp.zeros(5, jnp.uint8).at[state.at].set(255)
        mask = jnp.array([state.at > 0, True, True])
        return TimeStep(won * 1.0, 1.0 - won, Board(cells, mask), jnp.where(last, 2, kind), {"at": state.at})


# Plain loops


def gymnax(env: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    params = env.default_params

    def step(key: Any, state: Any, action: Any) -> Any:
        obs, state, reward, terminated, info = env.step_env(key, state, action, params)
        return state, (obs,), reward, terminated, env.is_truncated(state, params), info.get("angle", 0.0)

    return lambda key: (lambda obs, state: (state, (obs,)))(*env.reset(key, params)), step


def brax(env: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def step(key: Any, state: Any, action: Any) -> Any:
        state = env.step(state, action)
        cut = state.info["truncation"]
        return state, (state.obs,), state.reward, state.done * (1 - cut), cut, state.metrics.get("speed", 0.0)

    return lambda key: (lambda state: (state, (state.obs,)))(env.reset(key)), step


def jumanji(env: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def seen(timestep: Any) -> tuple[Any, ...]:
        return tuple(part for _, part in sorted(timestep.observation._asdict().items()))

    def step(key: Any, state: Any, action: Any) -> Any:
        state, now = env.step(state, action)
        won = now.last() & (now.discount == 0)
        return state, seen(now), now.reward, won, now.last() & ~won, (now.extras or {}).get("at", 0)

    return lambda key: (lambda state, first: (state, seen(first)))(*env.reset(key)), step


def plain(functions: Any, seed: int, actions: Any, limit: int) -> list[tuple[Any, ...]]:
    """A loop over one row: observation, reward, flags, the observation that followed, info."""
    reset, step = functions
    begin = jax.jit(lambda key, event: reset(jax.random.fold_in(key, 2 * event + 1)))
    go = jax.jit(lambda key, event, *given: step(jax.random.fold_in(key, 2 * event), *given))
    key, events, number, frames = jax.random.PRNGKey(seed), 1, 0, []
    state, obs = begin(key, 0)
    for action in actions:
        state, after, reward, terminated, truncated, told = go(key, events, state, action)
        events, number = events + 1, number + 1
        truncated = bool(truncated) or 0 < limit <= number
        frames.append((obs, reward, bool(terminated), truncated, after, told))
        if terminated or truncated:
            state, after = begin(key, events)
            events, number = events + 1, 0
        obs = after
    return frames
