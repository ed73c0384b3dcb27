"""What a worker process needs of a place that batches go to. Implemented by `shards.ShardWriter`; tests bring fakes."""

from typing import Protocol

from cormorant_worker.collect.block import Block
from cormorant_worker.normalize.moments import Statistics
from cormorant_worker.spaces import Array


class Sink(Protocol):
    """Takes sealed blocks of one collector, in order. Owned by one thread."""

    @property
    def durable_frames(self) -> int:
        """Frames that survive a crash of this process; never more than were appended, and it only grows."""

    def append(self, block: Block, moments: Statistics | None = None) -> None:
        """Take a sealed block, and what it adds to the job's statistics. When this returns, the block's memory may be
        written again.

        Raises:
            DatasetError: the block could not be stored; the message says what was kept. The sink takes no more.
        """

    def go_on(self, ids: Array, lengths: Array) -> None:
        """The next block's open trajectories are these.

        Args:
            ids: [B] of the trajectory in each column.
            lengths: [B] frames of it that were stored before, here or by an earlier writer.
        """

    def flush(self) -> None:
        """Make everything that was appended durable, and wait for it. Called before a long pause."""

    def close(self) -> None:
        """Flush and release everything. May be called twice."""
