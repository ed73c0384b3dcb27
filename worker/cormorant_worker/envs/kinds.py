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
