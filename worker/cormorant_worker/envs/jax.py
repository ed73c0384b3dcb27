"""`env.jax`: functional environments of gymnax, Brax, MuJoCo Playground and jumanji. Imports JAX to open one."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from cormorant_worker.entrypoints import load_object
from cormorant_worker.envs.gymnasium_env import EnvSource, construct, name_of
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.request import EnvRequest, OpenedEnvs
from cormorant_worker.envs.single_envs import Reseeded, open_rows
from cormorant_worker.errors import EnvBuildError


def check() -> None:
    if find_spec("jax") is None:
        raise EnvBuildError('env.jax needs JAX, which is not installed here; pip install "cormorant[jax]"')


def open_envs(request: EnvRequest) -> OpenedEnvs:
    """All rows in one group."""
    return OpenedEnvs((_compile(request)[1](request.seeds),))


def open_episodes(request: EnvRequest, wrap: Callable[[EnvSource], EnvSource]) -> VectorEnv:
    """An environment of one row for each episode."""
    name, vector_of = _compile(request)
    return open_rows(request, wrap, name, lambda: vector_of((0,)))


def _compile(request: EnvRequest) -> tuple[str, Callable[[Sequence[int]], Reseeded]]:
    """The environment's name, and what makes a vector of it from the seeds of its rows."""
    check()
    if "jax" not in sys.modules:
        # XLA's pool has a thread for each CPU of the machine unless this says otherwise, whatever the cgroup's limit.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        before, os.environ["NPROC"] = os.environ.get("NPROC"), str(request.threads)
        import jax

        jax.devices("cpu")
        del os.environ["NPROC"]
        if before is not None:
            os.environ["NPROC"] = before
    from cormorant_worker.envs.functional import Compiled, FunctionalVectorEnv

    block = request.env.jax
    assert block is not None
    make = request.makers[0] if request.makers else load_object(block.entrypoint, what="environment")
    name = name_of(make) if request.makers else block.entrypoint
    made = construct(lambda: make(**block.kwargs), f"the environment {name}")
    compiled = Compiled(made, name, max_episode_steps=request.env.max_episode_steps, info=request.info)
    return name, lambda seeds: FunctionalVectorEnv(compiled, seeds=seeds)
