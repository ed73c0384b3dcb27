"""The kinds of environments: one module for each block of `spec.env`."""

from collections.abc import Mapping

from cormorant_contract.env import Env
from cormorant_worker.envs import gymnasium, jax, openenv, pools, vector
from cormorant_worker.envs.request import EnvKind

_MODULES: Mapping[str, EnvKind] = {
    "envpool": pools,
    "gymnasium": gymnasium,
    "vector": vector,
    "pettingzoo": gymnasium,
    "openenv": openenv,
    "jax": jax,
}


def kind_of(env: Env) -> EnvKind:
    return _MODULES[env.block.kind]


def check_env(env: Env) -> None:
    """Refuse what cannot be built, before a process is started; of other kinds, only a worker can tell. Raises
    UnknownEnv or EnvBuildError, with what to write instead.
    """
    if env.envpool is not None:
        pools.check(env)
    elif env.jax is not None:
        jax.check()


def imports_of(env: Env) -> tuple[str, ...]:
    """Modules that its workers need before they are forked."""
    return ("cormorant_worker.envs.envpool_library",) if env.envpool is not None else ()
