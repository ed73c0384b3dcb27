"""Anonymous shared memory, which no crash can leak: it has a descriptor and no name."""

import mmap
import os
from pathlib import Path

from cormorant_worker.errors import FleetError


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
