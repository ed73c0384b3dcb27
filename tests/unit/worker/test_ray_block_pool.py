"""How many batches of a Ray fleet may be on their way, and how they land. No Ray is needed to know."""

import numpy as np
import pytest

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.errors import FleetError
from cormorant_worker.fleet.ray.engine import RayBlockPool
from cormorant_worker.spaces import Leaf

LAYOUT = Layout(
    num_rows=4,
    num_envs=2,
    observation=(Leaf(key=("observation",), shape=(3,), dtype=np.dtype(np.float32)),),
    action=(Leaf(key=("action",), shape=(), dtype=np.dtype(np.int64)),),
)


@pytest.mark.parametrize(("batches", "limit", "expected"), [(10, 3, 3), (10, 20, 8), (2, 5, 1)])
def test_four_fifths_of_the_object_store_are_lent_at_most(batches: int, limit: int, expected: int) -> None:
    blocks = RayBlockPool(LAYOUT, limit, store_bytes=batches * LAYOUT.size_bytes)
    assert (blocks.limit, blocks.room) == (expected, expected)


def test_a_store_without_room_is_refused_with_figures() -> None:
    size = LAYOUT.size_bytes
    words = f"store has {size:,} bytes on a node, a batch takes up to {size:,} and 1 of them must fit into 80%"
    with pytest.raises(FleetError, match=words):
        RayBlockPool(LAYOUT, 3, store_bytes=size)
    blocks = RayBlockPool(LAYOUT, 3, store_bytes=4 * size)
    with pytest.raises(FleetError, match="and 4 of them must fit into 80%"):
        blocks.resize(4, at_least=4)
    assert blocks.limit == 3


def test_what_is_lent_comes_back_and_landed_arrays_are_no_copies() -> None:
    blocks = RayBlockPool(LAYOUT, 1, store_bytes=10 * LAYOUT.size_bytes)
    block_index, _ = blocks.lend(pid=7)
    with pytest.raises(FleetError, match="all 1 batch slots are in use"):
        blocks.lend(pid=7)
    sent = Block(LAYOUT)
    sent.num_rows, sent.num_ends = 4, 0
    arrays = {name: array.copy() for name, array in sent.used_arrays().items()}
    for array in arrays.values():
        array.flags.writeable = False  # as Ray hands them out
    blocks.land(block_index, arrays, num_rows=4, num_ends=0)
    landed = blocks.block(block_index)
    assert np.shares_memory(landed.reward, arrays["reward"])
    assert landed.reward.flags.writeable
    blocks.give_back(block_index)
    assert blocks.room == 1
