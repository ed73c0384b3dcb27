"""The memory of batches in a Ray fleet: objects in Ray's store, mapped here and never copied. The local counterpart is
`SharedBlockPool`.
"""

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import numpy as np

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.errors import FleetError
from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.spaces import Array

_USABLE = 0.8
"""Share of the object store: the rest is for weights and for objects that are being freed."""


class StoreShares:
    """What each fleet of a process may lay out in the object store that they share: first what each needs for one
    round, then as much more as each wants, in equal parts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards everything here, and the pools' limits."""
        self._pools: WeakSet[RayBlockPool] = WeakSet()

    def resize(self, pool: "RayBlockPool", wanted: int, *, at_least: int) -> None:
        """Give a pool as many blocks as it wants, or as there is room for. Others may get fewer: they lend no more
        until enough of theirs are back.

        Raises:
            FleetError: there is no room for `at_least`; nothing has changed.
        """
        with self._lock:
            others = [known for known in self._pools if known is not pool]
            usable = int(pool.store_bytes * _USABLE)
            needed = sum(known.fewest * known.block_bytes for known in others)
            if usable - needed < at_least * pool.block_bytes:
                taken = f" ({needed:,} bytes of it are other fleets' of this process)" if others else ""
                raise FleetError(
                    f"Ray's object store has {pool.store_bytes:,} bytes on a node, a batch takes up to "
                    f"{pool.block_bytes:,} and {at_least} of them must fit into {_USABLE:.0%} of it{taken}; give it "
                    "more memory (RayOptions.object_store_bytes, or `ray start --object-store-memory`) or lower "
                    "framesPerBatch"
                )
            pool.wanted, pool.fewest = wanted, at_least
            self._pools.add(pool)
            self._share(usable)

    def leave(self, pool: "RayBlockPool") -> None:
        """A pool needs nothing any more; the others may have its share."""
        with self._lock:
            self._pools.discard(pool)
            self._share(int(pool.store_bytes * _USABLE))

    def _share(self, usable: int) -> None:
        left = usable - sum(pool.fewest * pool.block_bytes for pool in self._pools)
        # Those that want least come first, so that what they leave goes to the others.
        pools = sorted(self._pools, key=lambda pool: (pool.wanted - pool.fewest) * pool.block_bytes)
        for number, pool in enumerate(pools):
            more = min(max(0, pool.wanted - pool.fewest), left // (len(pools) - number) // pool.block_bytes)
            pool.limit = min(pool.wanted, pool.fewest + more)
            left -= more * pool.block_bytes


class RayBlockPool:
    """At most `limit` blocks: those that workers fill or have filled, and those that consumers hold."""

    def __init__(self, layout: Layout, limit: int, *, store_bytes: int, shares: StoreShares | None = None) -> None:
        self._layout = layout
        self.block_bytes = layout.size_bytes
        self.store_bytes = store_bytes
        self._shares = shares or StoreShares()  # without: this is the only fleet that uses the store
        self._next = 0
        self._lent: dict[int, Block | None] = {}
        self.limit = self.wanted = self.fewest = 0
        """Written by `StoreShares`."""
        self.resize(limit, at_least=1)

    def resize(self, limit: int, *, at_least: int) -> None:
        self._shares.resize(self, limit, at_least=at_least)

    @property
    def room(self) -> int:
        return max(0, self.limit - len(self._lent))

    @property
    def num_made(self) -> int:
        return len(self._lent)

    def lend(self, pid: int) -> tuple[int, SharedMemory | None]:
        if not self.room:
            raise FleetError(f"all {self.limit} batch slots are in use")
        self._next += 1
        self._lent[self._next] = None
        return self._next, None

    def land(self, block_index: int, arrays: Mapping[str, Array], *, num_rows: int, num_ends: int) -> None:
        """A ticket's arrays are in this process's memory."""
        block = Block.of_arrays(self._layout, {name: writable(array) for name, array in arrays.items()})
        block.num_rows, block.num_ends = num_rows, num_ends
        self._lent[block_index] = block

    def give_back(self, block_index: int) -> None:
        self._lent.pop(block_index, None)  # the object goes with the last view of it; the pool may be closed

    def forget(self, pid: int) -> None:
        """A worker is gone; it has mapped nothing."""

    def block(self, block_index: int) -> Block:
        block = self._lent[block_index]
        assert block is not None, block_index
        return block

    def memory(self, block_index: int) -> SharedMemory | None:
        return None  # the object store's memory is Ray's

    def close(self) -> None:
        self._shares.leave(self)
        self._lent.clear()


class _Alias:
    """Names an array's memory as writable, and keeps the array alive. Ray hands objects out read-only, because any
    number of processes may map them; ours have one reader, whose batches are its own to change.
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        interface: dict[str, Any] = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def writable(array: Array) -> Array:
    """The same memory, without the flag that keeps torch from viewing it in peace."""
    return array if array.flags.writeable else np.asarray(_Alias(array))
