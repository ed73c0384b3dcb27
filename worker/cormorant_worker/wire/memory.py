"""Anonymous shared memory, which no crash can leak (it has a descriptor and no name), and consecutive arrays over one
buffer, equal in every process that maps it.
"""

import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cormorant_worker.errors import FleetError
from cormorant_worker.spaces import Array

_ALIGNMENT = 64
"""A cache line: no two arrays share one."""

Field = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of one array."""


class SharedMemory:
    """A mapping of anonymous shared memory. Pages use memory once they are written."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map a descriptor that `create` made in this or another process; it belongs to this object from now on."""
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, size_bytes)

    @classmethod
    def create(cls, size_bytes: int, *, path: Path | None = None) -> "SharedMemory":
        """Create zeroed memory. `path`: file that holds this memory, replaced if it exists; None: anonymous."""
        try:
            if path is not None:
                # A file of its own: who maps the one that was there before keeps that.
                path.unlink(missing_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            else:
                descriptor = os.memfd_create("cormorant")
            os.ftruncate(descriptor, size_bytes)
            return cls(descriptor, size_bytes)
        except OSError as error:
            raise FleetError(f"cannot allocate {size_bytes:,} bytes of shared memory: {error}") from error

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._map)

    def close(self) -> None:
        """Close the descriptor, as the last reference does. The mapping lives as long as arrays over it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close


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
