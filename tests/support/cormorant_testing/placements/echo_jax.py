"""`EchoEnv` as pure functions in JAX, in gymnax's form: every episode has numbers of its own, drawn from its key."""

from typing import Any

import jax
import jax.numpy as jnp

from cormorant_testing.functional import Box
from cormorant_testing.placements.echo_env import IDENTS, STEPS, length_of


class EchoFunctions:
    default_params = None

    def reset(self, key: Any, params: None) -> tuple[Any, Any]:
        ident, episode = jax.random.randint(key, (2,), 0, jnp.array([IDENTS, STEPS]))
        obs = jnp.array([ident / IDENTS, episode / STEPS, 0.0, 0.0, 0.0])
        return obs, jnp.array([ident, episode, 0])

    def step_env(self, key: Any, state: Any, action: Any, params: None) -> tuple[Any, ...]:
        ident, episode, step = state[0], state[1], state[2] + 1
        obs = jnp.array([ident / IDENTS, episode / STEPS, step / STEPS, *action])
        is_won = (step >= length_of(ident, episode)) & (episode % 2 == 0)
        info = {"echo": action[1], "won": is_won}
        return obs, jnp.array([ident, episode, step]), step / STEPS + action[0], is_won, info

    def is_truncated(self, state: Any, params: None) -> Any:
        return (state[2] >= length_of(state[0], state[1])) & (state[1] % 2 == 1)

    def observation_space(self, params: None) -> Box:
        return Box(-jnp.inf, jnp.inf, (5,))

    def action_space(self, params: None) -> Box:
        return Box(-1.0, 1.0, (2,))
