"""Which environment plays which of `env.variants`.

Only a worker's slot determines it (`cormorant_contract.variants.seats_of`): shares hold over a worker group, even if
each worker has one environment, and a slot keeps its variants when the fleet is scaled, when its worker is replaced,
and across restores and new seeds.

    weights easy 1, hard 2    seats hard easy hard | hard easy hard ...    workers of 2: (h, e), (h, h), (e, h)
"""

from typing import NamedTuple

import numpy as np

from cormorant_contract.env import Env
from cormorant_contract.variants import seats_of
from cormorant_worker.spaces import Array


class Assignment(NamedTuple):
    names: tuple[str, ...]
    """All variants of the manifest."""
    task_ids: Array
    """[B] int64, positions in `names`, ascending: environments of one variant lie side by side."""


def assign(env: Env, *, group_number: int, index: int) -> Assignment | None:
    """Which variants a slot's environments play; None if the manifest has none."""
    if not env.variants:
        return None
    task_ids = seats_of(env.variants, group_number=group_number, index=index, num_envs=env.num_envs)
    return Assignment(tuple(variant.name for variant in env.variants), np.array(task_ids, dtype=np.int64))
