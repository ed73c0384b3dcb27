"""The memory of one worker's rows at its inference server: rows in, actions out, never pickled.

On one machine both ends map it. Between nodes each end has one of its own, and frames carry the arrays over.

A mailbox has one slot for each EnvGroup, so that the rows of one wait while another one steps. The bytes of a slot
belong to the worker until it has sent a request, then to the server until it has sent the answer: the socket orders
them.

    slot:  observation leaves | states | is_init  ->  actions | outputs | next states        [rows, ...] each

# n rows of a request, at most `rows`
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cormorant_worker.shared_memory import SharedMemory
from cormorant_worker.spaces import Array, Arrays, Leaf
from cormorant_worker.wire.arrays import ArrayCursor, Field, size_of

HEADER = struct.Struct("=qqII")
"""A `Header` as bytes."""


class Header(NamedTuple):
    """Begins a request and its answer."""

    number: int
    version: int
    """In a request, the lowest version that may act; in an answer, the one that acted."""
    slot: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxLayout:
    """What both ends must agree on."""

    rows: int
    num_slots: int
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[Leaf, ...]

    @property
    def arrays(self) -> tuple[Field, ...]:
        """(shape, dtype) of the arrays of a slot, in their order in memory."""
        asked = [*self.observation, *self.states]
        answered = [*self.action, *self.outputs, *self.states]
        parts = [[((self.rows, *leaf.shape), np.dtype(leaf.dtype)) for leaf in part] for part in (asked, answered)]
        return (*parts[0], ((self.rows,), np.dtype(np.bool_)), *parts[1])

    @property
    def slot_bytes(self) -> int:
        return size_of(self.arrays)

    @property
    def size_bytes(self) -> int:
        return max(1, self.slot_bytes * self.num_slots)


class MailboxSlot(NamedTuple):
    """Views of one slot, `[rows, ...]` each."""

    observation: Arrays
    states: Arrays
    is_init: Array
    action: Arrays
    outputs: Arrays
    next_states: Arrays

    @property
    def request(self) -> Arrays:
        """What the worker writes."""
        return (*self.observation, *self.states, self.is_init)

    @property
    def answer(self) -> Arrays:
        """What the server writes."""
        return (*self.action, *self.outputs, *self.next_states)


class Mailbox:
    """One end of a worker's shared memory with its server."""

    def __init__(self, layout: MailboxLayout, memory: SharedMemory) -> None:
        self.layout = layout
        self.memory = memory
        self.slots = tuple(self._slot(number) for number in range(layout.num_slots))

    @classmethod
    def create(cls, layout: MailboxLayout) -> "Mailbox":
        return cls(layout, SharedMemory.create(layout.size_bytes))

    def _slot(self, number: int) -> MailboxSlot:
        layout = self.layout
        cursor = ArrayCursor(self.memory.buffer, offset=number * layout.slot_bytes)
        parts = iter([cursor.take(shape, dtype) for shape, dtype in layout.arrays])

        def take(leaves: tuple[Leaf, ...]) -> Arrays:
            return tuple(next(parts) for _ in leaves)

        return MailboxSlot(
            observation=take(layout.observation),
            states=take(layout.states),
            is_init=next(parts),
            action=take(layout.action),
            outputs=take(layout.outputs),
            next_states=take(layout.states),
        )

    def close(self) -> None:
        """Let go of the descriptor; the mapping lives as long as its views."""
        self.memory.close()
