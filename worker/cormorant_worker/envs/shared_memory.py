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
from typing import Any

import numpy as np

from cormorant_worker.envs.env_row import StepArrays, take_actions, take_illegal
from cormorant_worker.envs.info import InfoField
from cormorant_worker.spaces import Array, Space

_ALIGNMENT = 64
"""A cache line: no two arrays share one."""
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
        measure = _Measure(num_envs)
        StepArrays.take(observation_space, num_envs, measure.take, info)
        size = 2 * measure.size
        take_actions(action_space, num_envs, measure.take)
        take_illegal(observation_space, action_space, num_envs, measure.take)
        size = _align(size + measure.size)
        if create:
            os.ftruncate(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        self._num_envs = num_envs
        cursor = _Cursor(self._map, _align(num_envs))
        self.pending = np.frombuffer(self._map, dtype=np.uint8, count=num_envs)
        """[n] uint8."""
        self.actions = take_actions(action_space, num_envs, cursor.take)
        self.illegal = take_illegal(observation_space, action_space, num_envs, cursor.take)
        self.sides = tuple(StepArrays.take(observation_space, num_envs, cursor.take, info) for _ in range(2))

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


class _Measure:
    def __init__(self, num_envs: int) -> None:
        self.size = _align(num_envs)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        self.size += _num_bytes(shape, dtype)
        return np.empty(0, dtype)


class _Cursor:
    def __init__(self, block: mmap.mmap, offset: int) -> None:
        self._block = block
        self._offset = offset

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = np.ndarray(shape, dtype, buffer=self._block, offset=self._offset)
        self._offset += _num_bytes(shape, dtype)
        return array


_LOCK = threading.Lock()


def _fence() -> None:
    """Atomic read-modify-writes: what is written before is seen before what is written after."""
    _LOCK.acquire()
    _LOCK.release()


def _num_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return _align(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
