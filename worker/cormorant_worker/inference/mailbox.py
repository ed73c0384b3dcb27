"""The memory of one worker's rows at its inference server: rows in, actions out, never pickled.

On one machine both ends map it. Between nodes each end has its own, and frames carry the arrays.

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

from cormorant_worker.spaces import Array, Arrays, Leaf
from cormorant_worker.wire import ArrayCursor

HEADER = struct.Struct("=qqII")
"""A `Header` as bytes."""


class Header(NamedTuple):
    """Begins a request and its answer."""

    number: int
    version: int
    """In a request, the lowest version that may be used; in an answer, the version that was used."""
    slot: int
    n: int


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
        """Arrays that the worker writes."""
        return (*self.observation, *self.states, self.is_init)

    @property
    def answer(self) -> Arrays:
        """Arrays that the server writes."""
        return (*self.action, *self.outputs, *self.next_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxLayout:
    """Layout on which both ends must agree."""

    rows: int
    num_slots: int
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    states: tuple[Leaf, ...]

    @property
    def size_bytes(self) -> int:
        self.slots(cursor := ArrayCursor())
        return cursor.size_bytes

    def slots(self, cursor: ArrayCursor) -> tuple[MailboxSlot, ...]:
        """The slots over the memory of a cursor, one after another. It lives as long as they do."""

        def take(leaves: tuple[Leaf, ...]) -> Arrays:
            return tuple([cursor.take((self.rows, *leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves])

        return tuple(
            [
                MailboxSlot(
                    observation=take(self.observation),
                    states=take(self.states),
                    is_init=cursor.take((self.rows,), np.dtype(np.bool_)),
                    action=take(self.action),
                    outputs=take(self.outputs),
                    next_states=take(self.states),
                )
                for _ in range(self.num_slots)
            ]
        )
