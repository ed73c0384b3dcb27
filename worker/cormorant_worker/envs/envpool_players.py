"""EnvPool's multi-player tasks as pools whose rows are environments: the players of one environment form the group
`agents`, or a group each. Used by `envpool.py`.

Games are turn-based: they take one action, the current player's, and `mask` is True for that player alone. In
Intersection all players act at once. A pool of players blocks forever if only some of its environments were sent, so it
is built with `batch_size=1`. This module assembles its single results into one step, in the order of the environments.

# k environments that were stepped, n players, A actions
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

from cormorant_worker.action_mask import ACTION_MASK, mask_length
from cormorant_worker.envs.pettingzoo_env import fields_of_group, group_agents, observation_of_group, several
from cormorant_worker.errors import EnvCrashed
from cormorant_worker.spaces import Array, Rooted, Space, leaves

_CURRENT, _LEGAL = "info:current_player", "info:legal_action_mask"


def group_players(num_players: int, groups: str) -> dict[str, slice]:
    """The players of each group, with `groups` as in env.pettingzoo: all or perAgent."""
    names = [f"player_{number}" for number in range(num_players)]
    found = group_agents(names, groups)
    return {name: slice(names.index(players[0]), names.index(players[-1]) + 1) for name, players in found.items()}


def spaces_of_players(
    one: tuple[Space, Space], groups: Mapping[str, slice], state_keys: list[str]
) -> tuple[Space, Space]:
    """Observation and action space of an environment from those of a player."""
    observed, acts = one
    length = mask_length(acts) if _LEGAL in state_keys else 0
    sizes = {name: players.stop - players.start for name, players in groups.items()}
    return (
        Rooted({name: observation_of_group(observed, n, length) for name, n in sizes.items()}),
        Rooted({name: spaces.Dict({"action": several(acts, n)}) for name, n in sizes.items()}),
    )


class PlayersPool:
    """A pool as `_OverPool` uses it: combines rows of players into leaves of environments."""

    def __init__(self, pool: Any, found: tuple[Space, Space], groups: Mapping[str, slice]) -> None:
        """`found`: what `spaces_of_players` gave."""
        self.spaces, self.config = found, pool.config | {"batch_size": pool.config["num_envs"]}
        self._pool, self._groups = pool, groups
        self._n = num_players = max(players.stop for players in groups.values())
        self._keys = list(pool._state_keys)
        self._obs = next(name for name in self._keys if name.startswith("obs"))
        self._takes_turns = _CURRENT in self._keys
        self._current: Array = np.zeros(int(pool.config["num_envs"]), dtype=np.int64)
        """[num_envs] whose turn it is."""
        self._under_way = 0
        self.own_info = tuple(
            field for name, players in groups.items() for field in fields_of_group(name, players.stop - players.start)
        )
        specs = {
            name: SimpleNamespace(dtype=spec.dtype, shape=[num_players if size < 0 else size for size in spec.shape])
            for name, spec in pool.spec.state_array_spec.items()
        }
        self._is_of_player = {name for name, spec in pool.spec.state_array_spec.items() if -1 in spec.shape}
        for field in self.own_info:
            specs[f"info:{field.key}"] = SimpleNamespace(dtype=np.dtype(field.dtype), shape=field.shape)
        self._leaves = {f"obs:{'.'.join(leaf.key)}": leaf for leaf in leaves(found[0], ())}
        self._state_keys = [*self._keys, *(name for name in specs if name not in self._keys), *self._leaves]
        self._acts = {leaf.key[0]: leaf for leaf in leaves(found[1], ())}
        self.spec = SimpleNamespace(state_array_spec=specs, action_array_spec=self._acts)

    def _reset(self, ids: Array) -> None:
        self._under_way = len(ids)
        self._pool._reset(ids)

    def _send(self, arrays: list[Array]) -> None:
        ids, _, *parts = arrays
        self._under_way = len(ids)
        actions = np.empty((len(ids), self._n), np.int32)
        for name, part in zip(self._acts, parts, strict=True):
            actions[:, self._groups[name]] = part
        if self._takes_turns:
            self._pool._send([ids, ids, actions[np.arange(len(ids)), self._current[ids]]])
        else:
            self._pool._send([ids, ids.repeat(self._n), actions.reshape(-1)])

    def _recv(self) -> list[Array]:
        single = [self._pool._recv() for _ in range(self._under_way)]
        state = dict(zip(self._keys, map(np.concatenate, zip(*single, strict=True)), strict=True))
        ids, n = state["info:env_id"], self._n
        if not np.array_equal(state["info:players.env_id"], ids.repeat(n)):
            raise EnvCrashed(f"a step of {type(self._pool).__name__} did not return {n} players of each environment")
        order = np.argsort(ids)
        for name, values in state.items():
            rows = values.reshape(len(ids), n, *values.shape[1:]) if name in self._is_of_player else values
            state[name] = rows[order]
        done, reward = state["done"], state["reward"]
        truncated = state["trunc"] & done
        acting = ~done[:, None].repeat(n, 1)
        if self._takes_turns:
            current = self._current[ids[order]] = state[_CURRENT]
            acting &= np.arange(n) == current[:, None]
        signals = {"reward": reward, "done": done, "terminated": done & ~truncated, "truncated": truncated}
        seen = {"observation": state[self._obs], "mask": acting}
        if _LEGAL in state:
            # As long as it does not act, a player may do everything: no distribution is left of nothing else.
            seen[ACTION_MASK] = state[_LEGAL][:, None] | ~acting[..., None]
        for name, values in signals.items():
            of_all = np.broadcast_to(values.reshape(len(ids), -1), (len(ids), n))
            for group, players in self._groups.items():
                state[f"info:{group}.{name}"] = of_all[:, players, None]
        for name, leaf in self._leaves.items():
            state[name] = seen[leaf.key[-1]][:, self._groups[leaf.key[0]]].astype(leaf.dtype, copy=False)
        state["reward"] = reward.sum(1)
        return [state[name] for name in self._state_keys]
