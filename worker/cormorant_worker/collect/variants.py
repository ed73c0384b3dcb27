"""Which environment plays which variant of `env.variants`, and what EnvPool builds for it.

The slot of a worker alone decides (`cormorant_contract.variants.seats_of`): shares are right over a worker group, also
where workers have one environment each, and a slot keeps its variants when the fleet is scaled, when its worker is
replaced, and over restores and new seeds.

    weights easy 1, hard 2    seats hard easy hard | hard easy hard ...    workers of 2: (h, e), (h, h), (e, h)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cormorant_contract.env import Env as EnvBlock
from cormorant_contract.variants import Variant, seats_of
from cormorant_worker.collect.env_sources import envpool_task
from cormorant_worker.collect.place import WorkerPlace
from cormorant_worker.envs.envpool import EnvPoolTask
from cormorant_worker.envs.variants import naming
from cormorant_worker.spaces import Array


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
        """[B] the variant that each environment plays."""
        return tuple(self.names[i] for i in self.task_ids.tolist())

    def shares(self) -> list[tuple[Variant, slice]]:
        """The variants that this worker plays, with their columns."""
        ids, firsts = np.unique(self.task_ids, return_index=True)
        stops = [*firsts[1:].tolist(), len(self.task_ids)]
        return [
            (self.variants[i], slice(first, stop))
            for i, first, stop in zip(ids.tolist(), firsts.tolist(), stops, strict=True)
        ]


def assign(env: EnvBlock, place: WorkerPlace) -> Assignment | None:
    """The variants of a worker's environments; None: the manifest has no variants."""
    if not env.variants:
        return None
    task_ids = seats_of(env.variants, group_number=place.group_number, index=place.index, num_envs=env.num_envs)
    return Assignment(variants=env.variants, task_ids=np.array(task_ids, dtype=np.int64))


def envpool_tasks(env: EnvBlock) -> dict[str, EnvPoolTask]:
    """The EnvPool task of each variant by its name, or one under an empty name; none where EnvPool is not used."""
    if env.envpool is None:
        return {}
    if not env.variants:
        return {"": envpool_task(env)}
    return {variant.name: envpool_task(env.of_variant(variant)) for variant in env.variants}


def check_tasks(tasks: Mapping[str, EnvPoolTask]) -> None:
    """Refuse what EnvPool does not know, before anything is built."""
    for name, task in tasks.items():
        with naming(name):
            task.check()
