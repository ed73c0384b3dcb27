"""The one block of memory that a SubprocessVectorEnv shares with its children: actions in, steps out.

It is a nameless file, inherited by descriptor: when the last process that maps it dies, however it dies, it is gone.

    pending   [n] bytes: 1 while a row is being stepped or reset, set by the parent, cleared by the child
    actions   [n, ...] a leaf, written by the parent
    illegal   [n, length] which actions the infos forbid next, written by the children, read while they are idle
    sides     two StepArrays in turn: what `recv` handed out stays as it is until the next `recv`
"""

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from cormorant_worker.envs.env_row import StepArrays, take_actions, take_illegal
from cormorant_worker.envs.info import InfoField
from cormorant_worker.spaces import Space
from cormorant_worker.wire.arrays import ArrayCursor

_PENDING = b"\x01"


class SharedSteps:
    """The arrays of num_envs environments over the block; parent and children make the same from the same spaces.

    Args:
        descriptor: from `anonymous_file`; stays the caller's to close.
        create: give the file its size; exactly one process does, before all others map it.
    """

    def __init__(
        self,
        descriptor: int,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        info: Sequence[InfoField],
        *,
        create: bool,
    ) -> None:
        self._num_envs = num_envs

        def lay_out(cursor: ArrayCursor) -> None:
            self.pending = cursor.take((num_envs,), np.dtype(np.uint8))
            """[n] uint8."""
            self.actions = take_actions(action_space, num_envs, cursor.take)
            self.illegal = take_illegal(observation_space, action_space, num_envs, cursor.take)
            self.sides = tuple(StepArrays.take(observation_space, num_envs, cursor.take, info) for _ in range(2))

        lay_out(measure := ArrayCursor())
        if create:
            os.ftruncate(descriptor, measure.size_bytes)
        self._map = mmap.mmap(descriptor, measure.size_bytes)
        lay_out(ArrayCursor(self._map))

    def is_settled(self) -> bool:
        return self._map.find(_PENDING, 0, self._num_envs) < 0

    def settle(self, row: int) -> bool:
        """Called by a child: `row` is done and written. Returns whether it was the last one.

        Two children that finish at the same instant both get True, or, on a processor that reorders, could both get
        False were it not for the fences; the parent looks for itself now and then, so nothing rests on them.
        """
        _fence()
        self._map[row] = 0
        _fence()
        return self.is_settled()


_LOCK = threading.Lock()


def _fence() -> None:
    """Atomic read-modify-writes: what is written before is seen before what is written after."""
    _LOCK.acquire()
    _LOCK.release()
