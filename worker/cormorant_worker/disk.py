"""Durable file writes: all bytes written, and synced to disk."""

import os
from pathlib import Path


def write_all(descriptor: int, buffer: memoryview) -> None:
    """Write all bytes, however many calls that takes.

    Raises:
        OSError: the disk does not take them.
    """
    while len(buffer):
        buffer = buffer[os.write(descriptor, buffer) :]


def sync_path(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
