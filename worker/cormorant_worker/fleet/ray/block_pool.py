"""The memory of batches in a Ray fleet: objects in Ray's store, mapped without copies. The local counterpart is
`SharedBlockPool`.
"""

from collections.abc import Mapping

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.errors import FleetError
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.spaces import Array, writable

_USABLE = 0.8
"""Share of the object store: the rest is for weights and for objects that are being freed."""


class RayBlockPool:
    """At most `limit` blocks, counting those that workers fill or have filled, and those that consumers hold."""

    def __init__(self, layout: Layout, limit: int, *, store_bytes: int) -> None:
        self._layout = layout
        self._store_bytes = store_bytes
        self._next = 0
        self._lent: dict[int, Block | None] = {}
        self.limit = 0
        self.resize(limit, at_least=1)

    def resize(self, limit: int, *, at_least: int) -> None:
        size_bytes = self._layout.size_bytes
        most = int(_USABLE * self._store_bytes) // size_bytes
        if most < at_least:
            raise FleetError(
                f"Ray's object store has {self._store_bytes:,} bytes on a node, a batch takes up to {size_bytes:,} "
                f"and {at_least} of them must fit into {_USABLE:.0%} of it; give it more memory "
                "(RayOptions.object_store_bytes, or `ray start --object-store-memory`) or lower framesPerBatch"
            )
        self.limit = min(limit, most)

    @property
    def room(self) -> int:
        return max(0, self.limit - len(self._lent))

    def lend(self, pid: int) -> tuple[int, SharedMemory | None]:
        if not self.room:
            raise FleetError(f"all {self.limit} batch slots are in use")
        self._next += 1
        self._lent[self._next] = None
        return self._next, None

    def land(self, block_index: int, arrays: Mapping[str, Array], *, num_rows: int, num_ends: int) -> None:
        """Add a ticket's arrays, which are mapped in this process."""
        block = Block.of_arrays(self._layout, {name: writable(array) for name, array in arrays.items()})
        block.num_rows, block.num_ends = num_rows, num_ends
        self._lent[block_index] = block

    def give_back(self, block_index: int) -> None:
        self._lent.pop(block_index, None)  # the object goes with the last view of it; the pool may be closed

    def forget(self, pid: int) -> None:
        """Has no effect: a worker that is gone has mapped nothing."""

    def block(self, block_index: int) -> Block:
        block = self._lent[block_index]
        assert block is not None, block_index
        return block

    def memory(self, block_index: int) -> SharedMemory | None:
        return None  # the object store's memory is Ray's

    def close(self) -> None:
        self._lent.clear()
