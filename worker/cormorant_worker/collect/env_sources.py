"""What `spec.env` describes, as the environments' room takes it, and which environment plays which of `env.variants`.
Collectors and evaluations build from the same.

The slot of a worker alone decides on variants (`cormorant_contract.variants.seats_of`): shares are right over a worker
group, also where workers have one environment each, and a slot keeps its variants when the fleet is scaled, when its
worker is replaced, and over restores and new seeds.

    weights easy 1, hard 2    seats hard easy hard | hard easy hard ...    workers of 2: (h, e), (h, h), (e, h)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cormorant_contract.env import Env as EnvBlock
from cormorant_contract.env import GymnasiumEnv as GymnasiumBlock
from cormorant_contract.variants import Variant, seats_of
from cormorant_worker.collect.overrides import WorkerOverrides
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.flat_vector import VectorSource
from cormorant_worker.envs.gymnasium_env import EnvFactory, EnvSource, naming
from cormorant_worker.envs.info import InfoField
from cormorant_worker.envs.inline import InlineVectorEnv
from cormorant_worker.envs.protocol import VectorEnv
from cormorant_worker.envs.restarts import RestartLimits
from cormorant_worker.envs.subprocess import SubprocessVectorEnv
from cormorant_worker.spaces import Array


def info_fields(env: EnvBlock) -> tuple[InfoField, ...]:
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
        wrappers=tuple((w.entrypoint, dict(w.kwargs)) for w in block.wrappers),
        max_episode_steps=env.max_episode_steps,
    )


def vector_source(env: EnvBlock, overrides: WorkerOverrides) -> VectorSource:
    block = env.vector
    assert block is not None
    make = overrides.envs[0] if overrides.envs else None
    return VectorSource(id=block.id or "", entrypoint=block.entrypoint or "", make=make, kwargs=dict(block.kwargs))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    variants: tuple[Variant, ...]
    """All of the manifest."""
    task_ids: Array
    """[B] int64, positions in `variants`, ascending: environments of one variant lie side by side."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(variant.name for variant in self.variants)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.names[i] for i in self.task_ids.tolist())


def assign(env: EnvBlock, place: WorkerPlace) -> Assignment | None:
    """The variants of a worker's environments; None: the manifest has no variants."""
    if not env.variants:
        return None
    task_ids = seats_of(env.variants, group_number=place.group_number, index=place.index, num_envs=env.num_envs)
    return Assignment(variants=env.variants, task_ids=np.array(task_ids, dtype=np.int64))


def envpool_tasks(env: EnvBlock) -> dict[str, EnvPoolTask]:
    """The EnvPool task of each variant by its name, or one under an empty name."""
    if not env.variants:
        return {"": envpool_task(env)}
    return {variant.name: envpool_task(env.of_variant(variant)) for variant in env.variants}


def check_tasks(tasks: Mapping[str, EnvPoolTask]) -> None:
    """Refuse what EnvPool does not know, before anything is built."""
    for name, task in tasks.items():
        with naming(name):
            task.check()
