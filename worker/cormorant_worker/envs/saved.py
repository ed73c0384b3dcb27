"""The states of environments as values of JSON.

An environment can be saved when it has `get_state() -> Mapping` and `set_state(mapping)`, of plain data and numpy
arrays, and when each of its wrappers has them too or is one of gymnasium's whose attributes are listed here.
"""

import base64
from collections import deque
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import (
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    OrderEnforcing,
    PassiveEnvChecker,
    RecordEpisodeStatistics,
    TimeLimit,
)

from cormorant_worker.envs.gymnasium_env import Env
from cormorant_worker.errors import EnvNotSaved, StateError

_KEPT: dict[type, tuple[str, ...]] = {
    FrameStackObservation: ("obs_queue",),
    NormalizeObservation: ("obs_rms.mean", "obs_rms.var", "obs_rms.count"),
    NormalizeReward: ("return_rms.mean", "return_rms.var", "return_rms.count", "discounted_reward"),
    RecordEpisodeStatistics: (
        "episode_count",
        "episode_returns",
        "episode_lengths",
        "time_queue",
        "return_queue",
        "length_queue",
    ),
}
"""Attributes of gymnasium's wrappers that change as they step, but for times of this process."""

EnvState = list[Any]
"""One entry per layer, from the outermost wrapper to the environment."""


def save_env(env: Env) -> EnvState:
    """The states of all layers of one environment."""
    states: EnvState = []
    for layer in _layers(env):
        if hasattr(layer, "get_state") and hasattr(layer, "set_state"):
            states.append(_plain(layer.get_state()))
        elif isinstance(layer, TimeLimit):
            states.append(layer._elapsed_steps)
        elif isinstance(layer, OrderEnforcing | PassiveEnvChecker):
            states.append(None)
        elif names := _KEPT.get(type(layer)):
            values = ((name, attrgetter(name)(layer)) for name in names)
            states.append(_plain({name: list(v) if isinstance(v, deque) else v for name, v in values}))
        else:
            raise EnvNotSaved(f"{type(layer).__name__} has no get_state and set_state")
    return states


def load_env(env: Env, states: EnvState) -> None:
    """Put `save_env`'s result into an equal environment."""
    layers = _layers(env)
    if len(layers) != len(states):
        raise StateError(f"a state of {len(states)} layers does not fit an environment of {len(layers)} layers: {env}")
    for layer, state in zip(layers, states, strict=True):
        if hasattr(layer, "set_state"):
            layer.set_state(_rich(state))
        elif isinstance(layer, TimeLimit):
            layer._elapsed_steps = state
        elif isinstance(layer, OrderEnforcing):
            layer._has_reset = True
        elif names := _KEPT.get(type(layer)):
            kept = _rich(state)
            for name in names:
                path, _, last = name.rpartition(".")
                owner = attrgetter(path)(layer) if path else layer
                if isinstance(queue := getattr(owner, last), deque):
                    queue.clear()
                    queue.extend(kept[name])
                else:
                    setattr(owner, last, kept[name])
        elif not isinstance(layer, PassiveEnvChecker):
            raise StateError(f"{type(layer).__name__} has no set_state: the state was saved by another environment")


def _layers(env: Env) -> list[Any]:
    layers: list[Any] = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {"map": [[_plain(key), _plain(item)] for key, item in value.items()]}
        case np.ndarray():
            array = np.ascontiguousarray(value).reshape(value.shape)
            return {"array": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}
        case np.generic():
            return {"scalar": _plain(np.asarray(value))}
        case tuple():
            return {"tuple": [_plain(item) for item in value]}
        case list():
            return [_plain(item) for item in value]
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case None | bool() | int() | float() | str():
            return value
    raise StateError(
        f"get_state returned a {type(value).__name__}; plain data (numbers, text, lists, mappings) and numpy arrays "
        "can be saved"
    )


def _rich(value: Any) -> Any:
    match value:
        case {"map": items}:
            return {_rich(key): _rich(item) for key, item in items}
        case {"array": [dtype, shape, data]}:
            return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
        case {"scalar": data}:
            return _rich(data)[()]
        case {"tuple": items}:
            return tuple(_rich(item) for item in items)
        case {"bytes": data}:
            return base64.b64decode(data)
        case list():
            return [_rich(item) for item in value]
    return value
