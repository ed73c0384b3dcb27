"""What `spec.env` describes, as the environments' room takes it. Collectors and evaluations build from the same."""

from collections.abc import Sequence

from cormorant_contract.env import Env as EnvBlock
from cormorant_contract.env import GymnasiumEnv as GymnasiumBlock
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.gymnasium_env import EnvFactory, EnvSource
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.inline import InlineVectorEnv
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.envs.subprocess import SubprocessVectorEnv


def info_fields(env: EnvBlock) -> tuple[InfoField, ...]:
    """The keys of info that frames store."""
    return tuple(
        InfoField(key=item.key, dtype=item.dtype or "", shape=item.shape, fill=item.fill) for item in env.info or ()
    )


def envpool_task(env: EnvBlock) -> EnvPoolTask:
    assert env.envpool is not None
    return EnvPoolTask(
        task_id=env.envpool.task_id, kwargs=dict(env.envpool.kwargs), max_episode_steps=env.max_episode_steps
    )


def env_factory(env: EnvBlock) -> EnvFactory:
    block = env.gymnasium
    assert block is not None
    return EnvFactory(
        id=block.id or "",
        entrypoint=block.entrypoint or "",
        kwargs=dict(block.kwargs),
        wrappers=tuple({"entrypoint": w.entrypoint, "kwargs": dict(w.kwargs)} for w in block.wrappers),
        max_episode_steps=env.max_episode_steps,
    )


def vectorize(
    source: EnvSource,
    block: GymnasiumBlock,
    *,
    seeds: Sequence[int],
    limits: RestartLimits,
    info: Sequence[InfoField],
) -> VectorEnv:
    """One environment for each seed: in this process with `vectorization: inline`, else in subprocesses."""
    if block.vectorization == "inline":
        return InlineVectorEnv(source, seeds=seeds, limits=limits, info=info)
    return SubprocessVectorEnv(
        source,
        seeds=seeds,
        step_timeout_s=block.step_timeout_seconds,
        reset_timeout_s=block.reset_timeout_seconds,
        limits=limits,
        info=info,
    )
