"""`env.gymnasium` and `env.pettingzoo`: single environments, each in a process of its own or all in this one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cormorant_contract.env import Env, GymnasiumEnv, PettingZooEnv
from cormorant_worker.envs.gymnasium_env import EnvFactory, EnvSource, MadeEnvs, VariantEnvs
from cormorant_worker.envs.pettingzoo_env import AgentsFactory, MaybeAgents
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.request import EnvRequest, OpenedEnvs
from cormorant_worker.envs.single_envs import InlineVectorEnv
from cormorant_worker.envs.subprocess import SubprocessVectorEnv
from cormorant_worker.errors import ManifestError


def open_envs(request: EnvRequest) -> OpenedEnvs:
    """Open the environments, in two groups if inference servers act, else in one."""
    env, seeds, assignment = request.env, request.seeds, request.assignment
    block, makers, info = _block(env), request.makers, request.info
    if makers:
        made = MadeEnvs([MaybeAgents(maker) for maker in makers])
        if len(makers) == 1:
            # A worker is a process already: its only environment needs no other.
            block = block.model_copy(update={"vectorization": "inline"})
            only = made.make(0)
            if hasattr(type(only), "vector_env"):
                if info:
                    raise ManifestError(
                        f"spec.env.info declares {info[0].key}, and environments that are stepped together have no "
                        "info; remove env.info"
                    )
                return OpenedEnvs((only.vector_env(request.seeds_of(only.num_workers)),))
        return OpenedEnvs((vectorize(made, block, request.seeds_of(len(makers)), request),))
    groups: list[VectorEnv] = []
    for columns in np.array_split(np.arange(len(seeds)), request.served_groups):
        source: EnvSource
        if assignment is None:
            source = source_of(env)
        else:
            sources = tuple(source_of(env.of_variant(variant)) for variant in env.variants or ())
            source = VariantEnvs(sources, assignment.names, assignment.task_ids[columns].tolist())
        own = [seeds[column] for column in columns]
        groups.append(vectorize(source, block, own, request))
    return OpenedEnvs(groups)


def open_episodes(request: EnvRequest, wrap: Callable[[EnvSource], EnvSource]) -> VectorEnv:
    """Open the environments of episodes, in subprocesses or in this process as the manifest says."""
    block, seeds = _block(request.env), request.seeds
    source: EnvSource
    if request.makers:
        source = MadeEnvs([MaybeAgents(request.makers[0])] * len(seeds))
    else:
        single = source_of(request.env)
        rendering = {"render_mode": "rgb_array"} if request.is_filmed else {}
        source = replace(single, kwargs={**single.kwargs, **rendering})
    if request.is_filmed:
        block = block.model_copy(update={"vectorization": "inline"})
    return vectorize(wrap(source), block, seeds, request)


def source_of(env: Env) -> EnvFactory:
    block = _block(env)
    agents: dict[str, Any] = {}
    if isinstance(block, PettingZooEnv):
        agents["groups"] = block.group_map or block.groups
        agents["ends_on_any"], agents["is_mean"] = block.episode_ends == "any", block.team_reward == "mean"
    return (AgentsFactory if agents else EnvFactory)(
        id=block.id or "",
        entrypoint=block.entrypoint or "",
        kwargs=dict(block.kwargs),
        wrappers=tuple((w.entrypoint, dict(w.kwargs)) for w in block.wrappers),
        max_episode_steps=env.max_episode_steps,
        **agents,
    )


def vectorize(source: EnvSource, block: GymnasiumEnv, seeds: Sequence[int], request: EnvRequest) -> VectorEnv:
    """One environment for each seed: in this process with `vectorization: inline`, else in subprocesses."""
    if block.vectorization == "inline":
        return InlineVectorEnv(source, seeds=seeds, limits=request.limits, info=request.info)
    return SubprocessVectorEnv(
        source,
        seeds=seeds,
        step_timeout_s=block.step_timeout_seconds,
        reset_timeout_s=block.reset_timeout_seconds,
        limits=request.limits,
        info=request.info,
    )


def _block(env: Env) -> GymnasiumEnv:
    assert isinstance(env.block, GymnasiumEnv)
    return env.block
