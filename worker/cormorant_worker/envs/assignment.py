"""Which environment plays which of `env.variants`.

Only a worker's slot determines it (`cormorant_contract.variants.seats_of`): shares hold over a worker group, even if
each worker has one environment, and a slot keeps its variants when the fleet is scaled, when its worker is replaced,
and across restores and new seeds.

    weights easy 1, hard 2    seats hard easy hard | hard easy hard ...    workers of 2: (h, e), (h, h), (e, h)
"""

from dataclasses import dataclass

import numpy as np

from cormorant_contract.env import Env
from cormorant_contract.variants import Variant, seats_of
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
        return tuple(self.names[i] for i in self.task_ids.tolist())


def assign(env: Env, *, group_number: int, index: int) -> Assignment | None:
    """Which variants a slot's environments play; None if the manifest has none."""
    if not env.variants:
        return None
    task_ids = seats_of(env.variants, group_number=group_number, index=index, num_envs=env.num_envs)
    return Assignment(variants=env.variants, task_ids=np.array(task_ids, dtype=np.int64))
