"""Consecutive arrays over one buffer, equal in every process that maps it."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cormorant_worker.spaces import Array

_ALIGNMENT = 64
"""A cache line: no two arrays share one."""

Field = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of one array."""


class ArrayCursor:
    """Allocates consecutive arrays from a buffer. Without a buffer it only measures: arrays are empty."""

    def __init__(self, buffer: Any = None, *, offset: int = 0) -> None:
        self.size_bytes = offset
        """Bytes up to the end of the last array that was taken, rounded up."""
        self._buffer = buffer

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        offset = self.size_bytes
        self.size_bytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None:
            return np.empty(0, dtype)
        return np.ndarray(shape, dtype, buffer=self._buffer, offset=offset)


def size_of(fields: Iterable[Field]) -> int:
    """Bytes of the buffer that holds these arrays."""
    cursor = ArrayCursor()
    for shape, dtype in fields:
        cursor.take(shape, dtype)
    return cursor.size_bytes
