"""Environments that cannot be collected from, known by their types, with what to use instead. Asked by the caller of a
fleet before anything starts, and by the code that builds environments.
"""

from functools import partial
from typing import Any

import gymnasium

_VECTOR = (
    "a gymnasium vector environment, which resets its environments by itself and is not supported; pass a function "
    "that makes one of its environments, and num_envs= (in the compatibility layers a list of functions) for how many"
)
_AGENTS = (
    "a PettingZoo environment of several agents, which is not supported; wrap it as one gymnasium.Env whose "
    "observation and action hold those of all agents"
)


def why_unsupported(env: Any) -> str:
    """What an environment, its class, or a function that is known to make one is, and what to use instead: "a
    SyncVectorEnv, a gymnasium vector environment, ...". Empty: nothing is known against it.
    """
    while isinstance(env, partial):
        env = env.func
    if env is gymnasium.make_vec:
        env = gymnasium.vector.VectorEnv
    kind = env if isinstance(env, type) else type(env)
    if issubclass(kind, gymnasium.Env):
        return ""
    if issubclass(kind, gymnasium.vector.VectorEnv):
        return f"a {kind.__name__}, {_VECTOR}"
    modules = [getattr(env, "__module__", None) or "", *(base.__module__ for base in kind.__mro__)]
    is_theirs = any(module.partition(".")[0] == "pettingzoo" for module in modules)
    if is_theirs or (hasattr(env, "possible_agents") and callable(getattr(env, "observation_space", None))):
        return f"a {getattr(env, '__name__', kind.__name__)}, {_AGENTS}"
    return ""
