"""The shared memory in which batches travel: blocks that the fleet owns and lends to workers, ticket by ticket."""

from cormorant_worker.collect.block import Block, Layout
from cormorant_worker.errors import FleetError
from cormorant_worker.shared_memory import SharedMemory


class SharedBlockPool:
    """At most `limit` blocks, made when they are first needed, used again last in first out. Owned by one thread."""

    def __init__(self, layout: Layout, limit: int) -> None:
        self.layout = layout
        self.limit = limit
        self._memories: list[SharedMemory] = []
        self._blocks: list[Block] = []
        self._free: dict[int, None] = {}
        """In the order in which they were given back."""
        self._known: dict[int, set[int]] = {}
        """Slots that each worker process has mapped, by its process id."""
        self._borrower: dict[int, int] = {}
        """The process that each block_index was lent to last: it is warm in its page tables."""
        self._warm: dict[int, list[int]] = {}
        """Slots that were given back, by that process; some of them are lent again."""

    def resize(self, limit: int, *, at_least: int) -> None:
        self.limit = limit  # memory is made when it is needed; the system refuses what it does not have

    @property
    def room(self) -> int:
        return len(self._free) + max(0, self.limit - len(self._blocks))

    @property
    def num_made(self) -> int:
        return len(self._blocks)

    def lend(self, pid: int) -> tuple[int, SharedMemory | None]:
        block_index = self._take(pid)
        self._borrower[block_index] = pid
        known = self._known.setdefault(pid, set())
        if block_index in known:
            return block_index, None
        known.add(block_index)
        return block_index, self._memories[block_index]

    def _take(self, pid: int) -> int:
        warm = self._warm.get(pid, [])
        while warm:
            if (block_index := warm.pop()) in self._free:
                del self._free[block_index]
                return block_index
        return self._free.popitem()[0] if self._free else self._make()

    def give_back(self, block_index: int) -> None:
        self._free[block_index] = None
        if (pid := self._borrower[block_index]) in self._known:
            self._warm.setdefault(pid, []).append(block_index)

    def forget(self, pid: int) -> None:
        self._known.pop(pid, None)
        self._warm.pop(pid, None)

    def block(self, block_index: int) -> Block:
        return self._blocks[block_index]

    def memory(self, block_index: int) -> SharedMemory:
        return self._memories[block_index]

    def close(self) -> None:
        for memory in self._memories:
            memory.close()

    def _make(self) -> int:
        if len(self._blocks) >= self.limit:
            raise FleetError(f"all {self.limit} batch slots are in use")
        memory = SharedMemory.create(self.layout.size_bytes)
        self._memories.append(memory)
        self._blocks.append(Block(self.layout, memory.buffer))
        return len(self._blocks) - 1
